"""Attention by slots: near one softmax written out, and the same bits wherever a token's ancestors lie."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slots import SCALE, Sizes, differing, exact, random_parents, tree_pass

from specjax.numerics.quantization import quantize
from specjax.pallas_kernels.tree_attention import by_slot, tree_attention
from specjax.pallas_kernels.tree_attention.reference import tree_attention as reference

BATCH, HEADS, KV, DIM, SLOTS, GROUP, NODES = 2, 6, 2, 16, 48, 8, 6
SIZES = {"scale": SCALE, "block": 16, "group": GROUP}
STATIC = "window", "softcap", "with_total"
BY_SLOT = jax.jit(functools.partial(by_slot.tree_attention_by_slot, **SIZES), static_argnames=STATIC)
XLA = jax.jit(functools.partial(tree_attention, scale=SCALE, implementation="xla"), static_argnames=STATIC)


def case(seed: int, lengths, nodes: int = NODES):
    """Arrays of a pass over a random tree, and its parents."""
    parents = random_parents(seed, nodes)
    return tree_pass(seed, Sizes(HEADS, KV, DIM, SLOTS), lengths, parents), parents


def apart(run, seed: int, lengths, **options) -> int:
    """`differing` of such a pass, in float32."""
    return differing(lambda *arrays: run(*arrays, with_total=True, **options)[0], *case(seed, lengths))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 5])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1000), lengths=st.tuples(*[st.sampled_from([0, 1, 7, 8, 15, 16, 33, 42])] * 2))
def test_is_one_softmax(window, softcap, seed, lengths):
    arrays, _ = case(seed, lengths)
    options = {"window": window, "softcap": softcap}
    got = np.asarray(BY_SLOT(*arrays, **options), np.float32)
    np.testing.assert_allclose(got, exact(arrays, **options), atol=0.03)


@pytest.mark.parametrize("window", [None, 5])
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1000), lengths=st.tuples(*[st.sampled_from([0, 5, 7, 8, 15, 37])] * 2))
def test_it_makes_no_difference_where_ancestors_lie(window, seed, lengths):
    assert apart(BY_SLOT, seed, lengths, window=window) == 0


@pytest.mark.parametrize("length", [126, 318])
def test_sizes_of_a_real_model(length, steps=4):
    """SmolLM2's heads, over the border of two groups: there a kernel chosen by the layout of its operands showed.

    One token reads the slots in other blocks than several tokens.
    """
    run, rng = real_sizes(), np.random.default_rng(1)
    normal = lambda *shape: jnp.asarray(2 * rng.normal(size=shape), jnp.bfloat16)
    q, k, v = normal(1, steps, 9, 64), normal(1, 3, steps, 64), normal(1, 3, steps, 64)
    prefix = [normal(1, 3, 512, 64), normal(1, 3, 512, 64)]
    mask = jnp.tril(jnp.ones((1, steps, steps), bool))
    chain, _ = run(q, k, v, *prefix, jnp.array([length]), length + jnp.arange(steps)[None], mask)
    for i in range(steps):
        query, at = slice(i, i + 1), jnp.array([length + i])
        one, _ = run(q[:, query], k[:, :, query], v[:, :, query], *prefix, at, at[None], jnp.ones((1, 1, 1), bool))
        np.testing.assert_array_equal(one[:, 0], chain[:, i])
        prefix = [x.at[:, :, length + i].set(new[:, :, i]) for x, new in zip(prefix, (k, v), strict=True)]


@functools.cache
def real_sizes():
    return jax.jit(functools.partial(by_slot.tree_attention_by_slot, scale=0.125, with_total=True))


def test_pending_and_prefix_summed_apart_are_caught():
    """The mutant is the attention of other passes."""
    assert sum(apart(XLA, seed, (7, 15), window=None) for seed in range(3)) > 0


def test_neither_rows_nor_capacity_nor_layers_count():
    arrays, _ = case(1, (7, 30))
    both = np.asarray(BY_SLOT(*arrays), np.float32)
    second = [x[1:] for x in arrays]
    np.testing.assert_array_equal(np.asarray(BY_SLOT(*second), np.float32)[0], both[1])
    q, k, v, prefix_k, prefix_v, *geometry = arrays
    wider = [jnp.pad(x, ((0, 0), (0, 0), (0, 80), (0, 0)), constant_values=7) for x in (prefix_k, prefix_v)]
    np.testing.assert_array_equal(np.asarray(BY_SLOT(q, k, v, *wider, *geometry), np.float32), both)
    bits = [jax.lax.bitcast_convert_type(jnp.stack([x + 1, x]), jnp.uint16) for x in (prefix_k, prefix_v)]
    np.testing.assert_array_equal(np.asarray(BY_SLOT(q, k, v, *bits, *geometry, layer=jnp.int32(1)), np.float32), both)


def test_more_nodes_than_are_put_together_at_once(monkeypatch):
    """A tree in parts, and a long chain, whose slots are the same for all."""
    arrays, _ = case(2, (7, 30), nodes=10)
    result = np.asarray(BY_SLOT(*arrays), np.float32)
    parts = jax.jit(functools.partial(by_slot.tree_attention_by_slot, **SIZES))
    monkeypatch.setattr(by_slot, "AT_ONCE", 4)
    np.testing.assert_array_equal(np.asarray(parts(*arrays), np.float32), result)
    q, k, v, prefix_k, prefix_v, length, _, _ = arrays
    chain = jnp.broadcast_to(jnp.tril(jnp.ones((10, 10), bool)), (BATCH, 10, 10))
    arrays = q, k, v, prefix_k, prefix_v, length, length[:, None] + jnp.arange(10), chain
    np.testing.assert_array_equal(np.asarray(parts(*arrays), np.float32), np.asarray(BY_SLOT(*arrays), np.float32))


def test_quantised_keys_and_values():
    (q, k, v, prefix_k, prefix_v, *geometry), _ = case(3, (7, 30))
    keys_values = [quantize(x.astype(jnp.float32)) for x in (k, v, prefix_k, prefix_v)]
    got = np.asarray(BY_SLOT(q, *keys_values, *geometry), np.float32)
    np.testing.assert_allclose(
        got, np.asarray(reference(q.astype(jnp.float32), *keys_values, *geometry, scale=SCALE)), atol=0.03
    )


@pytest.mark.parametrize("rows", [2, 14])
def test_scores_of_a_row_are_the_same_alone_and_in_a_batch(rows):
    """The scores have the same bits for 2 rows. With AMX, 67 of 1,024 scores of `xla.products` differ."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(2, 2, count, 16)), jnp.bfloat16) for count in (rows, 256))
    pad = by_slot._pad_rows
    run = jax.jit(lambda q, k: by_slot._score_products(*jax.lax.optimization_barrier((pad(q), pad(k)))))
    np.testing.assert_array_equal(run(q[:1], k[:1])[0], run(q, k)[0])
