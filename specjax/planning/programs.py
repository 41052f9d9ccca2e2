"""Programs of a workload: prefill, one step, and the complete loop, ready to be lowered for absent devices.

The state between steps is the `jax.eval_shape` of the real functions of `specjax.engine`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from specjax.arrays import scopes
from specjax.costs.accelerators import CHIP_OF_KIND
from specjax.costs.experts import expert_turns
from specjax.engine.prefill import CHUNK, count_chunks, wide_chunk
from specjax.engine.run import run, start, step
from specjax.files import libtpu
from specjax.numerics.filtered_draws import expected_races
from specjax.pallas_kernels.tree_attention.xla import BLOCK
from specjax.planning import hlo
from specjax.planning.abstract import Abstract, abstract_job, local_shape, place_state
from specjax.planning.drafting import share_of_layers
from specjax.planning.hlo.parsing import Instruction
from specjax.planning.traffic import mean_context
from specjax.planning.workload import Workload
from specjax.types import Drafter, PyTree

VISITED = 3.0
"""Assumed nodes that a verifier reads in a step with drafts, as in chains with an acceptance rate of 0.7."""

KEPT_SHARE = 0.9
"""Assumed mass of the tokens that top-k keeps."""

DIGITS = 4.0
"""Assumed passes over the vocabulary after the first one, to find the threshold of top-k or top-p."""


class Programs(NamedTuple):
    """The programs of a workload and their arguments."""

    programs: list[Program]
    arguments: Abstract
    state: PyTree  # ShapeDtypeStructs with shardings


class Program(NamedTuple):
    """A function and its abstract arguments."""

    name: str
    compiled: Callable[[], Any]  # () -> jax.stages.Compiled
    arguments: PyTree  # ShapeDtypeStructs with shardings
    trips: hlo.Trips  # assumed iterations of loops whose count depends on the data
    assumed: dict[str, float]  # assumptions of `trips` and `taken`, for the report
    large: frozenset[tuple]  # (dtype, sorted dims) of the caches and parameters of one device
    taken: hlo.Taken = hlo.always
    used: hlo.Taken = hlo.always  # share of a kernel's estimate that an average call takes, see `hlo.totals`


def build(work: Workload, devices: list, *, drafter: Drafter | None = None, rounds: float | None = None) -> Programs:
    """Build prefill, one step, and the complete loop of the workload's method.

    Args:
      rounds: assumed iterations of the loop; None: one per new token.
    """
    args = abstract_job(work, devices, drafter)
    parts = args.job.parts
    with device_kind(args.mesh):
        state = jax.eval_shape(start, args.job)
    state = place_state(work, args, state)
    chunks = count_chunks(work.context - 1, wide_chunk(work.batch, work.platform))
    blocks = cache_blocks(work)
    passes = max(parts.drafter.max_depth - 1, 0)  # the drafter's passes after the root's, if no draft stops early
    visited = min(VISITED, parts.drafter.max_depth + 1.0)
    races = expected_races(work.warping.top_p or KEPT_SHARE, work.batch)
    size = parts.drafter.size
    experts = turns_of_experts(work, size.num_nodes, -(-(size.num_nodes - 1) // max(size.max_depth, 1)))
    assumed = {
        "wide_chunks": float(chunks[0]), "chunks": float(chunks[1]),
        "rounds": float(rounds or work.max_new_tokens), "cache_blocks": float(blocks),
        "draft_passes": float(passes), "visited_nodes": visited, "digits": DIGITS,
        "races": races,
    }  # fmt: skip
    assumed |= experts
    share = share_of_layers(work)
    if share < 1:
        assumed["share_of_layers"] = share
    large = frozenset(keys_of((state.cache, state.draft, parts.target.params, parts.drafter.params)))
    # A chunk attends to half of the blocks on average.
    named_trips = trips_of_scopes(passes, visited, chunks, races)
    of_prefill: hlo.Trips = lambda loop: sum(chunks) if loop.depth == 0 else max(1.0, blocks / 2)
    in_prefill = named(named_trips, of_prefill, experts)
    in_step = named(named_trips, lambda loop: float(blocks), experts)
    in_loop = named(named_trips, in_loop_of(sum(chunks), blocks, assumed["rounds"]), experts)

    slots = args.job.tokens.shape[1]
    read_share = in_chunks_of(mean_context(work.target, work.context / 2) / slots)

    def program(name: str, function, arguments: tuple, trips: hlo.Trips) -> Program:
        return Program(
            name,
            compiler_of(function, arguments, args.mesh),
            arguments,
            trips,
            assumed,
            large,
            shares({scopes.SUBLAYER: share}),
            read_share,
        )

    program_list = [
        program("prefill", start, (args.job,), in_prefill),
        program("step", step, (parts, state), in_step),
        program("loop", run, (args.job,), in_loop),
    ]
    return Programs(program_list, args, state)


EXPERT_PASSES: Mapping[str, str] = MappingProxyType(
    {scopes.WIDE_CHUNKS: "experts_wide_chunk", scopes.CHUNKS: "experts_chunk", scopes.LEVELS: "experts_draft"}
)
"""Turns of a layer's experts by the scope of the pass around them. The turns of other passes are `experts`."""


def turns_of_experts(work: Workload, nodes: int, level: int = 0) -> dict[str, float]:
    """Return the expected turns of a layer's experts in each kind of pass, on the busiest device.

    Rows choose independently. A workload without a mixture has no turns.

    Args:
      nodes: of each row of a step's pass. level: of each row of a draft's pass; 0: no pass drafts.
    """
    target = getattr(work.target, "experts", None)
    draft = getattr(work.draft or getattr(work.head, "layer", None), "experts", None)
    if target is None and draft is None:
        return {}
    rows = work.batch // work.data
    turns = lambda sizes, tokens: expert_turns(sizes, tokens * rows, work.expert)
    read = target or draft
    passes = {
        "experts": turns(read, nodes),
        "experts_wide_chunk": turns(read, wide_chunk(work.batch, work.platform)),
        "experts_chunk": turns(read, CHUNK),
    }
    return passes | ({"experts_draft": turns(draft or read, level)} if level else {})


