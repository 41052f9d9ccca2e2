"""This module sums the memory of a decode with its draft on one device, by term, from the shapes of its arrays."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from specjax.engine.step import begin
from specjax.planning.abstract import Abstract, abstract_job, place_state, shard_bytes
from specjax.planning.memory import Memory, chunk_tokens, memory_of
from specjax.planning.programs import device_kind
from specjax.planning.workload import Workload


@dataclass(frozen=True)
class Footprint:
    """Bytes of a decode on one device, as a function of the slots per row and the nodes of its tree."""

    target: Memory  # of plain decoding
    draft_weights: int
    draft_per_slot: float  # all rows: cache of the draft
    draft_fixed: float  # all rows: tables and other arrays of the drafter, and the buffers of the texts
    draft_chunk: float = 0.0  # the target's hidden states that a draft head reads of a chunk of the prompts

    def terms(self, slots: int, nodes: int) -> dict[str, float]:
        """Return the bytes by what takes them."""
        return {
            "the weights": self.target.weights,
            "the draft's weights": self.draft_weights,
            "the cache": self.target.per_slot * slots,
            "the draft's cache": self.draft_per_slot * slots,
            "the recurrent states": self.target.states,
            "the drafter's state": self.draft_fixed,
            "the arrays of a pass": self.target.arrays_of_pass(nodes, self.draft_chunk),
        }

    def total(self, slots: int, nodes: int) -> float:
        """Return the bytes of a decode."""
        return sum(self.terms(slots, nodes).values())


LONGEST = 2048
"""The longer of two prompts for which the state of a drafter is measured, if the models read as many tokens."""


def footprint_of(work: Workload, devices: list, plain: Memory | None = None) -> Footprint:
    """Return the footprint of a workload with its draft. Nothing is allocated or compiled.

    The state of the drafter is that of its first step for two lengths of the prompt, between which it grows evenly.

    plain: the memory of plain decoding, if it is known.
    """
    models = work.target, work.draft or work.target
    longest = min(LONGEST, *(model.max_positions - work.max_new_tokens for model in models))
    contexts = max(longest // 2, 1), max(longest, 1)
    jobs = [abstract_job(dataclasses.replace(work, context=context), devices) for context in contexts]
    slots = [job.job.tokens.shape[1] for job in jobs]
    short, long = (_bytes_beside_cache(work, job) for job in jobs)
    per_slot = (long - short) / (slots[1] - slots[0]) if slots[1] > slots[0] else 0.0
    last = jobs[-1]
    draft = last.head or last.draft or last.job.parts.drafter
    plain = plain or memory_of(work.plain, last.job.parts.target)
    taps = () if last.head is None else last.job.parts.drafter.traits.taps
    return Footprint(plain, shard_bytes(draft.params), per_slot, long - per_slot * slots[1], _bytes_of_taps(work, taps))


def _bytes_of_taps(work: Workload, taps: tuple[int, ...]) -> float:
    """Return the bytes of the hidden states of some layers for a chunk of the prompts on a device."""
    inner = {tap for tap in taps if 0 < tap < work.target.num_layers}
    if not inner:
        return 0.0
    tokens = -(-work.batch // work.data) * chunk_tokens(work)
    return (len(inner) + 1) * tokens * work.target.width * jnp.dtype(work.target.dtype).itemsize


def _bytes_beside_cache(work: Workload, args: Abstract) -> int:
    """Return the bytes of the state between two steps on a device, without the cache of the target."""
    job = args.job
    with device_kind(args.mesh):
        state = jax.eval_shape(begin, job.parts, job.tokens, job.lengths, job.keys, job.stop)
    state = place_state(work, args, state)
    return shard_bytes(state) - shard_bytes(state.cache)
