"""The TPU kernel, simulated, against the specification: races detected, fresh memory and dead slots full of NaN."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from scripts import module_at
from tiers import exhaustive
from tpu import devices

from specjax.numerics.quantization import Quantized, quantize
from specjax.pallas_kernels.tree_attention import reference, tpu, tree_attention

SIMULATED = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
SLOTS, BLOCK = 384, 128


def ancestor_mask(parents) -> np.ndarray:
    mask = np.eye(len(parents), dtype=bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            mask[i] |= mask[parent]
    return mask


def case(seed, lengths, parents, *, heads=4, kv_heads=2, dim=64, dtype=jnp.float32, dead=0.0, earlier=0, int8=False):
    """Arguments of `tree_attention`; slots that hold no token are `dead`, if int8 their scales."""
    rng = np.random.default_rng(seed)
    batch, t = len(lengths), len(parents)
    length = np.asarray(lengths)
    among = ancestor_mask(parents)
    depth = among.sum(1) - 1
    # Nodes of earlier levels: some are seen, some are not.
    mask = np.concatenate([rng.random((t, earlier)) < 0.5, among], 1)
    key_positions = np.concatenate([np.full(earlier, -1), depth]) + length[:, None]
    values = lambda *shape: rng.normal(size=shape).astype(dtype)
    prefix = [values(batch, kv_heads, SLOTS, dim) for _ in "kv"]
    is_dead = np.arange(SLOTS)[:, None] >= length[:, None, None, None]
    new = [values(batch, kv_heads, earlier + t, dim) for _ in "kv"]
    if int8:
        new, prefix = ([jax.tree.map(np.asarray, jax.jit(quantize)(x)) for x in pair] for pair in (new, prefix))
        prefix = [Quantized(x.values, np.where(is_dead[..., 0], np.float32(dead), x.scale)) for x in prefix]
    else:
        prefix = [np.where(is_dead, np.asarray(dead, dtype), x) for x in prefix]
    integers = np.asarray(length, np.int32), np.asarray(length[:, None] + depth, np.int32)
    arrays = values(batch, t, heads, dim), *new, *prefix, *integers, np.broadcast_to(mask, (batch, *mask.shape))
    return jax.tree.map(jax.device_put, (arrays, {"key_positions": np.asarray(key_positions, np.int32)}))


@functools.partial(jax.jit, static_argnames=("softcap",))
def wanted(arrays, key_positions, window, softcap):
    return reference.tree_attention(*arrays, key_positions=key_positions, scale=0.2, window=window, softcap=softcap)


@functools.partial(jax.jit, static_argnames=("softcap", "block"))
def simulated(arrays, key_positions, window, softcap, block=BLOCK):
    return tpu.tree_attention(
        *arrays, key_positions=key_positions, scale=0.2, window=window, softcap=softcap, block=block,
        interpret=SIMULATED,
    )  # fmt: skip


def error(seed, lengths, parents, *, window=None, softcap=None, **shapes) -> float:
    """Largest difference between the kernel, which sees NaN in dead slots, and the specification, which sees zeros."""
    clean, options = case(seed, lengths, parents, **shapes)
    dirty, _ = case(seed, lengths, parents, dead=np.nan, **shapes)
    ours = simulated(dirty, **options, window=window, softcap=softcap)
    theirs = wanted(clean, **options, window=window, softcap=softcap)
    difference = np.abs(np.asarray(ours).astype(np.float32) - np.asarray(theirs).astype(np.float32)).max()
    return float("inf") if np.isnan(difference) else float(difference)


TREES = {
    "one": [-1],
    "chain": [-1, 0, 1, 2, 3, 4, 5, 6],
    "star": [-1] + [0] * 7,
    "ragged": [-1, 0, 0, 1, 1, 2, 3, 3, 5, 6, 0],  # 11: not a whole tile
    "wide": [-1] + [i // 2 for i in range(69)],  # three words of bits
}


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("tree", TREES)
def test_trees(tree, int8):
    assert error(0, [0, 1, 129, 384], TREES[tree], int8=int8) < 2e-6


@pytest.mark.parametrize("heads_dim", [(4, 4, 64), (6, 1, 128), (2, 2, 256)])
@pytest.mark.parametrize(
    ("window", "softcap", "int8"), [(100, None, False), (None, 3.0, False), (1, 3.0, False), (100, 3.0, True)]
)
def test_variants(heads_dim, window, softcap, int8):
    heads, kv_heads, dim = heads_dim
    shapes = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "int8": int8}
    assert error(1, [5, 300], TREES["ragged"], window=window, softcap=softcap, **shapes) < 2e-6


@pytest.mark.parametrize("int8", [False, True])
def test_bfloat16(int8):
    assert error(2, [127, 260], TREES["ragged"], dtype=jnp.bfloat16, int8=int8) < 0.03


@pytest.mark.parametrize("int8", [False, True])
def test_nodes_of_earlier_levels(int8):
    assert error(3, [0, 200], TREES["star"], earlier=5, int8=int8) < 2e-6


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.tuples(*[st.sampled_from([0, 1, 2, 126, 127, 128, 129, 255, 256, 257, 383, 384])] * 3),
    parents=st.lists(st.integers(0, 7), min_size=7, max_size=7),
    window=st.sampled_from([None, 1, 2, 127, 128, 130, 1 << 30]),
    int8=st.booleans(),
)
def test_any_lengths_and_trees(lengths, parents, window, int8):
    tree = [-1, *(min(parent, i) for i, parent in enumerate(parents))]
    assert error(4, lengths, tree, window=window, int8=int8) < 2e-6


def test_many_queries_are_computed_in_several_calls(monkeypatch):
    """Queries of a prefill of 512 tokens are read in parts.

    Each part has its own positions and rows of the mask, and all new keys.
    """
    clean, options = case(9, [5, 300], TREES["ragged"])
    dirty, _ = case(9, [5, 300], TREES["ragged"], dead=np.nan)
    monkeypatch.setattr(tpu, "MAX_ROWS", 8)
    monkeypatch.setattr(tpu, "_part_rows", lambda kv_heads: 8)
    more = {"scale": 0.2, "window": 100, "with_total": True}
    run = lambda arrays: tpu.tree_attention(*arrays, **options, **more, block=BLOCK, interpret=SIMULATED)
    calls = str(jax.make_jaxpr(lambda arrays: tpu.tree_attention(*arrays, **options, **more))(clean)).count(
        "pallas_call"
    )
    assert calls == 3  # 11 nodes of 2 rows
    theirs = jax.jit(lambda arrays: reference.tree_attention(*arrays, **options, **more))(clean)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), jax.jit(run)(dirty), theirs)


def test_512_new_tokens_are_supported_and_more_are_not():
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16)
    reason = lambda t: tpu.unsupported_reason(shape(1, t, 32, 128), shape(1, 8, t, 128), shape(1, 8, 1024, 128))
    assert reason(512) is None and "new tokens" in reason(1024)


@pytest.mark.parametrize("int8", [False, True])
def test_one_layer_of_a_stack(int8):
    arrays, options = case(5, [0, 130], TREES["chain"], int8=int8)
    other = lambda x: jnp.full_like(x, 99 if x.dtype == jnp.int8 else jnp.nan)
    stack = [jax.tree.map(lambda x: jnp.stack([other(x), x]), x) for x in arrays[3:5]]
    stacked = (*arrays[:3], *stack, *arrays[5:])
    run = jax.jit(
        lambda arrays, layer: tpu.tree_attention(
            *arrays, **options, layer=layer, scale=0.2, block=BLOCK, interpret=SIMULATED
        )
    )
    ours = run(stacked, jnp.int32(1))
    np.testing.assert_allclose(ours, wanted(arrays, **options, window=None, softcap=None), atol=2e-6)
    theirs = tree_attention(*stacked, **options, layer=jnp.int32(1), scale=0.2)  # the form for other backends
    np.testing.assert_allclose(theirs, ours, atol=2e-6)


@pytest.mark.parametrize("int8", [False, True])
def test_the_sum_by_which_parts_of_a_prefix_are_put_together(int8):
    """The totals equal the reference's, also where a part holds nothing to be seen."""
    clean, options = case(7, [0, 130, 384], TREES["ragged"], int8=int8)
    dirty, _ = case(7, [0, 130, 384], TREES["ragged"], int8=int8, dead=np.nan)
    sees_new = jnp.array([False, False, True])[:, None, None]
    other = {"scale": 0.2, "softcap": 3.0, "with_total": True}
    masked = lambda arrays: (*arrays[:-1], arrays[-1] & sees_new)
    kernel = jax.jit(lambda arrays: tpu.tree_attention(*arrays, **options, **other, block=BLOCK, interpret=SIMULATED))
    out, total = kernel(masked(dirty))
    wanted_out, wanted_total = reference.tree_attention(*masked(clean), **options, **other)
    np.testing.assert_allclose(out[1:], wanted_out[1:], atol=2e-6)
    np.testing.assert_allclose(total[1:], wanted_total[1:], atol=2e-6)
    assert np.isfinite(out[0]).all() and (total[0] < -1e29).all()
    sinks = jnp.array([-2.0, 0.0, 1.0, 30.0])
    wanted_out, wanted_total = reference.tree_attention(*masked(clean), **options, **other, sinks=sinks)
    with_sinks = reference.with_sinks(out, total, sinks)
    np.testing.assert_allclose(with_sinks[0][1:], wanted_out[1:], atol=2e-6)
    np.testing.assert_allclose(with_sinks[1][1:], wanted_total[1:], atol=2e-6)


