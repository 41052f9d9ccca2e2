"""Granite 4, and the mixtures of Granite 3: Mamba-2 or attention in each layer, with four constant factors.

A gated MLP follows, or a mixture of experts, or both on the same input. All layers of Granite 3 attend and have experts
alone. GGUF files of this architecture may also be Bamba, which rotates.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.hybrid.config import HybridConfig, LayerKind, Multipliers
from specjax.models.loading.families import mixtures, rope
from specjax.models.loading.families.config_fields import ROWS, ConfigFields
from specjax.models.loading.families.hybrid import common, mamba_mixer
from specjax.models.loading.tensors.assembly import StoredTensor

HF_TYPES = MODEL_TYPES = ("granitemoehybrid", "granitemoe", "granitemoeshared")
GGUF_TYPES = ("granitehybrid",)

FIELDS = {
    "vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "num_local_experts": 8, "shared_intermediate_size": 1024,
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
}  # fmt: skip
"""Defaults of the class of transformers."""

FIELDS_OF_MIXTURES = {
    **{name: FIELDS[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
    "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "num_local_experts": 8, "intermediate_size": 11_008,
    "position_embedding_type": "rope",
}  # fmt: skip
"""Defaults of the classes of models without Mamba-2."""

PREFIXES = {
    "granitemoehybrid": "GraniteMoeHybrid", "granitemoe": "GraniteMoe", "granitemoeshared": "GraniteMoeShared",
}  # fmt: skip
"""The beginning of the names of their classes."""

UNUSED = "output_router_logits", "router_aux_loss_coef", "init_method"
"""Fields of training and of the initialisation."""

KINDS = {"mamba": LayerKind("mamba2"), "attention": LayerKind("attention")}

_LAYER = "model.layers.*."


def stored_hf(config: HybridConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint with this `model_type`."""
    stored = {path: StoredTensor(row.hf) for path, row in common.by_path(common.WEIGHTS).items()}
    if config.mamba2 is not None:
        stored |= mamba_mixer.stored_hf(config, _LAYER + "mamba")
    experts = config.experts
    width = config.mlp_width if experts is None else experts.shared_width
    module = "layers.*.mlp." if experts is None else "layers.*.mlp.shared."
    mlp = common.joined_rows(_LAYER + "shared_mlp.input_linear.weight", {"gate": width, "up": width})
    stored |= {f"{module}{part}.weight": tensor for part, tensor in mlp.items()}
    stored[f"{module}down.weight"] = StoredTensor(_LAYER + "shared_mlp.output_linear.weight")
    if experts is None:
        return stored
    module = _LAYER + "block_sparse_moe."
    return {
        **stored,
        **mixtures.stacked_experts(module + "input_linear.weight", module + "output_linear.weight", experts.width),
        "layers.*.mlp.router.weight": StoredTensor(module + "router.layer.weight"),
    }


def variant_hf(config: HybridConfig, names: Collection[str]) -> dict[str, StoredTensor]:
    """Map the paths that differ in files with a tensor for each matrix of an expert."""
    return separate_hf(config) if mixtures.are_separate(names) else {}


def separate_hf(config: HybridConfig) -> dict[str, StoredTensor]:
    """Map the parameters of experts to separate tensors."""
    return mixtures.separate_experts(_LAYER + "block_sparse_moe.experts.#.")


