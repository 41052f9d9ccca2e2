"""Models that read images on meshes: each device reads a part of the tiles, and texts are those of one device."""

import functools

import jax
import numpy as np
import pytest
from image_heads import PROMPTS, VECTORS, head_of, vision_target
from image_models import IMAGE, random_tiles

import specjax
from specjax import UsageError, parallel
from specjax.bench import measure
from specjax.drafters import head_drafter
from specjax.engine.prepare import Settings
from specjax.models import PromptPatches, images, init_params, make_model
from specjax.models.vision.config import ConnectorSizes, TowerSizes, VisionLanguageConfig
from specjax.parallel import layer_parallel

MESHES = [{"data": 2, "model": 2}, {"model": 4}, {"sequence": 2, "model": 2}]
TILES = [random_tiles(prompt.count(IMAGE) // VECTORS, seed) for seed, prompt in enumerate(PROMPTS)]


@functools.cache
def grid_target():
    tower = TowerSizes(24, 2, 3, 48, patch_size=4, activation="quick_gelu", merge=2, frames=2)
    config = VisionLanguageConfig(
        71, 32, 2, 4, 2, 8, 48, tower=tower, connector=ConnectorSizes(), image_token=IMAGE, max_positions=256,
        sections=(1, 1, 2), model_type="qwen2_vl",
    )  # fmt: skip
    params = init_params(config, jax.random.key(0))
    return specjax.Target(make_model(config), jax.tree.map(lambda x: 3 * x, params))


def grid_inputs(target):
    patches = np.random.default_rng(0).normal(size=(24, 3 * 2 * 4 * 4)).astype(np.float32)
    prompts = [[5, 6, *[IMAGE] * 6, 7, 8], [5, 6, 7, 8]]
    return prompts, images(target, prompts, [PromptPatches(patches, np.array([[1, 4, 6]])), None], num_tiles=4)


def texts(target, prompts, inputs, method="prompt_lookup", **options):
    result = specjax.decode(target, method, prompts, key=jax.random.key(1), max_new_tokens=8, inputs=inputs, **options)
    return result.to_lists()


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("num_tiles", [2, 4])
def test_texts_are_those_of_one_device(sizes, num_tiles):
    """Three rows are not divided by the axis of rows, and two tiles not by four devices."""
    target = vision_target()
    inputs = images(target, PROMPTS, TILES, num_tiles=num_tiles)
    expected = texts(target, PROMPTS, inputs)
    assert expected != texts(target, PROMPTS, images(target, PROMPTS, [2 * x for x in TILES], num_tiles=num_tiles))
    assert texts(parallel.shard(target, parallel.mesh(**sizes)), PROMPTS, inputs) == expected


def test_images_of_any_size():
    target = grid_target()
    prompts, inputs = grid_inputs(target)
    expected = texts(target, prompts, inputs)
    assert texts(parallel.shard(target, parallel.mesh(2, 2)), prompts, inputs) == expected


def test_copies_of_rows_have_copies_of_their_images():
    """A batch of three rows is filled up to four, as the command line does."""
    target = vision_target()
    inputs = images(target, PROMPTS, TILES)
    expected = texts(target, PROMPTS, inputs)
    split = parallel.shard(target, parallel.mesh(4, 2))
    task = measure.DecodeTask(
        split, specjax.drafters.prompt_lookup(), PROMPTS, measure.row_keys(0, range(3)), Settings(), 8, inputs
    )
    assert len(task.job().inputs.pixels) == 4
    assert measure.run_decode(task).tokens[:3] == expected


def test_devices_read_different_tiles():
    """Each of eight devices computes the tower for one of eight tiles, and not for all of them."""
    target = vision_target()
    split = parallel.shard(target, parallel.mesh(2, 4))
    inputs = images(target, [PROMPTS[0]] * 2, [TILES[0]] * 2, num_tiles=4)
    encode = jax.jit(lambda params, inputs: split.model.init_cache(params, inputs, 2, 128).memory.vectors)
    program = encode.lower(split.params, inputs).compile()
    assert "f32[1,1,3,24,24]" in program.as_text()
    alone = target.model.init_cache(target.params, inputs, 2, 128).memory.vectors
    np.testing.assert_allclose(encode(split.params, inputs), alone, atol=1e-5)


@pytest.mark.parametrize("kind", ["msd", "specvlm"])
def test_heads(kind):
    target = vision_target()
    head, inputs = head_of(kind, target), images(target, PROMPTS, TILES)
    mesh = parallel.mesh(2, 2)
    split = parallel.shard(target, mesh)
    drafter = head_drafter(parallel.shard_head(head, mesh), 3)
    assert texts(split, PROMPTS, inputs, drafter) == texts(target, PROMPTS, inputs, None)


def test_a_server():
    target = vision_target()
    split = parallel.shard(target, parallel.mesh(2, 2))
    inputs = [
        jax.tree.map(lambda x: x[0], images(target, [prompt], [tiles], num_tiles=4))
        for prompt, tiles in zip(PROMPTS, TILES, strict=True)
    ]
    requests = [
        specjax.Request(prompt, row, inputs=entry)
        for row, (prompt, entry) in enumerate(zip(PROMPTS, inputs, strict=True))
    ]
    answers = [[] for _ in PROMPTS]
    for served in specjax.serve(
        split, "prompt_lookup", requests, slots=2, longest_prompt=64, max_new_tokens=8, inputs=inputs[0]
    ):
        assert served.error is None
        answers[served.request] += served.tokens
    assert answers == texts(target, PROMPTS, images(target, PROMPTS, TILES, num_tiles=4), None)


def test_a_layer_parallel_model_is_refused():
    with pytest.raises(UsageError, match="reads or writes more than text, which a layer-parallel model cannot"):
        layer_parallel.place_layer_parallel(vision_target(), parallel.mesh(layer=2, model=1))