def test_in_a_loop_over_a_mesh():
    """Under `shard_map` by heads, inside `while_loop`: what `decode` does."""
    arrays, options = case(6, [0, 130], TREES["ragged"], heads=8, kv_heads=4)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "model")
    P = jax.sharding.PartitionSpec
    by_head, replicated = P(None, "model"), P()

    def local(q, k, v, prefix_k, prefix_v, length, positions, mask, key_positions):
        def body(carry):
            i, q = carry
            out = tpu.tree_attention(
                q, k, v, prefix_k, prefix_v, length, positions, mask, key_positions=key_positions, scale=0.2,
                block=BLOCK, interpret=True,
            )  # fmt: skip
            return i + 1, out

        return jax.lax.while_loop(lambda carry: carry[0] < 2, body, (0, q))[1]

    specs = (P(None, None, "model"), by_head, by_head, by_head, by_head, replicated, replicated, replicated, replicated)
    spread = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False))
    once = wanted(arrays, **options, window=None, softcap=None)
    twice = wanted((once, *arrays[1:]), **options, window=None, softcap=None)
    np.testing.assert_allclose(spread(*arrays, options["key_positions"]), twice, atol=2e-6)


def bias_error(lengths, parents, *, furthest, module=tpu, window=None, chunk=None, **shapes) -> float:
    """Return the largest difference between the kernel and the specification with a bias by distance."""
    shapes = {"heads": 2, "kv_heads": 2} | shapes
    clean, options = case(8, lengths, parents, **shapes)
    dirty, _ = case(8, lengths, parents, dead=np.nan, **shapes)
    bias = jax.random.normal(jax.random.key(2), (2, furthest + 1))
    more = {"scale": 0.2, "window": window, "with_total": True, "bias": bias}
    kernel = functools.partial(module.tree_attention, **more, block=chunk or BLOCK, interpret=SIMULATED)
    ours = jax.jit(kernel)(*dirty, **options)
    theirs = jax.jit(functools.partial(reference.tree_attention, **more))(*clean, **options)
    differences = [np.abs(np.asarray(x) - np.asarray(y)).max() for x, y in zip(ours, theirs, strict=True)]
    return float("inf") if np.isnan(differences).any() else float(max(differences))


