"""Where two greedy texts part, and whether rounding decided it there: a near-tie of two logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import parallel
from specjax.arrays.indexing import take_along
from specjax.engine import logits_processing
from specjax.engine.prefill import CHUNK, prefill
from specjax.types import Array, Processor, Target

SAME_BITS = "same bits"  # as a dtype: of a model whose logits do not depend on the pass; there no flip is rounding
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.25, "int8": 1.0, SAME_BITS: 0.0}
"""By how much the better of two logits may lead for a flip between programs to count as rounding. In bfloat16, logits
of 16 to 32, which is where the best ones are, lie 0.125 apart. int8: of the cache, which magnifies rounding; passes of
two widths were up to 0.7 apart in one logit (SmolLM2)."""


class Difference(NamedTuple):
    """Where two texts part."""

    position: int  # in the new tokens, from 0
    token: int | None  # of the method; None: its text had ended
    plain_token: int | None  # of plain decoding
    top_two_gap: float  # between the two largest target logits after the common prefix
    behind: float  # how far the worse of the two tokens is behind the largest logit; inf where one is missing
    near_tie: bool


def difference(
    target: Target, prompt: Sequence[int], ours: list[int], plain: list[int], dtype: str,
    processors: tuple[Processor, ...] = (),
):  # fmt: skip
    """Where two greedy texts part and how close the choice was there: Difference, or None if they are equal."""
    position = _first_unlike(ours, plain)
    if position is None:
        return None
    before = plain[:position]
    logits = next_logits(target, [*prompt, *before], len(prompt))
    if processors:
        logits = np.asarray(logits_processing.after(processors, prompt, before, jnp.asarray(logits)))
    second, largest = np.sort(logits)[-2:]
    pair = [text[position] if position < len(text) else None for text in (ours, plain)]
    behind = float("inf") if None in pair else float(largest - min(logits[token] for token in pair))
    return Difference(position, pair[0], pair[1], float(largest - second), behind, behind < NEAR_TIE[dtype])


def difference_record(d: Difference, tokenizer, **where) -> dict:
    """A difference as JSON."""
    pieces = [None if token is None else tokenizer.decode([token]) for token in (d.token, d.plain_token)]
    return where | {
        "position": d.position,
        "token": d.token,
        "plain_token": d.plain_token,
        "text": pieces[0],
        "plain_text": pieces[1],
        "top_two_gap": d.top_two_gap,
        "near_tie": d.near_tie,
    }


def _first_unlike(ours: Sequence[int], plain: Sequence[int]) -> int | None:
    """The first position at which two texts differ; None if they are equal."""
    for position, (a, b) in enumerate(zip(ours, plain, strict=False)):
        if a != b:
            return position
    return None if len(ours) == len(plain) else min(len(ours), len(plain))


def next_logits(target: Target, ids: Sequence[int], prompt: int) -> np.ndarray:
    """float32[V]: the target's logits after `ids`, the first `prompt` of them a prompt, from one pass over them."""
    size = -(-len(ids) // CHUNK) * CHUNK
    tokens = np.zeros((1, size + CHUNK + 1), np.int32)
    tokens[0, : len(ids)] = ids
    length, prompts = jnp.asarray([len(ids)], jnp.int32), jnp.asarray([prompt], jnp.int32)
    return parallel.gather(_next_logits(target, jnp.asarray(tokens), length, prompts))


@jax.jit
def _next_logits(target: Target, tokens: Array, length: Array, prompt: Array) -> Array:
    model, params = target.model, target.params
    cache = prefill(model, params, model.start_cache(params, None, prompt, tokens.shape[1]), tokens, length - 1)
    last = take_along(tokens, length[:, None] - 1, 1)
    output, _ = model.forward(params, last, cache, positions=length[:, None] - 1, mask=jnp.ones((1, 1, 1), bool))
    return output.logits[0, 0].astype(jnp.float32)
