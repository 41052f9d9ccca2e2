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
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import buffers
from specjax.engine import step as one
from specjax.engine.parts import Job, Parts
from specjax.engine.run import step
from specjax.parallel.arrays import replicate
from specjax.precision import in_32_bits
from specjax.sampling import threefry
from specjax.types import Array, DecodeState, Info, PyTree


class Request(NamedTuple):
    """One text to decode."""

    prompt: Sequence[int]
    key: Array | int  # one PRNG key, or a seed; its text is that of `decode(..., [prompt], key=key[None])`
    max_new_tokens: int | None = None  # at most that of `serve`; None: as many
    inputs: PyTree = None  # what its text is conditioned on, arrays without the axis B, for models that take them


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


def serve_requests(
    job: Job, requests: Iterable[Request | None], longest_prompt: int, max_new_tokens: int
) -> Generator[Served, None, None]:
    """As `specjax.serve`. `job`: of a batch of as many rows, with the longest prompts and the most tokens."""
    parts, rows_of_batch = job.parts, len(job.lengths)
    state = _empty(job)
    waiting, came = iter(requests), -1
    rows: list[_Row | None] = [None] * rows_of_batch
    read: tuple[Info, list[_Row | None]] | None = None  # a step that was dispatched, and whose rows these were then
    more = True
    while True:
        while more and None in rows:
            try:
                request = next(waiting)
            except StopIteration:
                more = False
                break
            if request is None:
                break
            came += 1
            error = _misfit(request, longest_prompt, max_new_tokens, job.inputs)
            if error:
                yield Served(came, [], 0, "refused", error)
                continue
            count = max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
            slot = rows.index(None)
            rows[slot] = _Row(came, count)
            state = _admitted(parts, state, slot, request, count)
        before, read = read, None
        if any(rows):
            state, info, _ = step(parts, state)
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


def _misfit(request: Request, longest_prompt: int, max_new_tokens: int, inputs: PyTree) -> str | None:
    length, count = len(request.prompt), request.max_new_tokens
    if not 1 <= length <= longest_prompt:
        return f"its prompt has {length} tokens, not 1 to longest_prompt ({longest_prompt})"
    if count is not None and not 1 <= count <= max_new_tokens:
        return f"its max_new_tokens is {count}, not 1 to that of serve ({max_new_tokens})"
    form = lambda tree, of: (jax.tree.structure(tree), [(of(x), jnp.result_type(x)) for x in jax.tree.leaves(tree)])
    if form(request.inputs, jnp.shape) != form(inputs, lambda x: jnp.shape(x)[1:]):
        return "its inputs do not have the form of those that serve was given"
    return None


def _admitted(parts: Parts, state: DecodeState, slot: int, request: Request, count: int) -> DecodeState:
    tokens = np.zeros((1, state.tokens.shape[1]), np.int32)
    tokens[0, : len(request.prompt)] = request.prompt
    length = np.array([len(request.prompt)], np.int32)
    inputs = jax.tree.map(lambda x: x[None], request.inputs)
    return _admit(parts, state, np.int32(slot), tokens, length, threefry(request.key)[None], length + count, inputs)


@jax.jit
@in_32_bits
def _empty(job: Job) -> DecodeState:
    """A batch whose rows have all ended."""
    ones = jnp.ones_like(job.lengths)
    return one.init(job.parts, job.tokens, ones, job.keys, ones, job.inputs)


@functools.partial(jax.jit, donate_argnames=("state",))
@in_32_bits
def _admit(parts: Parts, state: DecodeState, slot, tokens, length, key, stop, inputs: PyTree) -> DecodeState:
    """`state` with the prompt int32[1, L] read into row `slot`."""
    alone = one.init(parts, tokens, length, key, stop, inputs)
    return buffers.put_row(state, alone, slot, one.axes(parts, state))
