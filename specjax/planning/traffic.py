"""Bytes that the programs of a workload have to move, from the shapes of their parameters and caches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.costs.experts import busiest_experts, expert_leaves
from specjax.engine.prefill import CHUNK, count_chunks, wide_chunk
from specjax.models.heads.contract import DraftHead
from specjax.models.variants.cache_parts import growing_part
from specjax.numerics.global_arrays import with_shardings
from specjax.planning.abstract import Abstract, cache_shapes, is_cache_of, shard_bytes
from specjax.planning.workload import Workload
from specjax.types import PyTree, Target


def must_bytes(work: Workload, args: Abstract, state: Any, draft_passes: int, rounds: float) -> dict[str, float]:
    """Return the bytes that a device has to move in each program.

    A step has `draft_passes` passes of the draft model and one target pass.
    """
    rows, nodes = work.batch // work.data, args.job.parts.drafter.size.num_nodes
    passes = [(1, _pass_of(work.target, args.job.parts.target, work.batch, state.cache), nodes)]
    cache = None if args.draft is None else _cache_in(state.draft, args.draft)
    if args.draft is not None and cache is not None:
        passes.append((draft_passes, _pass_of(work.draft, args.draft, work.batch, cache), 1))
    if args.head is not None and args.job.parts.drafter.traits.taps == args.head.head.taps:
        head = args.head.head
        count = 1 if head.is_single_pass else math.ceil(draft_passes / head.levels_per_pass)
        passes.append((count, functools.partial(_of_head, args.head), 1))
        stretches = head.target_layers(work.target.num_layers)
        share = sum(last - first for first, last in stretches) / work.target.num_layers
        layers = share * shard_bytes(args.job.parts.target.params["layers"])
        # prefill does not run these layers
        passes.append((count, lambda context, head=True, experts=None: layers if head else 0.0, 1))

    def step(context: float) -> float:
        return sum(count * one_pass(context, experts=(rows * size, work.expert)) for count, one_pass, size in passes)

    def of_chunk(tokens: int) -> float:
        experts = rows * tokens, work.expert
        return sum(one_pass(work.context / 2, head=False, experts=experts) for _, one_pass, _ in passes)

    wide = wide_chunk(work.batch, work.platform)
    num_wide, num_narrow = count_chunks(max(work.context - 1, 1), wide)
    models = [args.job.parts.target, *([] if args.draft is None else [args.draft])]
    towers = sum(shard_bytes(model.params) - shard_bytes(model.pass_params) for model in models)
    prefill = num_wide * of_chunk(wide) + num_narrow * of_chunk(CHUNK) + (towers if work.image_tiles else 0)
    middle = work.context + work.max_new_tokens / 2
    return {"prefill": prefill, "step": step(work.context), "loop": prefill + rounds * step(middle)}


def _of_head(draft: DraftHead, context: float, *, head: bool = True, experts: tuple[int, int] | None = None) -> float:
    """Return the bytes of a pass of a draft head: its weights, without its small cache."""
    head_params = draft.params.get("head") if isinstance(draft.params, dict) else None
    read = shard_bytes(draft.params) - (0 if head or head_params is None else shard_bytes(head_params))
    return read - unread_experts(getattr(draft.head.config, "layer", None), draft.params, experts)


def _pass_of(config: Any, target: Target, batch: int, cache: PyTree) -> Callable[..., float]:
    """Return `pass_bytes` of a model as a function of the context."""
    per_token, states = bytes_per_token(target, batch, cache), fixed_bytes(target, batch, cache)
    return functools.partial(pass_bytes, config, target.pass_params, per_token, states=states)


def pass_bytes(
    config: Any, params: Any, per_token: float, context: float, *, head: bool = True, states: float = 0.0,
    experts: tuple[int, int] | None = None,
) -> float:  # fmt: skip
    """Return the bytes that one pass moves on a device: its weights, and the cache of `context` tokens.

    An untied embedding is only looked up, and so is the table of layer inputs. Prefill does not use the output head.
    Windowed layers read their window. The `states` of recurrent layers, a number of bytes, are read by the pass and
    written by its commit. The weights of a mixture are those of the expected experts (`unread_experts`).
    """
    weights = shard_bytes(params) - shard_bytes(params.get("layer_inputs", {}).get("table", {}))
    weights -= 0 if config.tied and head else shard_bytes(params["embed"])
    weights -= 0 if config.tied or head else shard_bytes(params["head"])
    read = weights - unread_experts(config, params, experts)
    return read + per_token * mean_context(config, context) + 2 * states


def unread_experts(config: Any, params: Any, experts: tuple[int, int] | None) -> float:
    """Return the bytes of the experts that a pass does not read on the busiest device; 0 for a dense model.

    Args:
      experts: tokens of the pass, and devices that share the experts. None: the pass reads all experts.
    """
    sizes = getattr(config, "experts", None)
    if sizes is None or experts is None:
        return 0.0
    tokens, parts = experts
    return shard_bytes(expert_leaves(params)) * (1 - busiest_experts(sizes, tokens, parts) * parts / sizes.num_experts)


def bytes_per_token(target: Target, batch: int, cache: PyTree) -> float:
    """Return the bytes per token of all rows that a device stores in `cache`, without arrays of fixed size."""
    return sum(shard_bytes(leaf) / leaf.shape[axes[0]] for leaf, axes in _growing_axes(target, batch, cache) if axes)


def fixed_bytes(target: Target, batch: int, cache: PyTree) -> int:
    """Return the bytes of all rows that a device stores in `cache` for a text of any length: recurrent states."""
    leaves = _growing_axes(target, batch, cache)
    return sum(shard_bytes(leaf) for leaf, axes in leaves if not axes and leaf.ndim > 1)


def _growing_axes(target: Target, batch: int, cache: PyTree) -> list[tuple[Any, list[int]]]:
    """Return each array of a cache, and the axes whose size depends on the number of tokens."""
    small, large = (jax.tree.leaves(growing_part(cache_shapes(target, batch, capacity))) for capacity in (1024, 2048))
    sizes = lambda one, other: enumerate(zip(one.shape, other.shape, strict=True))
    return [
        (leaf, [axis for axis, (a, b) in sizes(one, other) if a != b])
        for leaf, one, other in zip(jax.tree.leaves(growing_part(cache)), small, large, strict=True)
    ]


def pending_bytes(target: Target, batch: int, nodes: int = 8) -> float:
    """Return the bytes per node of all rows that a device stores until a pass over a tree is committed."""
    model, tokens = target.model, jax.ShapeDtypeStruct((batch, nodes), jnp.int32)

    def pending(params: PyTree, tokens, mask) -> PyTree:
        cache = model.init_cache(params, None, batch, nodes)
        return model.forward(params, tokens, cache, positions=tokens, mask=mask)[1]

    shapes = jax.eval_shape(pending, target.params, tokens, jax.ShapeDtypeStruct((batch, nodes, nodes), bool))
    if model.shardings is not None:
        shapes = with_shardings(shapes, model.shardings(shapes))
    return shard_bytes([leaf for leaf in jax.tree.leaves(shapes) if leaf.ndim > 1]) / nodes


def _cache_in(state: PyTree, draft: Target) -> PyTree | None:
    """Return the first part of a drafter's state that is a cache of the model, or None."""
    is_cache = functools.partial(is_cache_of, draft)
    return next(filter(is_cache, jax.tree.leaves(state, is_leaf=is_cache)), None)


def mean_context(config: Any, context: float) -> float:
    """Return the cached tokens that a layer reads, averaged over layers."""
    window, kinds = getattr(config, "window", None), getattr(config, "kinds", ())
    if kinds:
        windows = [config.of_layer(i).window for i, kind in enumerate(kinds) if kind.has_keys] or [None]
        return sum(context if window is None else min(context, window) for window in windows) / len(windows)
    if window is None:
        return context
    full = getattr(config, "is_global", None) or (False,) * config.num_layers
    return sum(context if is_full else min(context, window) for is_full in full) / len(full)
