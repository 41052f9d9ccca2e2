"""`serve`: requests that come and go, in the rows of one running batch (continuous batching).

Yu et al.: Orca: A Distributed Serving System for Transformer-Based Generative Models (OSDI 2022).

Rule: the batch has `slots` rows. Where one has ended, the next request is read into its place: its prompt is prefilled
as a batch of one, and this row is written over the old one, in every array of the state that has rows. Then the step
that `decode` loops goes on with all rows. Two programs, the step and the admission, serve every request.
Guarantee: that of `decode` with the same settings. A row's randomness is its request's own key and positions, so a text
does not depend on when its request came, or beside which others; where rows share what they learn or how deep they
draft (`auto`, `choice`, `bass`, goodput), as in any batch, the draws of rejection rules may.
Deviations: a prompt is read in one go, while the other rows wait.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.engine.run import _step, prepare
from specjax.engine.step import Inputs, speculative
from specjax.errors import UsageError
from specjax.parallel.arrays import replicate
from specjax.types import Array, DecodeState, Drafter, Info, Target


class Request(NamedTuple):
    """One text to decode."""

    prompt: Sequence[int]
    key: Array  # one PRNG key; its text is that of `decode(..., [prompt], key=key[None])`
    max_new_tokens: int | None = None  # at most that of `serve`; None: as many


class Served(NamedTuple):
    """What one step added to one request."""

    request: int  # which one, counted from 0 in the order in which they came
    tokens: list[int]
    accepted: int  # how many of them, from the front, were drafted
    finish_reason: str | None = None  # at its end "eos", "length" or "refused"
    error: str | None = None  # of a refused one, in one sentence


class _Row(NamedTuple):
    """Whose a slot is."""

    request: int
    left: int  # tokens that may still come


def serve(
    target: Target,
    drafter: Drafter | str | None,
    requests: Iterable[Request | None],
    *,
    slots: int,
    longest_prompt: int,
    max_new_tokens: int,
    **options: Any,
) -> Generator[Served, None, None]:
    """Decode requests as they come, `slots` of them at a time, and yield what each step adds to each of them.

    After the first request nothing is compiled any more, whatever their lengths.

    Args:
      target, drafter: as for `decode`.
      requests: asked for the next one whenever a slot is free; None where there is none yet, and it is asked again
        after the next step. With nothing to decode it is asked at once, so it may wait there for work.
      slots: rows of the batch. longest_prompt, max_new_tokens: of any request, which set the size of the cache.
      options: those of `decode` but `key` and `logprobs`, for all requests alike: temperature, top_k, top_p, eos,
        sampling, verifier, controller, capacity.

    A request that does not fit is refused (`Served.error`), and the others go on. On several hosts each must give the
    same requests at the same times, and sees all of their texts.
    Raises: UsageError for a setting outside its range, or a mesh that splits the batch.
    """
    if slots < 1 or longest_prompt < 1:
        raise UsageError(f"slots and longest_prompt must be at least 1, not {slots} and {longest_prompt}")
    if target.model.mesh is not None and target.model.mesh.shape.get("data", 1) > 1:
        raise UsageError("serve reads one prompt at a time, which a mesh cannot split over data; use data=1")
    widest = np.zeros((slots, longest_prompt), np.int32), np.full(slots, longest_prompt, np.int32)
    inputs, tokens, _, keys, static = prepare(
        target, drafter, widest, key=jax.random.key(0), max_new_tokens=max_new_tokens, **options
    )
    return _serve(inputs, requests, tokens, keys, static["controller"], longest_prompt, max_new_tokens)


def _serve(inputs: Inputs, requests, tokens, keys, controller, longest_prompt: int, max_new_tokens: int):
    state = _empty(inputs, tokens, keys, controller=controller)
    waiting, came = iter(requests), -1
    rows: list[_Row | None] = [None] * len(keys)
    read: tuple[Info, list[_Row | None]] | None = None  # a step that was dispatched, and whose rows these were then
    more = True
    while True:
        while more and None in rows:
            request = next(waiting, waiting)
            if request is waiting:
                more = False
            elif request is None:
                break
            else:
                came += 1
                error = _misfit(request, longest_prompt, max_new_tokens)
                if error:
                    yield Served(came, [], 0, "refused", error)
                    continue
                count = max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
                slot = rows.index(None)
                rows[slot] = _Row(came, count)
                state = _admitted(inputs, state, slot, request, count, controller)
        before, read = read, None
        if any(rows):
            state, info, _ = _step(inputs, state, controller=controller)
            read = replicate(info), list(rows)  # the device goes on while the step before is read
        if before is not None:
            for slot, row, served in _news(*before):
                yield served
                goes_on = None if served.finish_reason else row._replace(left=row.left - len(served.tokens))
                rows[slot] = goes_on
                if read is not None:
                    read[1][slot] = goes_on
        if read is None and not any(rows) and not more:
            return


def _news(info: Info, rows: list[_Row | None]):
    """Of the rows that a step added to: slot, row, Served."""
    emitted, tokens, accepted, ends = jax.device_get((info.emitted, info.tokens, info.accepted, info.hit_eos))
    for slot, row in enumerate(rows):
        if row is not None and emitted[slot]:
            new = tokens[slot, : emitted[slot]].tolist()
            reason = "eos" if ends[slot] else "length" if len(new) == row.left else None
            yield slot, row, Served(row.request, new, int(accepted[slot]), reason)


def _misfit(request: Request, longest_prompt: int, max_new_tokens: int) -> str | None:
    length, count = len(request.prompt), request.max_new_tokens
    if not 1 <= length <= longest_prompt:
        return f"its prompt has {length} tokens, not 1 to longest_prompt ({longest_prompt})"
    if count is not None and not 1 <= count <= max_new_tokens:
        return f"its max_new_tokens is {count}, not 1 to that of serve ({max_new_tokens})"
    return None


def _admitted(inputs: Inputs, state: DecodeState, slot: int, request: Request, count: int, controller) -> DecodeState:
    tokens = np.zeros((1, state.tokens.shape[1]), np.int32)
    tokens[0, : len(request.prompt)] = request.prompt
    length = np.array([len(request.prompt)], np.int32)
    return _admit(
        inputs, state, np.int32(slot), tokens, length, request.key[None], length + count, controller=controller
    )


@functools.partial(jax.jit, static_argnames=("controller",))
def _empty(inputs: Inputs, tokens, keys, *, controller) -> DecodeState:
    """A batch whose rows have all ended."""
    one = jnp.ones(keys.shape, jnp.int32)
    return speculative(controller).init(inputs, tokens, one, keys, one)


@functools.partial(jax.jit, static_argnames=("controller",), donate_argnames=("state",))
def _admit(inputs: Inputs, state: DecodeState, slot, tokens, length, key, stop, *, controller) -> DecodeState:
    """`state` with the prompt int32[1, L] read into row `slot`."""
    alone = speculative(controller).init(inputs, tokens, length, key, stop)
    if state.length.shape == alone.length.shape:
        return alone  # the only row; what it shares with none begins anew
    return jax.tree.map(functools.partial(_put, slot), state, alone)


def _put(slot: Array, batch: Array, row: Array) -> Array:
    """`batch` with `row`, an array of a batch of one, at `slot`; what all rows share, whose shape tells, stays."""
    if batch.shape == row.shape:
        return batch
    axis = next(i for i, (many, one) in enumerate(zip(batch.shape, row.shape, strict=True)) if many != one)
    return jax.lax.dynamic_update_slice_in_dim(batch, row.astype(batch.dtype), slot * row.shape[axis], axis)
