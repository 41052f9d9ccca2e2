"""Memories: what of a canvas is computed in a pass."""

from specjax.diffusion.memories.append import append
from specjax.diffusion.memories.delayed import delayed
from specjax.diffusion.memories.dual import dual
from specjax.diffusion.memories.guided import guided
from specjax.diffusion.memories.phases import phases
from specjax.diffusion.memories.prefix import prefix
from specjax.diffusion.memories.token_causal import TOKEN_CAUSAL
from specjax.diffusion.memories.whole import WHOLE

__all__ = ["TOKEN_CAUSAL", "WHOLE", "append", "delayed", "dual", "guided", "phases", "prefix"]
