"""Checkpoints of diffusion language models: their architecture, and their settings as denoisers.

Every `model_type` here names a family with the same weights and fields, and its own differences. Settings that the
config lacks are taken from the tokenizer and never guessed, because a wrong mask or alignment gives meaningless text.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.loading.families.config_fields import POSITIONS, ROWS, ConfigFields


class DenoiserSettings(NamedTuple):
    """Settings of a model as a denoiser: the fields of `specjax.Denoiser`, which is built from them."""

    mask_token: int
    attention: str  # "full" or "block_causal"
    block: int | None  # columns of a block; None: full attention
    alignment: str  # "same" or "shifted"
    seeding: str  # "all_masked" or "seed_and_mask"


class DenoiserKind(NamedTuple):
    """Properties of a `model_type`."""

    base: str  # the `model_type` with the same weights and fields
    alignment: str = "same"
    seeding: str = "all_masked"
    block: str | None = None  # the field with the block size of block-causal attention; None: full attention
    optional: bool = False  # without that field the attention is full
    mask: str | None = None  # the mask token of its tokenizer, used if the config has no mask token id


KINDS = {
    "sdar": DenoiserKind("qwen3", block="block_size", mask="<|MASK|>"),  # and TraDo
    "Dream": DenoiserKind("qwen2", "shifted"),  # and DiffuCoder
    "Fast_dLLM_Qwen": DenoiserKind("qwen2", "shifted", "seed_and_mask", block="bd_size", mask="|<MASK>|"),
    # Tiny-A2D of dLLM: its masked models have full attention. Only the name identifies its block models.
    "a2d-qwen2": DenoiserKind("qwen2", block="block_size", optional=True, mask="<|mask|>"),
    "a2d-qwen3": DenoiserKind("qwen3", block="block_size", optional=True, mask="<|mask|>"),
    "a2d-llama": DenoiserKind("llama", block="block_size", optional=True, mask="<|mask|>"),
    "llada": DenoiserKind("llada"),
}

OPEN_DCODER = DenoiserKind("qwen2", "shifted")
"""Open-dCoder, with the model type qwen2 of autoregressive models, which have no mask token."""

MIXTURES_OF_EXPERTS = {
    "llada2_moe": "LLaDA2",
    "llada2_moe_v2": "LLaDA2",
    "lladamoe": "LLaDA-MoE",
    "sdar_moe": "SDAR-MoE",
}


class SpecialTokens(Protocol):
    """The part of a tokenizer that identifies the mask token."""

    @property
    def names(self) -> Any: ...  # mapping of a role such as "mask_token" to its piece

    @property
    def vocab(self) -> Any: ...  # sequence of pieces, by id

    @property
    def eos(self) -> Any: ...  # collection of the ids that end a text


def to_base_family(hf: ConfigFields) -> ConfigFields:
    """Return the fields of a config.json with the `model_type` of the family that reads it.

    Raises: UsageError for diffusion models that no family supports.
    """
    name = hf.text("model_type", "unnamed")
    kind = KINDS.get(name)
    experts = "LLaDA-MoE" if name == "llada" and hf.has("num_experts") else MIXTURES_OF_EXPERTS.get(name)
    if experts is not None:
        raise UsageError(
            f"{hf.where} is a {experts} model, a mixture of experts, which specjax does not support; use a dense model"
        )
    if kind is None:
        return hf
    if name == "Dream" and (hf.has("block_size") or hf.flag("use_mrope")):
        field = "use_mrope" if hf.flag("use_mrope") else "block_size"
        raise UsageError(
            f"{hf.where} is a Dream model with {field}, which specjax does not support; use Dream-7B or DiffuCoder"
        )
    return dataclasses.replace(hf, values={**hf.values, "model_type": kind.base})


def read_denoiser_settings(hf: ConfigFields, tokenizer: SpecialTokens) -> DenoiserSettings | None:
    """Return the denoiser settings of the model of a config.json; None if the model is autoregressive.

    Raises: UsageError if neither config nor tokenizer define the mask token, or the config lacks the block size.
    """
    name = hf.text("model_type", "unnamed")
    kind = OPEN_DCODER if is_open_dcoder(hf, tokenizer.names) else KINDS.get(name)
    if kind is None:
        return None
    block = None
    if kind.block is not None and (hf.has(kind.block) or not kind.optional):
        if not hf.has(kind.block):
            raise UsageError(
                f"{hf.where} lacks the block size of its attention; add the field {kind.block}, such as "
                f'"{kind.block}": {4 if name == "sdar" else 32}'
            )
        block = hf.size(kind.block, maximum=POSITIONS)
    return DenoiserSettings(
        mask_token=_find_mask_token(hf, kind, tokenizer),
        attention="full" if block is None else "block_causal",
        block=block,
        alignment=kind.alignment,
        seeding=kind.seeding,
    )


def is_open_dcoder(hf: ConfigFields, names: Any) -> bool:
    """Return True if a config of type qwen2 is that of a denoiser. `names` are the special tokens of the tokenizer."""
    return hf.text("model_type", None) == "qwen2" and (hf.has("mask_token_id") or bool(names.get("mask_token")))


def is_denoiser(hf: ConfigFields, names: Any) -> bool:
    """Return True if the model of a config.json is a denoiser. Only small files are read."""
    return hf.text("model_type", None) in KINDS or is_open_dcoder(hf, names)


def _find_mask_token(hf: ConfigFields, kind: DenoiserKind, tokenizer: SpecialTokens) -> int:
    """Return the mask token of the config, or else of the tokenizer."""
    rows = hf.size("embedding_size", hf.size("vocab_size", maximum=ROWS), maximum=ROWS)
    for field in ("mask_token_id", "mask_id"):
        if hf.has(field):
            mask_token = hf.size(field, minimum=0, maximum=ROWS)
            break
    else:
        piece = tokenizer.names.get("mask_token", kind.mask)
        if piece not in tokenizer.vocab:
            raise UsageError(
                f"neither {hf.where} nor its tokenizer defines the mask token; add mask_token_id to the config"
            )
        field, mask_token = f"the mask token {quote(piece)}", tokenizer.vocab.index(piece)
    if mask_token >= rows:
        raise UsageError(f"{hf.where} has {field} {mask_token}, which must be below its vocabulary size, {rows}")
    if mask_token in tokenizer.eos:
        raise UsageError(
            f"{hf.where} has {field} {mask_token}, which is also an end token; the mask must be a separate token"
        )
    return mask_token
