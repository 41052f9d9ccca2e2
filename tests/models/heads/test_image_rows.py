"""Heads for targets that read images: their rows, their caches, and texts equal to plain decoding."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from heads import layer_of
from image_heads import PROMPTS, SIZES, VECTORS, config_of, head_of, vision_target
from image_models import IMAGE, random_tiles

import specjax
from specjax import UsageError
from specjax.drafters import head_drafter
from specjax.models import init_params, make_model
from specjax.models.heads import image_rows
from specjax.models.heads.contract import DraftedNodes, FeaturePairs
from specjax.models.heads.eagle import EagleConfig, eagle_head
from specjax.models.heads.flash import Flash, flash_head
from specjax.models.heads.image_rows import ImageBlocks, ImageSizes
from specjax.models.heads.specvlm import EXPERTS, Compressor, SpecVlm, SpecVlmConfig
from specjax.models.vision.grids import UNUSED
from specjax.models.vision.memory import ImageMemory, ImagePositions, PromptImages, images
from specjax.types import Context, Target


@functools.cache
def text_target() -> Target:
    config = specjax.models.LlamaConfig(71, 32, 2, 4, 2, 8, 48, max_positions=256)
    return Target(make_model(config), jax.tree.map(lambda x: 3 * x, init_params(config, jax.random.key(0))))


def inputs_of(target, seed=0):
    tiles = [PromptImages(random_tiles(2, seed=seed)), PromptImages(random_tiles(1, seed=seed + 1)), None]
    return images(target, PROMPTS, tiles)


@pytest.mark.parametrize("kind", ["msd", "flash", "specvlm"])
def test_texts_equal_plain_decoding(kind):
    target = vision_target()
    settings = {"key": 0, "max_new_tokens": 24, "inputs": inputs_of(target)}
    plain = specjax.decode(target, None, PROMPTS, **settings)
    drafter = head_drafter(head_of(kind, target), 3)
    result = specjax.decode(target, drafter, PROMPTS, **settings)
    assert result.to_lists() == plain.to_lists()
    sampled = specjax.decode(target, drafter, PROMPTS, temperature=1.0, **settings)
    assert all(len(text) == 24 for text in sampled.to_lists())


def pairs_of(width=32, length=21, seed=0):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(1, length, width)).astype(np.float32)
    tokens = np.array([[5, 6, *[IMAGE] * VECTORS, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]])[:, :length]
    return features, tokens.astype(np.int32)


def memory_of(length=21, first=1):
    """Return vectors of an image whose placeholders begin at the token `first` + 1 of the text."""
    vectors = np.random.default_rng(5).normal(size=(1, VECTORS, 32)).astype(np.float32)
    return ImageMemory(jnp.asarray(vectors), jnp.arange(VECTORS, dtype=jnp.int32)[None] + first + 2)


def read(head, target, features, tokens, memory, cuts=(), keys=None):
    """Return the memory of a head after reading pairs in chunks."""
    text = jnp.asarray(np.concatenate([[[4]], tokens], 1))
    context = Context(text, jnp.array([text.shape[1]]), target=target, images=memory)
    state = head.head.init_memory(head.params, context, 1, 64)
    edges = [0, *cuts, tokens.shape[1]]
    for begin, end in itertools.pairwise(edges):
        part = slice(begin, end)
        count = jnp.array([end - begin])
        pairs = FeaturePairs(jnp.asarray(features[:, part]), jnp.asarray(tokens[:, part]), count, keys=keys)
        state = head.head.read(head.params, state, pairs, context)
    return state, context


def drafted(head, state, context, tokens=(20, 21)):
    """Return the logits of a chain."""
    step = context._replace(images=None)
    scratch, output = head.head.start(head.params, state, step, 4)
    rows = [output]
    for depth, token in enumerate(tokens, 1):
        ancestors = (jnp.arange(4) > 0) & (jnp.arange(4) < depth)
        at = jnp.full((1, 1), depth, jnp.int32)
        nodes = DraftedNodes(jnp.full((1, 1), token, jnp.int32), at, jnp.int32(depth), at - 1, ancestors[None, None])
        scratch, output = head.head.follow(head.params, scratch, nodes, step)
        rows.append(output[:, 0])
    return np.asarray(jnp.stack(rows, 1))[0]


def assert_close(values, expected):
    """Compare to float32's rounding at the scale of the largest value."""
    np.testing.assert_allclose(values, expected, atol=2e-5 * float(np.abs(expected).max()))


KINDS = [("msd", {}), ("msd", {"rows": "dropped"}), ("flash", {}), *(("specvlm", {"expert": e}) for e in EXPERTS)]
KINDS += [("specvlm", {})]


