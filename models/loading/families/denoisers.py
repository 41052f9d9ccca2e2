"""Checkpoints of diffusion language models: their architecture, and their settings as denoisers.

Every row names a family with the same weights and fields, and its own differences. Settings that the config lacks are
those of the caller, of the tokenizer or, with a note, of the release. They are never guessed, because a wrong mask or
alignment gives meaningless text.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from specjax.errors import CheckpointWarning, UsageError
from specjax.files.untrusted import quote
from specjax.models.loading.families.config_fields import POSITIONS, ROWS, ConfigFields
from specjax.models.loading.families.llama import ROWS_OF_HF
from specjax.models.loading.families.model_classes import check_class, check_own_code, diffusion_model, named_classes


class DenoiserSettings(NamedTuple):
    """Settings of a model as a denoiser: the fields of `specjax.Denoiser`, which is built from them."""

    mask_token: int
    attention: str  # "full" or "block_causal"
    block: int | None  # columns of a block; None: full attention
    alignment: str  # "same" or "shifted"
    seeding: str  # "all_masked" or "seed_and_mask"


class DenoiserKind(NamedTuple):
    """Properties of the diffusion models of a `model_type` or class."""

    base: str  # the `model_type` with the same weights and fields
    alignment: str = "same"
    seeding: str = "all_masked"
    block: str | None = None  # the field with the block size of block-causal attention; None: full attention
    released_block: int | None = None  # the block size of the release; None: without that field the attention is full
    mask: str | None = None  # the mask token of its tokenizer, used if the config has no mask token id
    released_mask: int | None = None  # the mask token id of the release, used if the tokenizer has none


KINDS = {
    # SDAR and TraDo. Their samplers take block and mask from the command line.
    "sdar": DenoiserKind("qwen3", block="block_size", released_block=4, mask="<|MASK|>", released_mask=151669),
    "Dream": DenoiserKind("qwen2", "shifted"),  # and DiffuCoder
    "Fast_dLLM_Qwen": DenoiserKind(
        "qwen2", "shifted", "seed_and_mask", block="bd_size", released_block=32, mask="|<MASK>|"
    ),
    # Tiny-A2D of dLLM: its masked models have full attention. Only the name identifies its block models.
    "a2d-qwen2": DenoiserKind("qwen2", block="block_size", mask="<|mask|>"),
    "a2d-qwen3": DenoiserKind("qwen3", block="block_size", mask="<|mask|>"),
    "a2d-llama": DenoiserKind("llama", block="block_size", mask="<|mask|>"),
    "llada": DenoiserKind("llada"),
    "sdar_moe": DenoiserKind(  # SDAR-30B-A3B
        "qwen3_moe", block="block_size", released_block=4, mask="<|MASK|>", released_mask=151669
    ),
    "lladamoe": DenoiserKind("qwen3_moe", mask="<|mask|>", released_mask=156895),
    "llada2_moe": DenoiserKind(  # LLaDA2.0 and 2.1
        "llada2_moe", block="block_size", released_block=32, mask="<|mask|>", released_mask=156895
    ),
}

CLASSES = {
    "StableDiffcoderForCausalLM": DenoiserKind(
        "llama", block="block_size", released_block=4, mask="<[MASK_TOKEN]>", released_mask=5
    ),
}
"""Kinds with the `model_type` of an autoregressive family, by the class in `architectures` or `auto_map`."""

OPEN_DCODER = DenoiserKind("qwen2", "shifted")
"""Open-dCoder, with the model type qwen2 of autoregressive models, which have no mask token."""

MASK_FIELDS = "mask_token_id", "mask_id"
"""Fields with the id of the mask token, the first that counts first."""

LLADA_MOE = "lladamoe"
FIELDS_OF_LLADA_MOE = {
    "expert_intermediate_size": "moe_intermediate_size", "dense_intermediate_size": "intermediate_size",
}  # fmt: skip
"""Fields of LLaDA-MoE, and those of Qwen3-MoE with the same meaning."""

ONLY_IN_LLADA_MOE = {
    "qk_layernorm": True, "moe_router_enable_expert_bias": False, "moe_router_score_function": "softmax",
    "routed_scaling_factor": 1, "partial_rotary_factor": 1,
}  # fmt: skip
"""Fields of LLaDA-MoE with the only value that specjax supports; they may be absent or null."""


class SpecialTokens(Protocol):
    """The part of a tokenizer that identifies the mask token."""

    @property
    def names(self) -> Any: ...  # mapping of a role such as "mask_token" to its piece

    @property
    def vocab(self) -> Any: ...  # sequence of pieces, by id

    @property
    def eos(self) -> Any: ...  # collection of the ids that end a text


def find_kind(hf: ConfigFields, names: Mapping[str, str] | None = None) -> DenoiserKind | None:
    """Return the kind of the diffusion model of a config.json; None for an autoregressive or unsupported model.

    names: the special tokens of its tokenizer, if they are read already.
    """
    hf = _with_own_type(hf)
    for entry in named_classes(hf):
        if entry.name in CLASSES:
            return CLASSES[entry.name]
    if diffusion_model(hf, KINDS) is not None:
        return None
    name = hf.text("model_type", "unnamed")
    if name == "qwen2" and (hf.has("mask_token_id") or bool((names or {}).get("mask_token"))):
        return OPEN_DCODER
    return KINDS.get(name)


def to_base_family(hf: ConfigFields) -> ConfigFields:
    """Return the fields of a config.json with the `model_type` of the family that reads it.

    Raises: UsageError for diffusion models that no family supports, and for a class that its family does not have.
    """
    hf = _with_own_type(hf)
    name = hf.text("model_type", "unnamed")
    kind, title = find_kind(hf), diffusion_model(hf, KINDS)
    if kind is None and title is not None:
        raise UsageError(
            f"{hf.where} is {title}, a diffusion model, which specjax does not support; use one of docs/diffusion.md"
        )
    if kind is None:
        check_class(hf)
        return hf
    if kind not in CLASSES.values():
        check_class(hf, kind.base)
    if name == "Dream" and (hf.has("block_size") or hf.flag("use_mrope")):
        field = "use_mrope" if hf.flag("use_mrope") else "block_size"
        raise UsageError(
            f"{hf.where} is a Dream model with {field}, which specjax does not support; use Dream-7B or DiffuCoder"
        )
    hf = _as_qwen3_moe(hf) if name == LLADA_MOE else hf
    return dataclasses.replace(hf, values={**hf.values, "model_type": kind.base})


def _with_own_type(hf: ConfigFields) -> ConfigFields:
    """Return the fields of a config.json with a `model_type` of its own for LLaDA-MoE, which can be that of LLaDA."""
    if hf.text("model_type", "unnamed") != "llada" or not hf.has("num_experts"):
        return hf
    return dataclasses.replace(hf, values={**hf.values, "model_type": LLADA_MOE})


def _as_qwen3_moe(hf: ConfigFields) -> ConfigFields:
    """Return the fields of LLaDA-MoE under the names of Qwen3-MoE, which has the same layers.

    Raises: UsageError for routers, rotations and shared MLPs that the released models do not have.
    """
    for name, only in ONLY_IN_LLADA_MOE.items():
        if hf.value(name) not in (None, only):
            raise UsageError(f"{hf.where} has {name} {quote(hf.value(name))}; specjax supports {quote(only)} only")
    if hf.size("shared_expert_intermediate_size", 0, minimum=-1) > 0:
        raise UsageError(f"{hf.where} has a shared_expert_intermediate_size, which specjax does not support")
    hf.skip("router_num_group", "router_topk_group", *FIELDS_OF_LLADA_MOE)  # groups are those of another score function
    new_names = {new: hf.value(old) for old, new in FIELDS_OF_LLADA_MOE.items() if hf.has(old)}
    if hf.has("moe_layer_freq"):
        flags = hf.array("moe_layer_freq", int)
        new_names["mlp_only_layers"] = [layer for layer, has_experts in enumerate(flags) if not has_experts]
    values = {name: value for name, value in hf.values.items() if value is not None}
    defaults = {
        "norm_topk_prob": False,
        "head_dim": hf.size("hidden_size") // hf.size("num_attention_heads"),
        "rms_norm_eps": 1e-5,
    }
    return dataclasses.replace(hf, values=defaults | values | new_names)


def write_denoiser_settings(fields: Mapping[str, Any], settings: DenoiserSettings) -> dict[str, Any]:
    """Return the fields of a config.json with the settings of a denoiser.

    fields: the fields of its model as an autoregressive one. A diffusion model of another release with the same weights
    and settings can have another `model_type`.

    Raises: UsageError for settings that no `model_type` has.
    """
    base, block = fields["model_type"], settings.block
    for name, kind in sorted(KINDS.items(), key=lambda item: item[1].released_block is not None):
        is_same = (kind.base, kind.alignment, kind.seeding) == (base, settings.alignment, settings.seeding)
        if is_same and (kind.released_block is None if block is None else kind.block is not None):
            more = {"model_type": name, "mask_token_id": settings.mask_token}
            more |= {} if block is None or kind.block is None else {kind.block: block}
            return {field: value for field, value in fields.items() if field != "architectures"} | more
    raise UsageError(
        f"no config.json of type {base} expresses a denoiser with {settings.alignment} alignment, {settings.seeding} "
        f"seeding and {settings.attention} attention"
    )


def read_denoiser_settings(
    hf: ConfigFields, tokenizer: SpecialTokens, *, block: int | None = None, mask_token: int | None = None
) -> DenoiserSettings | None:
    """Return the denoiser settings of the model of a config.json; None if the model is autoregressive.

    block, mask_token: values that replace those of the files; None: the files' values, or those of the release.

    Warns: CheckpointWarning that names a value of the release.

    Raises: UsageError for a value that does not fit the model, or one that nothing defines. It is also raised for an
      autoregressive model with code of its own, or with fields of a diffusion model.
    """
    kind = find_kind(hf, tokenizer.names)
    if kind is None:
        check_own_code(hf)
        if (block, mask_token) != (None, None):
            option = "block" if block is not None else "mask_token"
            raise UsageError(f"{option} applies to diffusion models, and {hf.where} is not of one; leave it out")
        return None
    block = _find_block(hf, kind, block)
    return DenoiserSettings(
        mask_token=_find_mask_token(hf, kind, tokenizer, mask_token),
        attention="full" if block is None else "block_causal",
        block=block,
        alignment=kind.alignment,
        seeding=kind.seeding,
    )


def skip_denoiser_settings(hf: ConfigFields) -> None:
    """Record the fields of `read_denoiser_settings` as read, for readers of a config without its tokenizer."""
    kind = find_kind(hf)
    if kind is not None:
        hf.skip(*MASK_FIELDS, *([] if kind.block is None else [kind.block]))


def is_denoiser(hf: ConfigFields, names: Mapping[str, str]) -> bool:
    """Return True if the model of a config.json is a denoiser. Only small files are read."""
    return find_kind(hf, names) is not None


def _find_block(hf: ConfigFields, kind: DenoiserKind, block: int | None) -> int | None:
    """Return the block size of the caller, of the config or, with a note, of the release; None for full attention."""
    if block is not None:
        if type(block) is not int or not 1 <= block <= POSITIONS:
            raise UsageError(f"block must be a whole number of at least 1, not {quote(block)}")
        if kind.block is None:
            raise UsageError(f"block applies to block-causal models, and {hf.where} has full attention; leave it out")
        hf.skip(kind.block)
        return block
    if kind.block is None:
        return None
    if not hf.has(kind.block) and kind.released_block is not None:
        _note(f"{hf.where} lacks the block size; assumed {kind.released_block}, as released. Other models need block=")
    return hf.size(kind.block, kind.released_block, maximum=POSITIONS)


def _find_mask_token(hf: ConfigFields, kind: DenoiserKind, tokenizer: SpecialTokens, mask_token: int | None) -> int:
    """Return the mask token of the caller, of the config, of the tokenizer or, with a note, of the release."""
    fields = hf.with_defaults(ROWS_OF_HF[kind.base].fields if kind.base in ROWS_OF_HF else {})
    rows = fields.size("embedding_size", fields.size("vocab_size", maximum=ROWS), maximum=ROWS)
    field = next((name for name in MASK_FIELDS if hf.has(name)), None)
    listed = None if field is None else hf.size(field, minimum=0, maximum=ROWS)
    piece = tokenizer.names.get("mask_token", kind.mask)
    where = f"{hf.where} has"
    if mask_token is not None:
        if type(mask_token) is not int or mask_token < 0:
            raise UsageError(f"mask_token must be a token id, not {quote(mask_token)}")
        where, field = "", "mask_token"
    elif listed is not None:
        mask_token = listed
    elif piece in tokenizer.vocab:
        field, mask_token = f"the mask token {quote(piece)}", tokenizer.vocab.index(piece)
    elif kind.released_mask is not None and kind.released_mask < rows:
        field, mask_token = "the mask token of the release", kind.released_mask
        _note(f"neither {hf.where} nor its tokenizer defines the mask token; assumed {mask_token}, as released")
    else:
        raise UsageError(
            f"neither {hf.where} nor its tokenizer defines the mask token; add mask_token_id to the config, or pass "
            "mask_token"
        )
    if mask_token >= rows:
        raise UsageError(f"{where} {field} {mask_token}, which must be below the vocabulary size, {rows}".strip())
    if mask_token in tokenizer.eos:
        raise UsageError(
            f"{where} {field} {mask_token}, which is also an end token; the mask must be a separate token".strip()
        )
    return mask_token


def _note(message: str) -> None:
    warnings.warn(message, CheckpointWarning, stacklevel=6)
