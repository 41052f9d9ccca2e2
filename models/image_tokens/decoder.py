"""Decoders of codes: their logits are not one product, and draft heads have the layers of Llama."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import jax

from specjax.models.decoder import Decoder, DecoderConfig
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Best


@dataclass(frozen=True)
class CodeDecoderConfig(DecoderConfig):
    """Shapes and constants of a decoder that writes the codes of images."""

    def as_llama(self) -> LlamaConfig:
        """Return the config of a model of the Llama family with the same shapes."""
        return LlamaConfig(**{field.name: getattr(self, field.name) for field in fields(DecoderConfig)})

    def draft_head_config(self, num_layers: int = 1, **changes) -> Any:
        """Return the config of a draft head, whose layers are those of Llama."""
        return self.as_llama().draft_head_config(num_layers, **changes)


class CodeDecoder(Decoder):
    """A decoder with a `predict` of its own, whose best tokens cannot be found by blocks of one matrix."""

    def predict_best(self, hidden: Array, k: int) -> Best:
        """Return the `k` best of `predict`."""
        logits = self.predict(hidden)
        values, tokens = jax.lax.top_k(logits, k)
        return Best(tokens, values, jax.nn.logsumexp(logits, -1))
