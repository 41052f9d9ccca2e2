"""Models with joined projections equal those with separate ones, also when they are read, written or changed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_llama

import specjax
from specjax.models import Gemma3Config, LlamaConfig, abstract_params, init_params, load, make_model, narrow_mlps
from specjax.models.heads.kinds import KINDS
from specjax.models.storage import JOINED, join_projections, rows_in_joined, split_projections
from specjax.models.variants.low_rank import LoraMatrices, apply_lora, init_lora
from specjax.training.loop.head_init import new_head
from specjax.types import Sublayers, Target

SHAPE = {
    "vocab_size": 32, "width": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "mlp_width": 24,
}  # fmt: skip
CONFIGS = {
    "biases": LlamaConfig(**SHAPE, qkv_bias=True),
    "stacked": LlamaConfig(**SHAPE, qk_norm=True, stacked=True),
    "projection norms": LlamaConfig(**SHAPE, qk_norm=True, qk_norm_scope="projection"),
    "gemma": Gemma3Config(**SHAPE, is_global=(False, True), window=3),
}


def joined(target: Target, names: tuple[str, ...] = tuple(JOINED)) -> Target:
    config = dataclasses.replace(target.model.config, joined=names)
    return Target(make_model(config), join_projections(target.params, config))


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def forward(model, params, runs):
    positions = jnp.broadcast_to(jnp.arange(4), (2, 4))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((4, 4), bool)), (2, 4, 4))
    cache = model.init_cache(params, None, 2, 8)
    tokens = jnp.array([[3, 1, 4, 1], [5, 9, 2, 6]])
    output, pending = model.forward(params, tokens, cache, positions=positions, mask=mask, layers=runs)
    return output.logits, pending.k, pending.v


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("skips", [False, True])
def test_passes_are_those_of_separate_projections(name, skips):
    """Random biases and norms, so that rows of another member would show."""
    config = CONFIGS[name]
    draw = lambda x, key: x + 0.3 * jax.random.normal(key, x.shape)
    params = init_params(config, jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    separate = Target(make_model(config), tree.unflatten([draw(*pair) for pair in zip(leaves, keys, strict=True)]))
    other = joined(separate)
    assert jax.tree.map(jnp.shape, other.params) == jax.tree.map(lambda x: x.shape, abstract_params(other.model.config))
    assert len(jax.tree.leaves(other.params)) < len(jax.tree.leaves(separate.params))
    assert_equal(split_projections(other.params, other.model.config), separate.params)
    runs = Sublayers(jnp.array([[True, False]] * 2), jnp.array([[False, True]] * 2)) if skips else None
    run = jax.jit(lambda target: forward(target.model, target.params, runs))
    for ours, theirs in zip(jax.tree.leaves(run(other)), jax.tree.leaves(run(separate)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_rows_of_members_partition_a_joined_matrix():
    config = CONFIGS["biases"]
    rows = [rows_in_joined(config, "qkv", member, 64) for member in ("q", "k", "v")]
    assert [len(part) for part in rows] == [32, 16, 16]
    assert sorted(np.concatenate(rows).tolist()) == list(range(64))
    assert rows[1].tolist() == [*range(16, 24), *range(48, 56)]  # after the two query heads of its group


def test_the_text_is_that_of_separate_projections():
    separate = tiny_llama()
    decode = lambda target: specjax.decode(
        target, specjax.drafters.prompt_lookup(), [[3, 1, 4, 1, 5, 9]], key=jax.random.key(0), max_new_tokens=24
    )
    np.testing.assert_array_equal(decode(joined(separate)).tokens, decode(separate).tokens)


@pytest.mark.parametrize("axes", [None, {"model": 8}])
def test_files_are_read_into_joined_matrices(axes, data):
    """stories260K has 8 query and 4 key/value heads, both permuted; the mesh repeats the latter."""
    source = data / "stories260K" / "stories260K.bin"
    separate, ours = (load(source, joined=value)[0] for value in (False, True))
    assert_equal(ours.params, join_projections(separate.params, ours.model.config))
    if axes is not None:
        mesh = specjax.mesh(**axes)
        placed, read = specjax.shard(ours, mesh), load(source, joined=True, mesh=mesh)[0]
        assert placed.model is read.model
        assert_equal(placed.params, read.params)
        qkv = read.params["layers"][0]["attention"]["qkv"]["weight"]
        assert qkv.addressable_shards[0].data.size * 8 == qkv.size


def test_passes_on_a_mesh_that_repeats_heads():
    separate, mesh = tiny_llama(layers=1, qkv_bias=True), specjax.mesh(1, 4)
    run = jax.jit(lambda target: forward(target.model, target.params, None)[0])
    ours, theirs = run(specjax.shard(joined(separate), mesh)), run(separate)
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_saved_models_have_separate_projections(tmp_path):
    separate = tiny_llama(qkv_bias=True)
    specjax.save_model(tmp_path / "separate", separate)
    specjax.save_model(tmp_path / "joined", joined(separate))
    names = ("model.safetensors", "config.json")
    read = lambda folder: [(tmp_path / folder / name).read_bytes() for name in names]
    assert read("joined") == read("separate")


def test_low_rank_updates_are_those_of_separate_projections():
    separate = tiny_llama()
    lora = init_lora(joined(separate), jax.random.key(0), 2, ("q", "up"))
    lora = {path: LoraMatrices(down, jnp.ones_like(up)) for path, (down, up) in lora.items()}
    assert_equal(apply_lora(joined(separate), lora).params, joined(apply_lora(separate, lora)).params)


def test_mlps_are_cut_to_their_first_units():
    separate = tiny_llama()
    assert_equal(narrow_mlps(joined(separate), 24).params, joined(narrow_mlps(separate, 24)).params)


@pytest.mark.parametrize("kind", ["eagle3", "hydra"])
def test_heads_begin_with_the_same_layers(kind):
    separate = tiny_llama(layers=3)
    config = KINDS[kind].of_target(joined(separate).model.config)
    begin = lambda target: new_head(kind, config, target, jax.random.key(0)).params
    assert_equal(begin(joined(separate)), begin(separate))