@pytest.mark.parametrize(
    ("furthest", "tree", "options"),
    [
        (128, "ragged", {}), (16, "wide", {"earlier": 5}), (200, "chain", {"window": 150}), (1, "one", {}),
        (128, "ragged", {"int8": True, "chunk": 256}),
    ],
)  # fmt: skip
def test_a_bias_by_distance(furthest, tree, options):
    """Blocks are near, far and partly near. The last block of 256 slots overlaps the one before."""
    assert bias_error([0, 1, 129, 384], TREES[tree], furthest=furthest, **options) < 5e-6


@pytest.mark.parametrize(
    ("line", "mutant"),
    [
        ("- furthest + 1) // block", "- furthest + 1 + block) // block"),
        ("distance = jnp.clip(places[0][...] - positions, 0, furthest)", "distance = jnp.maximum(positions, 0)"),
        ("(part < min(low + LANES, furthest))", "(part < low + LANES)"),
        ("table[0][head, :, low : low + LANES]", "table[0][0, :, low : low + LANES]"),
        ("bias_of_new(head))", "None)"),
    ],
)
def test_mutants_of_the_bias_are_caught(line, mutant, tmp_path):
    source = pathlib.Path(tpu.__file__).read_text()
    assert line in source
    path = tmp_path / "mutant.py"
    path.write_text(source.replace(line, mutant))
    module = module_at(path)
    assert max(bias_error([1, 300], TREES["ragged"], furthest=f, module=module) for f in (16, 128)) > 1e-3


