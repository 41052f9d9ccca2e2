"""Gemma 3: names of its weights, and its configuration in both formats."""

from __future__ import annotations

import functools

from specjax.errors import UsageError
from specjax.models.gemma3 import Gemma3Config
from specjax.models.loading import llama, rope
from specjax.models.loading.assembly import Stored, Weight
from specjax.models.loading.fields import require

HF_TYPES = ("gemma3_text", "gemma3")  # the second is multimodal; its text part is loaded
GGUF_TYPES = ("gemma3",)
PATTERN = 6  # every sixth layer is global

_SHARED = tuple(w for w in llama.WEIGHTS if not w.path.startswith("layers.*.mlp_norm") and not w.path.endswith("bias"))
WEIGHTS = (
    *_SHARED,
    Weight(
        "layers.*.attention_post_norm.weight",
        "model.layers.*.post_attention_layernorm.weight",
        "blk.*.post_attention_norm.weight",
    ),
    Weight("layers.*.mlp_norm.weight", "model.layers.*.pre_feedforward_layernorm.weight", "blk.*.ffn_norm.weight"),
    Weight(
        "layers.*.mlp_post_norm.weight",
        "model.layers.*.post_feedforward_layernorm.weight",
        "blk.*.post_ffw_norm.weight",
    ),
)


def stored_hf(config: Gemma3Config) -> dict[str, Stored]:
    """By parameter path: what a Hugging Face checkpoint keeps. Its norms hold w and multiply by 1 + w."""
    return {w.path: Stored(w.hf, add=1.0 if w.path.endswith("norm.weight") else 0.0) for w in WEIGHTS}


def stored_gguf(config: Gemma3Config, arch: str) -> dict[str, Stored]:
    """By parameter path: what a GGUF keeps. Its norms hold 1 + w already."""
    return {w.path: Stored(w.gguf) for w in WEIGHTS}


def config_from_hf(hf: dict, where: str, **options) -> Gemma3Config:
    """`hf`: config.json of one of HF_TYPES. `options`: dtype, stacked, cache_dtype, cache_lanes, name."""
    if hf["model_type"] == "gemma3":
        # The text part of a multimodal file states what differs from the defaults of the 4B model.
        hf = {
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            **require(hf, where, "text_config"),
        }
    if hf.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh" or hf.get("attention_bias"):
        raise UsageError(f"{where} changes the activation or adds attention biases, which specjax does not support")
    if hf.get("use_bidirectional_attention"):
        raise UsageError(f"{where} is an encoder (use_bidirectional_attention); specjax decodes causal models only")
    get = functools.partial(require, hf, where)
    layers = get("num_hidden_layers")
    types = hf.get("layer_types")
    pattern = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or PATTERN
    is_global = tuple(t == "full_attention" for t in types) if types else _every(pattern, layers)
    base, scaling = rope.from_hf(hf, where, base=1_000_000.0, layer_type="full_attention")
    return Gemma3Config(
        vocab_size=get("vocab_size"),
        width=get("hidden_size"),
        num_layers=layers,
        num_heads=get("num_attention_heads"),
        num_kv_heads=get("num_key_value_heads"),
        head_dim=hf.get("head_dim") or 256,
        mlp_width=get("intermediate_size"),
        is_global=is_global,
        window=hf.get("sliding_window") or 4096,
        rope_base=base,
        rope_scaling=scaling,
        local_rope_base=_local_base(hf, where),
        query_scale=hf.get("query_pre_attn_scalar", 256) ** -0.5,
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        tied=hf.get("tie_word_embeddings", True),
        attention_softcap=hf.get("attn_logit_softcapping"),
        logit_softcap=hf.get("final_logit_softcapping"),
        max_positions=hf.get("max_position_embeddings", 131_072),
        **options,
    )


def _local_base(hf: dict, where: str) -> float:
    """The rotary base of the windowed layers; they are never stretched."""
    if hf.get("rope_parameters") is None:
        return float(hf.get("rope_local_base_freq", 10_000.0))
    base, scaling = rope.from_hf(hf, where, layer_type="sliding_attention")
    if scaling is not None:
        raise UsageError(f"{where} scales RoPE in its windowed layers, which specjax does not support")
    return base


def config_from_gguf(meta: dict, shapes: dict[str, tuple[int, ...]], factors, where: str, **options) -> Gemma3Config:
    """`meta`: of a file of one of GGUF_TYPES. `shapes`: of its tensors. `factors`: must be None."""
    if factors is not None:
        raise UsageError(f"{where} has a rope_freqs.weight, which specjax does not support for Gemma 3")
    get = functools.partial(require, meta, where, prefix="gemma3.")
    layers, width, heads, head_dim = (
        get("block_count"), get("embedding_length"), get("attention.head_count"), get("attention.key_length"),
    )  # fmt: skip
    pattern = meta.get("gemma3.attention.sliding_window_pattern", PATTERN)
    # An array says of each layer whether it is windowed; a number is the period.
    is_global = _every(pattern, layers) if isinstance(pattern, int) else tuple(not bool(w) for w in pattern)
    base, scaling = rope.from_gguf(meta, "gemma3", where)
    return Gemma3Config(
        vocab_size=shapes.get("token_embd.weight", (0,))[0],
        width=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv"),
        head_dim=head_dim,
        mlp_width=get("feed_forward_length"),
        is_global=is_global,
        window=get("attention.sliding_window"),
        rope_base=base,
        rope_scaling=scaling,
        local_rope_base=float(meta.get("gemma3.rope.freq_base_swa", 10_000.0)),
        # The format does not keep query_pre_attn_scalar: only the 27B model (62 layers) has one of its own.
        query_scale=(width / heads if layers == 62 else head_dim) ** -0.5,
        norm_eps=get("attention.layer_norm_rms_epsilon"),
        tied="output.weight" not in shapes,
        logit_softcap=meta.get("gemma3.final_logit_softcapping"),
        max_positions=get("context_length"),
        **options,
    )


def _every(pattern: int, layers: int) -> tuple[bool, ...]:
    return tuple((i + 1) % pattern == 0 for i in range(layers))
