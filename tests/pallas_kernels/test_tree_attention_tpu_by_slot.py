"""The TPU kernel by slots, simulated: near one softmax, and the same bits wherever a token's ancestors lie."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from slots import SCALE, Sizes, differing, exact, random_parents, tree_pass
from tiers import exhaustive
from tpu import devices

from specjax.pallas_kernels.tree_attention import tpu, tpu_by_slot
from specjax.planning.programs import device_kind

SIZES = Sizes(heads=6, kv_heads=2, dim=64, slots=384)
SIMULATED = {"scale": SCALE, "block": 128, "interpret": True}
OPTIONS = "window", "softcap"
KERNEL = jax.jit(functools.partial(tpu_by_slot.tree_attention, **SIMULATED), static_argnames=OPTIONS)
USUAL = jax.jit(functools.partial(tpu.tree_attention, **SIMULATED), static_argnames=OPTIONS)
EDGES = [0, 1, 7, 126, 127, 128, 129, 255, 256, 300, 376]


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (130, 2.0)])
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1000), lengths=st.tuples(*[st.sampled_from(EDGES)] * 2))
def test_is_one_softmax(window, softcap, seed, lengths):
    arrays = tree_pass(seed, SIZES, lengths, random_parents(seed, 7))
    options = {"window": window, "softcap": softcap}
    got = np.asarray(KERNEL(*arrays, **options), np.float32)
    np.testing.assert_allclose(got, exact(arrays, **options), atol=0.03)


def test_copies_are_waited_for_and_what_holds_no_token_may_be_anything():
    parents = random_parents(3, 7)
    arrays = tree_pass(3, SIZES, (0, 250), parents)
    slot = np.arange(SIZES.slots)[:, None] >= np.array((0, 250))[:, None, None, None]
    dead = [jnp.where(slot, jnp.nan, x) for x in arrays[3:5]]
    simulated = {**SIMULATED, "interpret": pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)}
    got = tpu_by_slot.tree_attention(*arrays[:3], *dead, *arrays[5:], **simulated)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(KERNEL(*arrays), np.float32))


@pytest.mark.parametrize("window", [None, 100])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1000), lengths=st.tuples(*[st.sampled_from(EDGES)] * 2))
def test_it_makes_no_difference_where_ancestors_lie(window, seed, lengths):
    parents = random_parents(seed, 7)
    arrays = tree_pass(seed, SIZES, lengths, parents)
    assert differing(functools.partial(KERNEL, window=window), arrays, parents) == 0


@pytest.mark.parametrize("nodes", [2, 4, 16, 64, 128])
def test_widths(nodes):
    """A chain over the border of two groups, its tokens alone after those before; up to a piece of a prompt."""
    parents = list(range(-1, nodes - 1))
    arrays = tree_pass(nodes, SIZES, (121, 250), parents)
    assert differing(KERNEL, arrays, parents, nodes=sorted({0, 1, nodes // 2, nodes - 1})) == 0


@pytest.mark.parametrize(
    "sizes", [SIZES, Sizes(4, 4, 128, 256), Sizes(9, 3, 64, 256), exhaustive(Sizes(20, 1, 64, 256))]
)
def test_wide_trees(sizes):
    """70 nodes of which some share a tile, or fill several, or are too many for one call."""
    parents = [-1, *(i // 2 for i in range(69))]
    arrays = tree_pass(1, sizes, (123,), parents)
    assert differing(KERNEL, arrays, parents, nodes=(0, 1, 7, 40, 69)) == 0
    np.testing.assert_allclose(np.asarray(KERNEL(*arrays), np.float32), exact(arrays), atol=0.03)


def test_pending_and_prefix_summed_apart_are_caught():
    """The mutant is the kernel of other passes."""
    parents = random_parents(2, 7)
    assert sum(differing(USUAL, tree_pass(seed, SIZES, (7, 130), parents), parents) for seed in range(2)) > 0


def test_neither_rows_nor_capacity_nor_blocks_nor_layers_count():
    arrays = tree_pass(1, SIZES, (7, 300), random_parents(1, 7))
    both = np.asarray(KERNEL(*arrays), np.float32)
    np.testing.assert_array_equal(np.asarray(KERNEL(*[x[1:] for x in arrays]), np.float32)[0], both[1])
    q, k, v, prefix_k, prefix_v, *geometry = arrays
    wider = [jnp.pad(x, ((0, 0), (0, 0), (0, 384), (0, 0)), constant_values=7) for x in (prefix_k, prefix_v)]
    blocks = functools.partial(tpu_by_slot.tree_attention, **{**SIMULATED, "block": 256})
    np.testing.assert_array_equal(np.asarray(jax.jit(blocks)(q, k, v, *wider, *geometry), np.float32), both)
    stacked = [jnp.stack([x + 1, x]) for x in (prefix_k, prefix_v)]
    np.testing.assert_array_equal(
        np.asarray(KERNEL(q, k, v, *stacked, *geometry, layer=jnp.int32(1)), np.float32), both
    )


def test_one_path_beside_a_tree():
    """A row whose tokens are of one path is put together at once, whatever the others are."""
    chain, tree = list(range(-1, 6)), random_parents(5, 7)
    one, other = tree_pass(5, SIZES, (125,), chain), tree_pass(6, SIZES, (40,), tree)
    both = [jnp.concatenate(pair) for pair in zip(one, other, strict=True)]
    wanted = np.concatenate([np.asarray(KERNEL(*arrays), np.float32) for arrays in (one, other)])
    np.testing.assert_array_equal(np.asarray(KERNEL(*both), np.float32), wanted)


def test_heads_and_nodes_in_parts(monkeypatch):
    """The bits are the same where not all heads and nodes fit into the memory of a chip at once."""
    arrays = tree_pass(4, SIZES, (100, 250), random_parents(4, 20))
    wanted = np.asarray(KERNEL(*arrays), np.float32)
    monkeypatch.setattr(tpu_by_slot, "VMEM", 0)
    monkeypatch.setattr(tpu_by_slot, "AT_ONCE", 1 << 14)
    parts = jax.jit(functools.partial(tpu_by_slot.tree_attention, **(SIMULATED | {"block": 384})))
    calls = [eqn.params for eqn in jax.make_jaxpr(parts)(*arrays).jaxpr.eqns[0].params["jaxpr"].eqns]
    assert [call["grid_mapping"].grid for call in calls if "grid_mapping" in call] == [(2, 2)] * 2
    np.testing.assert_array_equal(np.asarray(parts(*arrays), np.float32), wanted)


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("topology", "sizes", "nodes"),
    [
        ("v5e:2x2", Sizes(9, 3, 128, 512), 1),
        ("v6e:1x1", Sizes(16, 8, 256, 384), 64),
        ("v4:1x1x1", Sizes(32, 8, 128, 1536), 1),  # with 16 MiB of VMEM
        ("v4:1x1x1", Sizes(32, 8, 128, 1536), 128),
        ("v4:1x1x1", Sizes(9, 3, 128, 512), 128),
    ],
)
def test_compiles_for_a_tpu(topology, sizes, nodes):
    (device, *_) = devices(topology)
    mesh = jax.sharding.Mesh(np.array([device]), ("data",))
    place = jax.sharding.SingleDeviceSharding(device)
    arrays = jax.eval_shape(lambda: tree_pass(0, sizes, (0,), list(range(-1, nodes - 1))))
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in arrays]
    run = jax.jit(functools.partial(tpu_by_slot.tree_attention, scale=SCALE))
    with device_kind(mesh):
        program = run.lower(*arrays).compile()
    assert "tree_attention_by_slot" in program.as_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": jnp.float32}, "takes bfloat16"),
        ({"dim": 32}, "head_dim 32"),
        ({"slots": 192}, "a cache of 192 slots"),
    ],
)
def test_what_it_does_not_take(change, message):
    sizes = SIZES._replace(**{name: value for name, value in change.items() if name != "dtype"})
    arrays = tree_pass(0, sizes, (5,), [-1])
    arrays = [x.astype(change.get("dtype", x.dtype)) if x.dtype == jnp.bfloat16 else x for x in arrays]
    with pytest.raises(NotImplementedError, match=message):
        KERNEL(*arrays)
