"""Rules that select the columns to decide."""

from specjax.diffusion.rules.quota import quota as quota
from specjax.diffusion.rules.threshold import threshold as threshold

__all__ = ["quota", "threshold"]
