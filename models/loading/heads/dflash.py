"""Formats of DFlash, DSpark, DFlash 2 and Domino.

The writers are z-lab, DeepSpec, speculators, SpecForge, Model-Optimizer and NeMo Automodel. The tensors determine the
kind of a head. `target_layer_ids` (z-lab and others) numbers outputs of layers. `aux_hidden_state_layer_ids`
(speculators) numbers streams, where 0 is the embedding.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.dflash import DFlashConfig, default_taps
from specjax.models.loading.families.config_fields import HEADS, WIDTH
from specjax.models.loading.heads import vocabulary
from specjax.models.loading.heads.block_fields import (
    CAUSAL,
    BlockFields,
    is_dspark,
    read_anchor,
    read_attention,
    read_scales,
    read_taps,
)
from specjax.models.loading.heads.checkpoint_contents import (
    MASK,
    Contents,
    HeadPlan,
    Rules,
    Tensors,
    count_indices,
    layer_table,
    rename_tensors,
    split_fused,
)
from specjax.models.loading.heads.describing import describe_layers, describe_verifier
from specjax.models.loading.heads.format import HeadFormat, SaveInfo, shown
from specjax.models.loading.heads.mask_tokens import read_mask_token
from specjax.models.loading.heads.settings import HeadVariant, change_config, tap_variants
from specjax.models.loading.heads.target_fit import TargetSpec, check_equal, layer_config, take_embedding
from specjax.types import Array

TABLE = {
    "embed.weight": "embed_tokens.weight",
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "hidden_norm.weight",
    "norm.weight": "norm.weight",
    "head.weight": "lm_head.weight",
    **layer_table("layers.*", "layers.*"),
    **{f"layers.*.{part}_conv.base": f"layers.*.{part}_conv.base_kernel" for part in ("attention", "mlp")},
    **{
        f"layers.*.{part}_conv.projection.weight": f"layers.*.{part}_conv.kernel_projection.weight"
        for part in ("attention", "mlp")
    },
    "mask_embedding": MASK,
    "markov.w1.weight": "markov_head.markov_w1.weight",
    "markov.w2.weight": "markov_head.markov_w2.weight",
    **{
        f"{ours}.{leaf}": f"{theirs}.{leaf}"
        for ours, theirs in (
            ("markov.gating", "markov_head.gate_proj"),
            ("markov.joint", "markov_head.joint_proj"),
            ("confidence.proj", "confidence_head.proj"),
        )
        for leaf in ("weight", "bias")
    },
    "selector.predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector.successor.weight": "candidate_selector.successor_codebook",
    "selector.projection.weight": "candidate_selector.hidden_projection.weight",
    "prefix.inputs.weight": "prefix_gru.weight_ih_l0",
    "prefix.states.weight": "prefix_gru.weight_hh_l0",
    "prefix.narrow.weight": "embed_proj.0.weight",
    "prefix.wide.weight": "embed_proj.2.weight",
}

SPELLINGS = {
    "sample_from_anchor": "from_anchor", "mask_token_id": "mask_token", "selector_top_k": "candidates",
    "input_embedding_scale": "embedding_scale", "output_multiplier": "logit_scale",
    "final_logit_softcapping": "softcap", "pure_draft_prefix_len": "pure_prefix",
}  # fmt: skip
"""Settings by the names of config.json."""

UNUSED = (r"verifier_", r".*rotary_emb\.inv_freq$", r"g_proj\.", r"aux_hidden_norms\.")

RULES: Rules = (
    (r"^model\.", ""),  # NeMo Automodel
    (r"^logit_head\.", ""),  # early Domino
    (r"^encoder\.fc\.", "fc."),  # assistants of Muse Glimmer
    (r"^encoder\.output_norm_enc\.", "hidden_norm."),
    (r"^(markov_w\d|gate_proj|joint_proj)\.", r"markov_head.\1."),  # Model-Optimizer
    (r"^confidence_proj\.", "confidence_head.proj."),
)


def dialect_of(contents: Contents) -> str | None:
    """Return the dialect of the writer, or None for other files."""
    c, names = contents.config, contents.tensors
    if c.has("speculators_model_type"):
        return "speculators" if c.text("speculators_model_type") in ("dflash", "dflash2", "dspark") else None
    plain = set(names)
    for pattern, replacement in RULES:
        plain = {re.sub(pattern, replacement, name) for name in plain}
    is_block = {"fc.weight", "hidden_norm.weight"} <= plain and any(re.match(r"layers\.0\.", name) for name in plain)
    if not is_block:
        return None
    if any(re.match(r"(markov_w\d|confidence_proj)\.", name) for name in names):
        return "modelopt"
    return "deepspec" if is_dspark(c) and not c.has("dflash_config") else "zlab"


def kind_of(contents: Contents) -> str:
    """Return the kind of head."""
    has = lambda *parts: any(part in name for name in contents.tensors for part in parts)
    if has("_conv.", "candidate_selector."):
        return "dflash2"
    if has("prefix_gru."):
        return "domino"
    if has("markov_w1", "confidence_"):
        return "dspark"
    fields = BlockFields(contents, [])
    return "jetspec" if any(fields.of(name).flag(name) for name in CAUSAL) else "dflash"


def plan(contents: Contents, dialect: str, spec: TargetSpec) -> HeadPlan:
    """Map the tensors to parameters. Raises: UsageError for inconsistent files, or a head of another target."""
    c, folder, where = contents.config, contents.folder, contents.config.where
    notes: list[str] = []
    block = BlockFields(contents, notes)
    block.refuse_unsupported()
    tensors = rename_tensors(contents, RULES)
    fields = c.subfields("transformer_layer_config") if dialect == "speculators" else c
    count = count_indices(tensors, r"layers\.(\d+)\.")
    layer = layer_config(fields, tensors, "layers.0.self_attn", count, spec, windows=False)
    split_fused(tensors, layer)
    check_equal(where, "vocab_size", layer.vocab_size, spec.vocab_size, f"the vocabulary of {spec.name} has")
    embeds, own_head = take_embedding(tensors, spec, notes), "lm_head.weight" in tensors
    size = tensors["lm_head.weight"].shape[0] if own_head else spec.vocab_size
    if not own_head or not embeds:
        check_equal(where, "hidden_size", layer.width, spec.width, f"the width of the target {spec.name} is")
    ids = vocabulary.take_drafted_ids(tensors, size, spec.vocab_size, folder)
    arrays: dict[str, np.ndarray | Array | Callable] = {}
    if ids is not None:
        arrays["vocabulary.place"] = vocabulary.place_table(ids, spec.vocab_size)
    default_size = 8 if dialect == "speculators" else 16  # of the writers
    block.note_assumed("block_size", default_size)
    config = DFlashConfig(
        layer=dataclasses.replace(layer, vocab_size=size),
        taps=read_taps(block, contents, tensors, spec, lambda n: default_taps(spec.num_layers, n)),
        target_width=spec.width,
        vocab_size=spec.vocab_size,
        block_size=block.of("block_size").size("block_size", default_size, maximum=HEADS),
        mask_token=read_mask_token(contents, (block.inner, block.top), notes),
        mask_embedding=MASK in tensors,
        from_anchor=read_anchor(block, dialect, kind_of(contents)),
        embeds=embeds,
        own_head=own_head,
        **read_attention(block, fields, count),
        **read_scales(block, spec, own_head),
        **_corrections(block, tensors, layer.width),
    )
    check_equal(where, "mask_token_id", min(config.mask_token, spec.vocab_size - 1), config.mask_token,
                f"the target has {spec.vocab_size} ids, so it cannot be")  # fmt: skip
    if config.confidence != "no":
        arrays["confidence.temperatures"] = functools.partial(_temperatures, block)
    names = (
        "taps", "block_size", "mask_token", "mask_embedding", "from_anchor", "windows", "causal", "embeds", "own_head",
        "embedding_scale", "logit_scale", "softcap", "capped_scale", "markov", "confidence", "conv_taps",
        "selector_rank", "candidates", "prefix_rank", "pure_prefix",
    )  # fmt: skip
    flags = {name: getattr(config, name) for name in names} | {"draft_vocab_size": size}
    return HeadPlan(
        config.kind, dialect, config, TABLE, tensors, flags, arrays, tuple(notes), UNUSED, tuple(block.assumed)
    )


def _temperatures(block: BlockFields, config: DFlashConfig) -> np.ndarray:
    """Return the temperatures of the confidence float32[max_depth]. They are 1 if settings change the number of slots.

    Raises: UsageError for another number of them.
    """
    values = block.top.array("confidence_temperatures", (int, float))
    if not values or (len(values) != config.max_depth and block.changes):
        return np.ones(config.max_depth, np.float32)
    named = "confidence_temperatures of slots"
    check_equal(block.top.where, named, len(values), config.max_depth, "a block drafts in")
    return np.asarray(values, np.float32)


def _corrections(block: BlockFields, tensors: Tensors, width: int) -> dict[str, Any]:
    """Return the fields of DFlashConfig for the corrections that have tensors."""
    shape = lambda name: tensors[name].shape if name in tensors else ()
    fields: dict[str, Any] = {}
    if len(w1 := shape("markov_head.markov_w1.weight")) == 2:
        kinds = {"markov_head.gate_proj.weight": "gated", "markov_head.joint_proj.weight": "rnn"}
        kind = next((kind for name, kind in kinds.items() if name in tensors), "vanilla")
        named = block.of("markov_head_type").text("markov_head_type", kind)
        if named != kind:
            raise UsageError(
                f'{block.top.where} has markov_head_type "{named}", and the file has the tensors of {kind}'
            )
        fields |= {"markov": kind, "markov_rank": w1[1]}
    if len(proj := shape("confidence_head.proj.weight")) == 2:
        fields["confidence"] = "state" if proj[1] == width else "markov"
    base, dynamic = (shape(f"layers.0.attention_conv.{x}") for x in ("base_kernel", "kernel_projection.weight"))
    if len(base) == 3 and len(dynamic) == 2:
        groups = max(dynamic[0] // max(2 * base[1], 1), 1)
        fields |= {"conv_taps": base[1], "conv_group": max(width // groups, 1)}
    if len(book := shape("candidate_selector.predecessor_codebook")) == 2:
        candidates = block.of("selector_top_k").size("selector_top_k", 16, maximum=WIDTH)
        fields |= {"selector_rank": book[1], "candidates": candidates}
    narrow, states = shape("embed_proj.0.weight"), shape("prefix_gru.weight_hh_l0")
    if len(narrow) == 2 and len(states) == 2:
        pure = block.of("pure_draft_prefix_len").size("pure_draft_prefix_len", 0, minimum=0, maximum=HEADS)
        fields |= {"prefix_rank": narrow[0], "prefix_state": states[1], "pure_prefix": pure}
    return fields


def variants(head: DraftHead, num_layers: int) -> list[HeadVariant]:
    """Return other interpretations of the same tensors, by the error that they would fix."""
    config = head.head.config
    root = "the slot of the root drafts the first token" if config.first else "the first mask drafts the first token"
    heads = [change_config(head, {"from_anchor": not config.from_anchor}, root)]
    windowed = any(window is not None for window in config.windows)
    sides = {"no": "see both sides", "windowed": "see earlier slots only if they have windows", "all": "are causal"}
    for causal, meaning in sides.items():
        if causal != config.causal and (windowed or {causal, config.causal} != {"no", "windowed"}):
            heads.append(change_config(head, {"causal": causal}, f"the slots of a block {meaning}"))
    if windowed:
        heads.append(change_config(head, {"windows": ()}, "its layers have no windows"))
    if config.prefix_rank:
        pure = int(not config.pure_prefix)
        heads.append(change_config(head, {"pure_prefix": pure}, f"{pure} first slots are not corrected"))
    return heads + tap_variants(head, num_layers)


def describe(config: DFlashConfig, layout: str, info: SaveInfo) -> dict[str, Any]:
    """Return config.json. Raises: UsageError for a head that the layout cannot represent."""
    is_zlab, kind = layout == "zlab", config.kind
    if not is_zlab and (config.causal == "all" or config.embedding_scale != 1.0 or config.mask_embedding):
        raise UsageError("the layout speculators has no causal blocks, scaled embeddings or masks; save it as zlab")
    if kind == "domino" and not is_zlab:
        raise UsageError("the layout speculators has no Domino head; save it as zlab")
    windows = {window for window in config.windows if window is not None}
    if len(windows) > 1:
        raise UsageError(f"the layout {layout} supports one window, but the head has {sorted(windows)}")
    layers = describe_layers(config.layer) | {"vocab_size": config.vocab_size}
    if windows:
        kinds = ["sliding_attention" if window else "full_attention" for window in config.windows]
        layers |= {"sliding_window": windows.pop(), "use_sliding_window": True, "layer_types": kinds}
    described = {
        "draft_vocab_size": config.layer.vocab_size if config.own_head else config.vocab_size,
        "block_size": config.block_size,
        "sample_from_anchor": config.from_anchor,
        "sliding_window_non_causal": config.causal == "no",
        "tie_word_embeddings": False,
    } | _described_corrections(config, info)
    scales = _described_scales(config)
    architecture = {
        "dflash": "DFlashDraftModel", "jetspec": "DFlashDraftModel", "dflash2": "DFlash2DraftModel",
        "dspark": "DSparkDraftModel", "domino": "DominoDraftModel",
    }[kind]  # fmt: skip
    if is_zlab:
        inner = {"mask_token_id": config.mask_token, "target_layer_ids": [tap - 1 for tap in config.taps]} | scales
        named = {"architectures": [architecture], "base_model_name_or_path": info.target}
        causal = {"is_causal": True} if config.causal == "all" else {}
        inner |= {"causal_head": True} if kind == "jetspec" else {}  # the field that JetSpec reads
        return layers | named | described | causal | {"dflash_config": inner}
    streams = {"mask_token_id": config.mask_token, "aux_hidden_state_layer_ids": list(config.taps)}
    verifier = describe_verifier(kind, architecture, info)
    return verifier | {"transformer_layer_config": layers} | described | streams | scales


def _described_scales(config: DFlashConfig) -> dict[str, Any]:
    """Return the factors that differ from their defaults."""
    values = {
        "input_embedding_scale": (config.embedding_scale, 1.0), "output_multiplier": (config.logit_scale, 1.0),
        "final_logit_softcapping": (config.softcap, None), "logit_scale": (config.capped_scale, 1.0),
    }  # fmt: skip
    return {name: value for name, (value, default) in values.items() if value != default}


def _described_corrections(config: DFlashConfig, info: SaveInfo) -> dict[str, Any]:
    """Return the fields of the corrections after the block and of the convolutions in its layers."""
    described: dict[str, Any] = {}
    if config.markov != "no":
        described |= {"markov_rank": config.markov_rank, "markov_head_type": config.markov}
    if config.kind == "dspark":
        described |= {
            "enable_confidence_head": config.confidence != "no",
            "confidence_head_with_markov": config.confidence == "markov",
        }
    if config.confidence != "no":  # a field of specjax: others store the fitted temperatures elsewhere
        described["confidence_temperatures"] = np.asarray(info.params["confidence"]["temperatures"]).tolist()
    if config.kind == "dflash2":
        described |= {
            "conv_kernel_size": config.conv_taps, "conv_group_size": config.conv_group,
            "selector_rank": config.selector_rank, "selector_top_k": config.candidates,
        }  # fmt: skip
    if config.kind == "domino":
        described |= {
            "projector_type": "domino", "emb_dim": config.prefix_rank, "gru_hidden_dim": config.prefix_state,
            "pure_draft_prefix_len": config.pure_prefix,
        }  # fmt: skip
    return described


SHOWN = shown(
    "conv_group_size", "conv_kernel_size", "confidence_head_with_markov", "draft_vocab_size", "emb_dim",
    "enable_confidence_head", "gru_hidden_dim", "has_embed_tokens", "has_lm_head", "loss_decay_gamma", "markov_rank",
    "num_anchors", "projector_type", "selector_rank", "use_confidence_head", "confidence_head_alpha",
)  # fmt: skip

FORMAT = HeadFormat(
    kinds=("dflash", "jetspec", "dflash2", "dspark", "domino"),
    table=TABLE,
    dialect_of=dialect_of,
    plan=plan,
    layouts={"speculators": (), "zlab": ()},
    describe=describe,
    kind_of=kind_of,
    variants=variants,
    neutral=SHOWN,
    spellings=SPELLINGS,
)
