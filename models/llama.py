"""Families of Llama's kind: Llama 2/3, SmolLM2, Mistral, Qwen2 (biases), Qwen3 (q/k norms), Phi-3 and Phi-4 (heads that
are rotated in part), OLMo 2 and 3 (norms behind the sublayers)."""

from __future__ import annotations

from dataclasses import dataclass

from specjax.models.decoder import DecoderConfig


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """Shapes and constants of a Llama-type model."""

    name: str = "llama"
