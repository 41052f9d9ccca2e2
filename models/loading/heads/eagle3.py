"""Formats of EAGLE-3 and 3.1: seven dialects are read, and two of them are written.

The table has vllm speculators' names. Writers with equal names may still number the target's layers differently.
speculators numbers streams, where 0 is the embedding. DeepSpec numbers outputs of layers, and so does an `eagle_config`
of SpecForge or Model-Optimizer. SpecJAX writes SafeAILab's numbers.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NamedTuple

import numpy as np

from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.eagle3 import Eagle3Config, default_taps
from specjax.models.loading.families.config_fields import ROWS, WIDTH, ConfigFields
from specjax.models.loading.heads import vocabulary
from specjax.models.loading.heads.checkpoint_contents import (
    Contents,
    HeadPlan,
    Rules,
    Tensors,
    attention_table,
    count_indices,
    layer_table,
    mlp_table,
    rename_tensors,
    split_fused,
)
from specjax.models.loading.heads.describing import describe_layers, describe_verifier
from specjax.models.loading.heads.format import HeadFormat, SaveInfo
from specjax.models.loading.heads.settings import HeadVariant, change_config, tap_variants
from specjax.models.loading.heads.target_fit import (
    TargetSpec,
    check_equal,
    check_fits_target,
    first_statement,
    layer_config,
    resolve_taps,
    take_embedding,
    unembedding_rows,
)
from specjax.models.loading.tensors.tensors import read_rows
from specjax.types import Array

DOWN = "lm_head_down_proj.weight"  # a tensor of specjax, for output layers of low rank

TABLE = {
    "embed.weight": "embed_tokens.weight",
    "tap_norms.*.weight": "fc_norm.*.weight",
    "joined_norm.weight": "input_norm.weight",
    "fc.weight": "fc.weight",
    "first.embedding_norm.weight": "layers.0.input_layernorm.weight",
    "first.state_norm.weight": "layers.0.hidden_norm.weight",
    "first.mlp_norm.weight": "layers.0.post_attention_layernorm.weight",
    **attention_table("first.attention", "layers.0"),
    **mlp_table("first.mlp", "layers.0"),
    **layer_table("others.*", "layers.*+1"),
    "norm.weight": "norm.weight",
    "head_down.weight": DOWN,
    "head.weight": "lm_head.weight",
}

UNUSED = (r"verifier_", r".*rotary_emb\.inv_freq$", r"parallel_draft_heads\.")
"""The last pattern matches Medusa heads of Model-Optimizer. Without them the layer drafts like any EAGLE-3 head."""

EAGLE_CONFIG = {
    f"eagle_config.{name}": value
    for name, value in {
        "next_layer_regular": True, "parallel_draft_step": 1, "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
    }.items()
}  # fmt: skip
"""Settings of Model-Optimizer and SpecForge that describe the layer that this module reads."""

MIDLAYER = (r"^midlayer\.", "layers.0.")


class Dialect(NamedTuple):
    """The differences of a dialect from that of speculators."""

    rules: Rules = ()
    adds_one: str = "eagle_config"  # the object in which layer ids number outputs; "": the top level


DIALECTS = {
    "speculators": Dialect(),
    "safeailab": Dialect((MIDLAYER,)),
    "specforge": Dialect(
        (
            MIDLAYER,
            (r"^aux_norm_low\.", "fc_norm.0."),
            (r"^aux_norm_mid\.", "fc_norm.1."),
            (r"^aux_norm_high\.", "fc_norm.2."),
        )
    ),
    "deepspec": Dialect(),
    "modelopt": Dialect(),
    "automodel": Dialect(((r"^model\.", ""),)),
}


def dialect_of(contents: Contents, name: str = "eagle3") -> str | None:
    """Return the dialect of the writer, or None for other files. name: the algorithm's name in speculators."""
    c, names = contents.config, contents.tensors
    if c.has("speculators_model_type"):
        return "speculators" if c.text("speculators_model_type") == name else None
    reads_states = any(re.search(r"(^|\.)(midlayer|layers\.0)\.hidden_norm\.weight$", key) for key in names)
    if not reads_states or any(key.endswith("mask_hidden") for key in names) != (name == "peagle"):
        return None
    if any(key.startswith("model.") for key in names):
        return "automodel"
    if c.has("target_layer_ids"):
        return "deepspec"
    if any(key.startswith("midlayer.") for key in names):
        writers = c.array("architectures", str)
        return "specforge" if any(writer.endswith("Eagle3") for writer in writers) else "safeailab"
    return "modelopt"


