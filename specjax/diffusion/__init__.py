"""Diffusion language models: masked and block diffusion under the contracts of `specjax.diffusion.types`.

`specjax.denoise` decodes with these models. `specjax.diffusion.methods` has one file per published method.
"""

from specjax.diffusion.drafting import as_drafter
from specjax.diffusion.hex import hex_vote
from specjax.diffusion.loop import Denoised
from specjax.diffusion.types import (
    Canvas,
    CanvasCache,
    CanvasOutput,
    ColumnRule,
    Control,
    ControlAction,
    Denoiser,
    Procedure,
    Proposal,
    Schedule,
    Score,
    Verify,
    View,
    Window,
    WindowOutput,
    autoregressive,
)

__all__ = [
    "Canvas",
    "CanvasCache",
    "CanvasOutput",
    "ColumnRule",
    "Control",
    "ControlAction",
    "Denoised",
    "Denoiser",
    "Procedure",
    "Proposal",
    "Schedule",
    "Score",
    "Verify",
    "View",
    "Window",
    "WindowOutput",
    "as_drafter",
    "autoregressive",
    "hex_vote",
]
