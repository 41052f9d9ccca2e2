"""The form of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from specjax.server.answers import Form, ServedChoice
from specjax.server.sampling import TokenTexts
from specjax.serving.batch import Served

LOWEST = -9999.0
"""The log-probability of an impossible token: JSON has no -inf."""


def _choice(index: int, choice: ServedChoice, logprobs: Any, stop_reason: Any) -> dict[str, Any]:
    content = choice.text or (None if choice.calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
    if choice.calls:
        message["tool_calls"] = [call.document() for call in choice.calls]
    return {
        "index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason,
        "stop_reason": stop_reason,
    }  # fmt: skip


def _delta(index: int, text: str, logprobs: Any, calls: list[dict[str, Any]]) -> dict[str, Any]:
    content = {"content": text} if text or not calls else {}
    return _chunk(index, content | ({"tool_calls": calls} if calls else {}), logprobs=logprobs)


def _chunk(index: int, delta: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **values}


def _logprobs(served: Served, start: int, texts: TokenTexts) -> dict[str, Any]:
    assert served.logprobs is not None
    entry = lambda token, value: {
        "token": texts.text(token), "logprob": max(float(value), LOWEST), "bytes": list(texts.spelling(token)),
    }  # fmt: skip
    of_tokens, likeliest, alternatives = served.logprobs
    content = []
    for token, value, ids, values in zip(served.tokens, of_tokens, likeliest, alternatives, strict=False):
        tops = [entry(int(other), x) for other, x in zip(ids, values, strict=True)]
        content.append({**entry(token, value), "top_logprobs": tops})
    return {"content": content, "refusal": None}


def _join(parts: list[Any]) -> dict[str, Any]:
    return {"content": [entry for part in parts for entry in part["content"]], "refusal": None}


CHAT = Form(
    prefix="chatcmpl", object="chat.completion", chunk_object="chat.completion.chunk", choice=_choice,
    first=lambda index, echo: _chunk(index, {"role": "assistant", "content": ""}),
    delta=_delta,
    last=lambda index, reason, stop: _chunk(index, {}, finish_reason=reason, stop_reason=stop),
    logprobs=_logprobs, join=_join,
)  # fmt: skip
