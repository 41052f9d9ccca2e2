"""The tiny trained model of images that comes with the tests, under guidance and lossless methods."""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_images
from toy_tasks import digits

import specjax
from specjax import processors
from specjax.drafters import autoregressive, jacobi, two_model
from specjax.models import guided, unconditional

FOLDER = Path(__file__).parents[1] / "data" / "images"
CLASSES = [0, 3, 7]
NEW = 20  # four rows


@functools.cache
def shipped():
    return tiny_images.load(FOLDER)


def decoded(drafter, target, **options):
    prompts = [[digits.FIRST_CLASS + n] for n in CLASSES]
    return specjax.decode(
        target, drafter, prompts, key=0, max_new_tokens=NEW, inputs=unconditional([[digits.ANY]] * len(CLASSES)),
        processors=(digits.layout(),), **options,
    )  # fmt: skip


def test_the_files_are_small_and_their_shapes_are_those_of_the_benchmark():
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) < 1_300_000
    for name, target in zip(tiny_images.SIZES, shipped()[:2], strict=True):
        shapes = jax.eval_shape(functools.partial(tiny_images.untrained, name), 0).params
        assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(lambda x: x.shape, target.params)


def test_images_become_tokens_and_come_back():
    rng, codebook = np.random.default_rng(0), shipped()[2]
    codes = rng.integers(0, digits.CODES, (3, digits.SIDE, digits.ROW - 1))
    tokens = np.pad(codes, ((0, 0), (0, 0), (0, 1)), constant_values=digits.NEWLINE).reshape(3, -1)
    np.testing.assert_array_equal(digits.to_tokens(digits.to_images(tokens, codebook), codebook), tokens)
    assert processors.forced_tokens(digits.layout()).count(digits.NEWLINE) == digits.SIDE


@pytest.mark.parametrize("name", ["SJD", "draft model"])
def test_guided_images_are_those_of_plain_decoding(name):
    """Coupled sampling has the text of plain sampling, and the models are good enough to draft."""
    model, draft, _ = shipped()
    target = guided(model, 2.0)
    drafter = two_model(guided(draft, 2.0), num_tokens=4) if name == "draft model" else jacobi(
        digits.VOCABULARY, window=8, ids=(0, digits.CODES), forced=processors.forced_tokens(digits.layout())
    )  # fmt: skip
    options = {"temperature": 1.0, "sampling": "coupled"}
    result, plain = decoded(drafter, target, **options), decoded(autoregressive(), target, **options)
    assert result.to_lists() == plain.to_lists()
    assert all(text[4::5] == [digits.NEWLINE] * 4 for text in plain.to_lists())
    assert np.sum(result.lengths) / np.sum(result.stats.target_passes) > 1.5