def plan(contents: Contents, dialect: str, spec: TargetSpec) -> HeadPlan:
    """Map the tensors to parameters. Raises: UsageError for inconsistent files, or a head of another target."""
    c, folder, where = contents.config, contents.folder, contents.config.where
    tensors = rename_tensors(contents, DIALECTS[dialect].rules)
    fields = c.subfields("transformer_layer_config") if dialect == "speculators" else c
    count = count_indices(tensors, r"layers\.(\d+)\.")
    layer = layer_config(fields, tensors, "layers.0.self_attn", count, spec)
    split_fused(tensors, layer)
    width = c.size("target_hidden_size", layer.width, maximum=WIDTH)
    named = "target_hidden_size" if c.has("target_hidden_size") else "hidden_size"
    check_fits_target(where, width, layer.vocab_size, spec, named)
    notes: list[str] = []
    taps = _taps(contents, dialect, tensors, spec, notes)
    embeds = take_embedding(tensors, spec, notes)
    listed_size = c.size("draft_vocab_size", 0, maximum=ROWS)
    if "lm_head.weight" not in tensors and fields.flag("tie_word_embeddings") and embeds:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
        tensors.file_names["lm_head.weight"] = "embed_tokens.weight"
    own_head = "lm_head.weight" in tensors
    size = tensors["lm_head.weight"].shape[0] if own_head else listed_size or spec.vocab_size
    if own_head and listed_size:
        check_equal(where, "draft_vocab_size", listed_size, size, "its lm_head.weight has as many rows as")
    if not own_head and size != spec.vocab_size:
        raise UsageError(f"{folder} has no lm_head.weight, but drafts {size} of the target's {spec.vocab_size} ids")
    if not own_head or not embeds:
        lacking = "an embedding" if own_head else "a head"
        check_equal(where, "hidden_size", layer.width, spec.width, f"without {lacking} of its own it must be")
    arrays: dict[str, np.ndarray | Array] = {}
    ids = vocabulary.take_drafted_ids(tensors, size, spec.vocab_size, folder)
    token_map = contents.token_map
    if token_map is not None:
        if ids is not None:
            raise UsageError(f"{folder} has a map of its {size} ids; leave the token map out")
        ids, size = token_map, len(token_map)
        tensor = tensors.pop("lm_head.weight", None)
        rows = unembedding_rows(spec, ids) if tensor is None else read_rows(tensor, 0, tensor.shape[0])[ids]
        own_head, arrays["head.weight"] = True, rows
    if ids is not None:
        arrays["vocabulary.place"] = vocabulary.place_table(ids, spec.vocab_size)
    norms_each, norms_joined = c.flag("fc_norm"), c.flag("norm_before_fc")
    config = Eagle3Config(
        layer=dataclasses.replace(layer, vocab_size=size),
        taps=taps,
        target_width=spec.width,
        vocab_size=spec.vocab_size,
        norm_taps="each" if norms_each or "fc_norm.0.weight" in tensors
        else "joined" if norms_joined or "input_norm.weight" in tensors else "no",
        norm_before_residual=_norm_before_residual(c, dialect, notes),
        norm_output=_norm_output(c, dialect, tensors, notes),
        embeds=embeds,
        own_head=own_head,
        head_rank=tensors[DOWN].shape[0] if own_head and DOWN in tensors else 0,
    )  # fmt: skip
    flags = {
        name: getattr(config, name)
        for name in ("taps", "norm_taps", "norm_before_residual", "norm_output", "embeds", "own_head", "head_rank")
    }
    return HeadPlan(
        "eagle3", dialect, config, TABLE, tensors, flags | {"draft_vocab_size": size}, arrays,
        tuple(notes), UNUSED, _assumed(c, dialect),
    )  # fmt: skip


def _taps(contents: Contents, dialect: str, tensors: Tensors, spec: TargetSpec, notes: list[str]) -> tuple[int, ...]:
    """Return the streams of the target that the head reads."""
    c = contents.config
    statements: dict[str, list[int]] = {}
    for place, name, plus in (
        (c, "target_layer_ids", 1),
        (c, "eagle_aux_hidden_state_layer_ids", 0),
        (c, "aux_hidden_state_layer_ids", 0),
        (c.subfields("eagle_config"), "eagle_aux_hidden_state_layer_ids", 1),
    ):
        if ids := place.array(name, int):
            statements[place.prefix + name] = [i + plus for i in ids]
    field, ids = first_statement(statements, c.where, notes)
    default = lambda count: default_taps(spec.num_layers) if count == 3 else ()
    return resolve_taps(contents, tensors, spec, ids, field, default, notes)


