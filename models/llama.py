"""Models of the Llama family.

The family contains Llama 2 and 3, SmolLM2, Mistral, Qwen2 (biases) and Qwen3 (q/k norms). Phi-3 and Phi-4 have
partially rotated heads. OLMo 2 and 3 have norms after the sublayers.
"""

from __future__ import annotations

from dataclasses import dataclass

from specjax.models.decoder import DecoderConfig


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """Shapes and constants of a Llama-type model."""

    name: str = "llama"
