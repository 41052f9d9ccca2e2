"""Registry of the family modules by architecture."""

from __future__ import annotations

from types import ModuleType

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.bridge import Config
from specjax.models.gemma3 import Gemma3Config
from specjax.models.hybrid.config import HybridConfig
from specjax.models.image_tokens.chameleon import ChameleonConfig
from specjax.models.image_tokens.janus import JanusConfig
from specjax.models.llama import LlamaConfig
from specjax.models.loading.families import denoisers, llada, llama
from specjax.models.loading.families.gemma import gemma3, gemma4, gemma4_gguf
from specjax.models.loading.families.hybrid import (
    bamba,
    falcon_h1,
    granite_hybrid,
    lfm2,
    mamba2,
    nemotron_h,
    qwen3_5,
    qwen3_next,
)
from specjax.models.loading.families.image_tokens import chameleon, janus
from specjax.models.loading.families.latent import deepseek, deepseek_gguf
from specjax.models.loading.families.seq2seq import bart, t5, whisper
from specjax.models.loading.families.vision import (
    gemma3_vision,
    idefics,
    llava,
    onevision,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_vl,
)
from specjax.models.seq2seq.config import BartConfig, T5Config, WhisperConfig
from specjax.models.vision.config import VisionLanguageConfig

HYBRIDS = (
    qwen3_5,
    qwen3_next,
    lfm2,
    mamba2,
    bamba,
    nemotron_h,
    granite_hybrid,
    falcon_h1,
    gemma4,
    gemma4_gguf,
    deepseek,
    deepseek_gguf,
)
VISION = (idefics, llava, qwen2_vl, qwen2_5_vl, qwen3_vl, gemma3_vision, onevision)
OF_CODES = (chameleon, janus)
FAMILIES = (llama, gemma3, llada, *HYBRIDS, t5, bart, whisper, *VISION, *OF_CODES)

_MAMBA_1 = "its Mamba-1 layers have a decay for each channel and state, so one pass cannot verify a token tree"
_KDA = "its Kimi delta attention has a decay for each key channel, which specjax does not support"
_EXPERTS = "it is a mixture of experts, which specjax does not support; use a dense model"
REFUSED = {
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba", "zamba"), _MAMBA_1),
    **dict.fromkeys(("kimi_linear", "kimi-linear"), _KDA),
    **dict.fromkeys(("nemotron_h_moe",), _EXPERTS),
    **dict.fromkeys(("lfm2_moe", "lfm2moe"), _EXPERTS),
    "zamba2": "its attention layers share their weights, which specjax does not support",
}
"""Architectures that are refused for a reason of their own, in both formats."""


def by_config(config: Config) -> ModuleType:
    """Return the family of a loaded model. Raises: UsageError for a model that has no config.json."""
    if isinstance(config, HybridConfig):
        return next(family for family in HYBRIDS if config.model_type in family.MODEL_TYPES)
    if isinstance(config, VisionLanguageConfig):
        return next(family for family in VISION if config.model_type in family.HF_TYPES)
    families: dict[type, ModuleType] = {
        LlamaConfig: llama, Gemma3Config: gemma3, T5Config: t5, BartConfig: bart, WhisperConfig: whisper,
        ChameleonConfig: chameleon, JanusConfig: janus,
    }  # fmt: skip
    if type(config) not in families:
        raise UsageError(f"no config.json can describe {config.name}, which has a format of its own; keep its files")
    return families[type(config)]


def by_hf(kind: str, where: str) -> ModuleType:
    """Return the family of a Hugging Face `model_type`."""
    return _find("HF_TYPES", kind, where)


def with_images(kind: str) -> ModuleType | None:
    """Return the family of a Hugging Face `model_type` that reads images, if another one reads its text alone."""
    return next((family for family in VISION if kind in family.HF_TYPES and kind in gemma3.HF_TYPES), None)


def by_gguf(kind: str, where: str) -> ModuleType:
    """Return the family of a GGUF `general.architecture`."""
    return _find("GGUF_TYPES", kind, where)


def _find(table: str, kind: str, where: str) -> ModuleType:
    for family in FAMILIES:
        if kind in getattr(family, table):
            return family
    if kind in REFUSED:
        raise UsageError(f"{where} has the architecture {quote(kind)}, which specjax does not support: {REFUSED[kind]}")
    denoiser_types = denoisers.KINDS if table == "HF_TYPES" else ()
    supported = ", ".join(dict.fromkeys([*(k for family in FAMILIES for k in getattr(family, table)), *denoiser_types]))
    raise UsageError(f"{where} has the architecture {quote(kind)}, which specjax does not support (only {supported})")
