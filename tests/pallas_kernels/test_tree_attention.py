"""Tree attention against attention written out with one softmax, and its blocked and static forms against it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.numerics.quantization import dequantize, quantize
from specjax.pallas_kernels.tree_attention import tree_attention
from specjax.pallas_kernels.tree_attention.reference import tree_attention as reference
from specjax.pallas_kernels.tree_attention.reference import with_sinks
from specjax.pallas_kernels.tree_attention.static import static_tree_attention
from specjax.pallas_kernels.tree_attention.xla import blocked_tree_attention

BATCH, HEADS, KV, DIM, SLOTS = 2, 4, 2, 8, 40
BLOCKED = jax.jit(blocked_tree_attention, static_argnames=("scale", "window", "softcap", "block"))
STATIC = jax.jit(static_tree_attention, static_argnames=("scale", "window", "softcap", "max_scores", "with_total"))


def plain(q, k, v, prefix_k, prefix_v, length, positions, mask, *, scale, window, softcap, sinks=None, bias=None):
    """Per row and head, numpy, one softmax over what is visible."""
    out = np.zeros(q.shape)
    for b in range(q.shape[0]):
        keys = np.concatenate([prefix_k[b, :, : length[b]], k[b]], 1)
        values = np.concatenate([prefix_v[b, :, : length[b]], v[b]], 1)
        where = np.concatenate([np.arange(length[b]), positions[b]])
        for i in range(q.shape[1]):
            visible = np.concatenate([np.ones(length[b], bool), mask[b, i]])
            if window is not None:
                visible &= where > positions[b, i] - window
            for h in range(q.shape[2]):
                s = keys[h // (q.shape[2] // KV)] @ q[b, i, h] * scale
                s = softcap * np.tanh(s / softcap) if softcap else s
                if bias is not None:
                    s = s + bias[h, np.clip(positions[b, i] - where, 0, bias.shape[1] - 1)]
                w = np.where(visible, np.exp(s - s[visible].max()), 0)
                sink = 0.0 if sinks is None else np.exp(sinks[h] - s[visible].max())
                out[b, i, h] = w @ values[h // (q.shape[2] // KV)] / (w.sum() + sink)
    return out


def case(rng, t, lengths, tree):
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    parents = {
        "chain": np.arange(-1, t - 1),
        "star": np.r_[-1, np.zeros(t - 1, int)],
        "random": np.r_[-1, [rng.integers(0, i) for i in range(1, t)]].astype(int),
    }[tree]
    mask = np.eye(t, dtype=bool)
    depth = np.zeros(t, int)
    for i in range(1, t):
        mask[i] |= mask[parents[i]]
        depth[i] = depth[parents[i]] + 1
    prefix_k, prefix_v = normal(BATCH, KV, SLOTS, DIM), normal(BATCH, KV, SLOTS, DIM)
    for b, n in enumerate(lengths):  # dead slots
        prefix_k[b, :, n:], prefix_v[b, :, n:] = 1e4, 1e9
    length = np.array(lengths, np.int32)
    return (
        normal(BATCH, t, HEADS, DIM), normal(BATCH, KV, t, DIM), normal(BATCH, KV, t, DIM), prefix_k, prefix_v, length,
        length[:, None] + depth.astype(np.int32), np.broadcast_to(mask, (BATCH, t, t)),
    )  # fmt: skip


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 5])
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1000),
    lengths=st.tuples(*[st.sampled_from([0, 1, 7, 8, 9, 16, 39, 40])] * 2),
    tree=st.sampled_from(["chain", "star", "random"]),
)
def test_all_forms_equal_one_softmax(window, softcap, seed, lengths, tree):
    arrays = case(np.random.default_rng(seed), 6, lengths, tree)
    options = {"scale": 0.3, "window": window, "softcap": softcap}
    wanted = plain(*arrays, **options)
    arrays = [jnp.asarray(x) for x in arrays]
    np.testing.assert_allclose(reference(*arrays, **options), wanted, atol=2e-5)
    np.testing.assert_allclose(BLOCKED(*arrays, **options, block=16), wanted, atol=2e-5)
    np.testing.assert_allclose(STATIC(*arrays, **options), wanted, atol=2e-5)


SINKS = np.array([-3.0, 0.0, 1.5, 40.0], np.float32)
FORMS = {
    "reference": reference,
    "xla": functools.partial(tree_attention, implementation="xla"),
    "static": lambda *arrays, sinks, **options: with_sinks(
        *static_tree_attention(*arrays, **options, with_total=True), sinks
    )[0],
    "default": tree_attention,
}


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("form", FORMS)
def test_sinks_take_a_part_of_the_softmax(form, window):
    """A large sink leaves almost nothing for the values, and a small one changes little."""
    arrays = case(np.random.default_rng(8), 6, [9, 33], "random")
    options = {"scale": 0.3, "window": window, "softcap": None}
    wanted = plain(*arrays, **options, sinks=SINKS)
    run = jax.jit(functools.partial(FORMS[form], **options))
    got = run(*map(jnp.asarray, arrays), sinks=jnp.asarray(SINKS))
    np.testing.assert_allclose(got, wanted, atol=2e-5)
    np.testing.assert_allclose(got[:, :, 3], 0, atol=1e-5)
    without = plain(*arrays, **options)
    assert np.abs(without - wanted).max((0, 1, 3)).min() > 0.005


BIASED = {
    "reference": reference,
    "blocked": BLOCKED,
    "static": STATIC,
    "static in blocks": functools.partial(STATIC, max_scores=1),
    "xla": functools.partial(tree_attention, implementation="xla"),
    "default": tree_attention,
}


@pytest.mark.parametrize("form", BIASED)
@pytest.mark.parametrize("tree", ["chain", "random"])
def test_a_bias_by_distance_is_added_to_scores(form, tree):
    """Distances beyond the last column have its value."""
    rng = np.random.default_rng(5)
    arrays, bias = case(rng, 6, [9, 33], tree), rng.normal(size=(HEADS, 12)).astype(np.float32)
    options = {"scale": 0.3, "window": None, "softcap": None}
    wanted = plain(*arrays, **options, bias=bias)
    got = BIASED[form](*(jnp.asarray(x) for x in arrays), **options, bias=jnp.asarray(bias))
    np.testing.assert_allclose(got, wanted, atol=2e-5)
    assert np.abs(plain(*arrays, **options) - wanted).max((0, 1, 3)).min() > 0.005


def test_what_a_bias_by_distance_excludes():
    arrays = [jnp.asarray(x) for x in case(np.random.default_rng(5), 6, [9, 33], "chain")]
    with pytest.raises(NotImplementedError, match="bias by distance"):
        tree_attention(*arrays, scale=1.0, bias=jnp.zeros((HEADS, 4)), sinks=jnp.zeros(HEADS))


def test_sinks_of_rows_that_share_a_prefix_and_of_empty_caches():
    arrays = list(case(np.random.default_rng(6), 6, [37, 9], "random"))
    arrays[3], arrays[4] = (np.repeat(x[:1], BATCH, 0) for x in arrays[3:5])
    options = {"scale": 0.3, "window": 5, "softcap": None, "sinks": SINKS}
    wanted = plain(*arrays, **options)
    q, k, v, prefix_k, prefix_v, *geometry = (jnp.asarray(x) for x in arrays)
    got = tree_attention(q, k, v, prefix_k[:1], prefix_v[:1], *geometry, **options)
    np.testing.assert_allclose(got, wanted, atol=2e-5)
    arrays[5] = np.zeros(2, np.int32)
    arrays[6] = arrays[6] - np.array([[37], [9]], np.int32)
    empty = [x[:, :, :0] for x in (prefix_k, prefix_v)]
    got = tree_attention(q, k, v, *empty, *map(jnp.asarray, arrays[5:]), **options)
    np.testing.assert_allclose(got, plain(*arrays, **options), atol=2e-5)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, 2.0)])
def test_the_static_form_reads_many_scores_in_blocks(window, softcap):
    """Slots beyond the lengths are masked in every block, and the last block begins earlier."""
    rng = np.random.default_rng(8)
    arrays = list(case(rng, 6, [300, 9], "random"))
    for place in (3, 4):
        arrays[place] = rng.normal(size=(BATCH, KV, 320, DIM)).astype(np.float32)
        arrays[place][:, :, 300:] = 1e4
    options = {"scale": 0.3, "window": window, "softcap": softcap}
    wanted = plain(*arrays, **options)
    arrays = [jnp.asarray(x) for x in arrays]
    per_slot = BATCH * HEADS * 6
    for max_scores in (320 * per_slot, 256 * per_slot, 1):
        np.testing.assert_allclose(STATIC(*arrays, **options, max_scores=max_scores), wanted, atol=2e-5)
        ours, theirs = (
            run(*arrays, **options, with_total=True)
            for run in (functools.partial(STATIC, max_scores=max_scores), reference)
        )
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), ours, theirs)


@pytest.mark.parametrize(("platform", "has_loop"), [("cuda", False), ("cpu", True)])
def test_programs_for_gpus_have_no_loop_of_dynamic_length(platform, has_loop):
    arrays = [jnp.asarray(x) for x in case(np.random.default_rng(0), 6, [0, 23], "random")]
    traced = jax.jit(functools.partial(tree_attention, scale=0.3)).trace(*arrays)
    assert ("stablehlo.while" in traced.lower(lowering_platforms=(platform,)).as_text()) == has_loop


@pytest.mark.parametrize("layer", [None, 1])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, 2.0)])
def test_quantised_keys_and_values_stand_for_what_they_round_to(window, softcap, layer):
    q, *keys_values, length, positions, mask = case(np.random.default_rng(3), 6, [0, 23], "random")
    keys_values = [quantize(jnp.asarray(x)) for x in keys_values]
    options = {"scale": 0.3, "window": window, "softcap": softcap}
    wanted = plain(q, *(np.asarray(dequantize(x)) for x in keys_values), length, positions, mask, **options)
    if layer is not None:
        keys_values[2:] = [jax.tree.map(lambda x: jnp.stack([x + 1, x]), x) for x in keys_values[2:]]
    arrays = [jnp.asarray(q), *keys_values, *(jnp.asarray(x) for x in (length, positions, mask))]
    for run in (reference, functools.partial(BLOCKED, block=16), STATIC, tree_attention):
        np.testing.assert_allclose(run(*arrays, layer=layer, **options), wanted, atol=2e-5)


@pytest.mark.parametrize("stacked", [False, True])
def test_neither_capacity_nor_other_rows_count(stacked):
    """Blocks behind the longest row are not read, or NaN would show; those behind a shorter one count nothing.

    The capacity changes no bit. The number of rows may, by which some CPUs choose the kernel of a product: the form in
    which it does not is `by_slot`.
    """
    q, k, v, prefix_k, prefix_v, length, positions, mask = case(np.random.default_rng(4), 6, [37, 9], "random")
    options = {"scale": 0.3, "window": None, "softcap": None, "block": 16}
    stack = lambda x: jnp.stack([jnp.full_like(x, jnp.nan), x])

    def run(rows, slots, dtype=jnp.float32):
        keys_values = [
            np.pad(x, ((0, 0), (0, 0), (0, 80 - SLOTS), (0, 0)), constant_values=np.nan) for x in (prefix_k, prefix_v)
        ]
        for x in keys_values:
            x[:, :, SLOTS : SLOTS + 8] = 0.0  # what is left of the last block that is read
        keys_values = [jnp.asarray(x[rows, :, :slots], dtype) for x in keys_values]
        arrays = (
            *(jnp.asarray(x[rows], dtype) for x in (q, k, v)),
            *(map(stack, keys_values) if stacked else keys_values),
        )
        geometry = (jnp.asarray(x[rows]) for x in (length, positions, mask))
        return np.asarray(BLOCKED(*arrays, *geometry, layer=jnp.int32(1) if stacked else None, **options), np.float32)

    for dtype, rounding in ((jnp.float32, 1e-6), (jnp.bfloat16, 1e-2)):
        both = run(slice(0, 2), 48, dtype)
        assert np.isfinite(both).all()
        np.testing.assert_array_equal(run(slice(0, 2), 80, dtype), both)
        np.testing.assert_allclose(run(slice(1, 2), 48, dtype)[0], both[1], rtol=rounding, atol=rounding)


@pytest.mark.parametrize(("window", "softcap"), [(None, 2.0), (5, 2.0)])
def test_rows_that_share_a_prefix_are_capped_like_rows_that_do_not(window, softcap):
    """Row 1 sees the prefix of row 0; each of its own length."""
    arrays = list(case(np.random.default_rng(6), 6, [37, 9], "random"))
    arrays[3], arrays[4] = (np.repeat(x[:1], BATCH, 0) for x in arrays[3:5])
    options = {"scale": 0.3, "window": window, "softcap": softcap}
    wanted = plain(*arrays, **options)
    q, k, v, prefix_k, prefix_v, *geometry = (jnp.asarray(x) for x in arrays)
    got = tree_attention(q, k, v, prefix_k[:1], prefix_v[:1], *geometry, **options)
    np.testing.assert_allclose(got, wanted, atol=2e-5)
    options["softcap"] = None
    assert (
        np.max(np.abs(np.asarray(tree_attention(q, k, v, prefix_k[:1], prefix_v[:1], *geometry, **options)) - wanted))
        > 0.01
    )


def test_bits_of_bfloat16_stand_for_them():
    q, k, v, *prefix, length, positions, mask = case(np.random.default_rng(5), 6, [3, 23], "random")
    q, k, v, *prefix = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, *prefix))
    options = {"scale": 0.3, "window": None, "softcap": None}
    bits = [jax.lax.bitcast_convert_type(x, jnp.uint16) for x in prefix]
    for run in (reference, functools.partial(BLOCKED, block=16)):
        wanted = run(q, k, v, *prefix, length, positions, mask, **options)
        np.testing.assert_array_equal(run(q, k, v, *bits, length, positions, mask, **options), wanted)


def test_unknown_implementation_is_refused():
    with pytest.raises(NotImplementedError, match='"triton"; use None, xla, pallas_tpu, mosaic_gpu or by_slot'):
        tree_attention(*[None] * 8, scale=1.0, implementation="triton")
