"""Checkpoints of diffusion language models: which architecture they have, and how they are read as denoisers.

A table beside the families: a `model_type` names one of the families' own, whose weights and fields it has, and what is
its own. What a config does not say is asked of its tokenizer, and never guessed: a wrong mask or alignment gives text,
but nonsense.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.loading.families.config_fields import POSITIONS, ROWS, ConfigFields


class DenoiserSettings(NamedTuple):
    """How a model is read as a denoiser: the fields of `specjax.Denoiser`, which is made of it."""

    mask_token: int
    attention: str  # "full" or "block_causal"
    block: int | None
    alignment: str  # "same" or "shifted"
    seeding: str  # "all_masked" or "seed_and_mask"


class DenoiserKind(NamedTuple):
    """Of a `model_type`."""

    base: str  # the type whose weights and fields it has
    alignment: str = "same"
    seeding: str = "all_masked"
    block: str | None = None  # the field with the block of its block-causal attention; None: it has full attention
    optional: bool = False  # without that field it has full attention
    mask: str | None = None  # how its tokenizer spells the mask token, where the config does not say which it is


KINDS = {
    "sdar": DenoiserKind("qwen3", block="block_size", mask="<|MASK|>"),  # and TraDo
    "Dream": DenoiserKind("qwen2", "shifted"),  # and DiffuCoder
    "Fast_dLLM_Qwen": DenoiserKind("qwen2", "shifted", "seed_and_mask", block="bd_size", mask="|<MASK>|"),
    # Tiny-A2D of dLLM: its masked models have full attention; its block models say so by nothing but their name.
    "a2d-qwen2": DenoiserKind("qwen2", block="block_size", optional=True, mask="<|mask|>"),
    "a2d-qwen3": DenoiserKind("qwen3", block="block_size", optional=True, mask="<|mask|>"),
    "a2d-llama": DenoiserKind("llama", block="block_size", optional=True, mask="<|mask|>"),
    "llada": DenoiserKind("llada"),
}

OPEN_DCODER = DenoiserKind("qwen2", "shifted")
"""Of type qwen2, as the autoregressive models; those have no mask token."""

EXPERTS = {
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


def as_family(hf: ConfigFields) -> ConfigFields:
    """The fields of a config.json with the `model_type` of the family that it is read by.

    Raises: UsageError for diffusion models that no family has.
    """
    name = hf.text("model_type", "unnamed")
    kind = KINDS.get(name)
    experts = "LLaDA-MoE" if name == "llada" and hf.given("num_experts") else EXPERTS.get(name)
    if experts is not None:
        raise UsageError(f"{hf.where} is a {experts} model, a mixture of experts, which specjax does not support")
    if kind is None:
        return hf
    if name == "Dream" and (hf.given("block_size") or hf.flag("use_mrope")):
        field = "use_mrope" if hf.flag("use_mrope") else "block_size"
        raise UsageError(
            f"{hf.where} is a Dream model with {field}, which specjax does not support; Dream-7B and DiffuCoder have "
            "none"
        )
    return dataclasses.replace(hf, values={**hf.values, "model_type": kind.base})


def read_denoiser_settings(hf: ConfigFields, tokenizer: SpecialTokens) -> DenoiserSettings | None:
    """How the model of a config.json is read; None: it is autoregressive.

    Raises: UsageError where neither config nor tokenizer say which token is the mask, or how long a block is.
    """
    name = hf.text("model_type", "unnamed")
    kind = OPEN_DCODER if is_open_dcoder(hf, tokenizer.names) else KINDS.get(name)
    if kind is None:
        return None
    block = None
    if kind.block is not None and (hf.given(kind.block) or not kind.optional):
        if not hf.given(kind.block):
            raise UsageError(
                f"{hf.where} does not say how many columns its blocks have; add {kind.block}, such as "
                f'"{kind.block}": {4 if name == "sdar" else 32}'
            )
        block = hf.size(kind.block, most=POSITIONS)
    return DenoiserSettings(
        mask_token=_mask(hf, kind, tokenizer),
        attention="full" if block is None else "block_causal",
        block=block,
        alignment=kind.alignment,
        seeding=kind.seeding,
    )


def is_open_dcoder(hf: ConfigFields, names: Any) -> bool:
    """Whether a config of type qwen2 is that of a denoiser. `names`: the tokenizer's special tokens."""
    return hf.text("model_type", None) == "qwen2" and (hf.given("mask_token_id") or bool(names.get("mask_token")))


def is_denoiser(hf: ConfigFields, names: Any) -> bool:
    """Whether the model of a config.json is one, by what is read quickly."""
    return hf.text("model_type", None) in KINDS or is_open_dcoder(hf, names)


def _mask(hf: ConfigFields, kind: DenoiserKind, tokenizer: SpecialTokens) -> int:
    """The config's, else the tokenizer's."""
    rows = hf.size("embedding_size", hf.size("vocab_size", most=ROWS), most=ROWS)
    for field in ("mask_token_id", "mask_id"):
        if hf.given(field):
            found = hf.size(field, least=0, most=ROWS)
            break
    else:
        piece = tokenizer.names.get("mask_token", kind.mask)
        if piece not in tokenizer.vocab:
            raise UsageError(
                f"neither {hf.where} nor its tokenizer says which token is the mask; add mask_token_id to the config"
            )
        field, found = f"the mask token {quote(piece)}", tokenizer.vocab.index(piece)
    if found >= rows:
        raise UsageError(f"{hf.where} has {field} {found}, outside of its vocabulary of {rows}")
    if found in tokenizer.eos:
        raise UsageError(f"{hf.where} has {field} {found}, which ends a text too; a mask must be a token of its own")
    return found
