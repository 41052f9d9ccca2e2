"""Schedules: the window of each pass and the number of columns to decide in it."""

from specjax.diffusion.schedules.blocks import blocks as blocks
from specjax.diffusion.schedules.leading import leading
from specjax.diffusion.schedules.sliding import sliding
from specjax.diffusion.schedules.timesteps import timesteps as timesteps

__all__ = ["blocks", "leading", "sliding", "timesteps"]
