"""Classes that a config.json names: the family's own, or those of other models with the family's fields.

A model can differ from its family by its code alone, such as in its attention. Its config then names a class or a
module of its own in `architectures` or `auto_map`.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import NamedTuple

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.loading.families.config_fields import ConfigFields

PREFIXES = {
    "llama": "Llama", "mistral": "Mistral", "ministral": "Ministral", "mistral3": "Mistral3", "qwen2": "Qwen2",
    "qwen3": "Qwen3", "mimo": "MiMo", "phi3": "Phi3", "olmo2": "Olmo2", "olmo3": "Olmo3", "gemma2": "Gemma2",
    "qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral", "gpt_oss": "GptOss", "glm4_moe": "Glm4Moe",
    "deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3",
    "olmoe": "Olmoe", "gemma3_text": "Gemma3", "gemma3": "Gemma3", "qwen3_5": "Qwen3_5", "qwen3_5_text": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe", "qwen3_5_moe_text": "Qwen3_5Moe",
    "qwen3_next": "Qwen3Next", "lfm2": "Lfm2", "gemma4": "Gemma4", "gemma4_text": "Gemma4",
    "smolvlm": "SmolVLM", "idefics3": "Idefics3", "llava": "Llava", "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL",
    "llava_onevision": "LlavaOnevision", "chameleon": "Chameleon", "janus": "Janus",
    "gemma4_unified": "Gemma4Unified", "gemma4_unified_text": "Gemma4Unified",
}  # fmt: skip
"""The beginning of the class names of each supported `model_type` in transformers."""

TRAINERS_PREFIXES = {"chameleon": ("ChameleonXLLMX",)}
"""The same in code of authors who trained a model with a class of their own, such as Lumina-mGPT."""

DIFFUSION_PREFIXES = {
    "sdar": "SDAR", "Dream": "Dream", "Fast_dLLM_Qwen": "Fast_dLLM_Qwen", "a2d-qwen2": "A2DQwen2",
    "a2d-qwen3": "A2DQwen3", "a2d-llama": "A2DLlama", "llada": "LLaDA", "sdar_moe": "SDARMoe",
    "lladamoe": "LLaDAMoE", "llada2_moe": "LLaDA2Moe",
}  # fmt: skip
"""The same for diffusion models, whose classes are in files beside their weights."""

SUFFIXES = "forcausallm", "forconditionalgeneration", "model", "textmodel"
DIFFUSION_SUFFIXES = (*SUFFIXES, "modellm", "lmheadmodel", "formaskedlm", "fordiffusionlm", "basemodel")
WRAPPERS = ("fsdp",)  # prefixes of trainers, which change nothing

OWN_MODULES = {
    "phi3": "modeling_phi3", "mimo": "modeling_mimo", "deepseek_v2": "modeling_deepseek",
    "deepseek_v3": "modeling_deepseek",
}  # fmt: skip
"""Modules of families whose authors published the same code before transformers had it."""

DIFFUSION_MODELS = {
    "nemotronlabsdiffusion": "Nemotron-Labs-Diffusion", "wedlm": "WeDLM", "diffusiongemma": "DiffusionGemma",
    "sdlm": "SDLM", "dimple": "Dimple", "rnd1": "RND1", "coda": "CoDA", "mmada": "MMaDA", "llavallada": "LLaDA-V",
    "lfm2forblockdiffusion": "LFM2 with block diffusion", "bd3lm": "BD3-LM", "mdlm": "MDLM", "dreamvl": "Dream-VL",
    "tidar": "TiDAR", "refusion": "ReFusion", "illada": "iLLaDA", "sdarvl": "SDAR-VL",
}  # fmt: skip
"""Diffusion models that specjax does not support, by the beginning of a class or `model_type`, without punctuation."""

DIFFUSION_WORDS = re.compile(r"diffu|dllm|dlm|llada|sdar|dream|denois")
DIFFUSION_FIELDS = {"text_mask_token_id": "SDLM", "mask_token_id": None, "mask_id": None, "bd_size": None}
"""Fields that no autoregressive model has, and the model that has them."""

OTHER_TASKS = {
    r"for(sequence|token)classification|reward|forquestionanswering|forsequenceranking": "a classifier or reward model",
    r"eagle|medusa|dflash|dspark|domino|speculator|hydra|draft": "a draft head, which specjax.load_head reads",
}


class NamedClass(NamedTuple):
    """A class of a config.json."""

    module: str | None  # of the code in the folder; None: a class of transformers
    name: str
    field: str


def named_classes(hf: ConfigFields) -> list[NamedClass]:
    """Return the classes of models that a config.json names."""
    hf.skip("architectures", "auto_map")
    classes = [NamedClass(None, name, "architectures") for name in hf.array("architectures", str)]
    mapped = hf.value("auto_map")
    for task, path in (mapped if isinstance(mapped, dict) else {}).items():
        if str(task).startswith("AutoModel") and isinstance(path, str):
            module, _, name = path.rpartition("--")[2].rpartition(".")  # "org/name--module.Class"
            classes.append(NamedClass(module, name, f"auto_map.{task}"))
    return classes


def diffusion_model(hf: ConfigFields, supported: Container[str]) -> str | None:
    """Return the name of the unsupported diffusion model whose class or `model_type` a config names, or None.

    supported: values of `model_type` with diffusion models that are supported.
    """
    names = [hf.text("model_type", ""), *(entry.name for entry in named_classes(hf))]
    for name in names:
        plain = re.sub(r"[^a-z0-9]", "", name.lower())
        title = next((title for prefix, title in DIFFUSION_MODELS.items() if plain.startswith(prefix)), None)
        if title or (names[0] not in supported and DIFFUSION_WORDS.search(plain)):
            return title or quote(name)
    return None


def check_class(hf: ConfigFields, base: str | None = None) -> None:
    """Raise a UsageError if a config names another class than those of its `model_type`.

    base: the `model_type` with the same weights, whose classes files of diffusion models can name; None: there is none.
    """
    kind = hf.text("model_type", "")
    prefix = (PREFIXES | DIFFUSION_PREFIXES).get(kind)
    if prefix is None:
        return
    prefixes = [prefix, *TRAINERS_PREFIXES.get(kind, ()), *([PREFIXES[base]] if base in PREFIXES else [])]
    suffixes = DIFFUSION_SUFFIXES if base else SUFFIXES
    names = {name.lower() + suffix for name in prefixes for suffix in suffixes}
    for entry in named_classes(hf):
        plain = entry.name.lower()
        for wrapper in WRAPPERS:
            plain = plain.removeprefix(wrapper)
        if plain in names:
            continue
        task = next((task for words, task in OTHER_TASKS.items() if re.search(words, plain)), None)
        raise UsageError(
            f"{hf.where} names the class {quote(entry.name)} in {entry.field}, "
            + (f"{task}; use a language model" if task else f"which is not one of {kind}; make both fields agree")
        )


def check_own_code(hf: ConfigFields) -> None:
    """Raise a UsageError if the config of an autoregressive model names code of its own, or fields of diffusion."""
    for name, model in DIFFUSION_FIELDS.items():
        if hf.has(name):
            title = f"{model}, a diffusion model," if model else "a diffusion model of a kind"
            raise UsageError(
                f"{hf.where} has {name}, so it is {title} that specjax does not support; for an autoregressive model "
                "remove the field"
            )
    kind = hf.text("model_type", "")
    for entry in named_classes(hf):
        if entry.module is not None and entry.module != OWN_MODULES.get(kind):
            raise UsageError(
                f"{hf.where} names code of its own in {entry.field}, {quote(entry.module)}, which specjax never runs; "
                f"if that code equals {kind}, remove auto_map"
            )
