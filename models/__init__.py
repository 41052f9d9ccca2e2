"""Model families as Flax NNX modules, one file each, and their loaders."""

from specjax.models.bridge import abstract_params, init_params, make_model
from specjax.models.gemma3 import Gemma3Config
from specjax.models.llama import LlamaConfig

__all__ = ["Gemma3Config", "LlamaConfig", "abstract_params", "init_params", "make_model"]
