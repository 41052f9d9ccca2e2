"""Programs that admit one request: its prompt is read in chunks as a batch of one, and the result enters a row.

A chunk of a prompt can be stored and written into the state of a later prompt that begins with the same tokens
(`PrefixStore`). A stored chunk has the keys and values of its tokens, and every other array that reading changes, such
as the states of recurrent layers, as of the end of the chunk. So it works for all models, and needs no rewinding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays import batch_axes, platforms
from specjax.arrays.modes import with_standard_modes
from specjax.engine.job import Parts
from specjax.engine.prefill import CHUNK
from specjax.serving.requests import Request
from specjax.types import Array, DecodeState, Info, PyTree, TokenLogprobs

CHUNK_ON_CPU = 32
"""Tokens of a chunk on a CPU. SmolLM2 reads 128 tokens on two cores in the time of about five steps of eight rows."""
LATE = 8
"""Slots before a chunk that are stored with it, for draft heads, which write the entries of the last tokens of a chunk
only when they know the tokens after them."""
MORE = 4 * CHUNK
"""Tokens by which a second buffer is longer. The axes that are longer too have slots for tokens."""


class Admission(NamedTuple):
    """Arguments of the programs that read the prompt of one request."""

    slot: Any  # int32[], row that the request enters
    tokens: np.ndarray  # int32[1, L], the prompt
    length: np.ndarray  # int32[1]
    key: Array  # key[1]
    stop: np.ndarray  # int32[1], length of the text at which the row is full
    inputs: PyTree  # arrays [1, ...]
    processors: list[PyTree]  # settings of the processors
    scores: np.ndarray  # bool[], True if the log-probabilities of the prompt are computed


def _unused(*arguments: Any) -> Any:
    raise AssertionError("this loop reads a prompt as a whole")


class ServePrograms(NamedTuple):
    """The compiled functions that serve requests. The last three are unused if the loop reads a prompt as a whole."""

    empty: Callable[..., tuple[PyTree, DecodeState]]
    step: Callable[..., tuple[DecodeState, Info, Array]]
    end: Callable[..., tuple[PyTree, DecodeState]]
    begin: Callable[[Parts, Admission], DecodeState]
    enter: Callable[[Parts, DecodeState, DecodeState, Any], DecodeState]
    read: Callable[[Parts, DecodeState, Admission, Any], tuple[DecodeState, TokenLogprobs | None]] = _unused
    take_chunk: Callable[[Parts, DecodeState, Admission, Any], list[Array]] = _unused
    put_chunk: Callable[[Parts, DecodeState, Admission, Any, list[Array]], DecodeState] = _unused


def pack_request(size: int, slot: int, request: Request, key: Array, count: int, processors: list[PyTree]) -> Admission:
    """Return the arguments of the admission of a request.

    Args:
      size: slots of the token buffer. key: key[1]. count: number of new tokens.
    """
    tokens = np.zeros((1, size), np.int32)
    tokens[0, : len(request.prompt)] = request.prompt
    length = np.array([len(request.prompt)], np.int32)
    inputs = jax.tree.map(lambda x: x[None], request.inputs)
    scores = np.array(request.scores_prompt)
    return Admission(np.int32(slot), tokens, length, key, length + np.int32(count), inputs, processors, scores)


def chunk_size(parts: Parts) -> int | None:
    """Return the tokens of a chunk, or None if the loop of these parts reads a prompt as a whole."""
    if parts.loop.read is None:
        return None
    return CHUNK_ON_CPU if platforms.of_program() == "cpu" else CHUNK


@jax.jit
@with_standard_modes
def begin(parts: Parts, admission: Admission) -> DecodeState:
    """Return the state of a request, a batch of one. No token is read yet, unless the loop reads prompts as a whole."""
    return _begin(parts, admission)


@functools.partial(jax.jit, donate_argnames=("row",))
@with_standard_modes
def read(
    parts: Parts, row: DecodeState, admission: Admission, start: Array
) -> tuple[DecodeState, TokenLogprobs | None]:  # fmt: skip
    """Read the chunk of the prompt that begins at `start` int32[].

    Returns: the state, and the log-probabilities of the tokens after those of the chunk, if the request needs them.
    """
    return _read(parts, row, admission, start)


@functools.partial(jax.jit, donate_argnames=("state",))
@with_standard_modes
def enter(parts: Parts, state: DecodeState, row: DecodeState, slot: Array) -> DecodeState:
    """Write the state of a request over its row `slot` int32[] in every array of `state`."""
    axes = parts.loop.axes(parts, state)
    return batch_axes.put_row(state, batch_axes.with_shared(row, state, axes), slot, axes)


@jax.jit
@with_standard_modes
def take_chunk(parts: Parts, row: DecodeState, admission: Admission, start: Array) -> list[Array]:
    """Return the arrays of a stored chunk that begins at `start` int32[] and was just read."""
    return [slots.take(x, start) for slots, x in _stored(parts, row, admission)]


@functools.partial(jax.jit, donate_argnames=("row",))
@with_standard_modes
def put_chunk(parts: Parts, row: DecodeState, admission: Admission, start: Array, chunk: list[Array]) -> DecodeState:
    """Write a stored chunk instead of reading it."""
    chunks = iter(chunk)
    leaves, structure = jax.tree.flatten((row.cache, row.draft))
    layout = _layout(parts, row, admission)
    new = [x if slots is None else slots.put(x, next(chunks), start) for slots, x in zip(layout, leaves, strict=True)]
    cache, draft = jax.tree.unflatten(structure, new)
    return row._replace(cache=cache, draft=draft)


class _Slots(NamedTuple):
    """The place of a chunk in an array. Without an axis of slots, the whole array belongs to the chunk."""

    axis: int | None = None
    first: int = 0  # slots before those of the chunk's tokens
    size: int = 0
    unit: tuple[int, int] = (1, 1)  # slots per token, as a fraction

    def take(self, x: Array, start: Array) -> Array:
        return x if self.axis is None else jax.lax.dynamic_slice_in_dim(x, self._at(start), self.size, self.axis)

    def put(self, x: Array, chunk: Array, start: Array) -> Array:
        if self.axis is None:
            return chunk
        return jax.lax.dynamic_update_slice_in_dim(x, chunk, self._at(start), self.axis)

    def _at(self, start: Array) -> Array:
        return jnp.maximum(start * self.unit[0] // self.unit[1] - self.first, 0)


def _stored(parts: Parts, row: DecodeState, admission: Admission) -> list[tuple[_Slots, Array]]:
    leaves = jax.tree.leaves((row.cache, row.draft))
    return [(slots, x) for slots, x in zip(_layout(parts, row, admission), leaves, strict=True) if slots is not None]


def _layout(parts: Parts, row: DecodeState, admission: Admission) -> list[_Slots | None]:
    """Return the place of a chunk in each array of (cache, draft), or None for arrays that reading does not change.

    An array whose size depends on that of the token buffer along one axis has slots along it, token after token.
    """
    size = chunk_size(parts)
    assert size is not None
    changed: list[bool] = []

    def traced(row: DecodeState) -> DecodeState:
        result, _ = _read(parts, row, admission, jnp.int32(0))
        pairs = zip(*(jax.tree.leaves((state.cache, state.draft)) for state in (row, result)), strict=True)
        changed.extend(old is not new for old, new in pairs)
        return result

    jax.eval_shape(traced, row)
    longer = admission._replace(tokens=np.zeros((1, admission.tokens.shape[1] + MORE), np.int32))
    short_shapes, long_shapes = (
        [x.shape for x in jax.tree.leaves((state.cache, state.draft))]
        for state in (jax.eval_shape(functools.partial(_begin, parts, each)) for each in (admission, longer))
    )
    late = [0] * len(jax.tree.leaves(row.cache)) + [LATE] * len(jax.tree.leaves(row.draft))
    return [
        _slots(shape, longer_shape, size, first) if is_changed else None
        for shape, longer_shape, is_changed, first in zip(short_shapes, long_shapes, changed, late, strict=True)
    ]


def _slots(shape: tuple[int, ...], longer: tuple[int, ...], size: int, late: int) -> _Slots:
    """Return the place of a chunk of `size` tokens in an array with this shape.

    Args:
      longer: its shape with MORE tokens in the buffer. late: slots before the chunk that belong to it.
    """
    axes = [axis for axis, (short, long) in enumerate(zip(shape, longer, strict=True)) if short != long]
    if len(axes) != 1:
        return _Slots()
    axis = axes[0]
    slots = longer[axis] - shape[axis]
    if size * slots % MORE and MORE % (size * slots):  # chunks would begin at different places within a slot
        return _Slots()
    of_chunk = -(-size * slots // MORE)  # several chunks may share a slot, which the last of them completes
    first = min(-(-late * slots // MORE), shape[axis] - of_chunk)
    return _Slots(axis, first, of_chunk + first, (slots, MORE))


def _begin(parts: Parts, admission: Admission) -> DecodeState:
    _, tokens, length, key, stop, inputs, *_ = admission
    function = parts.loop.begin or parts.loop.init
    return function(_of_row(parts, admission), jnp.asarray(tokens), length, key, stop, inputs)


def _read(
    parts: Parts, row: DecodeState, admission: Admission, start: Array
) -> tuple[DecodeState, TokenLogprobs | None]:  # fmt: skip
    assert parts.loop.read is not None
    return parts.loop.read(
        _of_row(parts, admission), row, start, chunk_size(parts), admission.inputs, jnp.asarray(admission.scores)
    )


def _of_row(parts: Parts, admission: Admission) -> Parts:
    """Return the parts with the settings of the row that a request enters."""
    per_row = parts.sampling, parts.eos
    sampling, eos = batch_axes.take_row(per_row, admission.slot, batch_axes.rows_first(per_row))
    pairs = zip(parts.processors, admission.processors, strict=True)
    processors = tuple(processor.replace(settings=settings) for processor, settings in pairs)
    return dataclasses.replace(parts, sampling=sampling, eos=eos, processors=processors)
