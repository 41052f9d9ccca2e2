"""Gemma 4 without experts: local and global attention with heads of different sizes, and layers that share keys.

Checkpoints of images and audio have the same text model. Its norms store the factor itself, unlike those of Gemma 3.
"""

from __future__ import annotations

from typing import Any

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.decoder import UNLIMITED_WINDOW
from specjax.models.hybrid.config import HybridConfig, LayerInputSizes, LayerKind
from specjax.models.loading.families import llama
from specjax.models.loading.families.config_fields import HEADS, ROWS, WIDTH, ConfigFields, check_heads
from specjax.models.loading.families.hybrid import common
from specjax.models.loading.families.rope import BASE, FACTOR, FULL, SLIDING
from specjax.models.loading.tensors.assembly import StoredTensor, WeightNames
from specjax.models.rotary import RopeScaling

MULTIMODAL = "gemma4", "gemma4_unified"
HF_TYPES = (*MULTIMODAL, "gemma4_text", "gemma4_unified_text")
MODEL_TYPES = ("gemma4",)
GGUF_TYPES: tuple[str, ...] = ()  # see `gemma4_gguf`

ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
FIELDS = {
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
    "max_position_embeddings": 131_072, "sliding_window": 512, "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256, "rope_parameters": ROPE, "tie_word_embeddings": True,
}  # fmt: skip
"""Defaults of the class of transformers."""

UNIFIED_FIELDS = {"sliding_window": 1024, "max_position_embeddings": 262_144, "hidden_size_per_layer_input": 0}
"""Other defaults of the class whose image and audio inputs are projected without towers."""

CONSTANTS: dict[str, Any] = {
    "query_scale": 1.0, "qk_norm": True, "value_norm": True, "norms": "both", "activation": "gelu",
    "scales_embedding": True, "layer_scales": True, "model_type": "gemma4",
}  # fmt: skip
"""Fields of the config of each model."""

SHARED = "num_kv_shared_layers"
OF_EXPERTS = "num_experts", "top_k_experts", "moe_intermediate_size"

_PATHS = {
    "layers.*.attention_post_norm.weight": "layers.*.mixer_post_norm.weight",
}
NAMES = {
    "layers.*.mlp_norm.weight": "model.layers.*.pre_feedforward_layernorm.weight",
    "layers.*.layer_input.gate.weight": "model.layers.*.per_layer_input_gate.weight",
    "layers.*.layer_input.projection.weight": "model.layers.*.per_layer_projection.weight",
    "layers.*.layer_input.norm.weight": "model.layers.*.post_per_layer_input_norm.weight",
    "layers.*.scale.weight": "model.layers.*.layer_scalar",
    "layer_inputs.table.weight": "model.embed_tokens_per_layer.weight",
    "layer_inputs.projection.weight": "model.per_layer_model_projection.weight",
    "layer_inputs.norm.weight": "model.per_layer_projection_norm.weight",
}


def names_of(**changes: dict[str, str]) -> dict[str, WeightNames]:
    """Return the names of tensors by parameter path, `*` for the layer. `changes`: as in `common.by_path`."""
    rows = (*common.WEIGHTS, *(row._replace(path=_PATHS.get(row.path, row.path)) for row in llama.POST_NORMS))
    return common.by_path(rows, **changes)


def names_hf() -> dict[str, str]:
    """Return the names of tensors of a Hugging Face checkpoint by parameter path, `*` for the layer."""
    return {path: row.hf for path, row in names_of(hf=NAMES).items()}


