"""Published drafters that use a denoiser for an autoregressive target, one file each."""

from specjax.diffusion.drafters.deer import deer
from specjax.diffusion.drafters.diffuspec import diffuspec
from specjax.diffusion.drafters.failfast import failfast

__all__ = ["deer", "diffuspec", "failfast"]
