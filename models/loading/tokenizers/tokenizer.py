"""Tokenizer: text to ids and back, with the model's chat template and its end tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from specjax.errors import UsageError
from specjax.files.untrusted import first_line, quote
from specjax.models.loading.tokenizers import chat
from specjax.models.loading.tokenizers.chat import Spans, appears_in_template
from specjax.models.loading.tokenizers.spm import piece_bytes
from specjax.models.loading.tokenizers.templates.rendering import (
    INVALID_MESSAGES,
    SKIP_TEMPLATE,
    Conversation,
    Messages,
    render,
)

T = TypeVar("T")

UNMISTAKABLE_END_TOKENS = frozenset((
    "<|im_end|>", "<|endoftext|>", "<end_of_turn>", "<eos>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "<|end|>",
    "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<EOT>", "▁<EOT>", "[EOT]", "[EOS]", "<turn|>", "[e~[",
    "<end_of_utterance>", "<\uff5cend▁of▁sentence\uff5c>",
))  # fmt: skip
"""Tokens that end a turn or a text in some family, and are nothing else in any. They count as control tokens, also in
files that type them as text."""

END_TOKENS = UNMISTAKABLE_END_TOKENS | {"</s>"}  # in Gemma's vocabulary "</s>" is a tag of HTML
"""No file reliably states which of these a model was trained to emit, so every one that is a control token of the
vocabulary counts.
"""

CHANNEL_ENDS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
"""Vocabularies with both tokens of a pair have messages within a turn, which "<|end|>" ends."""

MISSING_TOKEN = "(none)"
BORDER = "\U0010ffff border \U0010ffff"  # U+10FFFF is not a character, so no text contains it


class TextCodec(Protocol):
    """Interface of encoders of text to ids and back.

    `special`: add bos/eos when encoding, and show control tokens when decoding.
    """

    def encode(self, text: str, special: bool) -> list[int]: ...
    def encode_parts(self, parts: Sequence[str], special: bool) -> list[int]:
        """Return the ids of the joined parts. No token crosses a border between parts."""
        ...

    def find(self, text: str, template: str) -> Spans:
        """Return the spans of control tokens in a text, and of other atomic tokens that also appear in the template."""
        ...

    def decode(self, ids: Sequence[int], special: bool) -> str: ...

    def spellings(self) -> list[bytes | None]:
        """Return the bytes of each token; None for control tokens."""
        ...


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A text codec with its vocabulary, end tokens and chat template."""

    codec: TextCodec = field(repr=False)
    vocab: tuple[str, ...] = field(repr=False)  # pieces by id, as the model's files spell them
    eos: tuple[int, ...]  # all ids that end a turn or a text
    chat_template: Any = field(default=None, repr=False)  # Jinja template in Hugging Face's form, as read from the file
    names: Mapping[str, str] = field(default_factory=dict)  # special tokens for templates, such as "bos_token"
    named_templates: Mapping[str, Any] = field(default_factory=dict, repr=False)  # other templates of the file by name
    template_args: Mapping[str, Any] = field(
        default_factory=dict
    )  # variables of the template that `chat` uses by default

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids of a text. `special` adds the bos (and eos) that the model expects.

        Control tokens that are written out in the text are recognised either way.
        """
        return self.codec.encode(text, special)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of ids, without control tokens unless `special`.

        Text that ends within a character ends with U+FFFD. Apart from those, the text of a prefix of ids is a prefix of
        the text. So a stream can show the new end of `decode(ids so far)` in each step, without trailing U+FFFDs.
        """
        return self.codec.decode([int(i) for i in ids], special)

    def spellings(self) -> list[bytes | None]:
        """Return the bytes that each token adds to a text, by id; None for control tokens.

        Some of them are incomplete characters.
        """
        return self.codec.spellings()

    def chat(
        self,
        text_or_messages: str | Messages,
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int]:
        """Return the ids of a conversation up to the start of the assistant's turn.

        Without a template these are the ids of the plain text after bos. Only the template writes control tokens. A
        control token that is written out in a message or in `tools` is encoded as plain text. So a user cannot end
        their turn and start one of the system; `encode` has no such protection.

        Args:
          tools: JSON schemas of functions that the model may call.
          chat_template: name of one of the file's templates, or a template in Jinja. None: the one called "tool_use"
            for tools if there is one, or else the default.
          variables: other variables of the template, for example `enable_thinking=False` for Qwen3. They take
            precedence over `template_args`.

        Raises: UsageError if the template refuses the messages, is broken, takes too long, or does not read a variable.
        """
        messages = text_or_messages
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        messages = list(messages) if isinstance(messages, Iterable) else [messages]  # also of an iterator
        if not all(isinstance(message, Mapping) for message in messages):
            raise UsageError(INVALID_MESSAGES)
        variables = {**self.template_args, **variables} | ({} if tools is None else {"tools": tools})
        default_name = variables.pop("chat_template", None)
        template = self._template(chat_template or default_name, variables)
        if template is not None:
            messages = chat.fit_contents(template, messages, self.names)
        conversation = Conversation(messages, variables)
        render_one, find = functools.partial(self._render, template), functools.partial(self._find, template)
        conversation, mark = chat.split_control_tokens(conversation, find)
        text = render_one(conversation)
        parts = chat.split_conversation(text, mark, conversation, render_one, find)
        special = template is None
        return self.codec.encode_parts(parts, special) if len(parts) > 1 else self.codec.encode(text, special)

    def with_template_args(self, variables: Mapping[str, Any]) -> Tokenizer:
        """Return the tokenizer with variables of the chat template that `chat` uses by default."""
        return replace(self, template_args=dict(variables))

    def _template(self, name: Any, variables: Mapping[str, Any]) -> str | None:
        """Return a template of the file by name, or the name itself if it is a template; None: the model has none.

        Raises: UsageError for an unknown name, for variables without a template, and for a template that is no text.
        """
        if not (name is None or isinstance(name, str)):
            raise UsageError(f"chat_template must be a name or a template in Jinja, not {quote(name)}")
        if "messages" in variables:
            raise UsageError("messages is no variable of a chat template; give the messages themselves")
        template = self.chat_template
        if name is None and variables.get("tools") is not None:
            template = self.named_templates.get("tool_use", template)
        elif name is not None:
            template = self.named_templates.get(name, template if name == "default" else None)
            template = name if template is None and "{" in str(name) else template
        if template is None and (name is not None or self.named_templates):
            names = ", ".join(map(quote, self.named_templates))
            fix = f"only {names}; give one of them as chat_template, {SKIP_TEMPLATE}" if names else "leave it out"
            raise UsageError(f"the model has no chat template called {quote(name or 'default')}, {fix}")
        if template is None and any(value is not None for value in variables.values()):
            name = next(name for name, value in variables.items() if value is not None)
            raise UsageError(f"the model has no chat template, which alone reads {quote(name)}; leave it out")
        if not (template is None or isinstance(template, str)):
            raise UsageError(f"the model's chat template is not text ({type(template).__name__}); {SKIP_TEMPLATE}")
        return template

    def _render(self, template: str | None, conversation: Conversation) -> str:
        if template is None:
            return "\n".join(str(message.get("content", "")) for message in conversation.messages)
        return render(template, conversation, self.names)

    def _find(self, template: str | None, text: str, by_model: bool) -> Spans:
        """Find control tokens, and for text that the model did not write also other tokens of the template.

        In DeepSeek's files, roles and <think> are not control tokens.
        """
        return self.codec.find(text, "" if by_model else template or "")