def test_biases_that_the_kernel_does_not_take():
    arrays, options = case(8, [5], TREES["one"])
    for bias, reason in ((jnp.zeros((4, 8)), "4 query heads and 2 kv heads"), (jnp.zeros((4, 1)), "one distance")):
        with pytest.raises(NotImplementedError, match=reason):
            tree_attention(*arrays, **options, scale=0.2, bias=bias, implementation="pallas_tpu")


@pytest.mark.tpu_compile
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_the_compiler_takes_a_bias(topology):
    """Flan-T5-large has 16 heads of 64 and 128 distances. Programs for a TPU choose the kernel themselves."""
    mesh = jax.sharding.Mesh(np.array(devices(topology)[:1]), "x")
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)
    for tree in ("one", "wide"):
        arrays, options = case(0, [5, 300], TREES[tree], heads=16, kv_heads=16, dtype=jnp.bfloat16)
        arguments = jax.tree.map(place, (arrays, options, jax.ShapeDtypeStruct((16, 129), jnp.float32)))
        run = lambda arrays, options, bias: tree_attention(*arrays, **options, scale=1.0, bias=bias)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            assert "tpu_custom_call" in jax.jit(run).lower(*arguments).compile().as_text()


MUTANTS = {
    "a bit of the wrong key": (
        "unpack_bits",
        lambda words, count: jnp.roll(ORIGINAL["unpack_bits"](words, count), 1, 1),
    ),
    "all nodes see all": ("unpack_bits", lambda words, count: jnp.ones((words.shape[0], count), bool)),
    "bits packed in reverse": ("pack_bits", lambda mask: ORIGINAL["pack_bits"](mask[..., ::-1])),
}
ORIGINAL = {name: getattr(tpu, name) for name, _ in MUTANTS.values()}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_the_mask_are_caught(name, monkeypatch):
    simulated.clear_cache()
    monkeypatch.setattr(tpu, *MUTANTS[name])
    assert error(0, [1, 129], TREES["ragged"]) > 1e-2
    simulated.clear_cache()


