"""Model families as Flax NNX modules, one file each, and the loaders of their checkpoints."""

from specjax.models.bridge import abstract_params, init_params, make_model
from specjax.models.gemma3 import Gemma3Config
from specjax.models.image_tokens.captions import captions, unconditional_captions
from specjax.models.image_tokens.chameleon import code_tokens
from specjax.models.image_tokens.pixels import janus_pixels
from specjax.models.llama import LlamaConfig
from specjax.models.loading import Tokenizer, first_difference, load
from specjax.models.loading.formats.llamagen import read_llamagen
from specjax.models.seq2seq.memory import sources, spectrograms
from specjax.models.storage import storage_options
from specjax.models.variants.guidance import guided, unconditional
from specjax.models.variants.pruning import narrow_mlps, prune_layers
from specjax.models.variants.shared_encoder import share_encoder
from specjax.models.vision.grids import PromptPatches
from specjax.models.vision.memory import PromptImages, images
from specjax.models.vision.processor import load_image_processor

__all__ = [
    "Gemma3Config",
    "LlamaConfig",
    "PromptImages",
    "PromptPatches",
    "Tokenizer",
    "abstract_params",
    "captions",
    "code_tokens",
    "first_difference",
    "guided",
    "images",
    "init_params",
    "janus_pixels",
    "load",
    "load_image_processor",
    "make_model",
    "narrow_mlps",
    "prune_layers",
    "read_llamagen",
    "share_encoder",
    "sources",
    "spectrograms",
    "storage_options",
    "unconditional",
    "unconditional_captions",
]
