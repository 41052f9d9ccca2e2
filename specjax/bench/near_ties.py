"""The first difference of two texts that must be equal, and the test whether rounding caused it: a near-tie.

A pass over several tokens rounds differently from passes over one token. How differently depends on the model, the
dtype, the cache, the device and the rows, so it is measured: the text is read again in passes of all widths of the
method, and the logits of the same positions are compared. Rounding can exchange two tokens if a change of the gaps
between logits, no larger than the largest that was measured, makes the same draw choose the other token. For a greedy
text that is a gap of two logits. A sampled text has the noise of its key in every draw, and its filters.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import parallel
from specjax.arrays.indexing import take_along
from specjax.arrays.modes import jit, with_standard_modes
from specjax.arrays.texts import causal_mask
from specjax.engine.prefill import CHUNK, prefill
from specjax.numerics.filtered_draws import draw_warped
from specjax.numerics.sampling import node_keys, noise, temperature_of
from specjax.numerics.text_identity import NEAR_TIES, SAME_BITS, text_identity
from specjax.processors import pipeline
from specjax.types import Array, Processor, PyTree, Sampling, Target

NUM_MEASURED = 16
"""Number of positions, up to the difference, whose logits are compared between both widths."""


class TextOrigin(NamedTuple):
    """The decoding of a method's text: the rows and widths of its passes, and the choice of its tokens."""

    widths: Sequence[int]  # tokens per row of its target passes
    batch: int = 1  # rows that are decoded together
    processors: tuple[Processor, ...] = ()
    sampling: Sampling = Sampling()
    key: Array | None = None  # key[], of the row; None: the text is greedy
    inputs: PyTree = None  # arrays [1, ...] of the row, for a model that reads more than tokens


class Difference(NamedTuple):
    """The first place at which the text of a method differs from that of plain decoding."""

    position: int  # in new tokens
    token: int | None  # of the method; None: its text has ended
    plain_token: int | None  # of plain decoding
    top_two_gap: float  # between the two best scores after the common prefix; scores are logits, with noise if sampled
    behind: float  # distance of the less likely token from the best score; inf if a token is missing
    rounding: (
        float  # largest change of a gap between two logits, between passes of one token and of the method's widths
    )
    near_tie: bool  # rounding may have decided, and the same bits are not promised


def are_excluded(target: Target) -> bool:
    """Return True if texts that a method promises to be equal must be equal, except at ties within float32 rounding."""
    return text_identity(target) != NEAR_TIES


@with_standard_modes
def find_difference(
    target: Target, prompt: Sequence[int], text: list[int], plain: list[int], origin: TextOrigin
) -> Difference | None:
    """Return the first difference of two texts, and the scores' gap and rounding there; None for equal texts."""
    position = first_difference(text, plain)
    if position is None:
        return None
    prefix = plain[:position]
    process = lambda logits: np.asarray(pipeline.process_text(origin.processors, prompt, prefix, jnp.asarray(logits)))
    ids, batch, inputs = [*prompt, *prefix], origin.batch, origin.inputs
    of_width = lambda width: measured_logits(target, ids, len(prompt), width, batch, inputs)
    narrow, rounding = of_width(1), 0.0
    logits = process(narrow[-1]) if origin.processors else narrow[-1]
    for width in sorted({*origin.widths} - {1}):
        wide = of_width(width)
        rounding = max(rounding, _largest_gap_change(narrow, wide))
        if origin.processors:
            rounding = max(rounding, _largest_gap_change(logits, process(wide[-1])))
    scores = _scores(logits, origin, len(prompt) + position)
    second, best = np.sort(scores)[-2:]
    token, plain_token = (tokens[position] if position < len(tokens) else None for tokens in (text, plain))
    behind, near_tie = float("inf"), False
    if token is not None and plain_token is not None:
        behind = float(best - min(scores[token], scores[plain_token]))
        choose = lambda logits: _choose(logits, origin, len(prompt) + position)
        may_choose = functools.partial(_may_choose, choose, logits, rounding)
        may_differ = may_choose(token, plain_token) and may_choose(plain_token, token)
        near_tie = may_differ and text_identity(target) != SAME_BITS
    return Difference(position, token, plain_token, float(best - second), behind, rounding, near_tie)


def _scores(logits: np.ndarray, origin: TextOrigin, length: int) -> np.ndarray:
    """Return logits float32[V] with the noise of the draw after `length` tokens, in units of logits."""
    if origin.key is None or origin.sampling.temperature is None:
        return logits
    scale, is_sampled = temperature_of(jnp.asarray(origin.sampling.temperature))
    return np.asarray(logits + jnp.where(is_sampled, scale * noise(_draw_keys(origin, length), len(logits))[0], 0.0))


