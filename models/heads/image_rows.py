"""Image vectors as inputs of draft heads.

A head of a text model reads pairs (feature, next token). Where the next token is the placeholder of an image vector, a
head for vision-language targets reads a row instead: the vector, or one that its compressor made of all vectors of the
image. It caches no other rows of images. Positions do not change, so those of the text agree with the target's. They
count tokens, also for targets whose own positions have several axes.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.errors import UsageError
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.heads import memory
from specjax.models.heads.contract import FeaturePairs
from specjax.models.heads.memory import HeadMemory
from specjax.models.llama import LlamaConfig
from specjax.models.vision.config import VisionLanguageConfig
from specjax.models.vision.grids import UNUSED
from specjax.models.vision.memory import ImageMemory
from specjax.types import Array, Context


class ImageRows(NamedTuple):
    """The rows that a head reads in place of the image vectors of a batch."""

    rows: Array  # [B, P, D]
    is_kept: Array  # bool[B, P], False for rows that it does not cache


class ImagePairs(NamedTuple):
    """The rows at some pairs."""

    rows: Array  # [B, T, D]
    is_image: Array  # bool[B, T], True if the next token of the pair is a placeholder
    is_kept: Array  # bool[B, T]; all pairs of text are kept

    def put(self, x: Array) -> Array:
        """Replace the inputs x [B, T, D] of pairs that are rows of images."""
        return jnp.where(self.is_image[..., None], self.rows.astype(x.dtype), x)


class ImageModule(Protocol):
    """A module that reads rows of images."""

    def image_rows(self, images: ImageMemory, context: Context, keys: Array | None) -> ImageRows:
        """Return the rows. keys: key[B] of what it draws in training; None: it is not trained."""

    def embedded(self, tokens: Array, context: Context) -> Array: ...
    def fused(self, features: Array) -> Array: ...
    def layers(
        self, embedded: Array, state: Array, step: L.PassInputs, cache: kv.KVCache, images: ImagePairs | None = None
    ) -> tuple[Array, kv.Pending]: ...


def read_pairs(
    module: ImageModule, state: HeadMemory, pairs: FeaturePairs, context: Context, layer: LlamaConfig
) -> HeadMemory:
    """Read pairs, with rows of the images of `Context.images` if there are any."""
    embedded, fused = module.embedded(pairs.tokens, context), module.fused(pairs.features.astype(layer.dtype))
    if context.images is None:
        return memory.read(state, pairs, context, layer, lambda *pass_of: module.layers(embedded, fused, *pass_of))
    images, rows = context.images, module.image_rows(context.images, context, pairs.keys)
    number = state.num_pairs[:, None] + jnp.arange(pairs.tokens.shape[1])
    index, is_image = images.find(number + 1)  # a pair has the token after its own position
    row_is_kept = take_along(rows.is_kept, index, 1)
    at_pairs = ImagePairs(take_along(rows.rows, index[..., None], 1), is_image, ~is_image | row_is_kept)
    layers = lambda step, cache: module.layers(embedded, fused, step, cache, at_pairs)
    return memory.read(state, pairs, context, layer, layers, at_pairs.is_kept)


class ImageSizes(NamedTuple):
    """The placeholder and the number of vectors of the images of a target."""

    token: int = -1  # the placeholder; -1: the target reads no images
    vectors: int = 0  # of each tile; 0: images have any size

    @classmethod
    def of_target(cls, target: Any) -> ImageSizes:
        """Return the sizes of a target with this config."""
        if not isinstance(target, VisionLanguageConfig):
            return cls()
        return cls(target.image_token, 0 if target.tower.merge else target.places_per_tile)

    def default_rows(self, per_row: int) -> int:
        """Return the rows of a compressor: 64, or fewer if each row then stands for less than `per_row` vectors."""
        return min(64, max(self.vectors // per_row, 1)) if self.vectors else 64

    def check_rows(self, queries: int) -> None:
        """Check the number of rows of a compressor. Raises: UsageError for more rows than vectors."""
        if 0 < self.vectors < queries:
            raise UsageError(f"queries={queries} is more than the {self.vectors} vectors of an image; lower it")


NO_IMAGES = ImageSizes()


class ImageBlocks(NamedTuple):
    """The vectors of images or tiles, each by itself."""

    vectors: Array  # [B, N, n, D]
    is_valid: Array  # bool[B, N, n], the first vectors of a block; others do not exist

    def regions(self, count: int) -> tuple[Array, Array]:
        """Divide the vectors of each block into at most `count` regions of consecutive ones.

        Returns: the region int32[B, N, n] of each vector, and bool[B, N, n], True for the first one of a region.
        """
        size = jnp.maximum(jnp.sum(self.is_valid, 2, keepdims=True, dtype=jnp.int32), 1)
        region = jnp.minimum(jnp.arange(self.vectors.shape[2]) * count // size, count - 1)
        is_first = jnp.concatenate([jnp.ones_like(region[..., :1], bool), region[..., 1:] != region[..., :-1]], 2)
        return region, is_first & self.is_valid

    def at_regions(self, compressed: Array) -> ImageRows:
        """Return rows [B, N, count, D] of regions, each at the first vector of its region."""
        region, is_first = self.regions(compressed.shape[2])
        return self.flat(take_along(compressed, region[..., None], 2), is_first)

    def flat(self, rows: Array, is_kept: Array) -> ImageRows:
        """Return the rows [B, N, n, D] of blocks as those of a batch."""
        batch, _, _, width = rows.shape
        return ImageRows(rows.reshape(batch, -1, width), is_kept.reshape(batch, -1))


def split_blocks(images: ImageMemory, sizes: ImageSizes) -> ImageBlocks:
    """Return the vectors by image, or by tile of one."""
    batch, count, width = images.vectors.shape
    blocks = count // sizes.vectors if images.axes is None else images.axes.ends.shape[1]
    shape = batch, blocks, count // blocks
    return ImageBlocks(images.vectors.reshape(*shape, width), (images.places != UNUSED).reshape(shape))


def attend(queries: Array, blocks: ImageBlocks) -> Array:
    """Return [B, N, R, D]: means of the vectors of each block, weighted by softmax(queries [R, D] v / sqrt(D))."""
    vectors = blocks.vectors.astype(jnp.float32)
    scores = jnp.einsum("rd,bnvd->bnrv", queries.astype(jnp.float32), vectors) * queries.shape[1] ** -0.5
    scores = jnp.where(blocks.is_valid[:, :, None], scores, jnp.finfo(jnp.float32).min)
    return jnp.einsum("bnrv,bnvd->bnrd", jax.nn.softmax(scores, -1), vectors)
