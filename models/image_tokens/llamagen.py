"""LlamaGen: a Llama over the codes of an image, row by row (Sun et al. 2024, arXiv 2406.06525).

Differences from Llama: half of each head is rotated by the row of a token in the grid, and the other half by its
column. The cosines and sines of the condition are zero, so its queries and keys are zero vectors. Every token has the
score 0 with it, and only its values count.

The vocabulary contains the codes, then the classes, and at last the class of unconditional images. An image cannot
contain a class, so the logits of classes are -inf.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from specjax.models import layers as L
from specjax.models.image_tokens.decoder import CodeDecoder, CodeDecoderConfig
from specjax.models.rotary import Rotation, rope_frequencies
from specjax.types import Array


@dataclass(frozen=True)
class LlamaGenConfig(CodeDecoderConfig):
    """Shapes and constants of LlamaGen for images of classes (c2i)."""

    grid: int = 16  # rows and columns of the image
    codes: int = 16384  # the first tokens of the vocabulary; the others are classes
    condition_tokens: int = 1
    name: str = "llamagen"

    @property
    def unconditional_class(self) -> int:
        """Return the token of the class of unconditional images."""
        return self.vocab_size - 1

    def attention_settings(self, positions: Array, condition: Array | None = None) -> L.AttentionSettings:
        """Return the rotation by the rows and columns of the tokens at positions int32[B, T].

        condition: int32[B, 1], tokens before the grid. None: `condition_tokens`.
        """
        first = self.condition_tokens if condition is None else condition
        place = jnp.maximum(positions - first, 0)
        frequencies = rope_frequencies(self.head_dim // 2, self.rope_base)
        by_axis = (place // self.grid, place % self.grid)
        angle = jnp.concatenate([axis[:, :, None, None] * frequencies for axis in by_axis], -1)
        is_image = (positions >= first)[:, :, None, None]
        return L.AttentionSettings(Rotation.of_angles(angle, is_image.astype(jnp.float32), same_bits=self.same_bits))


class LlamaGenDecoder(CodeDecoder):
    """A decoder whose text consists of codes."""

    config: LlamaGenConfig

    def predict(self, hidden: Array, layout=None) -> Array:
        logits = super().predict(hidden, layout)
        return jnp.where(jnp.arange(logits.shape[-1]) < self.config.codes, logits, -jnp.inf)
