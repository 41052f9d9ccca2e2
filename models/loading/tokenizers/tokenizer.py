"""Text to ids and back, with the model's chat format and its end tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from specjax.errors import UsageError
from specjax.files.untrusted import first_line
from specjax.models.loading.tokenizers import chat
from specjax.models.loading.tokenizers.chat import Messages, Spans, appears_in_template
from specjax.models.loading.tokenizers.spm import spelled

T = TypeVar("T")

END_NAMES = (
    "<|im_end|>", "<|endoftext|>", "<end_of_turn>", "<eos>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "</s>",
)  # fmt: skip
"""Tokens that end a turn or a text in some family. Which of them a model was trained to emit is not written down
reliably, so every one that is a control token of the vocabulary counts."""

NO_TOKEN = "(none)"
BORDER = "\U0010ffff border \U0010ffff"  # what no text holds: its characters are none


class TextCodec(Protocol):
    """What turns text into ids and back. `special`: add bos/eos; show control tokens."""

    def encode(self, text: str, special: bool) -> list[int]: ...
    def encode_parts(self, parts: Sequence[str], special: bool) -> list[int]:
        """Of the parts joined; no token reaches over a border."""
        ...

    def find(self, text: str, template: str) -> Spans:
        """Where control tokens stand in a text, and other tokens that it is cut at if they stand in the template."""
        ...

    def decode(self, ids: Sequence[int], special: bool) -> str: ...

    def spellings(self) -> list[bytes | None]:
        """The bytes that each token stands for; None of control tokens."""
        ...


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A vocabulary with everything a prompt needs."""

    codec: TextCodec = field(repr=False)
    vocab: tuple[str, ...] = field(repr=False)  # pieces by id, as the model's files spell them
    eos: tuple[int, ...]  # every id that ends a turn or a text
    chat_template: Any = field(default=None, repr=False)  # Jinja, as Hugging Face defines it; as the file has it
    names: Mapping[str, str] = field(default_factory=dict)  # "bos_token" and the like, which templates use

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a text. `special`: with the bos (and eos) that the model expects around it.

        Control tokens written out in the text are recognised either way.
        """
        return self.codec.encode(text, special)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Text of ids, without control tokens unless `special`.

        Text that ends within a character ends in U+FFFD. But for those, the text of a prefix is a prefix of the text,
        so a stream is shown as what is new in `decode(ids so far)`, holding back trailing U+FFFDs.
        """
        return self.codec.decode([int(i) for i in ids], special)

    def spellings(self) -> list[bytes | None]:
        """The bytes that each token adds to a text, by id; None of control tokens. Some are no whole characters."""
        return self.codec.spellings()

    def chat(self, text_or_messages: str | Messages) -> list[int]:
        """Ids of a conversation up to where the assistant speaks; without a template, of the plain text after bos.

        Only the template writes control tokens. One that is written out in a message is encoded as plain text, so that
        nobody can end their turn and begin one of the system; `encode` does otherwise.

        Raises: UsageError if the template refuses the messages, is broken, or takes too long.
        """
        messages = text_or_messages
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not all(isinstance(message, Mapping) for message in messages):
            raise UsageError(chat.NOT_PLAIN)
        template = self.chat_template
        if not (template is None or isinstance(template, str)):
            raise UsageError(f"the model's chat template is not text ({type(template).__name__}); {chat.WITHOUT}")
        messages, mark = chat.split_control_tokens(messages, self._find)
        text = self._written(messages)
        parts = chat.split_conversation(text, mark, messages, self._written, self._find)
        special = template is None
        return self.codec.encode_parts(parts, special) if len(parts) > 1 else self.codec.encode(text, special)

    def _written(self, messages: list) -> str:
        if self.chat_template is None:
            return "\n".join(str(message.get("content", "")) for message in messages)
        return chat.render(self.chat_template, messages, self.names)

    def _find(self, text: str, by_model: bool) -> Spans:
        """Control tokens; where the model did not write the text also other tokens that the template uses.

        DeepSeek's roles and <think> are no control tokens by their files.
        """
        return self.codec.find(text, "" if by_model else self.chat_template or "")


