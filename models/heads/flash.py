"""FLASH: compressed images, and several tokens from one pass, for vision-language targets.

Wang et al.: FLASH: Latent-Aware Semi-Autoregressive Speculative Decoding for Multimodal Tasks (2025), arXiv 2505.12728.

Rule: R learned queries A compress the vectors V of an image to softmax(A V^T) V. These R rows replace those of the
image. The row of a pair with a text token is fc[E x_{t+1}; f_t]. One layer reads the rows and returns k features per
pair: the j-th one predicts f_{t+1+j}, and W_o applied to it predicts x_{t+2+j}. The tokens of a draft do not see each
other, so nodes at one depth have the same distribution.
Guarantee: distribution (a tree of most likely tokens is a point mass; a sampled one is verified with its q).
Deviations: the scores are divided by sqrt(D), and V are the target's input vectors. The layer is a decoder layer with
norms and a residual for each feature, fc also applies to text before an image, and each tile of an image has R rows. A
draft has at most k tokens, from one pass; the authors feed features back for more.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx

from specjax.catalog import Method, shared
from specjax.errors import UsageError
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.heads import image_rows, memory
from specjax.models.heads.blocks import bind, embed, follow_depths, run_blocks, unembed
from specjax.models.heads.contract import FeaturePairs, Head, HeadKind
from specjax.models.heads.eagle import Layer
from specjax.models.heads.image_rows import NO_IMAGES, ImagePairs, ImageRows, ImageSizes
from specjax.models.heads.memory import HeadMemory
from specjax.models.llama import LlamaConfig
from specjax.models.vision.memory import ImageMemory
from specjax.types import Array, Context

METHOD = Method(
    name="flash",
    summary="drafts several tokens in one pass for targets that read images, which it compresses to a few rows",
    paper="Wang et al. 2025, arXiv 2505.12728",
    options=shared.head_options(),
    cpu_options={"num_tokens": 3},
    wide_tree="top:8x2x1",
    **shared.HEAD,
)


@dataclass(frozen=True)
class FlashConfig:
    """Shapes of a FLASH head."""

    layer: LlamaConfig  # shape of its single layer, as wide as the target
    block_size: int = 5  # k
    queries: int = 64  # R, rows of each image or tile
    bias: bool = True  # bias of fc
    images: ImageSizes = NO_IMAGES
    taps: tuple[int, ...] = ()


class Flash(nnx.Module):
    """The module of FLASH, an `image_rows.ImageModule`."""

    def __init__(self, config: FlashConfig, *, rngs: nnx.Rngs):
        self.config, c = config, config.layer
        self.fc = L.Linear(2 * c.width, c.width, bias=config.bias, dtype=c.dtype, rngs=rngs)
        self.queries = L.Linear(c.width, config.queries, dtype=c.dtype, rngs=rngs)
        self.stack = nnx.List([Layer(c, has_norm=True, outputs=config.block_size, rngs=rngs)])

    def embedded(self, tokens: Array, context: Context) -> Array:
        return embed(None, tokens, context).astype(self.config.layer.dtype)

    def fused(self, features: Array) -> Array:
        return features

    def layers(
        self, embedded: Array, state: Array, step: L.PassInputs, cache: kv.KVCache, images: ImagePairs | None = None
    ) -> tuple[Array, kv.Pending]:
        x = self.fc(jnp.concatenate([embedded, state], -1))
        return run_blocks(list(self.stack), x if images is None else images.put(x), step, cache, self.config.layer)

    def image_rows(self, images: ImageMemory, context: Context, keys: Array | None) -> ImageRows:
        blocks = image_rows.split_blocks(images, self.config.images)
        return blocks.at_regions(image_rows.attend(self.queries.weight[...], blocks))


class FlashScratch(NamedTuple):
    """The predictions of one pass."""

    logits: Array  # float32[B, k, V]
    features: Array  # [B, k, D]


@functools.cache
def flash_head(config: FlashConfig) -> Head:
    """Return the functions of a FLASH head. Raises: UsageError for several layers, or more rows than vectors."""
    if config.layer.num_layers != 1:
        raise UsageError(f"a FLASH head has one decoder layer, not {config.layer.num_layers}")
    config.images.check_rows(config.queries)
    module_of, layer, k = bind(Flash, config), config.layer, config.block_size

    def init_memory(params, context: Context, batch: int, capacity: int) -> HeadMemory:
        return memory.init(context, layer, k * layer.width, batch, capacity, skips=True)

    def read(params, state: HeadMemory, pairs: FeaturePairs, context: Context) -> HeadMemory:
        return image_rows.read_pairs(module_of(params), state, pairs, context, layer)

    def start(params, state: HeadMemory, context: Context, places: int) -> tuple[FlashScratch, Array]:
        features = state.last.reshape(-1, k, layer.width)
        logits = unembed(features, context)
        return FlashScratch(logits, features), logits[:, 0]

    return Head(
        init_memory=init_memory,
        read=read,
        start=start,
        follow=follow_depths,
        kind="flash",
        config=config,
        taps=config.taps,
        max_depth=k,
        is_single_pass=True,
        feature=lambda scratch, place: scratch.features[:, place],
        axes=memory.axes,
        shardings=memory.shardings(layer),
        reads_images=True,
    )


def of_target(
    target: LlamaConfig, *, block_size: int = 5, queries: int | None = None, mlp_width: int | None = None, **changes
) -> FlashConfig:
    """Return the shapes that the authors train for a target: one layer with 4 D hidden units, and 64 rows or fewer.

    Images of fewer than 128 vectors get half as many rows as vectors.
    """
    images = ImageSizes.of_target(target)
    layer = target.draft_head_config(mlp_width=mlp_width or 4 * target.width)
    return FlashConfig(layer, block_size, queries or images.default_rows(2), images=images, **changes)


KIND = HeadKind(METHOD, Flash, flash_head, of_target, ("block_size", "queries", "mlp_width"), flags=("bias",))
