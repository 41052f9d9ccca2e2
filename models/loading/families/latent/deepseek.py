"""DeepSeek-V2 and V3: multi-head latent attention, dense layers before mixtures of experts with a shared MLP.

Files rotate neighbouring numbers of queries and keys, unless a config of V3 states otherwise. The parameters here
rotate halves, so their rows are in another order, which changes no score.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.hybrid.config import HybridConfig, LayerKind
from specjax.models.latent.sizes import LatentSizes
from specjax.models.loading.families import mixtures, rope
from specjax.models.loading.families.config_fields import HEADS, LAYERS, ROWS, WIDTH, ConfigFields
from specjax.models.loading.families.deepseek import routing
from specjax.models.loading.families.hybrid import common
from specjax.models.loading.tensors.assembly import StoredTensor

HF_TYPES = MODEL_TYPES = ("deepseek_v2", "deepseek_v3")
GGUF_TYPES = ()

_SHARED_FIELDS = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-6,
}  # fmt: skip
FIELDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "deepseek_v2": _SHARED_FIELDS | {
            "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "max_position_embeddings": 2048, "n_routed_experts": 64, "n_shared_experts": 2,
            "moe_intermediate_size": 1407, "q_lora_rank": 1536, "topk_method": "greedy", "routed_scaling_factor": 1.0,
        },
        "deepseek_v3": _SHARED_FIELDS | {
            "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432, "num_hidden_layers": 61,
            "num_attention_heads": 128, "max_position_embeddings": 4096, "n_routed_experts": 256,
            "n_shared_experts": 1, "moe_intermediate_size": 2048, "q_lora_rank": 1536, "n_group": 8, "topk_group": 4,
            "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True,
            "routed_scaling_factor": 2.5, "rope_interleave": True, "topk_method": "noaux_tc",
        },
    }
)  # fmt: skip
"""Defaults of the classes of transformers."""

SCORES = {"deepseek_v2": "softmax", "deepseek_v3": "sigmoid"}
METHODS = {"deepseek_v2": ("greedy", "group_limited_greedy"), "deepseek_v3": ("noaux_tc",)}
UNUSED = "aux_loss_alpha", "seq_aux", "output_router_logits", "ep_size", "head_dim", "qk_head_dim", "mlp_bias"
"""Fields of training, and those that repeat others or that `config_from_hf` checks."""

_ATTENTION = "layers.*.attention."
_LAYER = "model.layers.*.self_attn."


def config_from_hf(hf: ConfigFields, **options) -> HybridConfig:
    """Build a config from the config.json of one of HF_TYPES.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.

    Raises: UsageError for projections with biases, another method of routing, or sizes that contradict each other.
    """
    kind = hf.text("model_type")
    has_no_query_rank = hf.is_stated("q_lora_rank") and not hf.has("q_lora_rank")
    hf = rope.with_length(hf).with_defaults(FIELDS[kind])
    common.check_activation(hf)
    common.refuse_flags(hf, "attention_bias", "mlp_bias")
    common.check_only(hf, {"scoring_func": SCORES[kind]})
    hf.skip(*UNUSED)
    layers = hf.size("num_hidden_layers", maximum=LAYERS)
    heads = hf.size("num_attention_heads", maximum=HEADS)
    if hf.size("num_key_value_heads", heads, maximum=HEADS) != heads:
        raise UsageError(f"{hf.where} has num_key_value_heads other than num_attention_heads, {heads}; make them equal")
    rotary_dim = hf.size("qk_rope_head_dim", maximum=HEADS)
    if rotary_dim % 2:
        raise UsageError(f"{hf.where} has qk_rope_head_dim {rotary_dim}, which must be even")
    base, scaling, _ = rope.rotary_from_hf(hf, rotary_dim)
    sizes = LatentSizes(
        hf.size("kv_lora_rank", maximum=WIDTH),
        rotary_dim,
        hf.size("qk_nope_head_dim", maximum=HEADS),
        hf.size("v_head_dim", maximum=HEADS),
        None if has_no_query_rank else hf.size("q_lora_rank", maximum=WIDTH),
        0.0 if scaling is None else _mscale(hf),
        hf.flag("rope_interleave", True),
    )
    experts = _experts(hf, kind, layers)
    return HybridConfig(
        vocab_size=hf.size("vocab_size", maximum=ROWS),
        width=hf.size("hidden_size", maximum=WIDTH),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=1,
        head_dim=sizes.cached,
        mlp_width=hf.size("intermediate_size", maximum=ROWS),
        kinds=kinds_of_layers(experts, layers),
        latent=sizes,
        experts=experts,
        rope_base=base,
        rope_scaling=scaling,
        rotary_dim=rotary_dim,
        norm_eps=hf.number("rms_norm_eps", maximum=1.0),
        tied=hf.flag("tie_word_embeddings"),
        max_positions=rope.max_positions(hf, scaling),
        model_type=kind,
        **options,
    )


def kinds_of_layers(experts: MixtureSizes, layers: int) -> tuple[LayerKind, ...]:
    """Return the kind of each layer."""
    latent = LayerKind("latent_attention")
    return tuple(latent if i in experts.dense_layers else latent._replace(feed="moe") for i in range(layers))


def _mscale(hf: ConfigFields) -> float:
    """Return YaRN's factor on the sharpness of scores, from the object with the rotary settings."""
    blocks = (hf.subfields(name) for name in ("rope_parameters", "rope_scaling"))
    return next((block.number("mscale_all_dim", 0.0, minimum=0.0) for block in blocks if block.values), 0.0)


