"""Tiny models whose memory is no cache of keys and values: what `Model` must carry besides transformers."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays import batch_axes
from specjax.types import Capabilities, Model, Output, Target

VOCAB, WIDTH, LAYERS, INPUTS = 12, 8, 2, 5


def _norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def _unembed(params, hidden):
    return hidden @ params["head"]


def _head(params, stream):
    return _unembed(params, _norm(stream))


class Running(NamedTuple):
    """The memory of the recurrent model: of all that it has read, one state per layer; no tokens, no length."""

    state: jax.Array  # float32[layers, B, D]


class Nodes(NamedTuple):
    """The state behind each of T new tokens, of which `commit` picks one."""

    states: jax.Array  # float32[layers, B, T, D]


def fold_along_ancestors(gate, new, start, earlier, mask):
    """h_i = g_i h_parent(i) + (1 - g_i) new_i for nodes i in order: float32[B, T, D].

    gate, new: [B, T, D]. start: [B, D], the state that roots follow. earlier: [B, P, D], states of nodes before these.
    mask: bool[B, T, P + T]. A parent is the last of a node's other ancestors.
    """
    batch, count, width = new.shape
    num_earlier = earlier.shape[1]
    states = jnp.concatenate([start[:, None], earlier, jnp.zeros((batch, count, width))], 1)  # [B, 1 + P + T, D]
    place = jnp.arange(num_earlier + count)
    ancestors = mask & (place != num_earlier + jnp.arange(count)[:, None])
    parent = jnp.max(jnp.where(ancestors, 1 + place, 0), -1)  # int32[B, T], 0: none

    def one(i, states):
        above = jnp.take_along_axis(states, parent[:, i][:, None, None], 1)[:, 0]
        return states.at[:, 1 + num_earlier + i].set(gate[:, i] * above + (1 - gate[:, i]) * new[:, i])

    return jax.lax.fori_loop(0, count, one, states)[:, 1 + num_earlier :]


def fold_in_order(gate, new, start, earlier, mask):
    """A mistake: every node follows the one before it, whatever the tree."""
    count = earlier.shape[1] + new.shape[1]
    chain = jnp.tril(jnp.ones((count, count), bool))[earlier.shape[1] :]
    return fold_along_ancestors(gate, new, start, earlier, jnp.broadcast_to(chain, mask.shape))


@functools.cache
def recurrent_model(vocab: int, fold=fold_along_ancestors) -> Model:
    """Gated linear recurrences, one per layer, that add to a residual stream. It cannot rewind."""

    def forward(params, tokens, cache, *, positions, mask, taps=(), earlier=None):
        x = params["embed"][tokens]
        stream, states = [x], []
        for layer, weights in enumerate(params["layers"]):
            y = _norm(x)
            earlier_states = jnp.zeros((len(tokens), 0, WIDTH)) if earlier is None else earlier.states[layer]
            gate = jax.nn.sigmoid(y @ weights["gate"])
            states.append(fold(gate, jnp.tanh(y @ weights["new"]), cache.state[layer], earlier_states, mask))
            x = x + states[-1] @ weights["out"]
            stream.append(x)
        hidden = _norm(x)
        return Output(_unembed(params, hidden), hidden, tuple(stream[tap] for tap in taps)), Nodes(jnp.stack(states))

    def commit(cache, pending, path, num_nodes):
        last = jnp.take_along_axis(path, jnp.maximum(num_nodes - 1, 0)[:, None], 1)
        picked = jnp.take_along_axis(pending.states, jnp.maximum(last, 0)[None, :, :, None], 2)[:, :, 0]
        return Running(jnp.where((num_nodes > 0)[None, :, None], picked, cache.state))

    return Model(
        init_cache=lambda params, inputs, batch, capacity: Running(jnp.zeros((LAYERS, batch, WIDTH))),
        forward=forward,
        commit=commit,
        vocab_size=vocab,
        max_positions=1 << 20,
        name="recurrent",
        widen=lambda pending, slots: batch_axes.widen(pending, slots, axis=2),
        insert=lambda pending, new, place: batch_axes.insert(pending, new, place, axis=2, rows=1),
        axes=lambda tree: jax.tree.map(lambda x: 1, tree),
        embed=lambda params, tokens: params["embed"][tokens],
        unembed=_unembed,
        head=_head,
        capabilities=Capabilities(num_layers=LAYERS, taps=True),
    )


def _matrices(seed: int, **shapes):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        name: jax.random.normal(key, shape) * scale
        for key, (name, (scale, *shape)) in zip(keys, shapes.items(), strict=True)
    }


@functools.cache
def recurrent(vocab: int = VOCAB, seed: int = 0) -> Target:
    """Random weights, such that what was read long ago still matters."""
    square = {"gate": (0.5, WIDTH, WIDTH), "new": (1.0, WIDTH, WIDTH), "out": (1.0, WIDTH, WIDTH)}
    params = _matrices(seed, embed=(1.0, vocab, WIDTH), head=(1.5, WIDTH, vocab))
    return Target(recurrent_model(vocab), params | {"layers": [_matrices(seed + i, **square) for i in (10, 20)]})


class Memory(NamedTuple):
    """The state of the model with an encoder: its inputs, encoded, and its text."""

    encoded: jax.Array  # float32[INPUTS, B, D]
    text: jax.Array  # float32[B, S, D]
    length: jax.Array  # int32[B]


def _attend(query, keys, visible):
    """Attend from query [B, T, D] to keys [B, S, D], which are the values too, where visible bool[B, T, S]."""
    scores = jnp.where(visible, jnp.einsum("btd,bsd->bts", query, keys), -jnp.inf)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores, -1), keys)


@functools.cache
def encoding_model(vocab: int) -> Model:
    """A layer of attention to the text and one to an encoder's output; `inputs` are int32[B, INPUTS]."""

    def init_cache(params, inputs, batch, capacity):
        encoded = jnp.tanh(params["source"][inputs] + params["place"]).swapaxes(0, 1)
        return Memory(encoded, jnp.zeros((batch, capacity, WIDTH)), jnp.zeros((batch,), jnp.int32))

    def forward(params, tokens, cache, *, positions, mask, taps=(), earlier=None):
        embedded = params["embed"][tokens] + 0.3 * jnp.sin(positions[:, :, None] * params["frequency"])
        new = embedded if earlier is None else jnp.concatenate([earlier, embedded], 1)
        in_cache = jnp.arange(cache.text.shape[1]) < cache.length[:, None]
        visible = jnp.concatenate([jnp.broadcast_to(in_cache[:, None], (*tokens.shape, in_cache.shape[1])), mask], 2)
        x = embedded + _attend(embedded @ params["self"], jnp.concatenate([cache.text, new], 1), visible)
        encoded = cache.encoded.swapaxes(0, 1)
        x = x + 2 * _attend(x @ params["cross"], encoded, jnp.ones((*tokens.shape, INPUTS), bool))
        hidden = _norm(x)
        return Output(_unembed(params, hidden), hidden), embedded

    def commit(cache, pending, path, num_nodes):
        accepted = jnp.take_along_axis(pending, jnp.maximum(path, 0)[:, :, None], 1)
        index = jnp.arange(path.shape[1])
        slot = jnp.where(index < num_nodes[:, None], cache.length[:, None] + index, cache.text.shape[1])
        text = cache.text.at[jnp.arange(len(path))[:, None], slot].set(accepted, mode="drop")
        return Memory(cache.encoded, text, cache.length + num_nodes)

    return Model(
        init_cache=init_cache,
        forward=forward,
        commit=commit,
        vocab_size=vocab,
        max_positions=1 << 20,
        name="encoding",
        rewind=lambda cache, length: cache._replace(length=jnp.minimum(cache.length, length)),
        axes=lambda tree: Memory(1, 0, 0) if isinstance(tree, Memory) else 0,
        unembed=_unembed,
        head=_head,
        capabilities=Capabilities(inputs=True),
    )


