"""EAGLE-1, whose layout EAGLE-2 and HASS share, its older form in vllm speculators, and FSPAD.

The table has SafeAILab's names.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.eagle import EagleConfig
from specjax.models.loading.heads import vocabulary
from specjax.models.loading.heads.checkpoint_contents import (
    Contents,
    Plan,
    Reader,
    Rules,
    check_of_target,
    has_embedding,
    indices,
    layer_config,
    renamed,
    rows_of_head,
    split_fused,
)
from specjax.models.loading.heads.describing import described_layers, described_verifier

KINDS = ("eagle",)

TABLE = {
    "embed.weight": "embed_tokens.weight",
    "fc.weight": "fc.weight",
    "fc.bias": "fc.bias",
    "embedding_norm.weight": "embedding_layernorm.weight",
    "norm.weight": "pre_lm_head_layernorm.weight",
    "sampler.norm.weight": "fc.post_attention_layernorm.weight",
    **{f"sampler.mlp.{part}.weight": f"fc.mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
    "stack.*.attention_norm.weight": "layers.*.input_layernorm.weight",
    "stack.*.mlp_norm.weight": "layers.*.post_attention_layernorm.weight",
    **{
        f"stack.*.attention.{part}.{what}": f"layers.*.self_attn.{part}_proj.{what}"
        for part in "qkvo"
        for what in ("weight", "bias")
    },
    **{f"stack.*.attention.{part}_norm.weight": f"layers.*.self_attn.{part}_norm.weight" for part in "qk"},
    **{f"stack.*.mlp.{part}.weight": f"layers.*.mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
}

UNUSED = (r"verifier_", r"lm_head\.weight$", r".*rotary_emb\.inv_freq$")

DIALECTS: dict[str, Rules] = {
    "safeailab": ((r"^model\.", ""),),
    "speculators": ((r"^transformer\.", "layers.0."), (r"^fusion_fc\.", "fc.")),
    "fspad": ((r"^fc\.fc\.", "fc."),),
}


def dialect_of(contents: Contents) -> str | None:
    """Who wrote it; None: it is no EAGLE-1."""
    c, names = contents.config, contents.tensors
    if c.given("speculators_model_type"):
        return "speculators" if c.text("speculators_model_type") == "eagle" else None
    if "fc.fc.weight" in names:
        return "fspad"
    fc = names.get("fc.weight", names.get("model.fc.weight"))
    layers = any(re.match(r"(model\.)?layers\.0\.self_attn\.", name) for name in names)
    others = any(re.search(r"(hidden_norm|mask_hidden|^lstm|\.fc\.)", name.removeprefix("model.")) for name in names)
    return "safeailab" if fc is not None and layers and not others else None


def kind_of(contents: Contents) -> str:
    """The method that it is drafted with."""
    return "eagle"


def plan(contents: Contents, dialect: str, reader: Reader, token_map: np.ndarray | None) -> Plan:
    """Raises: UsageError for a head that does not fit the target, or itself."""
    c, where = contents.config, contents.config.where
    tensors = renamed(contents, DIALECTS[dialect])
    fields = c.inside("transformer_layer_config") if dialect == "speculators" else c
    layer = layer_config(fields, tensors, "layers.0.self_attn", indices(tensors, r"layers\.(\d+)\."), reader)
    split_fused(tensors, layer)
    check_of_target(where, layer.width, layer.vocab_size, reader)
    columns = tensors.shape("fc.weight", contents.folder)[-1]
    if columns != 2 * layer.width:
        raise UsageError(
            f"{contents.folder} has fc.weight for {columns} numbers, and by hidden_size {layer.width} it reads "
            f"{2 * layer.width}"
        )
    notes: list[str] = []
    embeds = has_embedding(tensors, reader, notes)
    if "lm_head.weight" in tensors:
        notes.append("lm_head.weight is not read: these heads predict with the target's")
    arrays = {}
    if token_map is not None:
        arrays = {
            "head.weight": rows_of_head(reader, token_map),
            "vocabulary.place": vocabulary.places(token_map, reader.vocab_size),
        }
    config = EagleConfig(
        layer=dataclasses.replace(layer, vocab_size=reader.vocab_size),
        bias="fc.bias" in tensors,
        embeds=embeds,
        vocab_size=reader.vocab_size,
        sampler="fc.mlp.gate_proj.weight" in tensors,
        split=tensors.shape("layers.0.mlp.down_proj.weight", contents.folder)[0] == 2 * layer.width,
        norms=c.flag("layernorms") or "embedding_layernorm.weight" in tensors,
        draft_vocab_size=0 if token_map is None else len(token_map),
    )
    said = "fusion_bias" if dialect == "speculators" else "bias"
    if c.given(said) and c.flag(said) != config.bias:
        has = "an" if config.bias else "no"
        raise UsageError(f"{where} has {said} {str(c.flag(said)).lower()}, and {contents.folder} has {has} fc.bias")
    flags = {name: getattr(config, name) for name in ("bias", "norms", "sampler", "split", "embeds")}
    flags["draft_vocab_size"] = config.draft_vocab_size or reader.vocab_size
    return Plan("eagle", dialect, config, TABLE, tensors, flags, arrays, tuple(notes), UNUSED)


def variants(head: DraftHead, num_layers: int) -> dict[str, DraftHead]:
    """Other readings of the same tensors, by what would be wrong with this one: none."""
    return {}


LAYOUTS: dict[str, Rules] = {
    "safeailab": (),
    "fspad": ((r"^fc\.(weight|bias)$", r"fc.fc.\1"),),
    "speculators": ((r"^layers\.0\.", "transformer."), (r"^fc\.", "fusion_fc.")),
}


def describe(config: EagleConfig, layout: str, about: dict[str, Any]) -> dict[str, Any]:
    """config.json. Raises: UsageError for a head that the layout has no words for."""
    if config.draft_vocab_size:
        raise UsageError("a head with a token map cannot be saved; save it as it was without the map")
    if (config.sampler or config.split) != (layout == "fspad"):
        has = "a" if config.sampler or config.split else "no"
        raise UsageError(f"the head has {has} sampler, which the layout {layout} does not fit; choose another")
    layers = described_layers(config.layer) | {"vocab_size": config.vocab_size or config.layer.vocab_size}
    if layout == "speculators":
        if config.layer.num_layers > 1:
            raise UsageError(f"the layout speculators has one layer, and the head {config.layer.num_layers}")
        return described_verifier("eagle", "EagleSpeculator", about) | {
            "transformer_layer_architecture": "LlamaDecoderLayer",
            "transformer_layer_config": layers,
            "layernorms": config.norms,
            "fusion_bias": config.bias,
        }
    if config.norms:
        raise UsageError("the layout safeailab has no norms; save the head as speculators")
    return {"architectures": ["LlamaForCausalLM"], "bias": config.bias} | layers
