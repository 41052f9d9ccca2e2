"""The first difference of two greedy texts, and the test whether rounding caused it: a near-tie of two logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import parallel
from specjax.arrays.indexing import take_along
from specjax.engine.prefill import CHUNK, prefill
from specjax.processors import pipeline
from specjax.types import Array, Processor, Target

SAME_BITS = "same bits"  # in place of a dtype: the logits do not depend on the pass, so rounding flips no token
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.25, "int8": 1.0, SAME_BITS: 0.0}
"""Maximum gap of two logits, by dtype, for which a flip between two programs counts as rounding.

The largest logits are between 16 and 32, where bfloat16 has steps of 0.125. "int8" is the dtype of the cache, which
magnifies rounding: one logit differed by up to 0.7 between passes of two widths (SmolLM2)."""


class Difference(NamedTuple):
    """The first difference of two texts."""

    position: int  # in the new tokens, from 0
    token: int | None  # of the method; None: its text had ended
    plain_token: int | None  # of plain decoding
    top_two_gap: float  # between the two largest target logits after the common prefix
    behind: float  # distance of the less likely token from the largest logit; inf if a token is missing
    near_tie: bool


def find_difference(
    target: Target, prompt: Sequence[int], text: list[int], plain: list[int], dtype: str,
    processors: tuple[Processor, ...] = (),
) -> Difference | None:  # fmt: skip
    """Return the first difference of two greedy texts and the gap of the logits there; None if they are equal."""
    position = first_difference(text, plain)
    if position is None:
        return None
    prefix = plain[:position]
    logits = next_logits(target, [*prompt, *prefix], len(prompt))
    if processors:
        logits = np.asarray(pipeline.process_text(processors, prompt, prefix, jnp.asarray(logits)))
    second, largest = np.sort(logits)[-2:]
    pair = [tokens[position] if position < len(tokens) else None for tokens in (text, plain)]
    behind = float("inf") if None in pair else float(largest - min(logits[token] for token in pair))
    return Difference(position, pair[0], pair[1], float(largest - second), behind, behind < NEAR_TIE[dtype])


def difference_record(d: Difference, tokenizer, **where) -> dict:
    """Return a difference as JSON. where: more fields, such as the number of the prompt."""
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


def first_difference(text: Sequence[int], plain: Sequence[int]) -> int | None:
    """Return the first position at which two texts differ; None if they are equal."""
    for position, (a, b) in enumerate(zip(text, plain, strict=False)):
        if a != b:
            return position
    return None if len(text) == len(plain) else min(len(text), len(plain))


def next_logits(target: Target, ids: Sequence[int], prompt: int) -> np.ndarray:
    """Return the target's logits float32[V] after `ids`, from one pass. The first `prompt` ids are the prompt."""
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
