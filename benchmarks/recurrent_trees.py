"""A tree pass of a hybrid model: time and memory per node, against a state per node.

    python benchmarks/recurrent_trees.py --nodes 8 16 32 64

The model has two gated delta nets, a Mamba-2 mixer and an attention layer, with random weights. `tree` is the form of
specjax: all nodes in matrix products, and rank-one updates until the commit. `walked` computes the state of each node
from that of its parent, one node after another, and keeps all of them until the commit. Both forms give the same logits
and the same state after a commit, which is checked first. Times are medians of interleaved passes and commits, in one
process. Memory per node is that of the entries between pass and commit; the scratch memory is the compiler's.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.models import init_params, make_model
from specjax.models.hybrid import block
from specjax.models.hybrid import recurrence as R
from specjax.models.hybrid.config import GatedDeltaSizes, HybridConfig, LayerKind, Mamba2Sizes
from specjax.models.hybrid.mixers.gated_delta import GatedDelta
from specjax.models.hybrid.mixers.mamba2 import Mamba2
from specjax.types import Array, Model

KINDS = LayerKind("gated_delta"), LayerKind("mamba2"), LayerKind("gated_delta"), LayerKind()
CONFIG = HybridConfig(
    vocab_size=4096, width=512, num_layers=4, num_heads=8, num_kv_heads=2, head_dim=64, mlp_width=1536, kinds=KINDS,
    gated_delta=GatedDeltaSizes(8, 16, 128, 128), mamba2=Mamba2Sizes(16, 64, 1, 128), max_positions=4096, name="tree",
)  # fmt: skip
CONTEXT = 128


def walk(state: Array, decay: Array, step: Callable, inputs: Any) -> tuple[Array, Array]:
    """Return the outputs [B, T, H, v] and the states [T, B, H, d, v] of all nodes of the `beam`.

    step: from the decayed state of the parent and the node's `inputs` to its state and output.
    """
    states, outputs = [], []
    for node, parent in enumerate(beam(decay.shape[1])):
        at_node, decay_at_node = jax.tree.map(lambda x: x[:, node], (inputs, decay))  # noqa: B023
        above = states[parent] if node else state
        new, output = step(jnp.exp(decay_at_node)[..., None, None] * above, at_node)
        states.append(new)
        outputs.append(output)
    return jnp.stack(outputs, 1), jnp.stack(states)


def read(state: Array, vector: Array) -> Array:
    """Return S' q [B, H, v]."""
    return jnp.einsum("bhdv,bhd->bhv", state, vector, precision=R.EXACT)


