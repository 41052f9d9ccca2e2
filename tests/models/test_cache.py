"""Commit: after any tree and any path the cache equals a fresh prefill of the committed text.

An int8 cache is just as good, whatever was pending when.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import exhaustive
from toy import tiny_llama

import specjax
from specjax.arrays import platforms, texts
from specjax.drafters import autoregressive, prompt_lookup, swift, two_model
from specjax.engine.prefill import CHUNK, prefill
from specjax.engine.prepare import Settings, prepare
from specjax.engine.run import run
from specjax.errors import UsageError
from specjax.models import bridge, make_model
from specjax.models import cache as kv
from specjax.numerics.quantization import Quantized, dequantize, quantize
from specjax.trees import operations
from specjax.types import Target

NODES, CAPACITY = 6, 2 * CHUNK + 64


def slots(cache, length):
    """Return the slots below `length` of every layer as one array."""
    is_quantized = lambda x: isinstance(x, Quantized)
    leaves = jax.tree.leaves((cache.k, cache.v), is_leaf=is_quantized)
    leaves = [np.asarray(dequantize(leaf) if is_quantized(leaf) else leaf)[..., :length, :] for leaf in leaves]
    return np.concatenate([leaf.reshape(-1, *leaf.shape[-3:]) for leaf in leaves])


@jax.jit
def verify_pass(target, cache, tokens, parents, path, count):
    depth = operations.depths(parents)
    _, pending = target.model.forward(
        target.params, tokens, cache, positions=cache.length[:, None] + depth, mask=operations.ancestor_mask(parents)
    )
    return target.model.commit(cache, pending, path, count)


@jax.jit
def filled(target, tokens, count):
    cache = target.model.init_cache(target.params, None, tokens.shape[0], CAPACITY)
    dead = lambda tree, value: jax.tree.map(lambda x: jnp.full_like(x, 99 if x.dtype == jnp.int8 else value), tree)
    cache = cache._replace(k=dead(cache.k, jnp.nan), v=dead(cache.v, 1e9))
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
    committed = verify_pass(
        target, cache, jnp.asarray(tokens), jnp.array(parents), jnp.asarray(path), jnp.asarray(count)
    )
    full = filled(target, jnp.asarray(text), jnp.array(lengths) + count)
    assert committed.length.tolist() == full.length.tolist()
    for b in range(2):
        n = int(committed.length[b])
        row = lambda c, b=b: jax.tree.map(lambda x: jnp.take(x, jnp.array([b]), axis=x.ndim - 4), (c.k, c.v))
        one = lambda c, row=row: kv.KVCache(*row(c), c.length)
        np.testing.assert_allclose(slots(one(committed), n), slots(one(full), n), atol=2e-5)


@pytest.mark.parametrize("options", [{}, {"stacked": True, "cache_dtype": "int8"}])
def test_one_scatter_writes_what_one_slice_per_row_writes(options, monkeypatch):
    """GPUs write all rows of a batch at once, also a row whose window would pass the last slot."""
    target = tiny_llama(**options)
    rng = np.random.default_rng(0)
    cache = target.model.init_cache(target.params, None, 3, 128)
    cache = cache._replace(length=jnp.array([0, 17, 126]))
    pending = kv.empty_pending(cache, 4)
    fill = lambda x: jnp.asarray(rng.integers(-9, 9, x.shape), x.dtype)
    pending = pending._replace(k=jax.tree.map(fill, pending.k), v=jax.tree.map(fill, pending.v))
    path = jnp.array([[0, 2, -1, -1], [1, -1, -1, -1], [0, 1, 2, 3]])
    by_row = kv.commit(cache, pending, path, jnp.array([2, 1, 0]))
    monkeypatch.setattr(platforms, "of_program", lambda: "gpu")
    at_once = kv.commit(cache, pending, path, jnp.array([2, 1, 0]))
    jax.tree.map(np.testing.assert_array_equal, at_once, by_row)


@jax.jit
def finite(cache):
    """Fill dead slots with large numbers instead of nan, which 0 * nan would spread."""
    return jax.tree.map(lambda x: jnp.nan_to_num(x, nan=1e9) if x.dtype == jnp.float32 else x, cache)


def test_dead_slots_do_not_matter():
    target = tiny_llama()
    tokens = jnp.array([[3, 4, 5, 6]])
    forward = jax.jit(
        lambda cache: (
            target.model.forward(
                target.params,
                tokens[:, 2:],
                cache,
                positions=jnp.array([[2, 3]]),
                mask=jnp.tril(jnp.ones((1, 2, 2), bool)),
            )[0].logits
        )
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
    empty = target.model.init_cache(target.params, None, 1, 1)
    _, pending = jax.jit(target.model.forward)(
        target.params, tokens[:1], empty, positions=jnp.arange(length)[None], mask=mask
    )
    assert cache.length.tolist() == [length, 5]
    for ours, theirs in zip(cache.k, pending.k, strict=True):
        np.testing.assert_allclose(ours[0, :, :length], theirs[0], atol=2e-5)
    short = filled(target, tokens[1:, :5], jnp.array([5]))
    np.testing.assert_allclose(
        slots(short, 5), slots(kv.KVCache(*jax.tree.map(lambda x: x[1:], (cache.k, cache.v)), None), 5), atol=2e-5
    )


def copies_of_the_cache(drafter, batch, cache_dtype=None):
    """Return the copies of a layer's slots within the loops of the compiled program of `decode`."""
    prompts = (jnp.ones((batch, 384), jnp.int32), jnp.full((batch,), 384))
    target = tiny_llama(head_dim=64, cache_dtype=cache_dtype)
    job = prepare(target, drafter, prompts, Settings(), key=jax.random.key(0), max_new_tokens=32)
    text = run.lower(job).compile().as_text()
    shape = f"{batch},2,{-(-job.tokens.shape[1] // kv.SLOTS) * kv.SLOTS}"
    shapes = [f"s8[{shape},64]", f"f32[{shape}]"] if cache_dtype else [f"f32[{shape},64]"]  # which kernels take, too
    loops = text.split("ENTRY")[0]
    assert all(shape in loops for shape in shapes)
    lines = loops.splitlines()
    return [line for line in lines if any(f"= {shape}" in line for shape in shapes) and " copy(" in line]