def first_difference(a: Tokenizer, b: Tokenizer) -> tuple[int, str, str] | None:
    """The first id that `a` and `b` spell differently, with both pieces; None if the vocabularies are equal."""
    if a.vocab == b.vocab:
        return None
    for i in range(max(len(a.vocab), len(b.vocab))):
        pieces = tuple(t.vocab[i] if i < len(t.vocab) else NO_TOKEN for t in (a, b))
        if pieces[0] != pieces[1]:
            return i, pieces[0], pieces[1]
    return None


def end_ids(vocab: Sequence[str], control: Iterable[int], stated: Iterable[int]) -> tuple[int, ...]:
    """The ids a file states and the control tokens of END_NAMES, in order."""
    named = {i for i in control if i < len(vocab) and vocab[i] in END_NAMES}
    return tuple(sorted(named | {int(i) for i in stated}))


@dataclass(frozen=True, eq=False)
class LibraryCodec:
    """A tokenizer of the `tokenizers` library."""

    backend: Any

    def encode(self, text: str, special: bool) -> list[int]:
        return _encoded(self.backend, text, special).ids

    def encode_parts(self, parts: Sequence[str], special: bool) -> list[int]:
        if any(BORDER in part for part in parts):
            raise UsageError("the prompt holds the characters between which messages are kept apart; take U+10FFFF out")
        backend, border = self._with_border
        return [i for i in _encoded(backend, BORDER.join(parts), special).ids if i != border]

    def find(self, text: str, template: str) -> Spans:
        found = _encoded(self.backend, text, special=False)
        added = self.backend.get_added_tokens_decoder()
        wanted = {i for i, t in added.items() if t.special or appears_in_template(template, t.content)}
        return [span for i, span in zip(found.ids, found.offsets, strict=True) if i in wanted]

    def decode(self, ids: Sequence[int], special: bool) -> str:
        return _alive(lambda: self.backend.decode(ids, skip_special_tokens=not special))

    def spellings(self) -> list[bytes | None]:
        special = self.backend.get_added_tokens_decoder()
        added = {i: None if token.special else token.content.encode() for i, token in special.items()}
        by_byte = self.backend.decoder is not None and b'"ByteLevel"' in self.backend.decoder.__getstate__()
        written = lambda piece: _of_bytes(piece) if by_byte else spelled(piece)
        pieces = {i: piece for piece, i in self.backend.get_vocab().items()}
        of = lambda i: added[i] if i in added else written(pieces[i]) if i in pieces else None
        return [of(i) for i in range(max(pieces, default=-1) + 1)]

    @functools.cached_property
    def _with_border(self) -> tuple[Any, int | None]:
        """A copy that cuts text at BORDER, as at any added token, and the id it has there."""
        import tokenizers

        copy = tokenizers.Tokenizer.from_str(self.backend.to_str())
        copy.add_special_tokens([tokenizers.AddedToken(BORDER, normalized=False)])
        return copy, copy.token_to_id(BORDER)


def _of_bytes(piece: str) -> bytes | None:
    """The bytes of a piece of a byte-level vocabulary, which writes each as a letter; None if it has other letters."""
    table = _letters()
    return bytes(table[letter] for letter in piece) if all(letter in table for letter in piece) else None


@functools.cache
def _letters() -> dict[str, int]:
    """GPT-2's: bytes that can be seen are their own letters, the others take those from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


def _encoded(backend: Any, text: str, special: bool) -> Any:
    return _alive(lambda: backend.encode(text, add_special_tokens=special))


def _alive(call: Callable[[], T]) -> T:
    """What the library answers. Rules of a tokenizer.json can make it fail, or panic, which is no `Exception`."""
    try:
        return call()
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise UsageError(f"the model's tokenizer breaks down on this text ({first_line(error)}); use another") from None
