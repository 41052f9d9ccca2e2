"""Granite 4 without experts: Mamba-2 or attention in each layer, before a gated MLP, with four constant factors.

GGUF files of this architecture may also be Bamba, which rotates.
"""

from __future__ import annotations

from typing import Any

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.hybrid.config import HybridConfig, LayerKind, Multipliers
from specjax.models.loading.families import rope
from specjax.models.loading.families.config_fields import ROWS, ConfigFields
from specjax.models.loading.families.hybrid import common, mamba_mixer
from specjax.models.loading.tensors.assembly import StoredTensor

HF_TYPES = MODEL_TYPES = ("granitemoehybrid",)
GGUF_TYPES = ("granitehybrid",)

FIELDS = {
    "vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "num_local_experts": 8, "shared_intermediate_size": 1024,
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
}  # fmt: skip
"""Defaults of the class of transformers."""

UNUSED = "intermediate_size", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef", "init_method"
"""Fields of experts, which a dense model does not have, and of the initialisation."""

KINDS = {"mamba": LayerKind("mamba2"), "attention": LayerKind("attention")}

_LAYER = "model.layers.*."


def stored_hf(config: HybridConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint with this `model_type`."""
    rows = common.by_path(common.WEIGHTS)
    mlp = common.joined_rows(
        _LAYER + "shared_mlp.input_linear.weight", {"gate": config.mlp_width, "up": config.mlp_width}
    )
    return {
        **{path: StoredTensor(row.hf) for path, row in rows.items()},
        **{f"layers.*.mlp.{part}.weight": stored for part, stored in mlp.items()},
        "layers.*.mlp.down.weight": StoredTensor(_LAYER + "shared_mlp.output_linear.weight"),
        **mamba_mixer.stored_hf(config, _LAYER + "mamba"),
    }


def stored_gguf(config: HybridConfig, arch: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a GGUF file. Rows of q and k are permuted."""
    stored = {path: StoredTensor(row.gguf) for path, row in common.by_path(common.WEIGHTS).items()}
    return stored | common.gguf_permuted(config) | mamba_mixer.stored_gguf(config)


def config_from_hf(hf: ConfigFields, **options) -> HybridConfig:
    """Build a config from the config.json of one of HF_TYPES.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.

    Raises: UsageError also for mixtures of experts.
    """
    hf = rope.with_length(hf).with_defaults(FIELDS)
    common.check_activation(hf)
    common.refuse_flags(hf, "attention_bias", "mlp_bias")
    common.refuse_experts(hf, "num_local_experts")
    common.check_only(hf, {"normalization_function": "rmsnorm"})
    hf.skip(*UNUSED)
    sizes = common.sizes_of_hf(hf)
    layers = sizes["num_layers"]
    field = "layer_types" if hf.has("layer_types") or not hf.has("layers_block_type") else "layers_block_type"
    names = common.layer_names(hf, layers, lambda: [mamba_mixer.MAMBA] * layers, mamba_mixer.ATTENTION_NAMES, field)
    inner = mamba_mixer.expansion(hf, "mamba_expand", sizes["width"])
    base, scaling, _ = rope.rotary_from_hf(hf, sizes["head_dim"])
    return HybridConfig(
        **sizes,
        kinds=mamba_mixer.kinds_from_names(names, KINDS),
        mamba2=mamba_mixer.sizes_from_hf(hf, mamba_mixer.FIELDS_OF_HYBRIDS, inner),
        mlp_width=hf.size("shared_intermediate_size", maximum=ROWS),
        rope_base=base,
        rope_scaling=scaling,
        rotates=rotates(hf),
        query_scale=hf.number("attention_multiplier", 1.0),
        multipliers=Multipliers(
            embedding=hf.number("embedding_multiplier", 1.0),
            residual=hf.number("residual_multiplier", 1.0),
            logits=1 / hf.number("logits_scaling", 1.0),
        ),
        norm_eps=hf.number("rms_norm_eps", maximum=1.0),
        tied=hf.flag("tie_word_embeddings"),
        max_positions=rope.max_positions(hf, scaling),
        model_type="granitemoehybrid",
        **options,
    )


def rotates(hf: ConfigFields) -> bool:
    """Return True if attention rotates queries and keys. Raises: UsageError for unknown positions."""
    kind = hf.text("position_embedding_type", "nope")
    if kind not in ("nope", "rope"):
        raise UsageError(f"{hf.where} has position_embedding_type {quote(kind)}; specjax supports nope and rope")
    return kind == "rope"


def config_to_hf(c: HybridConfig) -> dict[str, Any]:
    """Return the fields that `config_from_hf` reads."""
    assert c.mamba2 is not None
    return common.attention_to_hf(c) | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": c.mlp_width,
        "layer_types": [mamba_mixer.FULL if kind.attends else mamba_mixer.MAMBA for kind in c.kinds],
        "mamba_expand": mamba_mixer.expansion_to_hf(c),
        **mamba_mixer.fields_to_hf(c.mamba2, mamba_mixer.FIELDS_OF_HYBRIDS),
        "rope_parameters": rope.to_rope_parameters(rope.rotary_to_hf(c.rope_base, c.rope_scaling)),
        "position_embedding_type": "rope" if c.rotates else "nope",
        "attention_multiplier": c.head_dim**-0.5 if c.query_scale is None else c.query_scale,
        "embedding_multiplier": c.multipliers.embedding,
        "residual_multiplier": c.multipliers.residual,
        "logits_scaling": common.reciprocal(c.multipliers.logits),
        "rms_norm_eps": c.norm_eps,
        "hidden_act": "silu",
    }


def config_from_gguf(meta: ConfigFields, shapes: dict[str, tuple[int, ...]], factors, **options) -> HybridConfig:
    """Build a config from the metadata of a file of one of GGUF_TYPES, which is Bamba if it rotates.

    Args:
      shapes: shapes of the file's tensors.
      factors: tensors of rope.GGUF_DIVISORS, which must be empty.
    """
    common.refuse_experts(meta, "expert_count")
    meta.skip("expert_shared_feed_forward_length", "expert_used_count")
    if factors:
        raise UsageError(f"{meta.where} has a {min(factors)}, which specjax does not support for granitehybrid")
    sizes = common.gguf_sizes_of_model(meta, shapes)
    attention = common.gguf_attention(meta, sizes["width"])
    kinds_of_parts = {"ssm_in": KINDS["mamba"], "attn_q": KINDS["attention"]}
    kinds = common.gguf_kinds(shapes, sizes["num_layers"], kinds_of_parts, meta.where)
    base, scaling = rope.rotary_from_gguf(meta)
    is_bamba = meta.flag("rope.scaling.finetuned")
    rotary_dim = common.gguf_rotary_dim(meta, attention["head_dim"])
    return HybridConfig(
        **sizes,
        **attention,
        kinds=kinds,
        mamba2=mamba_mixer.gguf_sizes(meta, shapes),
        mlp_width=common.gguf_mlp_width(shapes, kinds, meta.where),
        rope_base=base,
        rope_scaling=scaling,
        rotary_dim=rotary_dim if is_bamba else None,
        rotates=is_bamba,
        query_scale=meta.number("attention.scale", None),
        multipliers=Multipliers(
            embedding=meta.number("embedding_scale", 1.0),
            residual=meta.number("residual_scale", 1.0),
            logits=1 / meta.number("logit_scale", 1.0),
        ),
        model_type="bamba" if is_bamba else "granitemoehybrid",
        **options,
    )
