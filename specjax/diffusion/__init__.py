"""Diffusion language models: masked and block diffusion under the contracts of `specjax.diffusion.types`.

`specjax.denoise` decodes with them; `specjax.diffusion.methods` has one file per published method."""

from specjax.diffusion.drafting import as_drafter
from specjax.diffusion.hex import hex_vote
from specjax.diffusion.loop import Denoised
from specjax.diffusion.types import (
    Act,
    Canvas,
    Control,
    Denoiser,
    Memory,
    Procedure,
    Proposal,
    Rule,
    Schedule,
    Score,
    Seen,
    Verify,
    View,
    Wide,
    Window,
    autoregressive,
)

__all__ = [
    "Act",
    "Canvas",
    "Control",
    "Denoised",
    "Denoiser",
    "Memory",
    "Procedure",
    "Proposal",
    "Rule",
    "Schedule",
    "Score",
    "Seen",
    "Verify",
    "View",
    "Wide",
    "Window",
    "as_drafter",
    "autoregressive",
    "hex_vote",
]