def _choose(logits: np.ndarray, origin: TextOrigin, length: int) -> int:
    """Return the token that plain decoding chooses after `length` tokens."""
    if origin.key is None:
        return int(np.argmax(logits))
    return int(draw_warped(_draw_keys(origin, length), jnp.asarray(logits)[None], origin.sampling)[0])


def _draw_keys(origin: TextOrigin, length: int) -> Array:
    """Return the key[1] of the draw after `length` tokens."""
    assert origin.key is not None
    return node_keys(origin.key[None], jnp.full((1,), length), jnp.zeros((1, 1), jnp.int32))[:, 0]


def _may_choose(
    choose: Callable[[np.ndarray], int], logits: np.ndarray, rounding: float, token: int, other: int
) -> bool:
    """Return True if `token` is chosen from logits float32[V] after some change of gaps by at most `rounding`."""
    change = 1.001 * rounding  # the gap may be as large as the largest change
    for raised, lowered in ((1.0, 0.0), (0.5, 0.5), (0.0, 1.0)):
        changed = logits.copy()
        changed[token] += raised * change
        changed[other] -= lowered * change
        if choose(changed) == token:
            return True
    return False


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
        f"the two best tokens there are {record['top_two_gap']:.2g} apart, and the width of a pass changes gaps by "
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


def measured_logits(
    target: Target, ids: Sequence[int], prompt: int, width: int, batch: int = 1, inputs: PyTree = None
) -> np.ndarray:
    """Return the target's logits float32[n, V] at the last n positions of a text, up to NUM_MEASURED.

    The prompt, the first `prompt` ids, is read as by `decode`. The other tokens are read in passes of `width` tokens,
    beside as many copies of the text as there are other rows in the batch.

    inputs: as in `TextOrigin`.
    """
    parts = 1 if target.model.mesh is None else target.model.mesh.shape.get("data", 1)
    chunks = 1 - (-len(ids) // CHUNK) - (-width // CHUNK)  # widths share the program of the prompt
    tokens = np.zeros((-(-batch // parts) * parts, chunks * CHUNK), np.int32)
    tokens[:, : len(ids)] = ids
    length, start = jnp.int32(len(ids)), jnp.int32(prompt - 1)  # the last token of the prompt is in the first pass
    text = jnp.asarray(tokens)
    inputs = jax.tree.map(lambda x: jnp.repeat(x, len(tokens), 0), inputs)
    cache = _read_prompt(target, text, start, max(width, 1), inputs)
    logits = parallel.gather(_logits_of_passes(target, cache, text, length, start, width))
    return logits[-min(len(ids) - prompt + 1, NUM_MEASURED) :]


def _under_mesh(target: Target) -> contextlib.AbstractContextManager:
    """Return the context of a model's passes, because some kernels need its mesh."""
    mesh = target.model.mesh
    return contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


@jit(static_argnames="width")
def _read_prompt(target: Target, tokens: Array, start: Array, width: int, inputs: PyTree) -> PyTree:
    """Return a cache of the first `start` tokens of equal rows, for passes of `width` tokens."""
    model, counts = target.model, jnp.broadcast_to(start, tokens.shape[:1])
    with _under_mesh(target):
        cache = model.start_cache(target.params, inputs, counts + 1, tokens.shape[1])
        cache = prefill(model, target.params, cache, tokens, counts)
        return model.cache_after_prompt(target.params, cache, tokens, counts + 1, width)


@jit(static_argnames="width")
def _logits_of_passes(target: Target, cache: PyTree, tokens: Array, length: Array, start: Array, width: int) -> Array:
    """Return the logits float32[NUM_MEASURED, V] of the first of equal rows, at the last positions of their text.

    Rows of the result before the prompt are zeros.

    Args:
      cache: of the first `start` int32[] tokens. tokens: int32[B, L], of which `length` int32[] are the text.
    """
    model, params = target.model, target.params
    rows = lambda value: jnp.broadcast_to(value, (len(tokens), *jnp.shape(value)))
    offset, mask = jnp.arange(width), causal_mask(len(tokens), width)

    def read_pass(carry):
        cache, start, logits = carry
        positions = start + offset
        output, pending = model.forward(
            params, take_along(tokens, rows(positions), 1), cache, positions=rows(positions), mask=mask
        )
        row = positions - length + NUM_MEASURED
        row = jnp.where((row < 0) | (positions >= length), NUM_MEASURED, row)
        logits = logits.at[row].set(output.logits[0].astype(jnp.float32), mode="drop")
        count = jnp.clip(length - start, 0, width)
        return model.commit(cache, pending, rows(offset), rows(count)), start + count, logits

    carry = cache, start, jnp.zeros((NUM_MEASURED, model.vocab_size))
    with _under_mesh(target):
        return jax.lax.while_loop(lambda carry: carry[1] < length, read_pass, carry)[2]
