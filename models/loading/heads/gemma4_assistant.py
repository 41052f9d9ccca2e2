"""The format of Gemma 4 assistants, which `Gemma4AssistantForCausalLM` of transformers writes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.heads.gemma4_assistant import NAME, AssistantConfig
from specjax.models.hybrid.config import HybridConfig
from specjax.models.loading.families.config_fields import ROWS, WIDTH, ConfigFields
from specjax.models.loading.families.gemma import gemma4
from specjax.models.loading.heads import vocabulary
from specjax.models.loading.heads.checkpoint_contents import Contents, HeadPlan, Tensors, rename_tensors
from specjax.models.loading.heads.format import HeadFormat, SaveInfo
from specjax.models.loading.heads.target_fit import TargetSpec, check_fits_target
from specjax.models.loading.tensors.tensors import INTEGERS, read_integers
from specjax.models.requirements import check_shared_keys

MODEL_TYPE = "gemma4_assistant"
TOKENS, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
ORDER = "masked_embedding.token_ordering"
TABLE = {
    **{path.replace("layers.", "stack.", 1): name for path, name in gemma4.names_hf().items() if "layers.*" in path},
    "input.weight": "pre_projection.weight",
    "output.weight": "post_projection.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": TOKENS,
    "clusters.centroids.weight": "masked_embedding.centroids.weight",
    "clusters.order": ORDER,
}


def dialect_of(contents: Contents) -> str | None:
    """Return the dialect of the writer, or None for other files."""
    return "transformers" if {"pre_projection.weight", "post_projection.weight"} <= set(contents.tensors) else None


def plan(contents: Contents, dialect: str, spec: TargetSpec) -> HeadPlan:
    """Map the tensors to parameters.

    Raises: UsageError for inconsistent files, for a target that shares no keys, or for an assistant of another target.
    """
    c, tensors = contents.config, rename_tensors(contents, ())
    shared = check_shared_keys(spec.target.model, NAME)
    decoder = _decoder(c, spec)
    width = c.size("backbone_hidden_size", 1536, maximum=WIDTH)
    check_fits_target(c.where, width, decoder.vocab_size, spec, "backbone_hidden_size")
    _check_keys(c.where, decoder, spec, shared)
    c.skip("num_centroids", "centroid_intermediate_top_k")
    centroids, arrays = 0, {}
    if c.flag("use_ordered_embeddings"):
        centroids = c.size("num_centroids", 2048, maximum=ROWS)
        arrays["clusters.order"] = _take_order(tensors, spec, contents)
    clusters = c.size("centroid_intermediate_top_k", 32, maximum=ROWS)
    config = AssistantConfig(decoder, width, centroids, clusters if centroids else 0)
    _choose_output(tensors, contents, tied=c.flag("tie_word_embeddings", True))
    flags = {"centroids": centroids} | ({"chosen": clusters} if centroids else {})
    return HeadPlan(NAME, dialect, config, TABLE, tensors, flags, arrays, unused=(r"lm_head\.weight$",))


def _decoder(c: ConfigFields, spec: TargetSpec) -> HybridConfig:
    """Return the config of an assistant's layers. Raises: UsageError for layers that no assistant has."""
    text = c.subfields("text_config")
    text = text.with_defaults({"model_type": "gemma4_text", "hidden_size_per_layer_input": 0})
    # All layers read the target's keys, so none of them reads those of an earlier layer.
    text = dataclasses.replace(text, values={**text.values, f"{text.prefix}num_kv_shared_layers": 0})
    decoder = gemma4.config_from_hf(text, dtype=spec.dtype, name=NAME)
    for name, has_part in {
        "hidden_size_per_layer_input": decoder.layer_inputs is not None,
        "use_double_wide_mlp": text.flag("use_double_wide_mlp"),
    }.items():
        if has_part:
            raise UsageError(
                f"{c.where} has {text.prefix}{name}, which no assistant of Gemma 4 has; use a published assistant"
            )
    return decoder


def _check_keys(where: str, decoder: HybridConfig, spec: TargetSpec, shared: tuple[int, int]) -> None:
    """Check that the layers can read the target's keys. Raises: UsageError for heads of another number or size."""
    target = spec.target.model.config
    for layer in range(decoder.num_layers):
        is_global = "window" in dict(decoder.kinds[layer].changes)
        reader, source = decoder.of_layer(layer), target.of_layer(shared[is_global])
        if (reader.num_kv_heads, reader.head_dim) != (source.num_kv_heads, source.head_dim):
            kind = "global" if is_global else "local"
            raise UsageError(
                f"{where} has {kind} layers for {reader.num_kv_heads} key/value heads of {reader.head_dim}, and the "
                f"target {spec.name} has {source.num_kv_heads} of {source.head_dim}; choose the assistant of it"
            )


def _take_order(tensors: Tensors, spec: TargetSpec, contents: Contents) -> np.ndarray:
    """Remove the tokens int64[V] of all clusters from `tensors`, and return them.

    Raises: UsageError for a missing tensor, or one that does not have each token once.
    """
    shape, tensor = tensors.shape(ORDER, contents.folder), tensors.pop(ORDER)
    if shape != (spec.vocab_size,) or tensor.kind not in INTEGERS:
        raise UsageError(
            f"{contents.folder} has {ORDER} of shape {quote(list(shape))} and type {tensor.kind}, not of "
            f"{spec.vocab_size} whole numbers"
        )
    ids = read_integers(tensor)
    vocabulary.check_ids(ids, spec.vocab_size, f"{contents.folder} has {ORDER}")
    return ids


def _choose_output(tensors: Tensors, contents: Contents, *, tied: bool) -> None:
    """Move the output layer to the name in the table, unless it is the tied embedding.

    Raises: UsageError for a missing output layer.
    """
    if not tied or TOKENS not in tensors:
        tensors.shape(OUTPUT, contents.folder)
        tensors[TOKENS], tensors.file_names[TOKENS] = tensors.pop(OUTPUT), tensors.file_names.pop(OUTPUT)


def describe(config: AssistantConfig, layout: str, info: SaveInfo) -> dict[str, Any]:
    """Return config.json."""
    decoder = config.decoder
    text = gemma4.config_to_hf(decoder) | {
        "num_kv_shared_layers": decoder.num_layers, "vocab_size_per_layer_input": 0, "tie_word_embeddings": True,
    }  # fmt: skip
    clusters = {"num_centroids": config.centroids, "centroid_intermediate_top_k": config.chosen}
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": MODEL_TYPE,
        "backbone_hidden_size": config.target_width,
        "use_ordered_embeddings": config.centroids > 0,
        "tie_word_embeddings": True,
        "dtype": config.dtype,
        "text_config": {name: value for name, value in text.items() if name != "architectures"},
        **(clusters if config.centroids else {}),
    }


FORMAT = HeadFormat(
    kinds=(NAME,),
    table=TABLE,
    dialect_of=dialect_of,
    plan=plan,
    layouts={"transformers": ()},
    describe=describe,
)