def stored_gguf(config: HybridConfig, arch: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a GGUF file. Rows of q and k are permuted."""
    stored = {path: StoredTensor(row.gguf) for path, row in common.by_path(common.WEIGHTS).items()}
    return stored | common.gguf_permuted(config) | mamba_mixer.stored_gguf(config)


def config_from_hf(hf: ConfigFields, **options) -> HybridConfig:
    """Build a config from the config.json of one of HF_TYPES.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.
    """
    kind = hf.text("model_type")
    is_hybrid = kind == "granitemoehybrid"
    hf = rope.with_length(hf).with_defaults(FIELDS if is_hybrid else FIELDS_OF_MIXTURES)
    common.check_activation(hf)
    common.refuse_flags(hf, "attention_bias", "mlp_bias")
    common.check_only(hf, {"normalization_function": "rmsnorm"})
    hf.skip(*UNUSED)
    sizes = common.sizes_of_hf(hf)
    experts = experts_from_hf(hf, kind)
    mixers: dict[str, Any] = {"kinds": (KINDS["attention"]._replace(feed="moe"),) * sizes["num_layers"]}
    mixers = _mixers_from_hf(hf, sizes, experts) if is_hybrid else mixers
    base, scaling, _ = rope.rotary_from_hf(hf, sizes["head_dim"])
    return HybridConfig(
        **sizes,
        **mixers,
        mlp_width=hf.size("shared_intermediate_size", maximum=ROWS) if experts is None else experts.width,
        experts=experts,
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
        model_type=kind,
        **options,
    )


def _mixers_from_hf(hf: ConfigFields, sizes: dict[str, Any], experts: MixtureSizes | None) -> dict[str, Any]:
    """Return the kinds of the layers of Granite 4, and the sizes of its Mamba-2 mixers; None if it has none."""
    layers = sizes["num_layers"]
    field = "layer_types" if hf.has("layer_types") or not hf.has("layers_block_type") else "layers_block_type"
    names = common.layer_names(hf, layers, lambda: [mamba_mixer.MAMBA] * layers, mamba_mixer.ATTENTION_NAMES, field)
    inner = mamba_mixer.expansion(hf, "mamba_expand", sizes["width"])
    kinds = mamba_mixer.kinds_from_names(names, KINDS)
    return {
        "kinds": kinds if experts is None else tuple(kind._replace(feed="moe") for kind in kinds),
        "mamba2": mamba_mixer.sizes_from_hf(hf, mamba_mixer.FIELDS_OF_HYBRIDS, inner),
    }


def experts_from_hf(hf: ConfigFields, kind: str) -> MixtureSizes | None:
    """Return the sizes of the experts, and of the MLP on the same input; None for a dense model.

    Raises: UsageError for more chosen experts than there are.
    """
    minimum = 0 if kind == "granitemoehybrid" else 1
    count = hf.size("num_local_experts", minimum=minimum, maximum=mixtures.EXPERTS)
    if not count:
        hf.skip("intermediate_size", "num_experts_per_tok")
        return None
    return MixtureSizes(
        count,
        hf.size("intermediate_size", maximum=ROWS),
        Routing(mixtures.check_num_chosen(hf, "num_experts_per_tok", count, 2), "softmax_of_chosen"),
        shared_width=0 if kind == "granitemoe" else hf.size("shared_intermediate_size", 0, minimum=0, maximum=ROWS),
    )


def rotates(hf: ConfigFields) -> bool:
    """Return True if attention rotates queries and keys. Raises: UsageError for unknown positions."""
    kind = hf.text("position_embedding_type", "nope")
    if kind not in ("nope", "rope"):
        raise UsageError(f"{hf.where} has position_embedding_type {quote(kind)}; specjax supports nope and rope")
    return kind == "rope"


def config_to_hf(c: HybridConfig) -> dict[str, Any]:
    """Return the fields that `config_from_hf` reads."""
    mixers: dict[str, Any] = {}
    if c.mamba2 is not None:
        mixers = {
            "layer_types": [mamba_mixer.FULL if kind.attends else mamba_mixer.MAMBA for kind in c.kinds],
            "mamba_expand": mamba_mixer.expansion_to_hf(c),
            **mamba_mixer.fields_to_hf(c.mamba2, mamba_mixer.FIELDS_OF_HYBRIDS),
        }
    return common.attention_to_hf(c) | {
        "architectures": [f"{PREFIXES[c.model_type]}ForCausalLM"],
        "model_type": c.model_type,
        **_experts_to_hf(c),
        **mixers,
        "rope_parameters": rope.to_rope_parameters(rope.rotary_to_hf(c.rope_base, c.rope_scaling)),
        "position_embedding_type": "rope" if c.rotates else "nope",
        "attention_multiplier": c.head_dim**-0.5 if c.query_scale is None else c.query_scale,
        "embedding_multiplier": c.multipliers.embedding,
        "residual_multiplier": c.multipliers.residual,
        "logits_scaling": common.reciprocal(c.multipliers.logits),
        "rms_norm_eps": c.norm_eps,
        "hidden_act": "silu",
    }


def _experts_to_hf(c: HybridConfig) -> dict[str, Any]:
    """Return the fields that `experts_from_hf` reads, and the width of the MLP."""
    if c.experts is None:
        return {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": c.mlp_width}
    return {
        "num_local_experts": c.experts.num_experts,
        "num_experts_per_tok": c.experts.routing.num_chosen,
        "intermediate_size": c.experts.width,
        "shared_intermediate_size": c.experts.shared_width,
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