def _norm_before_residual(c: ConfigFields, dialect: str, notes: list[str]) -> bool:
    """Read a flag that older configs of speculators lack. Their own reader then assumes false, vLLM true."""
    if dialect == "speculators" and not c.has("norm_before_residual"):
        notes.append(f"{c.where} lacks norm_before_residual; assumed false (vLLM assumes true)")
    return c.flag("norm_before_residual")


def _norm_output(c: ConfigFields, dialect: str, tensors: Tensors, notes: list[str]) -> bool:
    """Read a flag with two meanings in SpecForge.

    Until September 2026 it is the norm before the output layer, which all heads have. Later it feeds that norm's output
    back. Only heads of EAGLE-3.1 can mean the latter.
    """
    if dialect != "specforge" or not c.flag("norm_output"):
        return c.flag("norm_output")
    fed_back = "fc_norm.0.weight" in tensors
    meaning = (
        "feeds the last norm's output back, as SpecForge since September 2026"
        if fed_back
        else ("is the norm before the output layer, since there is no fc_norm")
    )
    notes.append(f"{c.where} has norm_output true; assumed that it {meaning} (--head-set norm_output=... overrides it)")
    return fed_back


def _assumed(c: ConfigFields, dialect: str) -> tuple[str, ...]:
    """Return the settings that the files leave open."""
    is_open = {
        "norm_output": dialect == "specforge" and c.flag("norm_output"),
        "norm_before_residual": dialect == "speculators" and not c.has("norm_before_residual"),
    }
    return tuple(name for name, is_so in is_open.items() if is_so)


def variants(head: DraftHead, num_layers: int) -> list[HeadVariant]:
    """Return other interpretations of the same tensors, by the error that they would fix."""
    config, heads = head.head.config, []
    for name in ("norm_before_residual", "norm_output"):
        flipped = not getattr(config, name)
        heads.append(change_config(head, {name: flipped}, f"{name} should be {str(flipped).lower()}"))
    if config.layer.window is not None:
        heads.append(change_config(head, {"layer.window": None}, "its layers have no window"))
    heads += tap_variants(head, num_layers)
    if config.is_trimmed:
        size = config.layer.vocab_size
        ids = vocabulary.place_ids(np.asarray(head.params["vocabulary"]["place"]), size) - np.arange(size)
        if ids.min() >= 0 and len(np.unique(ids)) == size:
            place = vocabulary.place_table(ids, config.vocab_size)
            params = head.params | {"vocabulary": {"place": place}}
            heads.append(HeadVariant("its d2t has the target's ids, not differences", head.replace(params=params)))
    return heads


def describe(
    config: Eagle3Config,
    layout: str,
    info: SaveInfo,
    name: str = "eagle3",
    architecture: str = "Eagle3Speculator",
) -> dict[str, Any]:
    """Return config.json. Raises: UsageError for a head that the layout cannot represent."""
    layers = describe_layers(config.layer) | {"vocab_size": config.vocab_size}
    size = config.layer.vocab_size if config.own_head else config.vocab_size
    ids = {"draft_vocab_size": size, "eagle_aux_hidden_state_layer_ids": list(config.taps)}
    if layout == "speculators":
        return describe_verifier(name, architecture, info) | ids | {
            "transformer_layer_config": layers,
            "norm_before_residual": config.norm_before_residual,
            "norm_output": config.norm_output,
            "norm_before_fc": config.norm_taps == "joined",
            "fc_norm": config.norm_taps == "each",
            "target_hidden_size": config.target_width,
            "tie_word_embeddings": False,
        }  # fmt: skip
    odd = {
        "norm_taps": config.norm_taps != "no", "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output, "several layers": config.layer.num_layers > 1,
        "head of low rank": config.head_rank > 0,
    }  # fmt: skip
    if any(odd.values()):
        names = " and ".join(name for name, is_so in odd.items() if is_so)
        raise UsageError(f"the layout safeailab has no {names}; save the head as speculators")
    return {"architectures": ["LlamaForCausalLM"], "target_hidden_size": config.target_width} | ids | layers


FORMAT = HeadFormat(
    kinds=("eagle3",),
    table=TABLE,
    dialect_of=dialect_of,
    plan=plan,
    layouts={"speculators": (), "safeailab": ((r"^layers\.0\.", "midlayer."),)},
    describe=describe,
    variants=variants,
    takes_token_map=True,
    neutral=EAGLE_CONFIG,
)
