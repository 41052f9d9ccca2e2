"""Text to ids and back, with the model's chat format and its end tokens."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from specjax.errors import UsageError
from specjax.reading import reason

T = TypeVar("T")

END_NAMES = (
    "<|im_end|>", "<|endoftext|>", "<end_of_turn>", "<eos>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "</s>",
)  # fmt: skip
"""Tokens that end a turn or a text in some family. Which of them a model was trained to emit is not written down
reliably, so every one that is a control token of the vocabulary counts."""

NO_TOKEN = "(none)"

Messages = Sequence[Mapping[str, str]]


class Codec(Protocol):
    """What turns text into ids and back. `special`: add bos/eos; show control tokens."""

    def encode(self, text: str, special: bool) -> list[int]: ...
    def decode(self, ids: Sequence[int], special: bool) -> str: ...


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A vocabulary with everything a prompt needs."""

    codec: Codec = field(repr=False)
    vocab: tuple[str, ...] = field(repr=False)  # pieces by id, as the model's files spell them
    eos: tuple[int, ...]  # every id that ends a turn or a text
    chat_template: str | None = field(default=None, repr=False)  # Jinja, as Hugging Face defines it
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

    def chat(self, text_or_messages: str | Messages) -> list[int]:
        """Ids of a conversation up to where the assistant speaks; without a template, of the plain text after bos."""
        messages = text_or_messages
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if self.chat_template is None:
            return self.encode("\n".join(m["content"] for m in messages))
        return self.encode(_render(self.chat_template, messages, self.names), special=False)


def first_difference(a: Tokenizer, b: Tokenizer) -> tuple[int, str, str] | None:
    """The first id that `a` and `b` spell differently, with both pieces; None if the vocabularies are equal."""
    if a.vocab == b.vocab:
        return None
    for i in range(max(len(a.vocab), len(b.vocab))):
        pieces = tuple(t.vocab[i] if i < len(t.vocab) else NO_TOKEN for t in (a, b))
        if pieces[0] != pieces[1]:
            return i, pieces[0], pieces[1]
    return None


def _render(source: str, messages: Messages, names: Mapping[str, str]) -> str:
    """The text of a conversation, in the Jinja environment that chat templates are written for."""
    try:
        import jinja2
    except ImportError:
        raise UsageError("the model's chat template needs the package jinja2; run pip install jinja2") from None
    try:
        text = _template(source).render(messages=list(messages), add_generation_prompt=True, **names)
    except jinja2.TemplateError as error:
        raise UsageError(f"the model's chat template refuses these messages: {error}") from None
    return text


@functools.lru_cache(maxsize=8)
def _template(source: str):
    import datetime

    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str):
        raise jinja2.TemplateError(message)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = lambda x, **kw: json.dumps(x, ensure_ascii=False, **kw)
    env.globals["raise_exception"] = refuse
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return env.from_string(source)


def end_ids(vocab: Sequence[str], control: Iterable[int], stated: Iterable[int]) -> tuple[int, ...]:
    """The ids a file states and the control tokens of END_NAMES, in order."""
    named = {i for i in control if i < len(vocab) and vocab[i] in END_NAMES}
    return tuple(sorted(named | {int(i) for i in stated}))


@dataclass(frozen=True, eq=False)
class LibraryCodec:
    """A tokenizer of the `tokenizers` library."""

    backend: Any

    def encode(self, text: str, special: bool) -> list[int]:
        return _alive(lambda: self.backend.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int], special: bool) -> str:
        return _alive(lambda: self.backend.decode(ids, skip_special_tokens=not special))


def _alive(call: Callable[[], T]) -> T:
    """What the library answers. Rules of a tokenizer.json can make it panic, which is no `Exception`."""
    try:
        return call()
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UsageError(f"the model's tokenizer breaks down on this text ({reason(error)}); use another") from None
