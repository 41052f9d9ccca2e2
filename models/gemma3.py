"""Gemma 2 and 3, text only, with local and global attention and norms on both sides of each sublayer.

Gemma 2 has soft caps; Gemma 3 has two rope bases and q/k norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specjax.models.decoder import DecoderConfig


@dataclass(frozen=True)
class Gemma3Config(DecoderConfig):
    """Shapes and constants of a Gemma text model. The defaults are those of Gemma 3."""

    window: int | None = 512
    rope_base: float = 1_000_000.0  # base of the global layers
    local_rope_base: float | None = 10_000.0
    norm_eps: float = 1e-6
    qk_norm: bool = True
    norms: Literal["before", "after", "both"] = "both"
    activation: Literal["silu", "gelu"] = "gelu"
    scales_embedding: bool = True
    max_positions: int = 32768
    name: str = "gemma3"