def test_steps_do_not_copy_the_cache(monkeypatch):
    device_part = swift(tiny_llama(head_dim=64), 2, layers=(0, 1), window=4)  # reads the target's cache in branches
    for drafter in (autoregressive(), prompt_lookup(3), device_part):
        assert copies_of_the_cache(drafter, 8) == []
    assert copies_of_the_cache(prompt_lookup(3), 8, "int8") == []
    monkeypatch.setattr(kv, "write_dependency", lambda x: jnp.zeros(x.shape[0], jnp.int32))
    assert copies_of_the_cache(autoregressive(), 7)  # the test can fail: this is what `after` prevents


PROMPTS = [[1, 2, 3, 1, 2], [4, 5], [6, 7, 8, 9, 6, 7], [3]]


def int8(target):
    return Target(make_model(dataclasses.replace(target.model.config, cache_dtype="int8")), target.params)


@pytest.mark.parametrize("stacked", [exhaustive(False), True])
def test_int8_greedy_text_does_not_depend_on_the_draft(stacked):
    """It is that of plain decoding with the same cache."""
    full = tiny_llama(stacked=stacked)
    target = int8(full)
    noisy = jax.tree.map(lambda x: x * (1 + 0.2 * jax.random.normal(jax.random.key(5), x.shape)), full.params)
    draft = int8(Target(full.model, noisy))
    options = {"key": jax.random.key(3), "max_new_tokens": 60}
    plain = specjax.decode(target, autoregressive(), PROMPTS, **options).to_lists()
    for drafter in (prompt_lookup(3), two_model(draft, tree=specjax.trees.parse("2x1"))):
        actual = specjax.decode(target, drafter, PROMPTS, **options)
        assert actual.to_lists() == plain
        assert actual.block_efficiency.mean() > 1.3  # so that much was pending when it was seen