def stored_hf(config: HybridConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint."""
    return {path: StoredTensor(name) for path, name in names_hf().items()}


def unused_hf(config: HybridConfig) -> frozenset[str]:
    """Return the tensors that a checkpoint may have for layers without keys of their own."""
    return tensors_of_shared(config, "model.layers.{}.self_attn.{}.weight", ("k_proj", "v_proj", "k_norm", "v_norm"))


def tensors_of_shared(config: HybridConfig, name: str, parts: tuple[str, ...]) -> frozenset[str]:
    """Return the names of parts of layers without keys of their own. `name` has places for the layer and the part."""
    shared = (layer for layer, kind in enumerate(config.kinds) if kind.keys_of is not None)
    return frozenset(name.format(layer, part) for layer in shared for part in parts)


def config_from_hf(hf: ConfigFields, **options) -> HybridConfig:
    """Build a config from the config.json of one of HF_TYPES.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.

    Raises: UsageError for a mixture of experts, an encoder, or settings that no published model has.
    """
    kind = hf.text("model_type")
    hf = llama.text_config(hf, {}) if kind in MULTIMODAL else hf
    hf = hf.with_defaults(FIELDS | (UNIFIED_FIELDS if kind.startswith("gemma4_unified") else {}))
    _refuse(hf)
    sizes = common.sizes_of_hf(hf)
    layers, width = sizes["num_layers"], hf.size("hidden_size_per_layer_input", 0, minimum=0, maximum=WIDTH)
    names = common.layer_names(hf, layers, lambda: _default_names(layers), (SLIDING, FULL))
    base, scaling = _rotary(hf, SLIDING)
    rows = hf.size("vocab_size_per_layer_input", minimum=1 if width else 0, maximum=ROWS)
    names, mlp_width = [*names[:-1], FULL], hf.size("intermediate_size", maximum=ROWS // 2)
    shared = hf.size("num_kv_shared_layers", 0, minimum=0)
    of_full = _changes_of_full(hf, names, sizes)
    wide = mlp_width * 2 if hf.flag("use_double_wide_mlp") else mlp_width
    return HybridConfig(
        **sizes,
        **CONSTANTS,
        kinds=kinds_of_layers(names, shared, of_full, (mlp_width, wide), f"{hf.where} has {SHARED}"),
        mlp_width=mlp_width,
        window=hf.size("sliding_window", maximum=UNLIMITED_WINDOW),
        rope_base=base,
        rope_scaling=scaling,
        norm_eps=hf.number("rms_norm_eps", 1e-6, maximum=1.0),
        tied=hf.flag("tie_word_embeddings"),
        logit_softcap=hf.number("final_logit_softcapping", None),
        layer_inputs=LayerInputSizes(width, rows) if width else None,
        max_positions=hf.size("max_position_embeddings"),
        **options,
    )


def _refuse(hf: ConfigFields) -> None:
    """Check that a model has no experts and decodes tokens in order. Raises: UsageError if it does not."""
    if hf.flag("enable_moe_block"):
        raise UsageError(
            f"{hf.where} is a mixture of experts ({hf.prefix}enable_moe_block), which specjax does not support for "
            "Gemma 4; use a dense model"
        )
    hf.skip(*OF_EXPERTS)
    if hf.text("use_bidirectional_attention", "vision") != "vision":
        raise UsageError(
            f"{hf.where} has use_bidirectional_attention {quote(hf.text('use_bidirectional_attention'))}, so its "
            "tokens see later ones; specjax decodes causal models only"
        )
    if hf.text("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh" or hf.flag("attention_bias"):
        raise UsageError(
            f"{hf.where} has another activation than gelu_pytorch_tanh or attention biases, which specjax does not "
            "support for Gemma 4"
        )


def _default_names(layers: int) -> list[str]:
    """Return the kinds of layers of a config without the list: every sixth layer is global."""
    return [FULL if full else SLIDING for full in llama.every_nth_layer(6, layers)]


def kinds_of_layers(
    names: list[str], shared: int, of_full: tuple[tuple[str, Any], ...], mlp_widths: tuple[int, int], where: str
) -> tuple[LayerKind, ...]:
    """Return the kind of each layer.

    The last layers have no keys, and read those of the last layer of the same name that has.

    Args:
      names: FULL or SLIDING for each layer.
      shared: number of layers without keys.
      of_full: fields of a config that differ in global layers.
      mlp_widths: hidden units of the MLPs of layers with keys, and of those without.
      where: the subject and the verb of an error, which `shared` continues.
    """
    width, width_of_shared = mlp_widths
    wide = () if width == width_of_shared else (("mlp_width", width_of_shared),)
    with_keys = names[: max(len(names) - shared, 0)]
    if set(with_keys) != set(names):
        raise UsageError(
            f"{where} {shared}, which leaves no layer with keys of some kind among its {len(names)} layers; give an "
            "assistant as a draft, or use a model with more layers"
        )
    last = {name: len(with_keys) - 1 - with_keys[::-1].index(name) for name in with_keys}
    kinds = []
    for layer, name in enumerate(names):
        changes = of_full if name == FULL else ()
        is_shared = layer >= len(with_keys)
        kinds.append(LayerKind(changes=changes + wide * is_shared, keys_of=last[name] if is_shared else None))
    return tuple(kinds)


def _changes_of_full(hf: ConfigFields, names: list[str], sizes: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the fields of a config that differ in global layers."""
    joined = hf.flag("attention_k_eq_v")
    kv_heads = hf.size("num_global_key_value_heads", sizes["num_kv_heads"], maximum=HEADS)
    head_dim = hf.size("global_head_dim", sizes["head_dim"], maximum=HEADS)
    kv_heads = kv_heads if joined else sizes["num_kv_heads"]
    if hf.has("per_layer_config"):  # the form of newer files
        head_dim, kv_heads = _heads_by_layer(hf, names, sizes)
    check_heads(hf, llama.HF_HEADS, sizes["num_heads"], kv_heads, head_dim)
    return full_layer(head_dim, kv_heads, *_rotary(hf, FULL), joined)


def full_layer(
    head_dim: int, kv_heads: int, base: float, scaling: RopeScaling | None, joined: bool
) -> tuple[tuple[str, Any], ...]:
    """Return the fields of global layers. `joined`: values are the keys before their norm."""
    changes = {
        "head_dim": head_dim, "num_kv_heads": kv_heads, "rope_base": base, "rope_scaling": scaling, "window": None,
        "keys_are_values": joined,
    }  # fmt: skip
    return tuple(changes.items())


def _heads_by_layer(hf: ConfigFields, names: list[str], sizes: dict[str, Any]) -> tuple[int, int]:
    """Return the size and the number of key/value heads of global layers, from `per_layer_config`.

    Its keys are numbers of layers. transformers pads them with zeros to the digits of the last one.

    Raises: UsageError for other keys, or if layers of one kind differ.
    """
    table = hf.subfields("per_layer_config")
    keys = {
        name.removeprefix(table.prefix).lstrip("0") or "0": name.removeprefix(table.prefix) for name in table.values
    }
    unknown = keys.keys() - set(map(str, range(len(names))))
    if unknown:
        raise UsageError(
            f"{hf.where} has {quote(keys[min(unknown)])} in {hf.prefix}per_layer_config, which must be from 0 to "
            f"{len(names) - 1}"
        )
    local = sizes["head_dim"], sizes["num_kv_heads"]
    by_name: dict[str, set] = {SLIDING: {local}, FULL: set()}
    for layer, name in enumerate(names):
        entry = table.subfields(keys.get(str(layer), str(layer)))
        defaults = zip(("head_dim", "num_key_value_heads"), local, strict=True)
        by_name[name].add(tuple(entry.size(field, default, maximum=HEADS) for field, default in defaults))
    if any(len(heads) > 1 for heads in by_name.values()):
        raise UsageError(
            f"{hf.where} has a per_layer_config with different heads in layers of one kind, which specjax does not "
            "support; make them equal"
        )
    return by_name[FULL].pop()


def _rotary(hf: ConfigFields, name: str) -> tuple[float, RopeScaling | None]:
    """Return the rotary base and scaling of the layers with this name."""
    entry = hf.subfields("rope_parameters").subfields(name)
    default: Any = ROPE[name]
    entry = entry if entry.values else entry.with_defaults(default)
    base, kind = entry.number("rope_theta", default["rope_theta"], **BASE), entry.text("rope_type", "default")
    if kind not in ("default", "proportional"):
        raise UsageError(
            f"{hf.where} has {entry.prefix}rope_type {quote(kind)}, which specjax does not support for Gemma 4 (only "
            "default, proportional)"
        )
    if kind == "default":
        return base, None
    factor, share = entry.number("factor", 1.0, **FACTOR), entry.number("partial_rotary_factor", 1.0, maximum=1.0)
    return base, RopeScaling("proportional", factor, share=share)


def config_to_hf(c: HybridConfig) -> dict[str, Any]:
    """Return the fields that `config_from_hf` reads."""
    full = next(i for i, kind in enumerate(c.kinds) if "window" in dict(kind.changes))
    of_full = c.of_layer(full)
    widths = {c.of_layer(i).mlp_width for i, kind in enumerate(c.kinds) if kind.keys_of is not None}
    return common.attention_to_hf(c) | {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "intermediate_size": c.mlp_width,
        "global_head_dim": of_full.head_dim,
        "num_global_key_value_heads": of_full.num_kv_heads if of_full.keys_are_values else None,
        "attention_k_eq_v": of_full.keys_are_values,
        "num_kv_shared_layers": sum(kind.keys_of is not None for kind in c.kinds),
        "use_double_wide_mlp": widths == {2 * c.mlp_width},
        "layer_types": [FULL if "window" in dict(kind.changes) else SLIDING for kind in c.kinds],
        "sliding_window": c.window,
        "rope_parameters": {SLIDING: _rotary_to_hf(c), FULL: _rotary_to_hf(of_full)},
        "rms_norm_eps": c.norm_eps,
        "final_logit_softcapping": c.logit_softcap,
        "hidden_size_per_layer_input": 0 if c.layer_inputs is None else c.layer_inputs.width,
        "vocab_size_per_layer_input": c.vocab_size if c.layer_inputs is None else c.layer_inputs.vocab_size,
        "hidden_activation": "gelu_pytorch_tanh",
        "enable_moe_block": False,
    }


def _rotary_to_hf(c: HybridConfig) -> dict[str, Any]:
    """Return an entry of `rope_parameters`."""
    scaling = c.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": c.rope_base}
    factor = {} if scaling.factor == 1.0 else {"factor": scaling.factor}
    return {
        "rope_type": "proportional", "rope_theta": c.rope_base, "partial_rotary_factor": scaling.share, **factor,
    }  # fmt: skip
