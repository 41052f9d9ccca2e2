"""Formats of EAGLE-1 (shared by EAGLE-2 and HASS), its older form in vllm speculators, and FSPAD.

The table has SafeAILab's names.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from specjax.errors import UsageError
from specjax.models.heads.eagle import EagleConfig
from specjax.models.loading.heads import vocabulary
from specjax.models.loading.heads.checkpoint_contents import (
    Contents,
    HeadPlan,
    Rules,
    count_indices,
    layer_table,
    rename_tensors,
    split_fused,
)
from specjax.models.loading.heads.describing import describe_layers, describe_verifier
from specjax.models.loading.heads.format import HeadFormat, SaveInfo
from specjax.models.loading.heads.target_fit import (
    TargetSpec,
    check_fits_target,
    layer_config,
    take_embedding,
    unembedding_rows,
)

TABLE = {
    "embed.weight": "embed_tokens.weight",
    "fc.weight": "fc.weight",
    "fc.bias": "fc.bias",
    "embedding_norm.weight": "embedding_layernorm.weight",
    "norm.weight": "pre_lm_head_layernorm.weight",
    "sampler.norm.weight": "fc.post_attention_layernorm.weight",
    **{f"sampler.mlp.{part}.weight": f"fc.mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
    **layer_table("stack.*", "layers.*"),
}

IMAGE_ROWS = "image_rows"
"""The field that heads with rows of images have, whose tensors have the same names."""

UNUSED = (r"verifier_", r"lm_head\.weight$", r".*rotary_emb\.inv_freq$")

DIALECTS: dict[str, Rules] = {
    "safeailab": ((r"^model\.", ""),),
    "speculators": ((r"^transformer\.", "layers.0."), (r"^fusion_fc\.", "fc.")),
    "fspad": ((r"^fc\.fc\.", "fc."),),
}


def dialect_of(contents: Contents) -> str | None:
    """Return the dialect of the writer, or None for other files."""
    c, names = contents.config, contents.tensors
    if c.has(IMAGE_ROWS):
        return None
    if c.has("speculators_model_type"):
        return "speculators" if c.text("speculators_model_type") == "eagle" else None
    if "fc.fc.weight" in names:
        return "fspad"
    fc = names.get("fc.weight", names.get("model.fc.weight"))
    layers = any(re.match(r"(model\.)?layers\.0\.self_attn\.", name) for name in names)
    is_other = any(re.search(r"(hidden_norm|mask_hidden|^lstm|\.fc\.)", name.removeprefix("model.")) for name in names)
    return "safeailab" if fc is not None and layers and not is_other else None


def plan(contents: Contents, dialect: str, spec: TargetSpec) -> HeadPlan:
    """Map the tensors to parameters. Raises: UsageError for inconsistent files, or a head of another target."""
    c, where = contents.config, contents.config.where
    tensors = rename_tensors(contents, DIALECTS[dialect])
    fields = c.subfields("transformer_layer_config") if dialect == "speculators" else c
    layer = layer_config(fields, tensors, "layers.0.self_attn", count_indices(tensors, r"layers\.(\d+)\."), spec)
    split_fused(tensors, layer)
    check_fits_target(where, layer.width, layer.vocab_size, spec)
    columns = tensors.shape("fc.weight", contents.folder)[-1]
    if columns != 2 * layer.width:
        raise UsageError(
            f"{contents.folder} has fc.weight with {columns} columns, but hidden_size {layer.width} needs "
            f"{2 * layer.width}"
        )
    notes: list[str] = []
    embeds = take_embedding(tensors, spec, notes)
    if "lm_head.weight" in tensors:
        notes.append("lm_head.weight is not read: these heads use the target's output layer")
    arrays, token_map = {}, contents.token_map
    if token_map is not None:
        arrays = {
            "head.weight": unembedding_rows(spec, token_map),
            "vocabulary.place": vocabulary.place_table(token_map, spec.vocab_size),
        }
    config = EagleConfig(
        layer=dataclasses.replace(layer, vocab_size=spec.vocab_size),
        bias="fc.bias" in tensors,
        embeds=embeds,
        vocab_size=spec.vocab_size,
        sampler="fc.mlp.gate_proj.weight" in tensors,
        split=tensors.shape("layers.0.mlp.down_proj.weight", contents.folder)[0] == 2 * layer.width,
        norms=c.flag("layernorms") or "embedding_layernorm.weight" in tensors,
        draft_vocab_size=0 if token_map is None else len(token_map),
    )
    field = "fusion_bias" if dialect == "speculators" else "bias"
    if c.has(field) and c.flag(field) != config.bias:
        has = "an" if config.bias else "no"
        raise UsageError(f"{where} has {field} {str(c.flag(field)).lower()}, and {contents.folder} has {has} fc.bias")
    flags = {name: getattr(config, name) for name in ("bias", "norms", "sampler", "split", "embeds")}
    flags["draft_vocab_size"] = config.draft_vocab_size or spec.vocab_size
    return HeadPlan("eagle", dialect, config, TABLE, tensors, flags, arrays, tuple(notes), UNUSED)


def describe(config: EagleConfig, layout: str, info: SaveInfo) -> dict[str, Any]:
    """Return config.json. Raises: UsageError for a head that the layout cannot represent."""
    if config.draft_vocab_size:
        raise UsageError("a head with a token map cannot be saved; save the head without the map")
    if (config.sampler or config.split) != (layout == "fspad"):
        has = "a" if config.sampler or config.split else "no"
        raise UsageError(f"the head has {has} sampler, which the layout {layout} does not fit; choose another")
    layers = describe_layers(config.layer) | {"vocab_size": config.vocab_size or config.layer.vocab_size}
    if layout == "speculators":
        if config.layer.num_layers > 1:
            raise UsageError(f"the layout speculators has one layer, but the head has {config.layer.num_layers}")
        return describe_verifier("eagle", "EagleSpeculator", info) | {
            "transformer_layer_architecture": "LlamaDecoderLayer",
            "transformer_layer_config": layers,
            "layernorms": config.norms,
            "fusion_bias": config.bias,
        }
    if config.norms:
        raise UsageError("the layout safeailab has no norms; save the head as speculators")
    return {"architectures": ["LlamaForCausalLM"], "bias": config.bias} | layers


FORMAT = HeadFormat(
    kinds=("eagle",),
    table=TABLE,
    dialect_of=dialect_of,
    plan=plan,
    layouts={
        "safeailab": (),
        "fspad": ((r"^fc\.(weight|bias)$", r"fc.fc.\1"),),
        "speculators": ((r"^layers\.0\.", "transformer."), (r"^fc\.", "fusion_fc.")),
    },
    describe=describe,
    takes_token_map=True,
)
