"""EAGLE-3 and 3.1 as seven writers save them, and as two are written here.

The table has vllm speculators' names. Where the writers agree on names they may still mean different things: layers of
the target are counted as streams (0 the embedding) by speculators, as outputs of layers by DeepSpec and in an
`eagle_config`, as SpecForge and Model-Optimizer write it. SpecJAX writes what SafeAILab does.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NamedTuple

import numpy as np

from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.eagle3 import Eagle3Config, default_taps
from specjax.models.heads.kinds import KINDS as MADE_BY
from specjax.models.loading.families.config_fields import ROWS, WIDTH, Fields
from specjax.models.loading.heads import vocabulary
from specjax.models.loading.heads.checkpoint_contents import (
    Contents,
    Plan,
    Reader,
    Rules,
    Tensors,
    check_equal,
    check_layers,
    check_of_target,
    has_embedding,
    indices,
    layer_config,
    renamed,
    rows_of_head,
    split_fused,
)
from specjax.models.loading.heads.describing import described_layers, described_verifier
from specjax.models.loading.tensors.tensors import read_rows
from specjax.types import Array

KINDS = ("eagle3",)

DOWN = "lm_head_down_proj.weight"  # specjax's own: of a head of low rank

TABLE = {
    "embed.weight": "embed_tokens.weight",
    "tap_norms.*.weight": "fc_norm.*.weight",
    "joined_norm.weight": "input_norm.weight",
    "fc.weight": "fc.weight",
    "first.embedding_norm.weight": "layers.0.input_layernorm.weight",
    "first.state_norm.weight": "layers.0.hidden_norm.weight",
    "first.mlp_norm.weight": "layers.0.post_attention_layernorm.weight",
    **{
        f"{path}.attention.{part}.{what}": f"layers.{layer}.self_attn.{part}_proj.{what}"
        for path, layer in (("first", "0"), ("others.*", "*+1"))
        for part in "qkvo"
        for what in ("weight", "bias")
    },
    **{
        f"{path}.attention.{part}_norm.weight": f"layers.{layer}.self_attn.{part}_norm.weight"
        for path, layer in (("first", "0"), ("others.*", "*+1"))
        for part in "qk"
    },
    **{
        f"{path}.mlp.{part}.weight": f"layers.{layer}.mlp.{part}_proj.weight"
        for path, layer in (("first", "0"), ("others.*", "*+1"))
        for part in ("gate", "up", "down")
    },
    "others.*.attention_norm.weight": "layers.*+1.input_layernorm.weight",
    "others.*.mlp_norm.weight": "layers.*+1.post_attention_layernorm.weight",
    "norm.weight": "norm.weight",
    "head_down.weight": DOWN,
    "head.weight": "lm_head.weight",
}

UNUSED = (r"verifier_", r".*rotary_emb\.inv_freq$", r"parallel_draft_heads\.")
"""The last: Model-Optimizer's Medusa heads on top of the layer, without which it drafts as any EAGLE-3 does."""

MIDLAYER = (r"^midlayer\.", "layers.0.")


class Dialect(NamedTuple):
    """What a writer does otherwise than speculators."""

    rules: Rules = ()
    adds_one: str = "eagle_config"  # the object whose layer ids count outputs; "": the top level's do


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
    """Who wrote it; None: it is no EAGLE-3. `name`: as speculators calls it, or what is built on it."""
    c, names = contents.config, contents.tensors
    if c.given("speculators_model_type"):
        return "speculators" if c.text("speculators_model_type") == name else None
    reads_states = any(re.search(r"(^|\.)(midlayer|layers\.0)\.hidden_norm\.weight$", key) for key in names)
    if not reads_states or any(key.endswith("mask_hidden") for key in names) != (name == "peagle"):
        return None
    if any(key.startswith("model.") for key in names):
        return "automodel"
    if c.given("target_layer_ids"):
        return "deepspec"
    if any(key.startswith("midlayer.") for key in names):
        writers = c.array("architectures", str)
        return "specforge" if any(writer.endswith("Eagle3") for writer in writers) else "safeailab"
    return "modelopt"


def kind_of(contents: Contents) -> str:
    """The method that it is drafted with."""
    return "eagle3"


