"""Models of the Llama family.

They are Llama 2 and 3, SmolLM2, Mistral, Qwen2 (biases), Qwen3 (q/k norms), Phi-3 and Phi-4 (partially rotated heads),
and OLMo 2 and 3 (norms after the sublayers).
"""

from __future__ import annotations

from dataclasses import dataclass

from specjax.models.decoder import DecoderConfig


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """Shapes and constants of a Llama-type model."""

    name: str = "llama"
