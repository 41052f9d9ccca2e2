"""Targets that read images, and tiny heads for them."""

import dataclasses
import functools

import jax
from heads import layer_of
from image_models import IMAGE

from specjax.models import init_params, make_model
from specjax.models.heads.flash import FlashConfig
from specjax.models.heads.image_rows import ImageSizes
from specjax.models.heads.kinds import init_head
from specjax.models.heads.msd import MsdConfig
from specjax.models.heads.specvlm import SpecVlmConfig
from specjax.models.vision.config import ConnectorSizes, TowerSizes, VisionLanguageConfig
from specjax.types import Target

VECTORS = 9
SIZES = ImageSizes(IMAGE, VECTORS)


@functools.cache
def vision_target() -> Target:
    tower = TowerSizes(24, 1, 3, 40, image_size=24, patch_size=4)
    config = VisionLanguageConfig(
        71, 32, 2, 4, 2, 8, 48, tower=tower, connector=ConnectorSizes(2), image_token=IMAGE, max_positions=256
    )
    params = init_params(config, jax.random.key(0))
    return Target(make_model(config), jax.tree.map(lambda x: 3 * x, params))


def config_of(kind, target, **changes):
    layer = layer_of(target)
    if kind == "msd":
        return MsdConfig(layer, vocab_size=71, **changes)
    if kind == "flash":
        return FlashConfig(layer, **{"block_size": 3, "queries": 4, "images": SIZES} | changes)
    return SpecVlmConfig(layer, vocab_size=71, **{"queries": 3, "images": SIZES} | changes)


def head_of(kind, target, seed=1, **changes):
    """Return a head with sharp random parameters."""
    head = init_head(kind, config_of(kind, target, **changes), jax.random.key(seed))
    return dataclasses.replace(head, params=jax.tree.map(lambda x: 2 * x, head.params))


PROMPTS = [
    [5, 6, *[IMAGE] * VECTORS, 7, *[IMAGE] * VECTORS, 8, 9, 10],
    [11, *[IMAGE] * VECTORS, 12, 13, 5, 6],
    [11, 12, 13, 5, 6, 8],
]
