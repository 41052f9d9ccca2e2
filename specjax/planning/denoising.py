"""Programs of a diffusion model: prompts, a pass, a pass that also renews the cache, and the complete loop.

A pass and a renewing pass are the same compiled program. The branch with the scope `scopes.RENEWAL` runs only in the
latter. In block-causal models it reads a finished block together with the first pass over the next one (*fused pass*).
In a cache over full attention it reads the canvas (*renewing pass*).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from specjax.arrays import batch_axes, scopes
from specjax.arrays.batch_axes import SHARED
from specjax.catalog import METHODS
from specjax.diffusion.caches import append
from specjax.diffusion.loop import LOOP, DenoisingParts
from specjax.diffusion.prepare import check_parts, round_up, select_cache
from specjax.diffusion.procedures import procedure_of
from specjax.diffusion.types import Denoiser, Procedure
from specjax.engine.job import Job
from specjax.engine.prefill import CHUNK, count_chunks, wide_chunk
from specjax.engine.run import run, start, step
from specjax.engine.step import buffer_size
from specjax.numerics.global_arrays import with_shardings
from specjax.numerics.sampling import row_keys
from specjax.planning import hlo
from specjax.planning.abstract import Abstract, is_cache_of, is_pending_of, place_rows, shard_bytes, spread, unsharded
from specjax.planning.programs import (
    Program,
    Programs,
    cache_blocks,
    compiler_of,
    device_kind,
    in_loop_of,
    keys_of,
    named,
    shares,
    trips_of_scopes,
    turns_of_experts,
)  # fmt: skip
from specjax.planning.traffic import bytes_per_token, pass_bytes
from specjax.planning.workload import Workload
from specjax.types import PyTree

COLUMNS_AT = 2  # columns per pass that are assumed for the complete loop


def procedure(work: Workload, denoiser: Denoiser) -> Procedure:
    """Return the procedure of the workload's method. Raises: UsageError if it does not fit the model."""
    row, written = METHODS[work.method], dict(work.options)
    options = {option.name: option.parse(written[option.name]) for option in row.options if option.name in written}
    method_procedure = procedure_of(work.method, denoiser, **options)
    check_parts(denoiser, method_procedure, select_cache(denoiser, method_procedure))
    return method_procedure


def shape(work: Workload) -> tuple[Denoiser, Procedure]:
    """Return the denoiser on one device, for its static fields, and its procedure."""
    assert work.reading is not None
    target = unsharded(work.target)
    denoiser = Denoiser(target.model, target.params, **work.reading._asdict())
    return denoiser, procedure(work, denoiser)


def window(work: Workload) -> int:
    """Return the number of columns of the window."""
    return shape(work)[1].schedule.width or round_up(work.max_new_tokens)


def canvas_columns(work: Workload, width: int) -> int:
    """Return the number of columns of the token buffer.

    A cache needs extra columns after the text. Full attention needs exactly the columns that a pass reads.
    """
    size = buffer_size(work.context, work.max_new_tokens, 2 * width, work.target.max_positions)
    assert work.reading is not None
    return size if work.reading.attention == "block_causal" else min(size, round_up(work.context + work.max_new_tokens))


def renewal(work: Workload) -> str | None:
    """Return the name of the pass that renews the cache, or None."""
    denoiser, method_procedure = shape(work)
    memory = select_cache(denoiser, method_procedure)
    name = memory.name.partition(",")[0]  # a guided cache has two names
    if name == "append":
        return None if denoiser.is_shifted or memory == append(fuse=False) else "fused pass"
    return "renewing pass" if name in ("dual", "prefix", "delayed", "phases") else None


def names_of(work: Workload) -> tuple[str, ...]:
    """Return the names of the programs. Full attention has no prefill, because prompts are part of the canvas."""
    assert work.reading is not None
    programs = ("prefill" if work.reading.attention == "block_causal" else None, "pass", renewal(work), "loop")
    return tuple(name for name in programs if name)


def abstract_denoising(work: Workload, devices: list) -> Abstract:
    """Return the arguments of the program of `denoise`, like `specjax.planning.abstract.abstract_job`."""
    assert work.reading is not None
    mesh = work.mesh(devices)
    target = spread(work.target, mesh)
    denoiser = Denoiser(target.model, target.params, **work.reading._asdict())
    method_procedure = procedure(work, denoiser)
    replicate = lambda shape: place_rows(shape, SHARED, work, mesh)
    by_rows = lambda tree: place_rows(tree, batch_axes.rows_first(tree), work, mesh)
    width = method_procedure.schedule.width or round_up(work.max_new_tokens)
    parts = DenoisingParts(
        denoiser=denoiser,
        procedure=method_procedure,
        sampling=work.warping.sampling(replicate),
        eos=replicate(jax.ShapeDtypeStruct((1,), jnp.int32)),
        memory=select_cache(denoiser, method_procedure),
        width=width,
        loop=LOOP,
    )
    size = canvas_columns(work, width)
    tokens, rows = (by_rows(jax.ShapeDtypeStruct((work.batch, *more), jnp.int32)) for more in ((size,), ()))
    keys = by_rows(jax.eval_shape(lambda: row_keys(0, work.batch)))
    return Abstract(Job(parts, tokens, rows, keys, rows), mesh, None, None)


