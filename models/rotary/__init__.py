"""Rotary position embeddings."""

from specjax.models.rotary.frequencies import RopeScaling, rope_frequencies
from specjax.models.rotary.rotation import Rotation, rotate

__all__ = ["RopeScaling", "Rotation", "rope_frequencies", "rotate"]