def _experts(hf: ConfigFields, kind: str, layers: int) -> MixtureSizes:
    """Return the sizes of the experts. Raises: UsageError for another method of routing."""
    method = hf.text("topk_method", METHODS[kind][0])
    if method not in METHODS[kind]:
        raise UsageError(
            f"{hf.where} has topk_method {quote(method)}, which specjax does not support (only "
            f"{', '.join(METHODS[kind])})"
        )
    if kind == "deepseek_v3":
        return routing.sizes_from_hf(hf, layers)
    hf.skip("norm_topk_prob")  # its class does not read it
    count = mixtures.num_experts(hf, routing.COUNTS)
    groups, best_groups = routing.group_counts(hf, count)
    rules = Routing(
        mixtures.check_num_chosen(hf, "num_experts_per_tok", count, 6),
        scale=hf.number("routed_scaling_factor", 1.0),
        num_groups=groups if method == "group_limited_greedy" else 1,
        num_chosen_groups=best_groups if method == "group_limited_greedy" else 1,
    )
    return routing.with_shared(hf, layers, MixtureSizes(count, routing.width_of(hf), rules))


def stored_hf(config: HybridConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint with this `model_type`."""
    sizes = config.latent
    assert sizes is not None
    stored = {path: StoredTensor(row.hf) for path, row in common.by_path(common.WEIGHTS).items()}
    attention = {
        _ATTENTION + f"{part}.weight": form._replace(name=_LAYER + form.name)
        for part, form in attention_forms(sizes, config.num_heads).items()
    }
    return stored | attention | routing.stored_hf(config)


def attention_forms(sizes: LatentSizes, num_heads: int) -> dict[str, StoredTensor]:
    """Return the tensors of a layer's attention by module, with names below `self_attn.`."""
    pairs = np.arange(sizes.rotary_dim)
    pairs = pairs.reshape(-1, 2).T.reshape(-1) if sizes.interleaved else pairs  # the even ones are the first half
    size = sizes.plain_dim + sizes.rotary_dim
    of_head = np.concatenate([np.arange(sizes.plain_dim), sizes.plain_dim + pairs])
    queries = (np.arange(num_heads)[:, None] * size + of_head).reshape(-1)
    up = sizes.plain_dim + sizes.value_dim
    from_latent = lambda rows, first: StoredTensor(
        "kv_b_proj.weight", rows=num_heads * up, order=common.head_rows(num_heads, rows, up, first)
    )
    return {
        "q_down": StoredTensor("q_a_proj.weight"),
        "q_down_norm": StoredTensor("q_a_layernorm.weight"),
        "q": StoredTensor("q_proj.weight" if sizes.query_rank is None else "q_b_proj.weight", order=queries),
        "latent": StoredTensor(
            "kv_a_proj_with_mqa.weight", order=np.concatenate([np.arange(sizes.rank), sizes.rank + pairs])
        ),
        "latent_norm": StoredTensor("kv_a_layernorm.weight"),
        "k_up": from_latent(sizes.plain_dim, 0),
        "v_up": from_latent(sizes.value_dim, sizes.plain_dim),
    }


def config_to_hf(c: HybridConfig) -> dict[str, Any]:
    """Return the fields that `config_from_hf` reads."""
    sizes, experts = c.latent, c.experts
    assert sizes is not None and experts is not None
    method = METHODS[c.model_type][-1] if experts.routing.num_groups > 1 else METHODS[c.model_type][0]
    rotary = rope.rotary_to_hf(c.rope_base, c.rope_scaling)
    if rotary["rope_scaling"] is not None and sizes.mscale:
        rotary["rope_scaling"]["mscale_all_dim"] = sizes.mscale
    fields = {name: value for name, value in common.attention_to_hf(c).items() if name != "head_dim"}
    return fields | routing.to_hf(c) | rotary | {
        "architectures": ["DeepseekV2ForCausalLM" if c.model_type == "deepseek_v2" else "DeepseekV3ForCausalLM"],
        "model_type": c.model_type,
        "num_key_value_heads": c.num_heads,
        "intermediate_size": c.mlp_width,
        "kv_lora_rank": sizes.rank,
        "q_lora_rank": sizes.query_rank,
        "qk_rope_head_dim": sizes.rotary_dim,
        "qk_nope_head_dim": sizes.plain_dim,
        "v_head_dim": sizes.value_dim,
        "topk_method": method,
        "rope_interleave": sizes.interleaved,
        "scoring_func": SCORES[c.model_type],
        "rms_norm_eps": c.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
    }  # fmt: skip