@functools.cache
def encoding(vocab: int = VOCAB, seed: int = 0) -> Target:
    """Random weights; texts of other inputs are other texts."""
    params = _matrices(
        seed, embed=(1.0, vocab, WIDTH), head=(1.5, WIDTH, vocab), source=(1.5, vocab, WIDTH),
        place=(0.5, INPUTS, WIDTH), frequency=(1.0, WIDTH), self=(0.5, WIDTH, WIDTH), cross=(1.0, WIDTH, WIDTH),
    )  # fmt: skip
    return Target(encoding_model(vocab), params)


def inputs_of(batch: int, vocab: int = VOCAB, seed: int = 0) -> jax.Array:
    """int32[B, INPUTS] for `encoding`."""
    return jax.random.randint(jax.random.key(seed), (batch, INPUTS), 0, vocab)


def alike(target: Target, noise: float = 0.15) -> Target:
    """Return the target with noise on its weights: a draft model that errs now and then."""
    leaves, structure = jax.tree.flatten(target.params)
    # Callers cache the result, so it must not be made of tracers if the first call is inside of `jit`.
    with jax.ensure_compile_time_eval():
        keys = jax.random.split(jax.random.key(99), len(leaves))
        noises = [jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
        changed = [x + noise * jnp.std(x) * z for x, z in zip(leaves, noises, strict=True)]
    return Target(target.model, jax.tree.unflatten(structure, changed))


def law_of_triples(target: Target, prompt, inputs=None, temperature: float = 1.0) -> np.ndarray:
    """Compute float64[V, V, V], the distribution of the next three tokens, by a pass over every text."""
    vocab = target.model.vocab_size
    texts = np.array([[*prompt, *new] for new in itertools.product(range(vocab), repeat=3)], np.int32)
    count, width = texts.shape
    repeated = None if inputs is None else jnp.repeat(inputs, count, 0)
    cache = target.model.init_cache(target.params, repeated, count, 1)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (count, width, width))
    positions = jnp.broadcast_to(jnp.arange(width), texts.shape)
    output, _ = target.model.forward(target.params, jnp.asarray(texts), cache, positions=positions, mask=mask)
    log_p = jax.nn.log_softmax(output.logits.astype(jnp.float32) / temperature, -1)
    log_p = np.asarray(log_p, np.float64)[:, len(prompt) - 1 : -1]
    each = np.take_along_axis(log_p, texts[:, len(prompt) :, None], 2)[:, :, 0]
    return np.exp(each.sum(1)).reshape((vocab,) * 3)
