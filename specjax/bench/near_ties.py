"""The first difference of two greedy texts, and the test whether rounding caused it: a near-tie of two logits.

A pass over several tokens rounds differently from passes over one token. How differently depends on the model, the
dtype, the cache and the device, so it is measured: the text is read again in passes of both widths, and the logits of
the same positions are compared. Rounding can exchange two tokens if their logits are no further apart than the largest
change of a gap between two logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import parallel
from specjax.arrays.indexing import take_along
from specjax.arrays.modes import jit
from specjax.engine.prefill import CHUNK, prefill
from specjax.numerics.text_identity import SAME_BITS, text_identity
from specjax.processors import pipeline
from specjax.types import Array, Processor, Target

NUM_MEASURED = 16
"""Number of positions, up to the difference, whose logits are compared between both widths."""


class Difference(NamedTuple):
    """The first difference of two texts."""

    position: int  # in the new tokens, from 0
    token: int | None  # of the method; None: its text had ended
    plain_token: int | None  # of plain decoding
    top_two_gap: float  # between the two largest target logits after the common prefix
    behind: float  # distance of the less likely token from the largest logit; inf if a token is missing
    rounding: float  # largest change of a gap between two logits, between passes of one token and of the method's width
    near_tie: bool  # rounding may have decided: `behind` is at most `rounding`, and the same bits are not promised


def find_difference(
    target: Target, prompt: Sequence[int], text: list[int], plain: list[int], width: int,
    processors: tuple[Processor, ...] = (),
) -> Difference | None:  # fmt: skip
    """Return the first difference of two greedy texts, and the logits' gap and rounding there; None for equal texts.

    width: tokens of the method's widest target pass.
    """
    position = first_difference(text, plain)
    if position is None:
        return None
    prefix = plain[:position]
    narrow, wide = (measured_logits(target, [*prompt, *prefix], len(prompt), tokens) for tokens in (1, width))
    rounding = _largest_gap_change(narrow, wide)
    logits = narrow[-1]
    if processors:
        logits, other = (
            np.asarray(pipeline.process_text(processors, prompt, prefix, jnp.asarray(rows[-1])))
            for rows in (narrow, wide)
        )
        rounding = max(rounding, _largest_gap_change(logits, other))
    second, largest = np.sort(logits)[-2:]
    pair = [tokens[position] if position < len(tokens) else None for tokens in (text, plain)]
    behind = float("inf") if None in pair else float(largest - min(logits[token] for token in pair))
    near_tie = behind <= rounding and text_identity(target) != SAME_BITS
    return Difference(position, pair[0], pair[1], float(largest - second), behind, rounding, near_tie)


def _largest_gap_change(narrow: np.ndarray, wide: np.ndarray) -> float:
    """Return the largest change of a difference of two logits of one position, of logits float32[..., V] twice."""
    both = np.isfinite(narrow) & np.isfinite(wide)
    change = np.where(both, wide, 0.0) - np.where(both, narrow, 0.0)
    return float(np.max(np.ptp(change, axis=-1)))


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
        "rounding": d.rounding,
        "near_tie": d.near_tie,
    }


def describe_gap(record: dict) -> str:
    """Return the gap and the rounding of a difference in words."""
    gap = (
        f"the two largest logits there are {record['top_two_gap']:.2g} apart, and the width of a pass changes gaps by "
        f"up to {record['rounding']:.2g}"
    )
    return gap + (" (a near-tie, decided by rounding)" if record["near_tie"] else "")


def first_difference(text: Sequence[int], plain: Sequence[int]) -> int | None:
    """Return the first position at which two texts differ; None if they are equal."""
    for position, (a, b) in enumerate(zip(text, plain, strict=False)):
        if a != b:
            return position
    return None if len(text) == len(plain) else min(len(text), len(plain))


def next_logits(target: Target, ids: Sequence[int], prompt: int) -> np.ndarray:
    """Return the target's logits float32[V] after `ids`, of plain decoding. The first `prompt` ids are the prompt."""
    return measured_logits(target, ids, prompt, 1)[-1]


def measured_logits(target: Target, ids: Sequence[int], prompt: int, width: int) -> np.ndarray:
    """Return the target's logits float32[n, V] at the last n positions of a text, up to NUM_MEASURED.

    The prompt, the first `prompt` ids, is read as by `decode`. The other tokens are read in passes of `width` tokens.
    """
    size = -(-len(ids) // CHUNK) * CHUNK
    tokens = np.zeros((1, size + CHUNK + width), np.int32)
    tokens[0, : len(ids)] = ids
    length, prompts = jnp.asarray([len(ids)], jnp.int32), jnp.asarray([prompt], jnp.int32)
    logits = parallel.gather(_logits_of_passes(target, jnp.asarray(tokens), length, prompts, width))
    return logits[-min(len(ids) - prompt + 1, NUM_MEASURED) :]


@jit(static_argnames="width")
def _logits_of_passes(target: Target, tokens: Array, length: Array, prompt: Array, width: int) -> Array:
    """Return the logits float32[NUM_MEASURED, V] at the last positions of a text; rows before its prompt are zeros."""
    model, params = target.model, target.params
    cache = model.start_cache(params, None, prompt, tokens.shape[1])
    offset, mask = jnp.arange(width), jnp.tril(jnp.ones((1, width, width), bool))

    def read_pass(carry):
        cache, start, logits = carry  # start: int32[1]
        positions = start[:, None] + offset
        output, pending = model.forward(params, take_along(tokens, positions, 1), cache, positions=positions, mask=mask)
        row = positions[0] - length + NUM_MEASURED
        row = jnp.where((row < 0) | (positions[0] >= length), NUM_MEASURED, row)
        logits = logits.at[row].set(output.logits[0].astype(jnp.float32), mode="drop")
        count = jnp.clip(length - start, 0, width)
        return model.commit(cache, pending, offset[None], count), start + count, logits

    first = prompt - 1  # the last token of the prompt is in the first pass
    carry = prefill(model, params, cache, tokens, first), first, jnp.zeros((NUM_MEASURED, model.vocab_size))
    return jax.lax.while_loop(lambda carry: carry[1][0] < length[0], read_pass, carry)[2]