def per_head(x: Array, heads: int) -> Array:
    """Repeat vectors [B, T, G, d] of groups for their heads."""
    return jnp.repeat(x, heads // x.shape[2], 2)


class WalkedDelta(GatedDelta):
    """A gated delta net with a state per node."""

    def __call__(self, x, shared, ancestry, memory, earlier):
        count, heads = shared.positions.shape[1], self.sizes.num_value_heads
        new = lambda y: y[:, :count]
        inputs = new(self.convolved(x))
        past = ancestry.past_inputs(memory.window, None, inputs)
        q, k, v = self._heads(jax.nn.silu(self.convolution([*past, inputs])), shared)
        beta = jax.nn.sigmoid(new(self.beta(x)).astype(jnp.float32))

        def step(state, node):
            q, k, v, beta = node
            u = beta[..., None] * (v - read(state, k))
            state = state + k[..., None] * u[:, :, None]
            return state, read(state, q)

        node = per_head(q, heads), per_head(k, heads), v, beta
        o, states = walk(memory.state, self.decay(new(self.alpha(x))), step, node)
        z = new(self.output_gate(x)).reshape(o.shape)
        y = (self.norm(o) * jax.nn.silu(z.astype(jnp.float32))).reshape(*o.shape[:2], -1).astype(x.dtype)
        return self.out(jnp.pad(y, ((0, 0), (0, x.shape[1] - count), (0, 0)))), R.Updates(inputs, value=states)


class WalkedMamba2(Mamba2):
    """A Mamba-2 mixer with a state per node."""

    def __call__(self, x, shared, ancestry, memory, earlier):
        count, heads = shared.positions.shape[1], self.sizes.num_heads
        new = lambda y: y[:, :count]
        inputs = new(self.convolved(x))
        past = ancestry.past_inputs(memory.window, None, inputs)
        values, key, query = self._heads(jax.nn.silu(self.convolution([*past, inputs])), shared)
        dt = jnp.clip(self.decay.time_steps(new(self.time_step(x))), *self.sizes.time_step_limit)

        def step(state, node):
            query, key, u = node
            state = state + key[..., None] * u[:, :, None]
            return state, read(state, query)

        node = per_head(query, heads), per_head(key, heads), values * dt[..., None]
        o, states = walk(memory.state, self.decay.rate[...] * dt, step, node)
        y = o + self.skip.weight[...][:, None] * values
        y = self._gated_norm(y.reshape(*y.shape[:2], -1), new(self.output_gate(x)).astype(jnp.float32))
        y = jnp.pad(y.astype(x.dtype), ((0, 0), (0, x.shape[1] - count), (0, 0)))
        return self.out(y), R.Updates(inputs, value=states)


def walked_model() -> Model:
    """Return the model with a state per node."""
    layers = block.RECURRENT_LAYERS
    block.RECURRENT_LAYERS = layers | {"gated_delta": WalkedDelta, "mamba2": WalkedMamba2}
    model = make_model(dataclasses.replace(CONFIG, name="walked"))
    block.RECURRENT_LAYERS = layers

    def commit(cache, pending, path, num_nodes):
        last = take_along(path, jnp.maximum(num_nodes - 1, 0)[:, None], 1)

        def of_layer(memory: R.RecurrentState, updates: R.Updates) -> R.RecurrentState:
            convolution = R.commit_path(R.RecurrentState(memory.window), updates, path, num_nodes)
            state = updates.value[last[:, 0], jnp.arange(len(last))]
            return convolution._replace(state=jnp.where((num_nodes > 0)[:, None, None, None], state, memory.state))

        without = lambda x: x._replace(recurrent=())
        committed = model.commit(without(cache), without(pending), path, num_nodes)
        return committed._replace(recurrent=tuple(map(of_layer, cache.recurrent, pending.recurrent)))

    return model._replace(commit=commit)


def beam(nodes: int, width: int = 4) -> np.ndarray:
    """Return the parents int32[nodes] of a beam, of which the best node of each level has half of the children."""
    parents = np.maximum((np.arange(nodes) - 1) // width * width - width + 1, 0)
    parents[0] = -1
    return parents


def cases(nodes: int):
    """Return (name, function of the parameters and the cache, arguments) for both forms."""
    parents = beam(nodes)
    mask = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        mask[node] |= mask[parents[node]]
    path = np.flatnonzero(mask[-1])
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (1, nodes)).astype(np.int32)
    params = init_params(CONFIG, jax.random.key(0))
    for name, model in (("tree", make_model(CONFIG)), ("walked", walked_model())):

        @jax.jit
        def run(params, cache, tokens, model=model):
            positions = CONTEXT + jnp.asarray(mask.sum(1) - 1)[None]
            output, pending = model.forward(params, tokens, cache, positions=positions, mask=jnp.asarray(mask)[None])
            return output.logits, pending, model.commit(cache, pending, jnp.asarray(path)[None], jnp.array([len(path)]))

        yield name, run, (params, filled(params), tokens)


def filled(params):
    """Return a cache of CONTEXT random tokens."""
    model, places = make_model(CONFIG), jnp.arange(CONTEXT)[None]
    tokens = jax.random.randint(jax.random.key(1), places.shape, 0, CONFIG.vocab_size)
    cache = model.init_cache(params, None, 1, 2 * CONTEXT + 256)
    mask = jnp.tril(jnp.ones((1, CONTEXT, CONTEXT), bool))
    pending = jax.jit(model.forward)(params, tokens, cache, positions=places, mask=mask)[1]
    return jax.jit(model.commit)(cache, pending, places, jnp.array([CONTEXT]))


def measure(nodes: int, repeats: int) -> None:
    """Print a row per form."""
    forms = list(cases(nodes))
    results = {name: run(*args) for name, run, args in forms}
    for part in (0, 2):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, atol=2e-3), *(result[part] for result in results.values())
        )
    seconds: dict[str, list[float]] = {name: [] for name in results}
    for _ in range(repeats):
        for name, run, args in forms:
            start = time.perf_counter()
            jax.block_until_ready(run(*args))
            seconds[name].append(time.perf_counter() - start)
    for name, run, args in forms:
        updates = results[name][1].recurrent
        per_node = sum(x.nbytes for x in jax.tree.leaves(updates)) / nodes
        scratch = run.lower(*args).compile().memory_analysis().temp_size_in_bytes
        milliseconds = 1e3 * statistics.median(seconds[name])
        print(
            f"{nodes:6} {name:8} {milliseconds:9.2f} ms {milliseconds / nodes:8.3f} ms per node "
            f"{per_node / 1024:9.1f} KiB per node {scratch / 2**20:8.2f} MiB scratch",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=21)
    options = parser.parse_args()
    for nodes in options.nodes:
        measure(nodes, options.repeats)
