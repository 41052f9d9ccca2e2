"""Registry of the family modules by architecture."""

from __future__ import annotations

from types import ModuleType

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.bridge import Config
from specjax.models.gemma3 import Gemma3Config
from specjax.models.hybrid.config import HybridConfig
from specjax.models.llama import LlamaConfig
from specjax.models.loading.families import denoisers, gemma3, llada, llama
from specjax.models.loading.families.hybrid import lfm2, qwen3_5

HYBRIDS = (qwen3_5, lfm2)
FAMILIES = (llama, gemma3, llada, *HYBRIDS)


def by_config(config: Config) -> ModuleType:
    """Return the family of a loaded model."""
    if isinstance(config, HybridConfig):
        return next(family for family in HYBRIDS if config.model_type in family.MODEL_TYPES)
    return {LlamaConfig: llama, Gemma3Config: gemma3}[type(config)]


def by_hf(kind: str, where: str) -> ModuleType:
    """Return the family of a Hugging Face `model_type`."""
    return _find("HF_TYPES", kind, where)


def by_gguf(kind: str, where: str) -> ModuleType:
    """Return the family of a GGUF `general.architecture`."""
    return _find("GGUF_TYPES", kind, where)


def _find(table: str, kind: str, where: str) -> ModuleType:
    for family in FAMILIES:
        if kind in getattr(family, table):
            return family
    denoiser_types = denoisers.KINDS if table == "HF_TYPES" else ()
    supported = ", ".join(dict.fromkeys([*(k for family in FAMILIES for k in getattr(family, table)), *denoiser_types]))
    raise UsageError(f"{where} has the architecture {quote(kind)}, which specjax does not support (only {supported})")
