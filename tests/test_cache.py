"""Commit: after any tree and any path the cache equals a fresh prefill of the committed text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import tiny_llama

from specjax import cache as kv
from specjax import tree as trees
from specjax.decode import _decode, prepare
from specjax.drafters import autoregressive, prompt_lookup, swift
from specjax.prefill import CHUNK, prefill

NODES, CAPACITY = 6, 2 * CHUNK + 64


def slots(cache, length):
    """The slots below `length` of every layer, one array."""
    leaves = [np.asarray(leaf)[..., :length, :] for leaf in jax.tree.leaves((cache.k, cache.v))]
    return np.concatenate([leaf.reshape(-1, *leaf.shape[-3:]) for leaf in leaves])


@jax.jit
def verify_pass(target, cache, tokens, parents, path, count):
    depth = trees.depths(parents)
    _, pending = target.model.forward(
        target.params, tokens, cache, positions=cache.length[:, None] + depth, mask=trees.ancestor_mask(parents)
    )
    return target.model.commit(cache, pending, path, count)


@jax.jit
def filled(target, tokens, count):
    cache = target.model.init_cache(tokens.shape[0], CAPACITY)
    cache = cache._replace(k=jax.tree.map(lambda x: x + jnp.nan, cache.k), v=jax.tree.map(lambda x: x + 1e9, cache.v))
    return prefill(target.model, target.params, cache, tokens, count)


@pytest.mark.parametrize("stacked", [False, True])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_commit_of_a_path_equals_a_fresh_prefill(stacked, data):
    target = tiny_llama(stacked=stacked)
    lengths = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    parents = [[-1] + [data.draw(st.integers(0, i - 1)) for i in range(1, NODES)] for _ in range(2)]
    tokens = np.array(data.draw(st.lists(st.integers(0, 63), min_size=2 * NODES, max_size=2 * NODES))).reshape(2, NODES)
    text = np.tile(np.arange(3, 19), (2, 1))
    path = np.full((2, NODES), -1, np.int32)
    count = np.zeros(2, np.int32)
    for b in range(2):
        node, walk = data.draw(st.integers(0, NODES - 1)), []
        while node >= 0:
            walk.insert(0, node)
            node = parents[b][node]
        keep = data.draw(st.integers(0, len(walk)))
        path[b, : len(walk)] = walk
        count[b] = keep
        text[b, lengths[b] : lengths[b] + keep] = tokens[b, walk[:keep]]
    cache = finite(filled(target, jnp.asarray(text), jnp.array(lengths)))
    after = verify_pass(target, cache, jnp.asarray(tokens), jnp.array(parents), jnp.asarray(path), jnp.asarray(count))
    whole = filled(target, jnp.asarray(text), jnp.array(lengths) + count)
    assert after.length.tolist() == whole.length.tolist()
    for b in range(2):
        n = int(after.length[b])
        row = lambda c, b=b: jax.tree.map(lambda x: jnp.take(x, jnp.array([b]), axis=x.ndim - 4), (c.k, c.v))
        one = lambda c, row=row: kv.KVCache(*row(c), c.length)
        np.testing.assert_allclose(slots(one(after), n), slots(one(whole), n), atol=2e-5)


def finite(cache):
    """Dead slots hold large numbers, not nan, which 0 * nan would spread."""
    return jax.tree.map(lambda x: jnp.nan_to_num(x, nan=1e9) if x.dtype == jnp.float32 else x, cache)


def test_dead_slots_do_not_matter():
    target = tiny_llama()
    tokens = jnp.array([[3, 4, 5, 6]])
    forward = lambda cache: (
        target.model.forward(
            target.params, tokens[:, 2:], cache, positions=jnp.array([[2, 3]]), mask=jnp.tril(jnp.ones((1, 2, 2), bool))
        )[0].logits
    )
    dirty = finite(filled(target, tokens, jnp.array([2])))
    clean = jax.tree.map(lambda x: jnp.where(jnp.abs(x) > 1e8, 0, x) if x.dtype == jnp.float32 else x, dirty)
    np.testing.assert_array_equal(forward(dirty), forward(clean))


def test_prefill_in_chunks_equals_one_pass_and_rows_may_differ():
    target = tiny_llama()
    length = CHUNK + 37
    tokens = jax.random.randint(jax.random.key(0), (2, length), 0, 64)
    cache = filled(target, tokens, jnp.array([length, 5]))
    mask = jnp.tril(jnp.ones((1, length, length), bool))
    _, pending = target.model.forward(
        target.params, tokens[:1], target.model.init_cache(1, 1), positions=jnp.arange(length)[None], mask=mask
    )
    assert cache.length.tolist() == [length, 5]
    for ours, theirs in zip(cache.k, pending.k, strict=True):
        np.testing.assert_allclose(ours[0, :, :length], theirs[0], atol=2e-5)
    short = filled(target, tokens[1:, :5], jnp.array([5]))
    np.testing.assert_allclose(
        slots(short, 5), slots(kv.KVCache(*jax.tree.map(lambda x: x[1:], (cache.k, cache.v)), None), 5), atol=2e-5
    )


def copies_of_the_cache(drafter, batch):
    """Copies of a layer's slots within the loops of the compiled program of `decode`."""
    prompts = (jnp.ones((batch, 384), jnp.int32), jnp.full((batch,), 384))
    inputs, *arrays, static = prepare(
        tiny_llama(head_dim=64), drafter, prompts, key=jax.random.key(0), max_new_tokens=32
    )
    text = _decode.lower(inputs, *arrays, **static).compile().as_text()
    shape = f"f32[{batch},2,{-(-arrays[0].shape[1] // kv.SLOTS) * kv.SLOTS},64]"  # a head_dim that kernels take, too
    loops = text.split("ENTRY")[0]
    assert shape in loops
    return [line for line in loops.splitlines() if f"= {shape}" in line and " copy(" in line]


def test_steps_do_not_copy_the_cache(monkeypatch):
    own = swift(tiny_llama(head_dim=64), 2, layers=(0, 1), window=4)  # reads the target's cache in branches
    for drafter in (autoregressive(), prompt_lookup(3), own):
        assert copies_of_the_cache(drafter, 8) == []
    monkeypatch.setattr(kv, "after", lambda x: jnp.zeros(x.shape[0], jnp.int32))
    assert copies_of_the_cache(autoregressive(), 7)  # the test can fail: this is what `after` prevents
