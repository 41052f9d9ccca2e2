"""The programs of a workload: prefill, one step, and the whole loop, ready to be lowered for chips that are not here.

The state between steps is what `jax.eval_shape` says of the real functions of `specjax.engine`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from specjax.arrays import scopes
from specjax.engine.prefill import CHUNK
from specjax.engine.run import run, start, step
from specjax.planning import hlo
from specjax.planning.abstract import Abstract, abstract_job, local_shape, place_state
from specjax.planning.drafting import share_of_layers
from specjax.planning.workload import Workload
from specjax.types import Drafter, PyTree

BLOCK = 256
"""Slots of the cache that attention of many tokens reads at a time (pallas_kernels.tree_attention.xla.BLOCK)."""


class Programs(NamedTuple):
    """The programs of a workload, and what they were made from."""

    programs: list[Program]
    arguments: Abstract
    state: PyTree  # of ShapeDtypeStruct with shardings


class Program(NamedTuple):
    """One function and its abstract arguments."""

    name: str
    compiled: Callable[[], Any]  # -> jax.stages.Compiled
    arguments: PyTree  # of ShapeDtypeStruct with shardings
    trips: hlo.Trips  # of loops whose trip count depends on the data
    assumed: dict[str, float]  # what `trips` and `taken` assume, for the report
    large: frozenset[tuple]  # (dtype, sorted dims) of the caches and parameters of one device
    taken: hlo.Taken = hlo.always


def build(work: Workload, devices: list, *, drafter: Drafter | None = None, rounds: float | None = None) -> Programs:
    """Prefill, one step, and the whole loop of the workload's method.

    Args: rounds: how often the loop of the third is assumed to run; None: once per new token.
    """
    args = abstract_job(work, devices, drafter)
    parts = args.job.parts
    with device_kind(args.mesh):
        state = jax.eval_shape(start, args.job)
    state = place_state(work, args, state)
    chunks = max(1, math.ceil((work.context - 1) / CHUNK))
    blocks = math.ceil(work.context / BLOCK)
    passes = max(parts.drafter.max_depth - 1, 0)  # of the drafter, behind the root's: none stops early
    assumed = {
        "prefill_chunks": float(chunks), "rounds": float(rounds or work.max_new_tokens), "cache_blocks": float(blocks),
        "draft_passes": float(passes),
    }  # fmt: skip
    share = share_of_layers(work)
    if share < 1:
        assumed["share_of_layers"] = share
    large = frozenset(keys_of(state.cache) | keys_of(parts.target.params))
    # As many blocks as a chunk sees on average.
    in_prefill = lambda loop: chunks if loop.depth == 0 else max(1.0, blocks / 2)
    in_step = _named(passes, lambda loop: float(blocks))
    in_loop = _named(passes, in_loop_of(chunks, blocks, assumed["rounds"]))

    def program(name: str, function, arguments: tuple, trips: hlo.Trips) -> Program:
        return Program(
            name, compiler_of(function, arguments, args.mesh), arguments, trips, assumed, large, _sublayers(share)
        )

    found = [
        program("prefill", start, (args.job,), in_prefill),
        program("step", step, (parts, state), in_step),
        program("loop", run, (args.job,), in_loop),
    ]
    return Programs(found, args, state)


def compiler_of(function: Any, arguments: tuple, mesh: Mesh) -> Callable[[], Any]:
    """Lowers and compiles a function for the devices of its arguments; what it gives is kept, a refusal too."""

    @functools.cache
    def outcome() -> Any:
        try:
            with device_kind(mesh):
                lowered = function.lower(*arguments)
            return lowered.compile()
        except Exception as refusal:  # of several programs that are one and the same each says so
            return refusal

    def compiled() -> Any:
        found = outcome()
        if isinstance(found, Exception):
            raise found
        return found

    return compiled


def device_kind(mesh: Mesh):
    """Tells kernels which chip they are lowered for; they would ask the devices of this process."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if mesh.size == 1 else contextlib.nullcontext()


def _named(passes: float, others: hlo.Trips) -> hlo.Trips:
    """Trips of the loops that have a name, in a round that drafts on `passes` levels behind the root's; of other loops,
    what `others` says."""
    known = {scopes.LEVELS: passes, scopes.NARROW: 0.0, scopes.WIDE: 1.0, scopes.ONCE: 1.0, scopes.CATCH_UP: 0.0}
    name = re.compile(rf'op_name="[^"]*/({"|".join(known)})/while"')

    def trips(loop: hlo.Loop) -> float:
        found = name.search(loop.instruction.attributes)
        return float(known[found.group(1)]) if found else others(loop)

    return trips


def _sublayers(share: float) -> hlo.Taken:
    """Of passes that skip layers: how many of them run. Stacked layers are one loop, with a branch for each."""
    name = re.compile(rf'op_name="[^"]*/{scopes.SUBLAYER}/cond')
    return lambda conditional: share if name.search(conditional.attributes) else 1.0


def in_loop_of(chunks: float, blocks: float, rounds: float) -> hlo.Trips:
    """Trips in the whole program: the loops over prompts come first, the loop over rounds last; within them, blocks."""
    last: set[str] = set()

    def trips(loop: hlo.Loop) -> float:
        if loop.depth == 0:
            if loop.index == loop.siblings - 1:
                last.add(loop.instruction.name)
                return rounds
            return chunks
        return blocks if loop.path[0] in last else max(1.0, blocks / 2)

    return trips


def keys_of(tree: PyTree) -> set[tuple]:
    """(dtype, sorted dims) of the arrays of over a megabyte that one device holds."""
    names = {"bfloat16": "bf16", "float32": "f32", "int8": "s8"}
    leaves = [leaf for leaf in jax.tree.leaves(tree) if str(leaf.dtype) in names]
    return {
        (names[str(leaf.dtype)], tuple(sorted(local_shape(leaf))))
        for leaf in leaves
        if math.prod(local_shape(leaf)) * leaf.dtype.itemsize > 1 << 20
    }