def plan(contents: Contents, dialect: str, reader: Reader, token_map: np.ndarray | None) -> Plan:
    """Raises: UsageError for a head that does not fit the target, or itself."""
    c, folder, where = contents.config, contents.folder, contents.config.where
    tensors = renamed(contents, DIALECTS[dialect].rules)
    fields = c.inside("transformer_layer_config") if dialect == "speculators" else c
    count = indices(tensors, r"layers\.(\d+)\.")
    layer = layer_config(fields, tensors, "layers.0.self_attn", count, reader)
    split_fused(tensors, layer)
    width = c.size("target_hidden_size", layer.width, most=WIDTH)
    named = "target_hidden_size" if c.given("target_hidden_size") else "hidden_size"
    check_of_target(where, width, layer.vocab_size, reader, named)
    notes: list[str] = []
    taps = _taps(contents, dialect, tensors, reader, notes)
    embeds = has_embedding(tensors, reader, notes)
    said = c.size("draft_vocab_size", 0, most=ROWS)
    if "lm_head.weight" not in tensors and fields.flag("tie_word_embeddings") and embeds:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
        tensors.own["lm_head.weight"] = "embed_tokens.weight"
    own_head = "lm_head.weight" in tensors
    size = tensors["lm_head.weight"].shape[0] if own_head else said or reader.vocab_size
    if own_head and said:
        check_equal(where, "draft_vocab_size", said, size, "its lm_head.weight has as many rows as")
    if not own_head and size != reader.vocab_size:
        raise UsageError(f"{folder} has no lm_head.weight, and drafts {size} of the target's {reader.vocab_size} ids")
    if not own_head or not embeds:
        lacking = "an embedding" if own_head else "a head"
        check_equal(where, "hidden_size", layer.width, reader.width, f"without {lacking} of its own it must be")
    arrays: dict[str, np.ndarray | Array] = {}
    ids = vocabulary.drafted_ids(tensors, size, reader.vocab_size, folder)
    if token_map is not None:
        if ids is not None:
            raise UsageError(f"{folder} drafts {size} ids by a map of its own; leave the token map out")
        ids, size = token_map, len(token_map)
        tensor = tensors.pop("lm_head.weight", None)
        rows = rows_of_head(reader, ids) if tensor is None else read_rows(tensor, 0, tensor.shape[0])[ids]
        own_head, arrays["head.weight"] = True, rows
    if ids is not None:
        arrays["vocabulary.place"] = vocabulary.places(ids, reader.vocab_size)
    config = Eagle3Config(
        layer=dataclasses.replace(layer, vocab_size=size),
        taps=taps,
        target_width=reader.width,
        vocab_size=reader.vocab_size,
        norm_taps="each" if c.flag("fc_norm") or "fc_norm.0.weight" in tensors
        else "joined" if c.flag("norm_before_fc") or "input_norm.weight" in tensors else "no",
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
    return Plan(
        "eagle3", dialect, config, TABLE, tensors, flags | {"draft_vocab_size": size}, arrays,
        tuple(notes), UNUSED,
    )  # fmt: skip


def _taps(contents: Contents, dialect: str, tensors: Tensors, reader: Reader, notes: list[str]) -> tuple[int, ...]:
    """The target's streams, whose number fc has to fit."""
    c = contents.config
    found = ""
    ids: list[int] = []
    for place, name, plus in (
        (c, "target_layer_ids", 1),
        (c, "eagle_aux_hidden_state_layer_ids", 0),
        (c, "aux_hidden_state_layer_ids", 0),
        (c.inside("eagle_config"), "eagle_aux_hidden_state_layer_ids", 1),
    ):
        if not ids and place.given(name):
            found, ids = place.prefix + name, [i + plus for i in place.array(name, int)]
    default = lambda count: default_taps(reader.num_layers) if count == 3 else ()
    return check_layers(contents, tensors, reader, ids, found, default, notes)


def _norm_before_residual(c: Fields, dialect: str, notes: list[str]) -> bool:
    """Speculators' configs of before the flag: their own reader takes it for false, vLLM for true."""
    if dialect == "speculators" and not c.given("norm_before_residual"):
        notes.append(f"{c.where} lacks norm_before_residual; taken for false, which vLLM takes for true")
    return c.flag("norm_before_residual")


def _norm_output(c: Fields, dialect: str, tensors: Tensors, notes: list[str]) -> bool:
    """SpecForge once meant the norm before the head by it, which all have; its heads of 3.1 norm their taps too."""
    if dialect == "specforge" and c.flag("norm_output") and "fc_norm.0.weight" not in tensors:
        notes.append(
            f"{c.where} has norm_output without fc_norm; taken for the norm before the head, as SpecForge does"
        )
        return False
    return c.flag("norm_output")


def variants(head: DraftHead, num_layers: int) -> dict[str, DraftHead]:
    """Other readings of the same tensors, by what would be wrong with this one."""
    config = head.head.config
    functions = MADE_BY[head.head.kind].head
    other = lambda **changes: head.replace(head=functions(dataclasses.replace(config, **changes)))
    flipped = not config.norm_before_residual
    found = {f"norm_before_residual should be {str(flipped).lower()}": other(norm_before_residual=flipped)}
    for step, what in ((1, "outputs of layers"), (-1, "streams, and were read as outputs of layers")):
        taps = tuple(tap + step for tap in config.taps)
        if all(0 <= tap <= num_layers for tap in taps):
            found[f"its layer ids count {what}; as streams, 0 the embedding, they are {list(taps)}"] = other(taps=taps)
    if config.is_trimmed:
        size = config.layer.vocab_size
        ids = vocabulary.ids_of(np.asarray(head.params["vocabulary"]["place"]), size) - np.arange(size)
        if ids.min() >= 0 and len(np.unique(ids)) == size:
            place = vocabulary.places(ids, config.vocab_size)
            params = head.params | {"vocabulary": {"place": place}}
            found["its d2t holds the target's ids, not differences"] = head.replace(params=params)
    return found


LAYOUTS = {"speculators": (), "safeailab": ((r"^layers\.0\.", "midlayer."),)}
"""What is written here, and what differs from the table's names."""


def describe(
    config: Eagle3Config,
    layout: str,
    about: dict[str, Any],
    name: str = "eagle3",
    architecture: str = "Eagle3Speculator",
) -> dict[str, Any]:
    """config.json. Raises: UsageError for a head that the layout has no words for."""
    layers = described_layers(config.layer) | {"vocab_size": config.vocab_size}
    size = config.layer.vocab_size if config.own_head else config.vocab_size
    ids = {"draft_vocab_size": size, "eagle_aux_hidden_state_layer_ids": list(config.taps)}
    if layout == "speculators":
        return described_verifier(name, architecture, about) | ids | {
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
        said = " and ".join(name for name, is_so in odd.items() if is_so)
        raise UsageError(f"the layout safeailab has no {said}; save the head as speculators")
    return {"architectures": ["LlamaForCausalLM"], "target_hidden_size": config.target_width} | ids | layers
