"""A hybrid decoder: tokens to logits."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from specjax.errors import UsageError
from specjax.models import layers as L
from specjax.models.decoder import LanguageModel
from specjax.models.experts.counting import mean_experts, start_history
from specjax.models.hybrid.ancestry import Ancestry, find_ancestry
from specjax.models.hybrid.block import HybridBlock, scaled
from specjax.models.hybrid.config import HybridConfig
from specjax.models.hybrid.layer_inputs import LayerInputTable
from specjax.models.hybrid.loop import run_blocks
from specjax.models.hybrid.memory import HybridCache, HybridPending
from specjax.types import Appended, Array, Mixture, Output, Stream


class HybridDecoder(LanguageModel):
    """A decoder-only language model whose layers have different kinds."""

    config: HybridConfig

    def __init__(self, config: HybridConfig, *, rngs: nnx.Rngs, layers: nnx.List | None = None):
        super().__init__(config, rngs=rngs, layers=layers)
        self.layer_inputs = None if config.layer_inputs is None else LayerInputTable(config, rngs)

    @staticmethod
    def make_layer(config: HybridConfig, layer: int, rngs: nnx.Rngs) -> HybridBlock:
        return HybridBlock(config.of_layer(layer), config.kinds[layer], rngs)

    def __call__(
        self, tokens: Array | Mixture | Stream | Appended, cache: HybridCache, *, positions: Array, mask: Array,
        taps=(), earlier: HybridPending | None = None, layout=None,
    ) -> tuple[Output, HybridPending]:  # fmt: skip
        attention = None if earlier is None else earlier.attention
        shared = L.make_pass_inputs(
            positions, mask, cache.attention, attention, layout, history=start_history(self.config.experts, tokens)
        )
        x = L.embed_inputs(lambda tokens: self.embed_tokens(tokens, layout), tokens)
        of_layers = None
        if self.layer_inputs is not None:
            if isinstance(tokens, Stream | Appended):
                raise UsageError(
                    f"{self.config.name} has per-layer embeddings, which need tokens, so it reads no soft prompts or "
                    "other vectors; choose a method without them, such as token_recycling or eagle3"
                )
            of_layers = self.layer_inputs(tokens, x)
        stream, pending, history = run_blocks(
            self.config, self.layers, x, shared, self._ancestry(mask), cache, earlier, of_layers
        )
        hidden = self.norm(stream[-1])
        read = mean_experts(history, self.config)
        streams = tuple(stream[tap] for tap in taps)
        return Output(self.predict(hidden, layout), hidden, streams, experts=read), pending

    def _ancestry(self, mask: Array) -> Ancestry | None:
        """Return the ancestry for recurrent layers; None if there are none. A constant `mask` may mark a text."""
        if not any(kind.recurs for kind in self.config.kinds):
            return None
        return find_ancestry(mask, self.config.window_length)

    def embed_tokens(self, tokens: Array | Mixture | Stream, layout=None) -> Array:
        x = super().embed_tokens(tokens, layout)
        return x if isinstance(tokens, Stream) else scaled(x, self.config.multipliers.embedding)

    def _capped(self, logits: Array) -> Array:
        return super()._capped(scaled(logits, self.config.multipliers.logits)).astype(jnp.float32)
