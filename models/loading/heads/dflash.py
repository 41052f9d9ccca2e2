"""Formats of DFlash, DSpark, DFlash 2 and Domino.

The writers are z-lab, DeepSpec, speculators, SpecForge, Model-Optimizer and NeMo Automodel. The tensors determine the
kind of a head. `target_layer_ids` (z-lab and others) numbers outputs of layers. `aux_hidden_state_layer_ids`
(speculators) numbers streams, where 0 is the embedding.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.dflash import DFlashConfig, default_taps, dflash_head
from specjax.models.loading.families.config_fields import HEADS, ROWS, WIDTH, ConfigFields
from specjax.models.loading.heads import vocabulary
from specjax.models.loading.heads.checkpoint_contents import (
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
from specjax.models.loading.heads.target_fit import TargetSpec, check_equal, layer_config, resolve_taps, take_embedding
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

UNUSED = (r"verifier_", r".*rotary_emb\.inv_freq$", r"g_proj\.", r"aux_hidden_norms\.")

RULES: Rules = (
    (r"^model\.", ""),  # NeMo Automodel
    (r"^logit_head\.", ""),  # early Domino
    (r"^(markov_w\d|gate_proj|joint_proj)\.", r"markov_head.\1."),  # Model-Optimizer
    (r"^confidence_proj\.", "confidence_head.proj."),
)


def dialect_of(contents: Contents) -> str | None:
    """Return the dialect of the writer, or None for other files."""
    c, names = contents.config, contents.tensors
    if c.has("speculators_model_type"):
        return "speculators" if c.text("speculators_model_type") in ("dflash", "dflash2", "dspark") else None
    plain = {name.removeprefix("model.") for name in names}
    is_block = {"fc.weight", "hidden_norm.weight"} <= plain and any(re.match(r"layers\.0\.", name) for name in plain)
    if not is_block:
        return None
    if any(re.match(r"(markov_w\d|confidence_proj)\.", name) for name in names):
        return "modelopt"
    return "zlab" if c.has("dflash_config") else "deepspec"


def kind_of(contents: Contents) -> str:
    """Return the kind of head."""
    has = lambda *parts: any(part in name for name in contents.tensors for part in parts)
    if has("_conv.", "candidate_selector."):
        return "dflash2"
    if has("prefix_gru."):
        return "domino"
    return "dspark" if has("markov_w1", "confidence_") else "dflash"


def plan(contents: Contents, dialect: str, spec: TargetSpec) -> HeadPlan:
    """Map the tensors to parameters. Raises: UsageError for inconsistent files, or a head of another target."""
    c, folder, where = contents.config, contents.folder, contents.config.where
    nested = _NestedFields(c, c.subfields("dflash_config"))
    tensors = rename_tensors(contents, RULES)
    fields = c.subfields("transformer_layer_config") if dialect == "speculators" else c
    count = count_indices(tensors, r"layers\.(\d+)\.")
    layer = layer_config(fields, tensors, "layers.0.self_attn", count, spec, windows=False)
    split_fused(tensors, layer)
    check_equal(where, "vocab_size", layer.vocab_size, spec.vocab_size, f"the vocabulary of {spec.name} has")
    notes: list[str] = []
    embeds, own_head = take_embedding(tensors, spec, notes), "lm_head.weight" in tensors
    size = tensors["lm_head.weight"].shape[0] if own_head else spec.vocab_size
    if not own_head or not embeds:
        check_equal(where, "hidden_size", layer.width, spec.width, f"the width of the target {spec.name} is")
    ids = vocabulary.take_drafted_ids(tensors, size, spec.vocab_size, folder)
    arrays: dict[str, np.ndarray | Array] = {}
    if ids is not None:
        arrays["vocabulary.place"] = vocabulary.place_table(ids, spec.vocab_size)
    config = DFlashConfig(
        layer=dataclasses.replace(layer, vocab_size=size),
        taps=_taps(contents, nested, tensors, spec, notes),
        target_width=spec.width,
        vocab_size=spec.vocab_size,
        block_size=nested.fields_of("block_size").size("block_size", 8, maximum=HEADS),
        mask_token=nested.fields_of("mask_token_id").size("mask_token_id", minimum=0, maximum=ROWS),
        from_anchor=_from_anchor(nested, dialect, tensors),
        windows=_windows(fields),
        causal="no" if not c.flag("is_causal", True) or c.flag("sliding_window_non_causal") else "windowed",
        embeds=embeds,
        own_head=own_head,
        logit_scale=c.number("output_multiplier", 1.0),
        softcap=c.number("final_logit_softcapping", None),
        **_corrections(nested, tensors, layer.width),
    )
    check_equal(where, "mask_token_id", min(config.mask_token, spec.vocab_size - 1), config.mask_token,
                f"the target has {spec.vocab_size} ids, so it cannot be")  # fmt: skip
    if config.confidence != "no":
        temperatures = c.array("confidence_temperatures", (int, float)) or [1.0] * config.max_depth
        check_equal(where, "confidence_temperatures of slots", len(temperatures), config.max_depth, "a block drafts in")
        arrays["confidence.temperatures"] = np.asarray(temperatures, np.float32)
    names = (
        "taps", "block_size", "mask_token", "from_anchor", "windows", "causal", "embeds", "own_head", "markov",
        "confidence", "conv_taps", "selector_rank", "prefix_rank",
    )  # fmt: skip
    flags = {name: getattr(config, name) for name in names} | {"draft_vocab_size": size}
    return HeadPlan(config.kind, dialect, config, TABLE, tensors, flags, arrays, tuple(notes), UNUSED)


class _NestedFields:
    """Fields of config.json that are at the top level or, in some dialects, in `dflash_config`."""

    def __init__(self, top: ConfigFields, inner: ConfigFields):
        self.top, self.inner = top, inner

    def fields_of(self, name: str) -> ConfigFields:
        """Return the fields that contain `name`; the top level if none does."""
        return self.inner if self.inner.has(name) and not self.top.has(name) else self.top


def _taps(
    contents: Contents, nested: _NestedFields, tensors: Tensors, spec: TargetSpec, notes: list[str]
) -> tuple[int, ...]:
    field = ""
    ids: list[int] = []
    for name, plus in (("aux_hidden_state_layer_ids", 0), ("target_layer_ids", 1)):
        fields = nested.fields_of(name)
        if not ids and fields.has(name):
            field, ids = fields.prefix + name, [i + plus for i in fields.array(name, int)]
    return resolve_taps(contents, tensors, spec, ids, field, lambda n: default_taps(spec.num_layers, n), notes)


def _from_anchor(nested: _NestedFields, dialect: str, tensors: Tensors) -> bool:
    """Return True if the slot of the root drafts. DeepSpec's configs have no field for it; their blocks always do."""
    for name in ("sample_from_anchor", "shift_label"):
        if nested.fields_of(name).has(name):
            return nested.fields_of(name).flag(name)
    has_markov = "markov_head.markov_w1.weight" in tensors
    return dialect == "deepspec" or has_markov


