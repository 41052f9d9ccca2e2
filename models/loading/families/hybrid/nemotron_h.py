"""Nemotron-H and dense Nemotron-3: one norm and one sublayer per layer, Mamba-2, attention or an MLP.

Attention does not rotate. The MLP is down(relu(up(x)) ** 2).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.hybrid.config import HybridConfig, LayerKind
from specjax.models.loading.families import rope
from specjax.models.loading.families.config_fields import LAYERS, ROWS, ConfigFields
from specjax.models.loading.families.hybrid import common, mamba_mixer
from specjax.models.loading.families.hybrid.mamba_mixer import MixerFields
from specjax.models.loading.tensors.assembly import StoredTensor

HF_TYPES = GGUF_TYPES = MODEL_TYPES = ("nemotron_h",)

FIELDS = {
    "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 21_504, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "layer_norm_epsilon": 1e-5,
    "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4,
    "mlp_hidden_act": "relu2",
}  # fmt: skip
"""Defaults of the class of transformers."""

OLD_NAMES = {
    "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit", "attention_head_dim": "head_dim",
}  # fmt: skip
"""Names of fields in older files. The class of transformers prefers them, apart from the last one."""

UNUSED = (
    "expand", "mamba_expand", "mamba_proj_bias", "rms_norm_eps", "norm_eps", "moe_intermediate_size", "moe_latent_size",
    "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap", "n_group", "n_routed_experts",
    "n_shared_experts", "norm_topk_prob", "num_experts_per_tok", "routed_scaling_factor", "topk_group",
    "output_router_logits", "num_query_groups", "mtp_layers_block_type", "mtp_hybrid_override_pattern", "rope_theta",
)  # fmt: skip
"""Fields of layers that a dense model does not have, and fields that the class of transformers does not use."""

MIXER = MixerFields(
    "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "use_conv_bias", "use_bias",
    "use_bias",
)  # fmt: skip

MAMBA, ATTENTION, MLP = LayerKind("mamba2", "none"), LayerKind("attention", "none"), LayerKind("none", "relu2")
KINDS = {
    **dict.fromkeys(("M", "mamba", mamba_mixer.MAMBA), MAMBA),
    **dict.fromkeys(("*", "attention", mamba_mixer.FULL), ATTENTION),
    **dict.fromkeys(("-", "mlp"), MLP),
}
EXPERTS = "E", "moe"

_LAYER = "backbone.layers.*."


def stored_hf(config: HybridConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint with this `model_type`."""
    norm = StoredTensor(_LAYER + "norm.weight")
    mixer = lambda group, parts: {
        f"layers.*.{group}.{part}.weight": StoredTensor(f"{_LAYER}mixer.{part}_proj.weight") for part in parts
    }
    return {
        "embed.weight": StoredTensor("backbone.embeddings.weight"),
        "norm.weight": StoredTensor("backbone.norm_f.weight"),
        "head.weight": StoredTensor("lm_head.weight"),
        "layers.*.mixer_norm.weight": norm,
        "layers.*.mlp_norm.weight": norm,
        **mixer("attention", ("q", "k", "v", "o")),
        **mixer("mlp", ("up", "down")),
        **mamba_mixer.stored_hf(config, _LAYER + "mixer"),
    }