@pytest.mark.parametrize(
    ("line", "mutant"),
    [
        ("jnp.where(position < length, scales, 0.0)", "scales"),
        exhaustive("s if key_scales is None else s * key_scales", "s"),
        exhaustive("weights if value_scales is None else weights * value_scales", "weights"),
        exhaustive("x.scale[*first, pl.ds(head, 1)]", "x.scale[*first, pl.ds(0, 1)]"),
        exhaustive("enumerate(pairs)", "enumerate(list(pairs)[:3])"),  # one copy less
        exhaustive("jnp.where(is_text, values, jnp.zeros_like(values))", "values"),  # 0 times NaN is NaN
        ("(position < length) &", "(position <= length) &"),
        exhaustive("& (position >= i * block)", ""),  # the last block may overlap the one before
        ("copy.wait()", "pass"),
        ("fetch(row, i + 1, 1 - slot)", "fetch(row, i, 1 - slot)"),
        exhaustive("acc[head] * fade +", "acc[head] +"),
        exhaustive("- window + 1) // block", "- window + 1 + block) // block"),
    ],
)  # fmt: skip
def test_mutants_of_the_kernel_are_caught(line, mutant, tmp_path):
    """Wrong in one line, the kernel gives another result, or none."""
    source = pathlib.Path(tpu.__file__).read_text()
    assert line in source
    path = tmp_path / "mutant.py"
    path.write_text(source.replace(line, mutant))
    module = module_at(path)
    int8 = "scale" in line or "pairs" in line
    block = 256 if line.startswith("& (position") else BLOCK  # so that the last block overlaps the one before

    def worst(window) -> float:
        arrays = [case(0, [1, 250, 300], TREES["ragged"], dead=dead, int8=int8) for dead in (0.0, np.nan)]
        (clean, options), (dirty, _) = arrays
        run = functools.partial(module.tree_attention, scale=0.2, block=block, interpret=SIMULATED)
        try:
            ours = jax.jit(run)(*dirty, **options, window=window)
        except Exception:  # such as a copy that was never waited for
            return float("inf")
        difference = np.abs(np.asarray(ours) - np.asarray(wanted(clean, **options, window=window, softcap=None)))
        return float("inf") if np.isnan(difference).any() else float(difference.max())

    assert max(worst(None), worst(100)) > 1e-3


@pytest.mark.tpu_compile
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("heads_dim", [(9, 3, 64), (8, 2, 128), (4, 1, 256)])
@pytest.mark.parametrize("int8", [False, True])
def test_the_compiler_takes_it(topology, heads_dim, int8):
    """Stacked, in bfloat16, with one node and with many, without and with a window."""
    heads, kv_heads, dim = heads_dim
    mesh = jax.sharding.Mesh(np.array(devices(topology)[:1]), "x")
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for tree in ("one", "wide"):
        shapes = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "dtype": jnp.bfloat16, "int8": int8}
        arrays, options = case(0, [5, 300], TREES[tree], **shapes)
        stack = [jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), x) for x in arrays[3:5]]
        arguments = (*arrays[:3], *stack, *arrays[5:]), options, jax.ShapeDtypeStruct((), jnp.int32)
        place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)
        window = None if tree == "one" else 100
        run = lambda arrays, options, layer, window=window: tree_attention(
            *arrays, **options, layer=layer, scale=0.2, window=window, implementation="pallas_tpu"
        )
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            text = jax.jit(run).lower(*jax.tree.map(place, arguments)).compile().as_text()
        assert "tpu_custom_call" in text


CHUNK_BLOCKS = {"v5e:2x2": 1024, "v5p:2x2x1": 1024, "v6e:2x2": 2048}


