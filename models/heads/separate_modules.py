"""Heads with one module for each depth of the draft: module j predicts j + 2 tokens ahead of the state that it reads.

Every token y of the text and of the draft is read by the modules in turn, each with a cache of its own. Module 0 reads
the target's hidden state of the token before y. Module j reads what module j - 1 carried at the token before y, so all
modules stay at one state and read ids that are j tokens further on. A drafted token at depth d has no true hidden
state, so only the modules from d on can read it, and the prediction of its children is that of module d.

The entries of a module of its first j tokens would belong to states before the text. No token attends to them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.arrays import batch_axes
from specjax.arrays.indexing import take_along
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.heads import memory
from specjax.models.heads.autoregressive import AutoregressiveScratch
from specjax.models.heads.blocks import (
    attention_reach,
    bind,
    by_depth,
    causal_inputs,
    commit_pairs,
    drafted_mask,
    last_entry,
    pass_inputs,
)
from specjax.models.heads.contract import DraftedNodes, FeaturePairs, Head
from specjax.models.heads.memory import HeadMemory
from specjax.types import Array, Context


@functools.cache
def separate_modules(kind: str, module: Callable[..., Any], config: Any) -> Head:
    """Build the head of the `modules` of `module(config)`, each like `specjax.models.heads.mtp.MtpModule`.

    A token has outputs [B, T, n D] for n modules: the output that predicts the next token, and what each module but the
    last carries to the next token. `config.chained` is "normed" or "raw" for its output, or "target" for its own state.
    """
    modules_of, layer = bind(module, config), config.layer
    n, width = layer.num_layers, layer.width

    def carried(module: Any, state: Array, output: Array) -> Array:
        return state if config.chained == "target" else module.fed_back(output)

    def run(module: Any, j: int, embedded: Array, state: Array, step: L.PassInputs, cache: kv.KVCache):
        """Return the output [B, T, D] of module j, and its keys and values."""
        earlier = () if step.earlier is None else (step.earlier.k[j], step.earlier.v[j])
        inputs = L.LayerInputs(
            _without_first(step, j, cache), L.LayerCache(cache.k[j], cache.v[j], earlier=earlier),
            attention_reach(layer, cache, step.positions),
        )  # fmt: skip
        return module.block(module.joined(embedded, state, step.positions), inputs)

    def init_memory(params, context: Context, batch: int, capacity: int) -> HeadMemory:
        return memory.init(context, layer, config.output_width, batch, capacity)

    def read(params, state: HeadMemory, pairs: FeaturePairs, context: Context) -> HeadMemory:
        cache, last, _ = state
        modules = modules_of(params).modules
        step = causal_inputs(context, layer, cache, pairs.tokens.shape[1], pairs.first)
        embedded, x = modules[0].embedded(pairs.tokens, context), pairs.features.astype(layer.dtype)
        outputs, new = [], []
        for j, module in enumerate(modules):
            output, entries = run(module, j, embedded, x, step, cache)
            new.append(entries)
            outputs += [output] if j == 0 else []
            if j < n - 1:
                outputs.append(carried(module, x, output))
                previous = jnp.split(last, n, -1)[j + 1][:, None]
                x = jnp.concatenate([previous, outputs[-1][:, :-1]], 1)
        pending = _pending(new, step, outputs[0])
        ends = last_entry(jnp.concatenate(outputs, -1), pairs.count, last)
        return HeadMemory(commit_pairs(context, layer, cache, pending, pairs), ends)

    def start(params, state: HeadMemory, context: Context, places: int) -> tuple[AutoregressiveScratch, Array]:
        cache, last, _ = state
        outputs = jnp.zeros((last.shape[0], places, last.shape[1]), last.dtype).at[:, 0].set(last)
        scratch = AutoregressiveScratch(cache, kv.empty_pending(cache, places), outputs)
        return scratch, modules_of(params).modules[0].logits(last[:, :width], context)

    def follow(
        params, scratch: AutoregressiveScratch, drafted: DraftedNodes, context: Context
    ) -> tuple[AutoregressiveScratch, Array]:
        modules, (cache, pending, outputs, _) = modules_of(params).modules, scratch
        states = jnp.split(take_along(outputs, drafted.parent[:, :, None], 1), n, -1)
        positions = cache.length[:, None] - 1 + drafted.depth
        step = pass_inputs(context, layer, cache, positions, drafted_mask(drafted), pending)
        embedded = modules[0].embedded(drafted.tokens, context)
        results: list[Any] = []
        for j, module in enumerate(modules):
            one = functools.partial(run, module, j, embedded, states[j], step, cache)
            empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one))
            results.append(jax.lax.cond(jnp.any(drafted.depth <= j), one, lambda empty=empty: empty) if j else empty)
        logits = by_depth(n, drafted.depth, lambda depth: modules[depth].logits(results[depth][0], context))
        carry = [carried(modules[j], states[j], results[j][0]) for j in range(n - 1)]
        new_outputs = jnp.concatenate([jnp.zeros_like(states[0]), *carry], -1)
        outputs = batch_axes.insert(outputs, new_outputs, drafted.place)
        new = _pending([entries for _, entries in results], step, new_outputs)
        return AutoregressiveScratch(cache, kv.insert(pending, new, drafted.place), outputs), logits

    return Head(
        init_memory=init_memory,
        read=read,
        start=start,
        follow=follow,
        kind=kind,
        config=config,
        taps=config.taps,
        max_depth=n,
        axes=memory.axes,
        shardings=memory.shardings(layer),
    )


def _pending(entries: list[tuple], step: L.PassInputs, output: Array) -> kv.Pending:
    k, v = zip(*entries, strict=True)
    return kv.Pending(k, v, step.positions, kv.write_dependency(output))


def _without_first(step: L.PassInputs, count: int, cache: kv.KVCache) -> L.PassInputs:
    """Return the inputs of a pass that attends to no key of the first `count` tokens of its text, but to itself."""
    if count == 0:
        return step
    first = jnp.zeros_like(step.length) if step.first is None else step.first
    num_keys, size = step.mask.shape[2], step.positions.shape[1]
    itself = jnp.arange(num_keys) == num_keys - size + jnp.arange(size)[:, None]
    if step.earlier is not None:  # drafted tokens
        return step.replace(first=first + count)
    # The mask of a pass over several texts in one row starts at the first token of a token's own text.
    reach = step.key_positions[:, None] >= jnp.argmax(step.mask, 2)[:, :, None] + count
    mask = step.mask & reach | itself
    return step.replace(mask=mask, first=first + count) if cache.k[0].shape[-2] else step.replace(mask=mask)