def stored_gguf(config: HybridConfig, arch: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a GGUF file. Rows of q and k are permuted, although nothing is rotated."""
    stored = {path: StoredTensor(row.gguf) for path, row in common.by_path(common.WEIGHTS).items()}
    stored["layers.*.mlp_norm.weight"] = stored["layers.*.mixer_norm.weight"]
    return stored | common.gguf_permuted(config) | mamba_mixer.stored_gguf(config)


def config_from_hf(hf: ConfigFields, **options) -> HybridConfig:
    """Build a config from the config.json of one of HF_TYPES.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.

    Raises: UsageError also for mixtures of experts.
    """
    old = {hf.prefix + new: hf.value(name) for name, new in OLD_NAMES.items() if hf.has(name)}
    hf = dataclasses.replace(rope.with_length(hf), values={**hf.values, **old}).with_defaults(FIELDS)
    hf.skip(*UNUSED)
    if hf.text("mlp_hidden_act") != "relu2":
        raise UsageError(f"{hf.where} has mlp_hidden_act {quote(hf.text('mlp_hidden_act'))}; specjax supports relu2")
    common.refuse_flags(hf, "attention_bias", "mlp_bias")
    if hf.size("sliding_window", 0, minimum=0):
        raise UsageError(f"{hf.where} has a sliding_window, which specjax does not support for nemotron_h")
    kinds = kinds_from_hf(hf)
    hf = hf.with_defaults({"num_hidden_layers": len(kinds)})
    sizes = common.sizes_of_hf(hf)
    if sizes["num_layers"] != len(kinds):
        raise UsageError(
            f"{hf.where} has kinds for {len(kinds)} layers, but num_hidden_layers is {sizes['num_layers']}; make them "
            "equal"
        )
    return HybridConfig(
        **sizes,
        kinds=kinds,
        mamba2=mamba_mixer.sizes_from_hf(hf, MIXER),
        mlp_width=hf.size("intermediate_size", maximum=ROWS),
        rotates=False,
        norm_eps=hf.number("layer_norm_epsilon", maximum=1.0),
        tied=hf.flag("tie_word_embeddings"),
        max_positions=hf.size("max_position_embeddings"),
        model_type="nemotron_h",
        **options,
    )


def kinds_from_hf(hf: ConfigFields) -> tuple[LayerKind, ...]:
    """Return the kinds of layers. New configs list them, and old ones have a letter for each.

    Raises: UsageError for experts, and for unknown kinds.
    """
    field = next((name for name in ("layers_block_type", "layer_types") if hf.has(name)), "hybrid_override_pattern")
    hf.skip("hybrid_override_pattern")  # transformers reads the list, if there are both
    if field == "hybrid_override_pattern":
        names = list(hf.text(field))
    else:
        names = hf.array(field, str)
    if not 1 <= len(names) <= LAYERS:
        raise UsageError(f"{hf.where} has {len(names)} layers in {field}, which must be from 1 to {LAYERS}")
    if any(name in EXPERTS for name in names):
        raise UsageError(
            f"{hf.where} has layers with a mixture of experts in {field}, which specjax does not support; use a dense "
            "model"
        )
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise UsageError(
            f"{hf.where} has {quote(unknown[0])} in {field}, which specjax does not support (only {', '.join(KINDS)})"
        )
    return tuple(KINDS[name] for name in names)


def config_to_hf(c: HybridConfig) -> dict[str, Any]:
    """Return the fields that `config_from_hf` reads."""
    assert c.mamba2 is not None
    names = {MAMBA: mamba_mixer.MAMBA, ATTENTION: mamba_mixer.FULL, MLP: "mlp"}
    return common.attention_to_hf(c) | {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "intermediate_size": c.mlp_width,
        "layers_block_type": [names[kind] for kind in c.kinds],
        **mamba_mixer.fields_to_hf(c.mamba2, MIXER),
        "layer_norm_epsilon": c.norm_eps,
        "mlp_hidden_act": "relu2",
    }


def config_from_gguf(meta: ConfigFields, shapes: dict[str, tuple[int, ...]], factors, **options) -> HybridConfig:
    """Build a config from the metadata of a file of one of GGUF_TYPES.

    Args:
      shapes: shapes of the file's tensors.
      factors: tensors of rope.GGUF_DIVISORS, which this family does not use.
    """
    common.refuse_experts(meta, "expert_count")
    meta.skip("rope.dimension_count", "rope.freq_base", "rope.scaling.finetuned")  # nothing is rotated
    sizes = common.gguf_sizes_of_model(meta, shapes)
    kinds_of_parts = {"ssm_in": MAMBA, "attn_q": ATTENTION, "ffn_up": MLP}
    kinds = common.gguf_kinds(shapes, sizes["num_layers"], kinds_of_parts, meta.where)
    return HybridConfig(
        **sizes,
        **common.gguf_attention(meta, sizes["width"]),
        kinds=kinds,
        mamba2=mamba_mixer.gguf_sizes(meta, shapes),
        mlp_width=common.gguf_mlp_width(shapes, kinds, meta.where),
        rotates=False,
        model_type="nemotron_h",
        **options,
    )