@pytest.mark.tpu_compile
@pytest.mark.parametrize("topology", ["v4:2x2x1", *CHUNK_BLOCKS])
def test_a_chunk_of_a_long_prompt_compiles_with_all_heads_on_a_chip(topology):
    """All 8 kv heads of Llama 3 8B are on one chip. Chips with much on-chip memory read larger blocks of the cache."""
    mesh = jax.sharding.Mesh(np.array(devices(topology)[:1]), "x")
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    place = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)
    (t, kv_heads, slots, dim), ids = (512, 8, 32768, 128), functools.partial(place, dtype=jnp.int32)
    new, prefix = [place(1, kv_heads, t, dim)] * 2, [place(1, kv_heads, slots, dim)] * 2
    arguments = place(1, t, 4 * kv_heads, dim), *new, *prefix, ids(1), ids(1, t), place(1, t, t, dtype=bool)
    run = lambda *arguments: tree_attention(*arguments, scale=0.1, implementation="pallas_tpu")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert tpu._block(kv_heads, dim, 2, slots, 2, tpu._part_rows(kv_heads)) == CHUNK_BLOCKS.get(topology, 512)
        assert "tpu_custom_call" in jax.jit(run).lower(*arguments).compile().as_text()


def test_programs_of_64_bits_too():
    """Traced outside of the engine, which traces in 32; Mosaic takes no index of 64."""
    mesh = jax.sharding.Mesh(np.array(devices("v5e:2x2")[:1]), "x")
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)
    arrays, options = jax.tree.map(place, case(0, [5, 300], TREES["one"], dtype=jnp.bfloat16))
    run = lambda arrays, options: tree_attention(*arrays, **options, scale=0.2, implementation="pallas_tpu")
    with jax.enable_x64(True), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert "tpu_custom_call" in jax.jit(run).lower(arrays, options).as_text()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dim": 32}, "head_dim 32; it takes 64, 128, 192 and 256"),
        ({"dtype": jnp.float16}, "float16"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_by_name(change, reason):
    arrays, options = case(0, [5], TREES["one"], **change)
    with pytest.raises(NotImplementedError, match=reason):
        tree_attention(*arrays, **options, scale=0.2, implementation="pallas_tpu")
    assert tree_attention(*arrays, **options, scale=0.2).shape == arrays[0].shape  # None always works


def copied_bytes(monkeypatch, length: int, nodes: int, slots: int = 4608) -> int:
    """Return the bytes that the kernel copies from the prefix, with 2 kv heads of 128 in bfloat16 (Llama 3 8B on four
    chips)."""
    copied = []
    make = pltpu.make_async_copy

    def counted(source, destination, semaphore):
        copy = make(source, destination, semaphore)
        start, size = copy.start, int(np.prod(destination.shape)) * destination.dtype.itemsize

        class Counted:
            def start(self):
                jax.debug.callback(lambda: copied.append(size))
                start()

            wait = staticmethod(copy.wait)

        return Counted()

    monkeypatch.setattr(tpu.pltpu, "make_async_copy", counted)
    new, prefix = (jnp.zeros((1, 2, n, 128), jnp.bfloat16) for n in (nodes, slots))
    positions = length + jnp.arange(nodes)[None]
    result = tpu.tree_attention(
        jnp.zeros((1, nodes, 8, 128), jnp.bfloat16), new, new, prefix, prefix, jnp.array([length]), positions,
        jnp.tril(jnp.ones((1, nodes, nodes), bool)), scale=0.1, interpret=pltpu.InterpretParams(),
    )  # fmt: skip
    jax.block_until_ready(result)
    jax.effects_barrier()
    return sum(copied)


@pytest.mark.parametrize(("length", "factor"), [(4096, 1.0), (3000, 1.1), (1100, 2.0)])
def test_what_it_reads_goes_with_the_length(monkeypatch, length, factor):
    """Bytes over those of the keys and values that count; the same for a node and for a tree."""
    needed = 2 * 2 * length * 128 * 2
    one, tree = (copied_bytes(monkeypatch, length, nodes) for nodes in (1, 64))
    assert needed <= one == tree <= factor * needed
