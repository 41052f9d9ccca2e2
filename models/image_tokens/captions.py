"""Text-conditional LlamaGen: vectors of a caption stand before the codes of an image (arXiv 2406.06525).

A caption is a list of at most `condition_tokens` vectors of a text encoder. A learned MLP maps them to the width of the
model, and they replace the embeddings of placeholders. The released code pads captions on the left to a fixed length,
and hides the padding. The condition has no rotation, so a text without the padding has the same logits. A prompt has
one placeholder per vector, and the grid begins behind them.

The unconditional caption is learned. It has a vector for each of the padded places, so a caption of n vectors is
compared with its last n.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.arrays.indexing import take_along
from specjax.errors import UsageError
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.image_tokens.llamagen import LlamaGenConfig, LlamaGenDecoder
from specjax.numerics.global_arrays import gather
from specjax.types import Appended, Array, Mixture, Output, PyTree, Stream, Target

PARTS = "caption_mlp", "unconditional"
"""The parameters that only the captions need."""


@dataclass(frozen=True)
class CaptionConfig(LlamaGenConfig):
    """Shapes and constants of LlamaGen for images of captions (t2i). The last token is the placeholder."""

    condition_tokens: int = 120  # vectors of the longest caption
    caption_width: int = 2048
    name: str = "llamagen_t2i"

    @property
    def placeholder(self) -> int:
        """Return the token of prompts that a vector replaces."""
        return self.codes


class Captions(NamedTuple):
    """The captions of a batch, also after the MLP."""

    vectors: Array  # float32[B, P, W], then unspecified values
    length: Array  # int32[B]


def captions(target: Target, features: Sequence[Any]) -> Captions:
    """Return the `inputs` for the features [n, caption_width] of each caption. A prompt has n placeholders.

    Raises: UsageError for a model without captions, for no captions, and for features of another shape.
    """
    config = caption_config(target)
    arrays = [_features_of(row, x, config) for row, x in enumerate(features)]
    if not arrays:
        raise UsageError("there are no captions; give the features of one caption per prompt")
    padded = [np.pad(x, ((0, config.condition_tokens - len(x)), (0, 0))) for x in arrays]
    return Captions(jnp.asarray(np.stack(padded)), jnp.asarray([len(x) for x in arrays], jnp.int32))


def _features_of(row: int, features: Any, config: CaptionConfig) -> np.ndarray:
    """Return the features float32[n, W] of a caption. Raises: UsageError for another shape."""
    try:
        x: np.ndarray = np.asarray(features, np.float32)
    except (TypeError, ValueError):  # texts, or lists of different lengths
        x = np.zeros(0)
    if x.ndim != 2 or x.shape[1] != config.caption_width or not 1 <= len(x) <= config.condition_tokens:
        raise UsageError(
            f"the features of caption {row} have the shape {list(x.shape)}, which must be 1 to "
            f"{config.condition_tokens} vectors of {config.caption_width} numbers without padding"
        )
    return x


def unconditional_captions(target: Target, conditional: Captions) -> Captions:
    """Return the learned captions with the lengths of `conditional`: the last vectors of the learned ones."""
    count = caption_config(target).condition_tokens
    table = target.params["unconditional"]["weight"]
    places = count - conditional.length[:, None] + jnp.arange(conditional.vectors.shape[1])
    return Captions(jnp.take(table, places, axis=0, mode="clip").astype(jnp.float32), conditional.length)


def caption_config(target: Target) -> CaptionConfig:
    """Return the config of a model that reads captions. Raises: UsageError for other models."""
    config = target.model.config
    if not isinstance(config, CaptionConfig):
        raise UsageError(f"{target.model.name} reads no captions; read a text-conditional LlamaGen checkpoint")
    return config


def check_captions(config: CaptionConfig, inputs: PyTree) -> None:
    """Check the inputs of a model that reads captions. Raises: UsageError for others."""
    shape = (config.condition_tokens, config.caption_width)
    if not isinstance(inputs, Captions) or inputs.vectors.shape[1:] != shape:
        raise UsageError(f"inputs of {config.name} must be captions; pass inputs=specjax.models.captions(...)")


def check_placeholders(config: CaptionConfig, inputs: PyTree, tokens: Any, lengths: Any) -> None:
    """Check that each prompt int[B, P] begins with one placeholder per vector of its caption, and has no others.

    The vectors replace the first tokens of a text, so a shorter prompt would lose codes.

    Raises: UsageError for other prompts.
    """
    check_captions(config, inputs)
    tokens, lengths, counts = gather((tokens, lengths, inputs.length))
    for row, (prompt, length, count) in enumerate(zip(tokens, lengths, counts, strict=True)):
        is_placeholder = prompt[:length] == config.placeholder
        if is_placeholder.sum() != count or not is_placeholder[:count].all():
            raise UsageError(
                f"prompt {row} has {is_placeholder.sum()} placeholders (token {config.placeholder}), and its caption "
                f"{count} vectors; begin it with one placeholder per vector"
            )


class CaptionMLP(nnx.Module):
    """Two linear layers without biases, and gelu between them."""

    def __init__(self, c: CaptionConfig, *, rngs: nnx.Rngs):
        self.up = L.Linear(c.caption_width, c.width, dtype=c.dtype, rngs=rngs)
        self.down = L.Linear(c.width, c.width, dtype=c.dtype, rngs=rngs)
        self.act = functools.partial(jax.nn.gelu, approximate=True)

    def __call__(self, x: Array) -> Array:
        return self.down(self.act(self.up(x)).astype(x.dtype))


class CaptionDecoder(LlamaGenDecoder):
    """A decoder of codes whose prompts are captions. Its cache is a `ConditionedCache`."""

    config: CaptionConfig

    def __init__(self, config: CaptionConfig, *, rngs: nnx.Rngs, layers: nnx.List | None = None):
        super().__init__(config, rngs=rngs, layers=layers)
        self.caption_mlp = CaptionMLP(config, rngs=rngs)
        self.unconditional = L.Embedding(config.condition_tokens, config.caption_width, dtype=config.dtype, rngs=rngs)

    def encode(self, inputs: Captions) -> Captions:
        """Map the vectors of captions to the width of the model."""
        return Captions(self.caption_mlp(inputs.vectors.astype(self.config.dtype)), inputs.length)

    def __call__(
        self, tokens: Array | Mixture | Stream | Appended, cache: Any, *, positions: Array, mask: Array, **options: Any
    ) -> tuple[Output, kv.Pending]:
        memory: Captions = cache.memory
        if not isinstance(tokens, Stream):
            x = L.embed_inputs(self.embed_tokens, tokens)
            places = jnp.minimum(positions, memory.vectors.shape[1] - 1)
            vectors = take_along(memory.vectors, places[..., None], 1).astype(x.dtype)
            tokens = Stream(jnp.where((positions < memory.length[:, None])[..., None], vectors, x))
        options["settings"] = self.config.attention_settings(positions, memory.length[:, None])
        return super().__call__(tokens, cache.text, positions=positions, mask=mask, **options)


def pass_params(params: PyTree) -> PyTree:
    """Return the parameters that a pass over tokens reads. The captions were read before."""
    return {name: part for name, part in params.items() if name not in PARTS}
