"""Model families as Flax NNX modules, one file each, and their loaders."""

from specjax.models.bridge import abstract_params, init_params, make_model
from specjax.models.cache import lanes_of
from specjax.models.gemma3 import Gemma3Config
from specjax.models.llama import LlamaConfig
from specjax.models.loading import Tokenizer, first_difference, load
from specjax.models.variants.pruning import narrowed, pruned

__all__ = [
    "Gemma3Config",
    "LlamaConfig",
    "Tokenizer",
    "abstract_params",
    "first_difference",
    "init_params",
    "lanes_of",
    "load",
    "make_model",
    "narrowed",
    "pruned",
]