def one_pass_and_steps(target, tokens):
    """Compute the logits of a text in one pass, and token by token."""
    batch, count = tokens.shape
    model, params = target.model, target.params
    forward = lambda cache, tokens, start: model.forward(
        params, tokens, cache, positions=start + jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape),
        mask=jnp.broadcast_to(jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool)), (batch, *(tokens.shape[1],) * 2)),
    )  # fmt: skip
    cache = model.init_cache(params, None, batch, count + 1)

    def step(cache, token):
        output, pending = forward(cache, token[:, None], cache.length[:, None])
        ones = jnp.ones((batch,), jnp.int32)
        return model.commit(cache, pending, jnp.zeros((batch, 1), jnp.int32), ones), output.logits[:, 0]

    stepwise = jax.lax.scan(step, cache, tokens.T)[1].swapaxes(0, 1)
    return forward(cache, tokens, 0)[0].logits, stepwise


@pytest.mark.parametrize("mutant", [False, True])
def test_int8_tokens_see_each_other_as_the_cache_keeps_them(mutant, monkeypatch):
    """Otherwise a node's distribution would depend on the number of its ancestors that are pending."""
    if mutant:  # rounded only when written
        exact = lambda x: Quantized(x / quantize(x).scale[..., None], quantize(x).scale)
        monkeypatch.setattr(kv, "to_cache_dtype", lambda x, slots: exact(x))
        monkeypatch.setattr(kv, "commit", lambda cache, pending, *args: ORIGINAL(cache, rounded(pending), *args))
    tokens = jax.random.randint(jax.random.key(1), (4, 24), 0, 64)
    target = tiny_llama(seed=3 + mutant, cache_dtype="int8")
    bridge._make_model.cache_clear()
    target = Target(make_model(target.model.config), target.params)
    one_pass, stepwise = jax.jit(one_pass_and_steps)(target, tokens)
    worst = np.abs(np.asarray(one_pass - stepwise)).max(-1)
    # Rounding of a product may turn one element by a step, which later tokens see; most are the same.
    assert (np.quantile(worst, 0.9) < 2e-4) is not mutant
    bridge._make_model.cache_clear()


ORIGINAL = kv.commit


def rounded(pending):
    to_int8 = lambda x: Quantized(jnp.round(x.values).astype(jnp.int8), x.scale)
    k, v = jax.tree.map(to_int8, (pending.k, pending.v), is_leaf=lambda x: isinstance(x, Quantized))
    return pending._replace(k=k, v=v)


@pytest.mark.parametrize("stacked", [False, True])
def test_int8_commit_of_a_path_equals_a_fresh_prefill(stacked):
    target = tiny_llama(stacked=stacked, cache_dtype="int8")
    text = jax.random.randint(jax.random.key(0), (2, 16), 0, 64)
    lengths, count = jnp.array([9, 4]), jnp.array([3, 2])
    parents = jnp.array([[-1, 0, 0, 2, 2, 3], [-1, 0, 1, 1, 0, 4]])
    path = jnp.array([[0, 2, 3, -1, -1, -1], [0, 4, 5, -1, -1, -1]])
    tokens = jnp.zeros((2, 6), jnp.int32)
    for b in range(2):
        for place, node in enumerate(path[b, : int(count[b])].tolist()):
            tokens = tokens.at[b, node].set(text[b, int(lengths[b]) + place])
    committed = verify_pass(target, finite(filled(target, text, lengths)), tokens, parents, path, count)
    full = finite(filled(target, text, lengths + count))
    assert committed.length.tolist() == full.length.tolist()
    for ours, theirs in zip(
        jax.tree.leaves((committed.k, committed.v)), jax.tree.leaves((full.k, full.v)), strict=True
    ):
        assert ours.dtype == theirs.dtype in (jnp.int8, jnp.float32)
    for b in range(2):
        ours, theirs = (slots(c, int(committed.length[b]))[b::2] for c in (committed, full))
        step = np.abs(theirs).max(-1, keepdims=True) / 127
        assert (np.abs(ours - theirs) <= step * 1.01).all()
        assert (np.abs(ours - theirs) > step / 2).mean() < 0.01
    assert np.abs(slots(committed, 4) - slots(filled(tiny_llama(stacked=stacked), text, lengths), 4)).max() > 1e-4