@pytest.mark.parametrize(("kind", "changes"), KINDS)
def test_chunks_of_a_prompt_do_not_change_drafts(kind, changes):
    target, memory = vision_target(), memory_of()
    head = head_of(kind, target, **changes)
    features, tokens = pairs_of()
    at_once, context = read(head, target, features, tokens, memory)
    parts, _ = read(head, target, features, tokens, memory, cuts=(4, 9, 12))
    assert int(at_once.num_pairs[0]) == int(parts.num_pairs[0]) == tokens.shape[1]
    np.testing.assert_array_equal(at_once.skipped, parts.skipped)
    assert_close(drafted(head, at_once, context), drafted(head, parts, context))


NUM_ROWS = {"vectors": 9, "dropped": 0, "prune": 3, "pool": 3, "conv": 3, "resampler": 3, "none": 0}


@pytest.mark.parametrize(("kind", "changes"), KINDS[:-1])
def test_number_of_cached_rows(kind, changes):
    target, memory = vision_target(), memory_of()
    head = head_of(kind, target, **changes)
    state, _ = read(head, target, *pairs_of(), memory)
    rows = 4 if kind == "flash" else NUM_ROWS[changes.get("rows") or changes.get("expert") or "vectors"]
    assert int(state.skipped[0]) == VECTORS - rows
    assert int(state.cache.length[0]) == 21 - VECTORS + rows


@pytest.mark.parametrize("kind", ["msd", "flash", "specvlm"])
def test_texts_without_images_are_those_of_the_plain_head(kind):
    target, plain = vision_target(), text_target()
    target = dataclasses.replace(target, params=target.params | plain.params)
    features, tokens = pairs_of()
    tokens = np.where(tokens == IMAGE, 3, tokens)
    head = head_of(kind, target)
    state, context = read(head, target, features, tokens, None)
    blank = ImageMemory(jnp.ones((1, VECTORS, 32)), jnp.full((1, VECTORS), UNUSED, jnp.int32))
    other, _ = read(head, target, features, tokens, blank)
    assert_close(drafted(head, state, context), drafted(head, other, context))
    if kind == "flash":
        return
    config = head.head.config
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(EagleConfig)}
    if kind == "msd":
        eagle = dataclasses.replace(head, head=eagle_head(EagleConfig(**fields)))
        expected, context = read(eagle, plain, features, tokens, None)
        assert_close(drafted(head, state, context), drafted(eagle, expected, context))


def test_flash_of_one_feature_is_eagle_with_its_layer():
    target = vision_target()
    flash = head_of("flash", target, block_size=1)
    other = head_of("specvlm", target)
    other = other.replace(params=other.params | {name: flash.params[name] for name in ("fc", "stack")})
    features, tokens = pairs_of()
    tokens = np.where(tokens == IMAGE, 3, tokens)
    first = [drafted(head, *read(head, target, features, tokens, None), tokens=())[0] for head in (flash, other)]
    assert_close(*first)


