"""Attention whose values are the first numbers of the keys, in every form, as latent attention needs it."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid_logits import whole_text_logits
from jax.experimental.pallas import tpu as pltpu
from scripts import module_at
from tiers import exhaustive
from tpu import devices

import specjax
from specjax.models import init_params, make_model
from specjax.models.hybrid.config import HybridConfig, LayerKind
from specjax.models.latent import attention
from specjax.models.latent.sizes import LatentSizes
from specjax.numerics.quantization import Quantized, quantize
from specjax.pallas_kernels.tree_attention import over_slots, reference, tpu, tree_attention
from specjax.pallas_kernels.tree_attention.static import static_tree_attention

SIMULATED = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
SLOTS, BLOCK = 384, 128
DIM, VALUES = 640, 512  # the 576 cached numbers of DeepSeek-V2 and V3 in whole tiles


def case(seed, lengths, nodes, *, heads=4, dim=DIM, dtype=jnp.float32, dead=0.0, earlier=0, int8=False):
    """Return arguments of `tree_attention` without values, for a random tree.

    Slots without a token are `dead`, or their scales if int8. Of `earlier` nodes some are visible.
    """
    rng = np.random.default_rng(seed)
    among = np.eye(nodes, dtype=bool)
    for i in range(1, nodes):
        among[i] |= among[rng.integers(0, i)]
    depth, length = among.sum(1) - 1, np.asarray(lengths)
    mask = np.concatenate([rng.random((nodes, earlier)) < 0.5, among], 1)
    key_positions = np.concatenate([np.full(earlier, -1), depth]) + length[:, None]
    normal = lambda *shape: (rng.normal(size=shape) * 0.5).astype(dtype)
    new, prefix = normal(len(length), 1, earlier + nodes, dim), normal(len(length), 1, SLOTS, dim)
    is_dead = np.arange(SLOTS)[:, None] >= length[:, None, None, None]
    if int8:
        new, prefix = (jax.tree.map(np.asarray, jax.jit(quantize)(x)) for x in (new, prefix))
        prefix = Quantized(prefix.values, np.where(is_dead[..., 0], np.float32(dead), prefix.scale))
    else:
        prefix = np.where(is_dead, np.asarray(dead, dtype), prefix)
    integers = np.asarray(length, np.int32), np.asarray(length[:, None] + depth, np.int32)
    arrays = (
        normal(len(length), nodes, heads, dim), new, None, prefix, None, *integers,
        np.broadcast_to(mask, (len(length), *mask.shape)),
    )  # fmt: skip
    return jax.tree.map(jax.device_put, (arrays, {"key_positions": np.asarray(key_positions, np.int32)}))


def with_cut_values(arrays, size: int):
    """Return the arguments with the values as arrays of their own: keys whose numbers from `size` on are zero."""
    q, k, _, prefix, _, *more = arrays
    cut = lambda x: x * (jnp.arange(x.shape[-1]) < size).astype(x.dtype)
    values = lambda x: Quantized(cut(x.values), x.scale) if isinstance(x, Quantized) else cut(x)
    return (q, k, values(k), prefix, values(prefix), *more)


def wanted(arrays, size: int, **options):
    """Return the result with separate values."""
    result = reference.tree_attention(*with_cut_values(arrays, size), scale=0.1, **options)
    return jax.tree.map(lambda x: x[..., :size] if x.ndim == 4 else x, result)


def largest_difference(ours, theirs) -> float:
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    differences = [np.abs(np.asarray(x, np.float32) - np.asarray(y, np.float32)).max() for x, y in pairs]
    return float("inf") if np.isnan(differences).any() else float(max(differences))


def kernel_error(seed, lengths, nodes, *, module=tpu, size=VALUES, window=None, softcap=None, block=BLOCK, **shapes):
    """Return the largest difference between the kernel, with NaN in dead slots, and separate values."""
    clean, options = case(seed, lengths, nodes, **shapes)
    dirty, _ = case(seed, lengths, nodes, dead=np.nan, **shapes)
    options |= {"window": window, "softcap": softcap}
    run = functools.partial(module.tree_attention, scale=0.1, value_size=size, block=block, interpret=SIMULATED)
    return largest_difference(jax.jit(functools.partial(run, **options))(*dirty), wanted(clean, size, **options))


FORMS = {
    "reference": reference.tree_attention,
    "xla": functools.partial(tree_attention, implementation="xla"),
    "static": static_tree_attention,
    "default": tree_attention,
}


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_all_forms_equal_separate_values(form, int8):
    arrays, options = case(0, [0, 1, 200], 7, dim=20, int8=int8)
    options |= {"window": 60, "softcap": 3.0, "with_total": True}
    ours = jax.jit(functools.partial(FORMS[form], scale=0.1, value_size=12, **options))(*arrays)
    assert ours[0].shape == (3, 7, 4, 12)
    assert largest_difference(ours, wanted(arrays, 12, **options)) < 2e-6


def test_sinks_shared_prefixes_empty_caches_and_sums_by_slots():
    """The other paths of `tree_attention` cut their sums too."""
    arrays, options = case(1, [90, 33], 5, dim=20)
    run = functools.partial(tree_attention, scale=0.1, value_size=12, **options)
    sinks = jnp.array([-1.0, 0.0, 1.0, 2.0])
    theirs = lambda arrays, **more: wanted(arrays, 12, **options, **more)
    assert largest_difference(run(*arrays, sinks=sinks), theirs(arrays, sinks=sinks)) < 2e-6
    q, k, _, prefix, _, *more = arrays
    both = q, k, None, jnp.repeat(prefix[:1], 2, 0), None, *more
    assert largest_difference(run(q, k, None, prefix[:1], None, *more), theirs(both)) < 2e-6
    empty = q, k, None, prefix[:, :, :0], None, *more
    assert largest_difference(run(*empty), theirs(empty)) < 2e-6
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, arrays)
    assert largest_difference(run(*rounded, implementation="by_slot"), theirs(rounded)) < 0.02


def test_derivatives_are_those_of_separate_values():
    """A key has the derivatives of its scores and of its value."""
    arrays, options = case(2, [90, 33], 5, dim=20)
    q, k, _, prefix, _, *more = arrays
    loss = lambda attend: lambda q, k, prefix: jnp.sum(jnp.sin(attend((q, k, None, prefix, None, *more))))
    ours = jax.grad(loss(lambda x: tree_attention(*x, scale=0.1, value_size=12, **options)), (0, 1, 2))(q, k, prefix)
    theirs = jax.grad(loss(lambda x: wanted(x, 12, **options)), (0, 1, 2))(q, k, prefix)
    assert largest_difference(ours, theirs) < 2e-6 and all(float(jnp.abs(x).max()) > 1e-3 for x in ours)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("nodes", [1, 7, exhaustive(16), 70])
def test_the_kernel_on_trees(nodes, int8):
    """The cases have one kv head, ragged lengths, and one word of bits or three."""
    assert kernel_error(nodes, [0, 1, 129, 384], nodes, int8=int8) < 5e-6


@pytest.mark.parametrize(
    ("dim", "size", "window", "softcap"),
    [(640, 512, 100, 3.0), (576, 512, None, None), exhaustive(256, 128, 1, None), (128, 128, 100, None)],
)
def test_the_kernel_with_other_sizes(dim, size, window, softcap):
    assert kernel_error(3, [5, 300], 11, dim=dim, size=size, window=window, softcap=softcap, heads=6) < 5e-6


@pytest.mark.parametrize("int8", [False, True])
def test_the_kernel_in_bfloat16_with_earlier_nodes(int8):
    assert kernel_error(4, [127, 260], 8, dtype=jnp.bfloat16, earlier=5, heads=16, int8=int8) < 0.02


def test_the_kernel_in_a_stack_with_several_calls_and_totals(monkeypatch):
    """Each call has its own rows of queries, and all new keys."""
    monkeypatch.setattr(tpu, "MAX_ROWS", 16)
    monkeypatch.setattr(tpu, "_part_rows", lambda kv_heads: 16)
    arrays, options = case(5, [0, 130], 11)
    options |= {"with_total": True}
    stacked = (*arrays[:3], jnp.stack([jnp.full_like(arrays[3], jnp.nan), arrays[3]]), *arrays[4:])
    run = functools.partial(tpu.tree_attention, scale=0.1, value_size=VALUES, block=BLOCK, **options)
    calls = str(jax.make_jaxpr(functools.partial(run, layer=jnp.int32(1)))(*stacked)).count("pallas_call")
    assert calls == 3  # 11 nodes of 4 rows
    ours = jax.jit(functools.partial(run, interpret=SIMULATED))(*stacked, layer=jnp.int32(1))
    assert largest_difference(ours, wanted(arrays, VALUES, **options)) < 5e-6


def test_a_prefix_that_is_split_over_devices():
    """Each device has a part of the slots, and there is no array of values to split."""
    arrays, options = case(6, [0, 300], 7, dim=20)
    q, k, _, prefix, _, *more = arrays
    mesh, P = jax.sharding.Mesh(np.array(jax.devices()[:2]), "x"), jax.sharding.PartitionSpec
    attend = over_slots.shard_over_slots(functools.partial(tree_attention, scale=0.1, value_size=12), ("x",))
    run = lambda q, k, prefix, *more: attend(
        q, k, None, prefix, None, *more, key_positions=options["key_positions"], layer=None, window=None
    )
    specs = P(), P(), P(None, None, "x"), P(), P(), P()
    ours = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))(q, k, prefix, *more)
    assert largest_difference(ours, wanted(arrays, 12, **options)) < 2e-6


@pytest.mark.parametrize(
    ("line", "mutant"),
    [
        ("keys[0][:, :value_size]", "keys[0][:, -value_size:]"),
        ("jnp.where(is_text, values, jnp.zeros_like(values))", "values"),  # 0 times NaN is NaN
        exhaustive("(keys[0][:, :value_size], keys[1])", "(keys[0][:, :value_size], None)"),
        exhaustive("fetch(row, i + 1, 1 - slot)", "fetch(row, i, 1 - slot)"),
    ],
)
def test_mutants_of_the_kernel_are_caught(line, mutant, tmp_path):
    source = pathlib.Path(tpu.__file__).read_text()
    assert line in source
    path = tmp_path / "mutant.py"
    path.write_text(source.replace(line, mutant))
    assert kernel_error(0, [1, 250, 300], 7, module=module_at(path), int8="None" in mutant) > 1e-3


@pytest.mark.parametrize(
    ("shapes", "size", "reason"),
    [
        ({"dim": 576}, 500, "values of 500 numbers in keys of 576; it takes multiples of 128"),
        ({"dim": 256}, 384, "values of 384 numbers in keys of 256"),
        ({"dim": 704}, 512, "head_dim 704; it takes multiples of 64 up to 640"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_by_name(shapes, size, reason):
    arrays, options = case(0, [5], 1, **shapes)
    with pytest.raises(NotImplementedError, match=reason):
        tree_attention(*arrays, **options, scale=0.1, value_size=size, implementation="pallas_tpu")


@pytest.mark.parametrize(("rank", "runs_kernel"), [(128, True), (96, False)])
def test_layers_of_latent_attention_run_the_kernel_on_tpus(rank, runs_kernel):
    """A vector that does not fill whole tiles leaves the loop of XLA. The logits are the same in both cases."""
    sizes = LatentSizes(rank, 32, 32, 32)
    config = HybridConfig(
        vocab_size=64, width=64, num_layers=1, num_heads=4, num_kv_heads=1, head_dim=sizes.cached, mlp_width=64,
        kinds=(LayerKind("latent_attention"),), latent=sizes, rotary_dim=32, cache_lanes=128, name="latent",
    )  # fmt: skip
    run = jax.jit(functools.partial(whole_text_logits, make_model(config)))
    params = init_params(config, jax.random.key(0))
    tokens = jnp.arange(12, dtype=jnp.int32)[None]
    mesh = jax.sharding.Mesh(np.array(devices("v5e:2x2")[:1]), "x")
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), (params, tokens))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = run.lower(*shapes).as_text()
    assert ("tpu_custom_call" in text) == runs_kernel
    unpadded = functools.partial(whole_text_logits, make_model(dataclasses.replace(config, cache_lanes=1)))
    assert largest_difference(run(params, tokens), jax.jit(unpadded)(params, tokens)) < 1e-5


@pytest.fixture
def interpreted(monkeypatch):
    """Run the kernel, interpreted, in layers of latent attention. Return the heads and cached rows of its calls."""
    calls, kernel = [], tpu.tree_attention

    def spy(q, k, v, prefix_k, *arguments, **options):
        calls.append((q.shape[2], prefix_k.shape[-4]))
        return kernel(q, k, v, prefix_k, *arguments, **options, interpret=True)

    monkeypatch.setattr(tpu, "tree_attention", spy)
    monkeypatch.setattr(attention, "tree_attention", functools.partial(tree_attention, implementation="pallas_tpu"))
    yield calls
    jax.clear_caches()  # traces with the interpreted kernel


@pytest.mark.parametrize(("data", "model"), [(1, 8), exhaustive(2, 4), exhaustive(2, 2)])
def test_drafted_text_on_a_mesh_is_that_of_one_device(data, model, interpreted):
    """Each device runs the kernel for its heads, on the whole cache of its rows."""
    sizes = LatentSizes(128, 32, 32, 32)
    config = HybridConfig(
        vocab_size=64, width=64, num_layers=2, num_heads=8, num_kv_heads=1, head_dim=sizes.cached, mlp_width=64,
        kinds=(LayerKind("latent_attention"),) * 2, latent=sizes, rotary_dim=32, cache_lanes=128, name="latent",
    )  # fmt: skip
    target = specjax.Target(make_model(config), init_params(config, jax.random.key(0)))
    prompts = [list(range(12)), [5, 6, 7, 5, 6, 7]]
    run = lambda target: specjax.decode(
        target, specjax.drafters.token_recycling(64, num_nodes=4), prompts, key=jax.random.key(0), max_new_tokens=6
    ).to_lists()
    mesh = specjax.mesh(data, model, devices=jax.devices()[: data * model])
    spread = run(specjax.shard(target, mesh))
    assert interpreted and set(interpreted) == {(8 // model, 2 // data)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "tree_attention", functools.partial(tree_attention, implementation="xla"))
        jax.clear_caches()
        assert spread == run(target)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("topology", ["v5e:2x2", exhaustive("v6e:2x2")])
def test_the_compiler_takes_it_without_a_copy_of_the_cache(topology, int8):
    """The cache is the only large array, with 16 and with 128 heads, and with one node and with 16."""
    mesh = jax.sharding.Mesh(np.array(devices(topology)[:1]), "x")
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for heads, nodes in ((16, 1), (16, 16), (128, 8)):
        arrays, options = case(0, [5], nodes, heads=heads, dtype=jnp.bfloat16, int8=int8)
        place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)
        cache = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*x.shape[:2], 8192, *x.shape[3:]), x.dtype), arrays[3])
        arguments = jax.tree.map(place, ((*arrays[:3], cache, *arrays[4:]), options))
        run = lambda arrays, options: tree_attention(*arrays, **options, scale=0.1, value_size=VALUES)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            compiled = jax.jit(run).lower(*arguments).compile()
        assert "tpu_custom_call" in compiled.as_text()
        num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
        assert compiled.memory_analysis().temp_size_in_bytes < num_bytes / 2
