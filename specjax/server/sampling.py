"""Requests of the scheduler, from the fields of a call.

All requests use one family of programs. Its processors are penalties and a bias, which are off by default.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Sequence
from typing import Any

import jax

from specjax import processors
from specjax.errors import UsageError
from specjax.numerics.sampling import threefry
from specjax.processors.automaton import Automaton
from specjax.server.errors import ApiError
from specjax.server.schemas import MAX_BAD_WORDS, MAX_BIASES, MAX_TOP_LOGPROBS, SampledFields
from specjax.serving.requests import Limits, Request, check_request, padded_size, processor_settings, row_settings
from specjax.types import Array, Processor, PyTree

LONGEST_BAD_WORD = 16
"""Maximum number of tokens of a bad word."""


def make_processors(
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    bias: dict[int, float] | None = None,
    length: int = 0,
    ends: Sequence[int] = (),
    words: Sequence[Sequence[int]] = (),
    *,
    room: int,
) -> tuple[Processor, ...]:
    """Return the processors of the server with some settings. By default, they change nothing.

    Args:
      length, ends: minimum number of tokens, and those that end a text. words: bad words. room: number of ends of a
        request.
    """
    return (
        processors.repetition(repetition), processors.presence(presence), processors.frequency(frequency),
        processors.bias(bias or {}, room=MAX_BIASES), processors.min_length(length, ends, room=room),
        processors.bad_words(words, room=2 * MAX_BAD_WORDS, longest=LONGEST_BAD_WORD),
    )  # fmt: skip


def serve_options(vocab_size: int, eos: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of `specjax.serve` that the server needs for any request."""
    neutral = make_processors(room=padded_size(len(eos)))
    return {"processors": neutral, "max_alternatives": min(MAX_TOP_LOGPROBS, vocab_size)}


def make_requests(
    fields: SampledFields,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    eos: tuple[int, ...],
    automaton: Automaton | None = None,
    owner: str = "",
    bad_words: Sequence[Sequence[int]] = (),
    inputs: PyTree = None,
) -> list[Request]:
    """Return `n` requests per prompt, in order.

    The first text of a prompt has the key of the seed, and text i the key `fold_in(key, i)`. Without a seed, each
    prompt has one of its own.

    Args:
      automaton: the constraint of the texts. owner: a name for the user, whose prompts share no prefixes with others.
      bad_words: the tokens of the words that the texts must not contain.
      inputs: those of the prompts in addition to tokens, without the batch axis; None: the model reads tokens only.

    Raises: ApiError if one of them does not fit.
    """
    for prompt in prompts:
        if len(prompt) > limits.longest_prompt:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens, and this server takes at most {limits.longest_prompt}; shorten "
                "it, or start the server with a larger --longest-prompt",
                code="context_length_exceeded",
            )
    if fields.length is not None and fields.length > limits.max_new_tokens:
        raise ApiError(
            400,
            f"max_tokens is {fields.length}, and this server writes at most {limits.max_new_tokens}; lower it, or "
            "start the server with a larger --max-new-tokens",
            param="max_tokens",
        )
    if (fields.min_tokens or 0) > limits.max_new_tokens:
        raise ApiError(
            400, f"min_tokens is {fields.min_tokens}, and this server writes at most {limits.max_new_tokens}; lower it",
            param="min_tokens",
        )  # fmt: skip
    if fields.scores_prompt and not limits.can_score:
        raise ApiError(
            400, "this server cannot compute log-probabilities of prompts; leave echo or logprobs out", param="logprobs"
        )  # fmt: skip
    longest_word = max(map(len, bad_words), default=0)
    if longest_word > LONGEST_BAD_WORD:
        raise ApiError(
            400, f"a bad word has {longest_word} tokens, more than {LONGEST_BAD_WORD}; shorten it", param="bad_words"
        )  # fmt: skip
    try:
        salt = f"{owner} {fields.cache_salt or ''}"
        shared = _settings(fields, limits, eos, bad_words) | {"constraint": automaton, "salt": salt, "inputs": inputs}
        requests = []
        for prompt in prompts:
            seed = secrets.randbits(62) if fields.seed is None else fields.seed
            requests += [Request(prompt, _key(seed, index), **shared) for index in range(fields.count)]
        for request in requests[:: fields.count]:
            check_request(request, limits)
            row_settings(limits, request)
            processor_settings(limits, request)
    except UsageError as error:
        raise ApiError(400, f"the request does not fit: {error}") from None
    return requests


def _key(seed: int, index: int) -> Array | int:
    return jax.random.fold_in(threefry(seed), index) if index else seed


def _settings(
    fields: SampledFields, limits: Limits, eos: tuple[int, ...], bad_words: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return the settings of a request. Raises: ApiError for a bias of something else than an id."""
    ends = tuple(dict.fromkeys((*(() if fields.ignore_eos else eos), *(fields.stop_token_ids or ()))))
    if len(ends) > limits.num_eos:
        raise ApiError(
            400, f"stop_token_ids and eos are {len(ends)} ids, more than {limits.num_eos}", param="stop_token_ids"
        )  # fmt: skip
    return {
        "max_new_tokens": 1 if fields.length == 0 else fields.length,  # the answer drops the token
        "temperature": fields.temperature,
        "top_k": limits.vocab_size if fields.top_k in (-1, 0) else fields.top_k,
        "top_p": fields.top_p,
        "min_p": fields.min_p,
        "eos": ends,
        "stop": fields.stops,
        "processors": _processors(fields, ends, bad_words, limits.num_eos),
        "shows_control": fields.skip_special_tokens is False,
        "includes_stop": bool(fields.include_stop_str_in_output),
        "min_unstopped": fields.min_tokens or 0,
        "alternatives": fields.alternatives,
        "scores_prompt": fields.scores_prompt,
    }


def _processors(
    fields: SampledFields, ends: tuple[int, ...], bad_words: Sequence[Sequence[int]], room: int
) -> tuple[Processor, ...] | None:
    repetition = 1.0 if fields.repetition_penalty is None else fields.repetition_penalty
    values = repetition, fields.presence_penalty or 0.0, fields.frequency_penalty or 0.0
    entries = fields.logit_bias or {}
    wrong = next((token for token in entries if not (token.isascii() and token.isdigit())), None)
    if wrong is not None:
        raise ApiError(400, f"logit_bias needs ids of tokens, not {wrong[:20]!r}", param="logit_bias")
    if values == (1.0, 0.0, 0.0) and not (entries or fields.min_tokens or bad_words):
        return None
    biases = {int(token): value for token, value in entries.items()}
    return make_processors(*values, biases, fields.min_tokens or 0, ends, bad_words, room=room)


class TokenTexts:
    """The bytes and the texts of single tokens."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    @functools.cached_property
    def _spellings(self) -> Sequence[bytes | None]:
        return self._tokenizer.spellings()

    def spelling(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; none for control tokens."""
        return (self._spellings[token] or b"") if token < len(self._spellings) else b""

    def text(self, token: int) -> str:
        """Return the text of a token, with U+FFFD for bytes of incomplete characters."""
        return self.spelling(token).decode(errors="replace")