def _placed(work: Workload, args: Abstract, state: PyTree) -> PyTree:
    """Shard the state between two passes: keys and values in the model's layout, everything else by rows."""
    parts = args.job.parts
    placed = place_rows(state, parts.loop.axes(parts, state), work, args.mesh)
    if args.mesh.size == 1:
        return placed
    target = parts.target
    is_model_part = lambda part: is_cache_of(target, part) or is_pending_of(target, part)
    place = lambda part: with_shardings(part, target.model.shardings(part)) if is_model_part(part) else part
    return placed._replace(cache=jax.tree.map(place, placed.cache, is_leaf=is_model_part))


def build(work: Workload, devices: list) -> tuple[Programs, dict[str, float]]:
    """Return the programs of the workload, and the bytes that a device has to move in each."""
    args = abstract_denoising(work, devices)
    parts = args.job.parts
    with device_kind(args.mesh):
        state = jax.eval_shape(start, args.job)
    state = _placed(work, args, state)
    causal = parts.denoiser.is_causal
    chunks = count_chunks(work.context - 1, wide_chunk(work.batch, work.platform))
    blocks = cache_blocks(work) if causal else 1
    rounds = math.ceil(work.max_new_tokens / COLUMNS_AT)
    share = min(1.0, COLUMNS_AT / parts.width)
    experts = turns_of_experts(work, parts.width)
    assumed = {
        "wide_chunks": float(chunks[0]), "chunks": float(chunks[1]),
        "rounds": float(rounds), "cache_blocks": float(blocks), "renewals": share
    } | experts  # fmt: skip
    large = frozenset(keys_of(state.cache) | keys_of(parts.target.params))
    named_trips = trips_of_scopes(0.0, 0.0, chunks)
    of_prefill: hlo.Trips = lambda loop: sum(chunks) if loop.depth == 0 else max(1.0, blocks / 2)
    in_prefill = named(named_trips, of_prefill, experts)
    in_step = named(named_trips, lambda loop: float(blocks), experts)
    in_loop = named(named_trips, in_loop_of(sum(chunks), blocks, float(rounds)), experts)
    one = compiler_of(step, (parts, state), args.mesh)

    def program(name: str, compiled: Any, trips: hlo.Trips, renewals: float, arguments: tuple) -> Program:
        return Program(name, compiled, arguments, trips, assumed, large, shares({scopes.RENEWAL: renewals}))

    of_job = lambda function: compiler_of(function, (args.job,), args.mesh)
    programs = [
        program("prefill", of_job(start), in_prefill, 1.0, (args.job,)),
        program("pass", one, in_step, 0.0, (parts, state)),
        program(renewal(work) or "", one, in_step, 1.0, (parts, state)),
        program("loop", of_job(run), in_loop, share, (args.job,)),
    ]
    names = names_of(work)
    return Programs([one for one in programs if one.name in names], args, state), _must_bytes(
        work, args, state, sum(chunks), rounds
    )


def _must_bytes(work: Workload, args: Abstract, state: PyTree, chunks: int, rounds: int) -> dict[str, float]:
    """Return the bytes per program: the weights of each pass, and the cached text or the complete canvas."""
    target = args.job.parts.target
    is_cache = lambda part: is_cache_of(target, part)
    caches = [part for part in jax.tree.leaves(state.cache, is_leaf=is_cache) if is_cache(part)]
    grows = args.job.parts.denoiser.is_causal
    per_token = sum(bytes_per_token(target, work.batch, cache) for cache in caches) if grows else 0.0
    canvas_bytes = 0.0 if grows else float(shard_bytes(state.cache))
    rows, width = work.batch // work.data, args.job.parts.width

    def one(context: float, tokens: int, **more: Any) -> float:
        experts = rows * tokens, work.expert
        weights = pass_bytes(work.target, target.params, per_token, context, experts=experts, **more)
        return weights + canvas_bytes

    prefill = chunks * one(work.context / 2, CHUNK, head=False) if grows else 0.0
    of_pass, middle = one(work.context, width), work.context + work.max_new_tokens / 2
    return {
        "prefill": prefill, "pass": of_pass, "fused pass": of_pass, "renewing pass": of_pass,
        "loop": prefill + rounds * one(middle, width),
    }  # fmt: skip