def first_difference(a: Tokenizer, b: Tokenizer) -> tuple[int, str, str] | None:
    """Return the first id that `a` and `b` spell differently, with both pieces; None if the vocabularies are equal."""
    if a.vocab == b.vocab:
        return None
    for i in range(max(len(a.vocab), len(b.vocab))):
        pieces = tuple(t.vocab[i] if i < len(t.vocab) else MISSING_TOKEN for t in (a, b))
        if pieces[0] != pieces[1]:
            return i, pieces[0], pieces[1]
    return None


def end_ids(vocab: Sequence[str], control: Iterable[int], end_tokens: Iterable[int]) -> tuple[int, ...]:
    """Return the end ids of a file and the control tokens in END_TOKENS, in order."""
    named = {vocab[i]: i for i in control if i < len(vocab) and vocab[i] in END_TOKENS}
    if any(pair <= named.keys() for pair in CHANNEL_ENDS):
        named.pop("<|end|>", None)
    return tuple(sorted({*named.values(), *map(int, end_tokens)}))


@dataclass(frozen=True, eq=False)
class LibraryCodec:
    """A tokenizer of the `tokenizers` library."""

    backend: Any

    def encode(self, text: str, special: bool) -> list[int]:
        return _encode(self.backend, text, special).ids

    def encode_parts(self, parts: Sequence[str], special: bool) -> list[int]:
        if any(BORDER in part for part in parts):
            raise UsageError("the prompt contains U+10FFFF, which separates messages internally; remove it")
        backend, border = self._with_border
        return [i for i in _encode(backend, BORDER.join(parts), special).ids if i != border]

    def find(self, text: str, template: str) -> Spans:
        encoding = _encode(self.backend, text, special=False)
        added = self.backend.get_added_tokens_decoder()
        token_ids = {i for i, t in added.items() if t.special or appears_in_template(template, t.content)}
        return [span for i, span in zip(encoding.ids, encoding.offsets, strict=True) if i in token_ids]

    def decode(self, ids: Sequence[int], special: bool) -> str:
        return _guard_library(lambda: self.backend.decode(ids, skip_special_tokens=not special))

    def spellings(self) -> list[bytes | None]:
        special = self.backend.get_added_tokens_decoder()
        added = {i: None if token.special else token.content.encode() for i, token in special.items()}
        by_byte = self.backend.decoder is not None and b'"ByteLevel"' in self.backend.decoder.__getstate__()
        to_bytes = lambda piece: _piece_bytes(piece) if by_byte else piece_bytes(piece)
        pieces = {i: piece for piece, i in self.backend.get_vocab().items()}
        spell = lambda i: added[i] if i in added else to_bytes(pieces[i]) if i in pieces else None
        return [spell(i) for i in range(max(pieces, default=-1) + 1)]

    @functools.cached_property
    def _with_border(self) -> tuple[Any, int | None]:
        """Return a copy that splits text at BORDER, as at any added token, and the id of BORDER in it."""
        import tokenizers

        copy = tokenizers.Tokenizer.from_str(self.backend.to_str())
        copy.add_special_tokens([tokenizers.AddedToken(BORDER, normalized=False)])
        return copy, copy.token_to_id(BORDER)


def _piece_bytes(piece: str) -> bytes | None:
    """Return the bytes of a piece of a byte-level vocabulary, one per letter; None if it has other letters."""
    table = _byte_letters()
    return bytes(table[letter] for letter in piece) if all(letter in table for letter in piece) else None


@functools.cache
def _byte_letters() -> dict[str, int]:
    """Return the byte of each letter of GPT-2.

    Visible bytes are their own letters; the others have code points from 256 on.
    """
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


def _encode(backend: Any, text: str, special: bool) -> Any:
    return _guard_library(lambda: backend.encode(text, add_special_tokens=special))


def _guard_library(call: Callable[[], T]) -> T:
    """Call the library and convert its failures.

    Rules of a tokenizer.json can make it panic, which is not an `Exception`.
    """
    try:
        return call()
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise UsageError(
            f"the model's tokenizer fails on this text ({first_line(error)}); use another tokenizer"
        ) from None