def cache_blocks(work: Workload) -> int:
    """Return the iterations of attention's loop of unknown length over the cache. On a GPU it has no such loop."""
    return 1 if work.platform == "gpu" else math.ceil(work.context / BLOCK)


def compiler_of(function: Any, arguments: tuple, mesh: Mesh) -> Callable[[], Any]:
    """Return a function that lowers and compiles once for the arguments' devices. It caches its result or error."""

    @functools.cache
    def outcome() -> Any:
        try:
            with device_kind(mesh):
                lowered = function.lower(*arguments)
            return compile_for(mesh, lowered)
        except Exception as refusal:  # cached, so that each program with this function raises it
            return refusal

    def compiled() -> Any:
        compiled_or_error = outcome()
        if isinstance(compiled_or_error, Exception):
            raise compiled_or_error
        return compiled_or_error

    return compiled


def compile_for(mesh: Mesh, lowered: Any) -> Any:
    """Compile a lowered program for the devices of a mesh.

    For TPUs the options are those of the chip. For GPUs no kernel is timed, because there is no GPU to time it on. XLA
    then finds no form of its own for some products, which a real GPU would leave to a library. So the program is
    compiled again with products in libraries.
    """
    device = mesh.devices.flat[0]
    if device.platform != "gpu":
        return lowered.compile(libtpu.options_of(CHIP_OF_KIND.get(device.device_kind, "")))
    options: dict[str, Any] = {"xla_gpu_autotune_level": 0}
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if "No supported config found" not in str(error):
            raise
    return lowered.compile(options | {"xla_gpu_enable_triton_gemm": False})


def device_kind(mesh: Mesh):
    """Return a context in which kernels are lowered for the mesh's chip, not for the devices of this process."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if mesh.size == 1 else contextlib.nullcontext()


def trips_of_scopes(
    passes: float, visited: float = VISITED, chunks: tuple[int, int] = (0, 0), races: float = 1.0
) -> dict[str, float]:
    """Return the iterations of named loops of a step that drafts.

    Args:
      passes: the drafter's passes after the root's. visited: nodes that the verifier reads. chunks: wide and narrow
        chunks of the prompts. races: those of a draw under top-k or top-p.
    """
    return {
        scopes.WIDE_CHUNKS: chunks[0], scopes.CHUNKS: chunks[1], scopes.LEVELS: passes, scopes.NARROW: 0.0,
        scopes.WIDE: 1.0, scopes.ONCE: 1.0, scopes.CATCH_UP: 0.0, scopes.WALK: visited, scopes.DIGITS: DIGITS,
        scopes.TIES: 0.0, scopes.RACES: races,
    }  # fmt: skip


def named(
    named_trips: Mapping[str, float], default_trips: hlo.Trips, experts: Mapping[str, float] = MappingProxyType({})
) -> hlo.Trips:
    """Return iteration counts of loops by the names of their scopes. `default_trips` returns those of the others.

    Args:
      experts: turns of a layer's experts (`turns_of_experts`), which depend on the pass around them.
    """
    name = re.compile(rf'op_name="([^"]*)/({"|".join([*named_trips, scopes.EXPERTS])})/while"')
    around = re.compile(rf"/({'|'.join(EXPERT_PASSES)})/while/")

    def trips(loop: hlo.Loop) -> float:
        match = name.search(loop.instruction.attributes)
        if match is None:
            return default_trips(loop)
        if match.group(2) != scopes.EXPERTS:
            return float(named_trips[match.group(2)])
        scope = around.findall(f"{match.group(1)}/")
        kind = EXPERT_PASSES[scope[-1]] if scope else "experts"
        return float(experts.get(kind, experts.get("experts", 1.0)))

    return trips


def shares(named_shares: Mapping[str, float]) -> hlo.Taken:
    """Return the share of executions in which branches run, by the names of their scopes. Flat rows never occur.

    Stacked layers are one loop with a branch per layer.
    """
    by_name = {scopes.FLAT: 0.0, **named_shares}
    name = re.compile(rf'op_name="[^"]*/({"|".join(by_name)})/cond')

    def taken(conditional: Instruction) -> float:
        match = name.search(conditional.attributes)
        return by_name[match.group(1)] if match else 1.0

    return taken


def in_chunks_of(share: float) -> hlo.Taken:
    """Return `share` for the attention kernel in chunks of a prompt, and 1 for other kernels.

    The kernel's estimate counts all slots of the cache, but a chunk reads the tokens before it.
    """
    name = re.compile(rf'op_name="[^"]*/({scopes.WIDE_CHUNKS}|{scopes.CHUNKS})/.*{scopes.ATTENTION}')
    return lambda kernel: share if name.search(kernel.attributes) else 1.0


def in_loop_of(chunks: float, blocks: float, rounds: float) -> hlo.Trips:
    """Return iteration counts for the complete program: loops over prompts come first, and the decoding loop last."""
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
    """Return (dtype, sorted dims) of the arrays above one megabyte on one device."""
    names = {"bfloat16": "bf16", "float32": "f32", "int8": "s8"}
    leaves = [leaf for leaf in jax.tree.leaves(tree) if str(leaf.dtype) in names]
    return {
        (names[str(leaf.dtype)], tuple(sorted(local_shape(leaf))))
        for leaf in leaves
        if math.prod(local_shape(leaf)) * leaf.dtype.itemsize > 1 << 20
    }
