"""Caches of diffusion decoding: the columns that a pass computes, and those it reads from earlier passes."""

from specjax.diffusion.caches.append import append
from specjax.diffusion.caches.delayed import delayed
from specjax.diffusion.caches.dual import dual
from specjax.diffusion.caches.guided import guided
from specjax.diffusion.caches.phases import phases
from specjax.diffusion.caches.prefix import prefix
from specjax.diffusion.caches.token_causal import TOKEN_CAUSAL
from specjax.diffusion.caches.whole import WHOLE

__all__ = ["TOKEN_CAUSAL", "WHOLE", "append", "delayed", "dual", "guided", "phases", "prefix"]
