"""A text model that reads images. The tower runs once per prompt, and its vectors replace those of placeholders."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.arrays import texts
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.decoder import Decoder
from specjax.models.layout import REPLICATED, Layout
from specjax.models.products import pad_tokens
from specjax.models.skipping.attention_layers import SkippingLayers
from specjax.models.vision.config import VisionLanguageConfig
from specjax.models.vision.connectors import make_connector
from specjax.models.vision.grid_tower import GridTower
from specjax.models.vision.grids import GridImages
from specjax.models.vision.look_ahead import look_ahead, with_images
from specjax.models.vision.memory import ImageMemory, ImagePositions, Images
from specjax.models.vision.tower import ImageTower
from specjax.types import Appended, Array, Mixture, Output, PyTree, Stream


class ImageDecoder(Decoder):
    """A decoder with an image tower and a connector."""

    config: VisionLanguageConfig

    def __init__(self, config: VisionLanguageConfig, *, rngs: nnx.Rngs, layers: nnx.List | None = None):
        super().__init__(config, rngs=rngs, layers=layers)
        tower = GridTower if config.tower.merge else ImageTower
        self.tower = tower(config.tower, dtype=config.dtype, rngs=rngs)
        self.connector: Any = make_connector(config, rngs)

    def encode(self, images: Images | GridImages, layout: Layout | None = None) -> ImageMemory:
        """Run the tower and the connector, one tile after another. Tiles without an image take no time.

        On a mesh each device reads a part of the tiles.
        """
        (graphdef, state), width = nnx.split((self.tower, self.connector)), self.config.width
        levels = 1 + len(self.config.tower.deep_layers)
        dtype = jnp.dtype(self.config.dtype)
        if isinstance(images, GridImages):
            values, extent = images.patches, images.grids
            axes = ImagePositions(images.rotary, images.ends, images.shifts)
        else:
            values, extent, axes = images.pixels, images.patches, None
        samples = None if isinstance(images, GridImages) else images.samples
        rows, tiles = extent.shape[:2]
        count = images.places.shape[1] // tiles if samples is None else self.config.vectors_per_tile

        def read_tiles(state: PyTree, values: Array, extent: Array) -> Array:
            def read_tile(tile: tuple[Array, Array]) -> Array:
                tower, connector = nnx.merge(graphdef, state)
                return connector(tower(*tile)).astype(dtype).reshape(levels, count, width)

            def read_any(tile: tuple[Array, Array]) -> Array:
                blank = lambda tile: jnp.zeros((levels, count, width), dtype)
                return jax.lax.cond(jnp.any(tile[1]), read_tile, blank, tile)

            rows, tiles = extent.shape[:2]
            flat = tuple(x.reshape(rows * tiles, *x.shape[2:]) for x in (values, extent))
            return jax.lax.map(read_any, flat).reshape(rows, tiles, levels, count, width)

        read = read_tiles if layout is None else functools.partial(layout.map_tiles, read_tiles)
        by_level = read(state, values, extent).swapaxes(1, 2).reshape(rows, levels, tiles * count, width)
        vectors, deep = by_level[:, 0], by_level[:, 1:] if levels > 1 else None
        if samples is not None:
            vectors = samples.apply(vectors, self.connector.row_end["vector"][...])
        return ImageMemory(vectors, images.places, axes, deep)

    def __call__(
        self, tokens: Array | Mixture | Stream | Appended, cache: Any, *, positions: Array, mask: Array, **options: Any
    ) -> tuple[Output, kv.Pending]:
        """Run the text model on new tokens, as `Model.forward` does.

        Args:
          cache: a `ConditionedCache`.
          options: those of `Decoder`.

        If the vectors of an image see each other, a chunk of a text also reads the rest of an image that it cuts in
        two. Such a chunk has the constant mask of `texts.causal_mask`.
        """
        if cache.memory is not None and not isinstance(tokens, Stream):
            embed = functools.partial(self.embed_tokens, layout=options.get("layout"))
            x = L.embed_inputs(embed, tokens)
            tokens = Stream(cache.memory.put(x, positions))
            additions = cache.memory.additions(positions)
            if additions:
                options["run_layers"] = with_additions(options.get("run_layers", L.run_layers), additions)
        if cache.memory is not None and self.config.sections:
            rotary = cache.memory.rotary(positions, self.config.frequency_axes)
            options["settings"] = self.config.attention_settings(rotary)
        decode: Callable[..., tuple[Output, kv.Pending]] = super().__call__
        run = functools.partial(decode, cache=cache.text, **options)
        if cache.memory is None or not self.config.sees_ahead:
            return run(tokens, positions=positions, mask=mask)
        count, earlier = self.config.vectors_per_tile, options.get("earlier")
        keys = positions if earlier is None else jnp.concatenate([earlier.positions, positions], 1)
        visible = with_images(mask, positions, keys, cache.memory, count)
        # No depth policy reads a prompt with images that see ahead, so such a pass has no images to complete.
        if not texts.is_causal(mask) or isinstance(options.get("run_layers"), SkippingLayers):
            return run(tokens, positions=positions, mask=visible)
        assert isinstance(tokens, Stream), "made above, or given"
        output, pending = look_ahead(run, tokens.values, positions, visible, cache.memory, count)
        return output._replace(logits=self.predict(output.hidden, options.get("layout"))), pending


class AddingBlock(nnx.Module):
    """A layer of the text model with vectors that are added to the stream after it."""

    def __init__(self, block: nnx.Module, addition: Array):
        self.block: Any = block
        self.addition = nnx.Variable(addition)

    def attend(self, x: Array, inputs: L.LayerInputs):
        return self.block.attend(x, inputs)

    def keys(self, x: Array, inputs: L.LayerInputs):
        return self.block.keys(x, inputs)

    def feed(self, x: Array, shared: L.PassInputs) -> Array:
        return self.feed_with_history(x, shared)[0]

    def feed_with_history(self, x: Array, shared: L.PassInputs):
        y, history = self.block.feed_with_history(x, shared)
        return y + pad_tokens(self.addition[...].astype(y.dtype), x.shape[1]), history


def with_additions(run_layers: Callable[..., Any], additions: Sequence[Array]) -> Callable[..., Any]:
    """Return a loop over layers that adds vectors [B, T, D] to the stream after each of the first layers."""

    def run(layers: nnx.List, *inputs: Any, **options: Any):
        first = [AddingBlock(block, x) for block, x in zip(layers, additions, strict=False)]
        return run_layers(nnx.List([*first, *layers[len(first) :]]), *inputs, **options)

    return run


def pass_params(params: PyTree) -> PyTree:
    """Return the parameters that a pass over tokens reads. The images were read before."""
    return {name: part for name, part in params.items() if name not in REPLICATED}