def _windows(fields: ConfigFields) -> tuple[int | None, ...]:
    kinds = fields.array("layer_types", str)
    if "sliding_attention" not in kinds:
        return ()
    window = fields.size("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _corrections(nested: _NestedFields, tensors: Tensors, width: int) -> dict[str, Any]:
    """Return the fields of DFlashConfig for the corrections that have tensors."""
    shape = lambda name: tensors[name].shape if name in tensors else ()
    fields: dict[str, Any] = {}
    if len(w1 := shape("markov_head.markov_w1.weight")) == 2:
        kinds = {"markov_head.gate_proj.weight": "gated", "markov_head.joint_proj.weight": "rnn"}
        kind = next((kind for name, kind in kinds.items() if name in tensors), "vanilla")
        named = nested.fields_of("markov_head_type").text("markov_head_type", kind)
        if named != kind:
            raise UsageError(
                f'{nested.top.where} has markov_head_type "{named}", and the file has the tensors of {kind}'
            )
        fields |= {"markov": kind, "markov_rank": w1[1]}
    if len(proj := shape("confidence_head.proj.weight")) == 2:
        fields["confidence"] = "state" if proj[1] == width else "markov"
    base, dynamic = (shape(f"layers.0.attention_conv.{x}") for x in ("base_kernel", "kernel_projection.weight"))
    if len(base) == 3 and len(dynamic) == 2:
        groups = max(dynamic[0] // max(2 * base[1], 1), 1)
        fields |= {"conv_taps": base[1], "conv_group": max(width // groups, 1)}
    if len(book := shape("candidate_selector.predecessor_codebook")) == 2:
        candidates = nested.fields_of("selector_top_k").size("selector_top_k", 16, maximum=WIDTH)
        fields |= {"selector_rank": book[1], "candidates": candidates}
    narrow, states = shape("embed_proj.0.weight"), shape("prefix_gru.weight_hh_l0")
    if len(narrow) == 2 and len(states) == 2:
        pure = nested.fields_of("pure_draft_prefix_len").size("pure_draft_prefix_len", 1, minimum=0, maximum=HEADS)
        fields |= {"prefix_rank": narrow[0], "prefix_state": states[1], "pure_prefix": pure}
    return fields


def variants(head: DraftHead, num_layers: int) -> dict[str, DraftHead]:
    """Return other interpretations of the same tensors, by the error that they would fix."""
    config, heads = head.head.config, {}
    for step, meaning in ((1, "outputs of layers"), (-1, "streams, and were read as outputs of layers")):
        taps = tuple(tap + step for tap in config.taps)
        if all(0 <= tap <= num_layers for tap in taps):
            other = head.replace(head=dflash_head(dataclasses.replace(config, taps=taps)))
            heads[f"its layer ids count {meaning}; as streams, 0 the embedding, they are {list(taps)}"] = other
    return heads


def describe(config: DFlashConfig, layout: str, info: SaveInfo) -> dict[str, Any]:
    """Return config.json. Raises: UsageError for a head that the layout cannot represent."""
    is_zlab, kind = layout == "zlab", config.kind
    if config.causal == "all" or config.embedding_scale != 1.0:
        raise UsageError(f"the layout {layout} has no causal blocks or scaled embeddings")
    if kind == "domino" and not is_zlab:
        raise UsageError("the layout speculators has no Domino head; save it as zlab")
    windows = {window for window in config.windows if window is not None}
    if len(windows) > 1:
        raise UsageError(f"the layout {layout} supports one window, but the head has {sorted(windows)}")
    layers = describe_layers(config.layer) | {"vocab_size": config.vocab_size}
    if windows:
        kinds = ["sliding_attention" if window else "full_attention" for window in config.windows]
        layers |= {"sliding_window": windows.pop(), "layer_types": kinds}
    described = {
        "draft_vocab_size": config.layer.vocab_size if config.own_head else config.vocab_size,
        "block_size": config.block_size,
        "sample_from_anchor": config.from_anchor,
        "sliding_window_non_causal": config.causal == "no",
        "tie_word_embeddings": False,
    } | _described_corrections(config, info)
    if config.logit_scale != 1.0 or config.softcap is not None:
        described |= {"output_multiplier": config.logit_scale, "final_logit_softcapping": config.softcap}
    architecture = {
        "dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel",
        "domino": "DominoDraftModel",
    }[kind]  # fmt: skip
    if is_zlab:
        inner = {"mask_token_id": config.mask_token, "target_layer_ids": [tap - 1 for tap in config.taps]}
        named = {"architectures": [architecture], "base_model_name_or_path": info.target}
        return layers | named | described | {"dflash_config": inner}
    streams = {"mask_token_id": config.mask_token, "aux_hidden_state_layer_ids": list(config.taps)}
    verifier = describe_verifier(kind, architecture, info)
    return verifier | {"transformer_layer_config": layers} | described | streams


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
    "enable_confidence_head", "gru_hidden_dim", "markov_rank", "projector_type", "selector_rank",
)  # fmt: skip

FORMAT = HeadFormat(
    kinds=("dflash", "dflash2", "dspark", "domino"),
    table=TABLE,
    dialect_of=dialect_of,
    plan=plan,
    layouts={"speculators": (), "zlab": ()},
    describe=describe,
    kind_of=kind_of,
    variants=variants,
    neutral=SHOWN,
)