@pytest.mark.parametrize("changes", [{}, {"stacked": True, "cache_dtype": "int8"}], ids=["float", "int8"])
def test_heads_that_fill_the_lanes_change_no_logit(changes):
    """On a TPU heads of 8 are padded to 128 lanes."""
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 64)
    narrow, filled = (tiny_llama(cache_lanes=lanes, **changes) for lanes in (1, 128))
    assert {leaf.shape[-1] for leaf in jax.tree.leaves(narrow.model.init_cache(None, None, 2, 24).k)} <= {8, kv.SLOTS}
    assert {leaf.shape[-1] for leaf in jax.tree.leaves(filled.model.init_cache(None, None, 2, 24).k)} == {128}
    one_pass, stepwise = jax.jit(one_pass_and_steps)(filled, tokens)
    for actual, expected in zip((one_pass, stepwise), jax.jit(one_pass_and_steps)(narrow, tokens), strict=True):
        np.testing.assert_allclose(actual, expected, atol=2e-5 if not changes else 2e-2)


def test_int8_takes_half_the_memory_of_bfloat16():
    def size(**changes):
        cache = tiny_llama(head_dim=64, **changes).model.init_cache(None, None, 2, 256)
        return sum(leaf.nbytes for leaf in jax.tree.leaves((cache.k, cache.v)))

    assert size(cache_dtype="int8") / size(dtype="bfloat16") == (64 + 4) / (2 * 64)


def test_a_cache_of_another_dtype_is_refused():
    with pytest.raises(UsageError, match='cache_dtype must be "int8", gear:BITS or left out'):
        tiny_llama(cache_dtype="int4")


def test_widen_and_insert_follow_the_tokens():
    x = jax.random.normal(jax.random.key(0), (2, 3, 4, 8))
    both = lambda x: kv.Pending((quantize(x),), (x,), jnp.arange(2 * x.shape[2]).reshape(2, -1), jnp.zeros((2,)))
    wide = kv.insert(kv.widen(both(x), 6), both(x[:, :, :1] + 1), 5)
    for ours in (dequantize(wide.k[0]), wide.v[0]):
        np.testing.assert_allclose(ours[:, :, :4], x, atol=0.02)
        np.testing.assert_allclose(ours[:, :, 5], x[:, :, 0] + 1, atol=0.02)
        assert not ours[:, :, 4].any()
    assert wide.positions.tolist() == [[0, 1, 2, 3, 0, 0], [4, 5, 6, 7, 0, 1]]


def test_a_text_is_committed_without_a_gather():
    """The constant path through all tokens gives the cache of the same path as an array."""
    random = np.random.default_rng(0)
    array = lambda count: jnp.asarray(random.normal(size=(2, 3, 2, count, 4)), jnp.float32)
    cache = kv.KVCache(array(12), array(12), jnp.array([0, 5, 2]))
    pending = kv.Pending(array(4), array(4), jnp.zeros((3, 4), jnp.int32), jnp.zeros((3,), jnp.int32))
    count, constant = jnp.array([4, 1, 0]), texts.in_order(3, 4)
    commit = lambda path: jax.jit(lambda cache: kv.commit(cache, pending, path, count)).lower(cache)
    with_gather, without = commit(jnp.asarray(constant)), commit(constant)
    assert "gather" in with_gather.as_text() and "gather" not in without.as_text()
    jax.tree.map(np.testing.assert_array_equal, without.compile()(cache), with_gather.compile()(cache))
