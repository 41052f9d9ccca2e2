"""The form of /v1/completions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from specjax.server.answers import Form, ServedChoice
from specjax.server.chat import LOWEST
from specjax.server.sampling import TokenTexts
from specjax.serving.batch import Served
from specjax.types import TokenLogprobs


def _text(index: int, text: str, **values: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None, **values}


def _choice(index: int, choice: ServedChoice, logprobs: Any, stop_reason: Any) -> dict[str, Any]:
    return _text(
        index, choice.echo + choice.text, logprobs=logprobs, finish_reason=choice.finish_reason, stop_reason=stop_reason
    )  # fmt: skip


def _logprobs(served: Served, start: int, texts: TokenTexts) -> dict[str, Any]:
    assert served.logprobs is not None
    return _entries(served.tokens, served.logprobs, start, texts)


def _prompt_logprobs(prompt: Sequence[int], logprobs: TokenLogprobs, texts: TokenTexts) -> dict[str, Any]:
    """Return the log-probabilities of a prompt. Its first token follows no other, so it has none."""
    first = texts.text(prompt[0])
    none = {"tokens": [first], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
    return _join([none, _entries(prompt[1:], logprobs, len(first), texts)])


def _entries(tokens: Sequence[int], logprobs: TokenLogprobs, start: int, texts: TokenTexts) -> dict[str, Any]:
    """Return the log-probabilities of tokens, the first of which has `start` characters before it."""
    of_tokens, likeliest, alternatives = logprobs
    words = [texts.text(token) for token in tokens]
    tops = [
        {texts.text(int(token)): max(float(x), LOWEST) for token, x in zip(ids, values, strict=True)}
        for ids, values in zip(likeliest[: len(words)], alternatives, strict=False)
    ]
    offsets = itertools.accumulate(map(len, words), initial=start)
    return {
        "tokens": words, "token_logprobs": [max(float(x), LOWEST) for x in of_tokens[: len(words)]],
        "top_logprobs": tops, "text_offset": list(offsets)[: len(words)],
    }  # fmt: skip


def _join(parts: list[Any]) -> dict[str, Any]:
    names = "tokens", "token_logprobs", "top_logprobs", "text_offset"
    return {name: [x for part in parts for x in part[name]] for name in names}


COMPLETION = Form(
    prefix="cmpl", object="text_completion", chunk_object="text_completion", choice=_choice,
    first=lambda index, echo: _text(index, echo) if echo else None,
    delta=lambda index, text, logprobs, calls: _text(index, text, logprobs=logprobs),
    last=lambda index, reason, stop: _text(index, "", finish_reason=reason, stop_reason=stop),
    logprobs=_logprobs, join=_join, prompt_logprobs=_prompt_logprobs,
)  # fmt: skip