def numpy_attention_row(params, layer, rows, positions, has_norm):
    """Return the output of the layer at the last row, in float64."""
    rows = rows.astype(np.float64)
    weight = lambda path: np.asarray(functools.reduce(lambda p, k: p[k], path.split("/"), params), np.float64)
    norm = lambda x, w: x / np.sqrt((x * x).mean(-1, keepdims=True) + layer.norm_eps) * w
    x = norm(rows, weight("attention_norm/weight")) if has_norm else rows
    split = lambda y, heads: y.reshape(len(y), heads, layer.head_dim)

    def rotate(y):
        half = layer.head_dim // 2
        angle = positions[:, None] * layer.rope_base ** (-np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = y[..., :half], y[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    q = rotate(split(x @ weight("attention/q/weight").T, layer.num_heads))
    k = rotate(split(x @ weight("attention/k/weight").T, layer.num_kv_heads))
    v = split(x @ weight("attention/v/weight").T, layer.num_kv_heads)
    out = []
    for head in range(layer.num_heads):
        group = head // (layer.num_heads // layer.num_kv_heads)
        scores = k[:, group] @ q[-1, head] * layer.head_dim**-0.5
        p = np.exp(scores - scores.max())
        out.append(p @ v[:, group] / p.sum())
    y = rows[-1] + np.concatenate(out) @ weight("attention/o/weight").T
    h = norm(y, weight("mlp_norm/weight"))
    gate = h @ weight("mlp/gate/weight").T
    return y + (gate / (1 + np.exp(-gate)) * (h @ weight("mlp/up/weight").T)) @ weight("mlp/down/weight").T


@pytest.mark.parametrize("choice", ["vectors", "dropped"])
def test_rows_of_msd_in_numpy(choice):
    """[a, V1 ... V9, b, c]: rows of vectors are the vectors, the others are fc[E x; f]; positions count all tokens."""
    target, memory = vision_target(), memory_of()
    head = head_of("msd", target, rows=choice)
    features, tokens = pairs_of()
    table, fc = np.asarray(target.params["embed"]["weight"]), head.params["fc"]
    rows = np.concatenate([table[tokens[0]], features[0]], 1) @ np.asarray(fc["weight"]).T + np.asarray(fc["bias"])
    is_image = tokens[0] == IMAGE
    rows[is_image] = np.asarray(memory.vectors)[0]
    is_row = ~is_image if choice == "dropped" else np.ones_like(is_image)
    layer = head.head.config.layer
    expected = numpy_attention_row(head.params["stack"][0], layer, rows[is_row], np.arange(21.0)[is_row], False)
    state, _ = read(head, target, features, tokens, memory, cuts=(7,))
    assert_close(np.asarray(state.last[0]), expected)
    without_gaps = numpy_attention_row(
        head.params["stack"][0], layer, rows[is_row], np.arange(is_row.sum()) * 1.0, False
    )
    assert choice == "vectors" or np.abs(without_gaps - expected).max() > 1e-3  # positions without gaps differ


def test_fc_has_no_gradient_from_rows_of_images():
    target, memory = vision_target(), memory_of()
    head = head_of("msd", target)
    features, tokens = pairs_of(length=11)  # ends with the rows of the image

    def last(fc, count):
        other = head.replace(params=head.params | {"fc": fc})
        return read(other, target, features[:, :count], tokens[:, :count], memory)[0].cache.k[0][:, :, 2:count].sum()

    gradient = jax.grad(last)(head.params["fc"], 11)
    assert not np.any(np.asarray(gradient["weight"]))
    text = jax.grad(
        lambda fc: read(head.replace(params=head.params | {"fc": fc}), target, features, tokens, memory)[0].last.sum()
    )
    assert np.any(np.asarray(text(head.params["fc"])["weight"]))


def test_queries_of_flash_select_rows():
    """Large queries that match one vector each select it."""
    vectors = jnp.eye(9, 32)[None, None] * 2.0
    blocks = ImageBlocks(vectors, jnp.ones((1, 1, 9), bool))
    choice = [7, 0, 3, 4]
    rows = blocks.at_regions(image_rows.attend(500 * vectors[0, 0, jnp.array(choice)], blocks))
    is_kept = np.asarray(rows.is_kept[0])
    assert np.flatnonzero(is_kept).tolist() == [0, 3, 5, 7]  # the first vector of each of four regions
    np.testing.assert_allclose(np.asarray(rows.rows[0])[is_kept], np.asarray(vectors[0, 0])[choice], atol=1e-5)


def test_blocks_of_images_of_any_size():
    """Images of 3 and 2 vectors in a prompt, padded to 4 each, and text between them."""
    places = jnp.array([[2, 3, 4, UNUSED, 7, 8, UNUSED, UNUSED]])
    axes = ImagePositions(jnp.zeros((1, 8, 3), jnp.int32), jnp.array([[5, 9]]), jnp.zeros((1, 2), jnp.int32))
    memory = ImageMemory(jax.random.normal(jax.random.key(0), (1, 8, 32)), places, axes)
    blocks = image_rows.split_blocks(memory, ImageSizes(IMAGE))
    assert np.asarray(blocks.is_valid[0]).sum(1).tolist() == [3, 2]
    target = vision_target()
    features, tokens = pairs_of(length=12)
    tokens = np.where(np.isin(np.arange(1, 13), np.asarray(places)), IMAGE, 9)[None].astype(np.int32)
    for kind, rows in (("flash", 4), ("specvlm", 4), ("msd", 5)):
        changes = {"images": ImageSizes(IMAGE), "queries": 2} | ({"expert": "pool"} if kind == "specvlm" else {})
        head = head_of(kind, target, **({} if kind == "msd" else changes))
        at_once, context = read(head, target, features, tokens, memory)
        parts, _ = read(head, target, features, tokens, memory, cuts=(3, 6))
        assert int(at_once.skipped[0]) == int(parts.skipped[0]) == 5 - rows
        assert_close(drafted(head, at_once, context, ()), drafted(head, parts, context, ()))


def test_regions_of_images_of_any_size():
    is_valid = jnp.array([[[True] * 8, [True] * 3 + [False] * 5, [False] * 8]])
    blocks = ImageBlocks(jnp.ones((1, 3, 8, 2)), is_valid)
    region, is_first = blocks.regions(4)
    assert np.asarray(region[0, 0]).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert np.asarray(is_first[0]).sum(1).tolist() == [4, 3, 0]


def compressor(width=8, queries=3):
    config = SpecVlmConfig(dataclasses.replace(layer_of(vision_target()), width=width), queries=queries, images=SIZES)
    return Compressor(config, nnx.Rngs(0))


def test_experts_of_specvlm_in_numpy():
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(1, 2, 9, 8)).astype(np.float32)
    rows = dict(
        zip(EXPERTS, compressor().rows(ImageBlocks(jnp.asarray(vectors), jnp.ones((1, 2, 9), bool))), strict=True)
    )
    flat = vectors.reshape(1, 18, 8)
    places = {name: np.flatnonzero(np.asarray(row.is_kept[0])) for name, row in rows.items()}
    longest = [np.sort(np.argsort(-np.linalg.norm(tile, axis=-1))[:3]) + 9 * i for i, tile in enumerate(vectors[0])]
    assert places["prune"].tolist() == np.concatenate(longest).tolist()
    np.testing.assert_array_equal(np.asarray(rows["prune"].rows)[0, places["prune"]], flat[0, places["prune"]])
    regions = [0, 3, 6, 9, 12, 15]
    assert [places[name].tolist() for name in ("pool", "conv", "resampler", "none")] == [regions, regions, regions, []]
    means = vectors.reshape(6, 3, 8).mean(1)
    np.testing.assert_allclose(np.asarray(rows["pool"].rows)[0, regions], means, atol=1e-6)
    padded = np.concatenate([vectors[0], np.zeros((2, 3, 8))], 1)
    sums = np.concatenate([[tile[i : i + 4].mean(0) for i in (0, 3, 6)] for tile in padded])
    np.testing.assert_allclose(np.asarray(rows["conv"].rows)[0, regions], sums, atol=1e-6)


def test_the_gate_is_the_limit_of_its_draws():
    gate = compressor()
    question, image = jax.random.normal(jax.random.key(0), (2, 6, 8))
    sure = jax.tree.map(lambda x: x, gate)
    sure.gate_down.weight[...] = 1e4 * gate.gate_down.weight[...]
    hard = sure.choose(question, image, None)
    draws = sure.choose(question, image, jax.random.split(jax.random.key(1), 6))
    np.testing.assert_array_equal(np.argmax(hard, 1), np.argmax(draws, 1))
    np.testing.assert_allclose(np.asarray(draws).max(1), 1, atol=1e-6)
    keys = jax.random.split(jax.random.key(2), 6)
    total = lambda weight: jnp.sum(jnp.arange(5.0) * _chosen(gate, weight, question, image, keys))
    assert np.any(np.asarray(jax.grad(total)(gate.gate_up.weight[...])))


def _chosen(gate, weight, question, image, keys):
    graphdef, state = nnx.split(gate)
    params = nnx.to_pure_dict(state)
    params = params | {"gate_up": {"weight": weight}}
    return nnx.merge(graphdef, nnx.State(params)).choose(question, image, keys)


def test_images_change_drafts_and_no_text():
    target = vision_target()
    head = head_of("msd", target)
    features, tokens = pairs_of()
    rows = [
        drafted(head, *read(head, target, features, tokens, memory))
        for memory in (memory_of(), memory_of()._replace(vectors=-memory_of().vectors))
    ]
    assert np.abs(rows[0] - rows[1]).max() > 1e-2


@pytest.mark.parametrize("kind", ["flash", "specvlm"])
def test_rows_that_are_not_kept_have_no_effect(kind, monkeypatch):
    target, memory = vision_target(), memory_of()
    head = head_of(kind, target, seed=4)
    module = Flash if kind == "flash" else SpecVlm
    rows_of = module.image_rows

    def with_noise(self, *arguments):
        rows = rows_of(self, *arguments)
        return rows._replace(rows=jnp.where(rows.is_kept[..., None], rows.rows, 1e3))

    expected = drafted(head, *read(head, target, *pairs_of(), memory))
    monkeypatch.setattr(module, "image_rows", with_noise)
    assert_close(drafted(head, *read(head, target, *pairs_of(), memory)), expected)


def test_more_rows_than_vectors_are_refused():
    target = vision_target()
    with pytest.raises(UsageError, match="more than the 9 vectors of an image"):
        flash_head(config_of("flash", target, queries=10))
    with pytest.raises(UsageError, match="more than the 9 vectors of an image"):
        head_of("specvlm", target, queries=10)
