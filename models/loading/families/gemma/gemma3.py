"""Gemma 2 and 3: tensor names, and configurations in both formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from specjax.errors import UsageError
from specjax.models.decoder import UNLIMITED_WINDOW
from specjax.models.gemma3 import Gemma3Config
from specjax.models.loading.families import llama, rope
from specjax.models.loading.families.config_fields import HEADS, LAYERS, ROWS, WIDTH, ConfigFields, check_heads
from specjax.models.loading.tensors.assembly import StoredTensor, WeightNames

HF_TYPES = ("gemma2", "gemma3_text", "gemma3")  # the last is multimodal; only its text part is loaded
GGUF_TYPES = ("gemma2", "gemma3")


class GemmaDefaults(NamedTuple):
    """Properties of a Gemma version that its config omits, or may omit."""

    fields: Mapping[str, Any]  # what config.json leaves out, as in the class of transformers
    pattern: int  # every n-th layer is global
    rope_base: float
    qk_norm: bool  # if set, windowed layers have their own rotary base
    attention_softcap: float | None
    logit_softcap: float | None
    layers_of_27b: int


_FIELDS = {
    "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
    "sliding_window": 4096, "query_pre_attn_scalar": 256, "tie_word_embeddings": True,
}  # fmt: skip

ROWS_OF_HF = {
    "gemma2": GemmaDefaults(_FIELDS, 2, 10_000.0, False, 50.0, 30.0, 46),
    "gemma3": GemmaDefaults(
        _FIELDS | {"vocab_size": 262_208, "max_position_embeddings": 131_072}, 6, 1_000_000.0, True, None, None, 62
    ),
}  # fmt: skip

_SHARED = tuple(w for w in llama.WEIGHTS if not w.path.startswith("layers.*.mlp_norm") and not w.path.endswith("bias"))
WEIGHTS = (
    *_SHARED,
    *llama.POST_NORMS,
    WeightNames("layers.*.mlp_norm.weight", "model.layers.*.pre_feedforward_layernorm.weight", "blk.*.ffn_norm.weight"),
)


def stored_hf(config: Gemma3Config, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint, whose norms store w for a factor of 1 + w."""
    return {w.path: StoredTensor(w.hf, add=1.0 if w.path.endswith("norm.weight") else 0.0) for w in WEIGHTS}


def stored_gguf(config: Gemma3Config, arch: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a GGUF file, whose norms store 1 + w."""
    return {w.path: StoredTensor(w.gguf) for w in WEIGHTS}


def config_from_hf(hf: ConfigFields, **options) -> Gemma3Config:
    """Build a config from the config.json of one of HF_TYPES.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.
    """
    kind, where = hf.text("model_type"), hf.where
    if kind == "gemma3":
        hf = llama.text_config(hf, {})
    row = ROWS_OF_HF["gemma2" if kind == "gemma2" else "gemma3"]
    hf = rope.with_length(hf).with_defaults(row.fields)
    if hf.text("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh" or hf.flag("attention_bias"):
        raise UsageError(
            f"{where} has another activation than gelu_pytorch_tanh or attention biases, which specjax does not support"
        )
    if hf.flag("use_bidirectional_attention"):
        raise UsageError(f"{where} is an encoder (use_bidirectional_attention); specjax decodes causal models only")
    layers = hf.size("num_hidden_layers", maximum=LAYERS)
    pattern = hf.size("sliding_window_pattern", hf.size("_sliding_window_pattern", row.pattern))
    heads, kv_heads = (hf.size(f"num_{kind}_heads", maximum=HEADS) for kind in ("attention", "key_value"))
    head_dim = hf.size("head_dim", maximum=HEADS)
    check_heads(hf, llama.HF_HEADS, heads, kv_heads, head_dim)
    base, scaling, _ = rope.rotary_from_hf(hf, head_dim, base=row.rope_base, layer_type=llama.FULL)
    softcap = lambda name, default: hf.number(name, None if hf.is_stated(name) else default)
    has_local = row.qk_norm  # all layers of Gemma 2 have the same rotary frequencies and scaling
    local_base = lambda: rope.local_base_from_hf(hf, head_dim, hf.number("rope_local_base_freq", 10_000.0, **rope.BASE))
    return Gemma3Config(
        vocab_size=hf.size("vocab_size", maximum=ROWS),
        width=hf.size("hidden_size", maximum=WIDTH),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=hf.size("intermediate_size", maximum=ROWS),
        is_global=llama.global_layers(hf, layers) or llama.every_nth_layer(pattern, layers),
        window=hf.size("sliding_window", maximum=UNLIMITED_WINDOW),
        rope_base=base,
        rope_scaling=scaling,
        local_rope_base=local_base() if has_local else None,
        query_scale=hf.number("query_pre_attn_scalar") ** -0.5,
        norm_eps=hf.number("rms_norm_eps", 1e-6, maximum=1.0),
        tied=hf.flag("tie_word_embeddings"),
        qk_norm=row.qk_norm,
        attention_softcap=softcap("attn_logit_softcapping", row.attention_softcap),
        logit_softcap=softcap("final_logit_softcapping", row.logit_softcap),
        max_positions=rope.max_positions(hf, scaling),
        **options,
    )


def config_to_hf(c: Gemma3Config) -> dict[str, Any]:
    """Return the fields that `config_from_hf` reads."""
    scale = c.head_dim**-0.5 if c.query_scale is None else c.query_scale
    scalar = scale**-2
    if round(scalar) ** -0.5 == scale:  # the form in the published files
        scalar = round(scalar)
    return {
        "architectures": ["Gemma3ForCausalLM" if c.qk_norm else "Gemma2ForCausalLM"],
        "model_type": "gemma3_text" if c.qk_norm else "gemma2",
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "intermediate_size": c.mlp_width,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": c.norm_eps,
        **rope.rotary_to_hf(c.rope_base, c.rope_scaling),
        "rope_local_base_freq": c.local_rope_base,
        "sliding_window": c.window,
        "layer_types": llama.layer_types(c),
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": c.attention_softcap,
        "final_logit_softcapping": c.logit_softcap,
        "attention_bias": False,
        "max_position_embeddings": c.max_positions,
        "tie_word_embeddings": c.tied,
        "torch_dtype": c.dtype,
    }


def config_from_gguf(meta: ConfigFields, shapes: dict[str, tuple[int, ...]], factors, **options) -> Gemma3Config:
    """Build a config from GGUF metadata of one of GGUF_TYPES.

    Args:
      shapes: shapes of the file's tensors.
      factors: tensors of rope.GGUF_DIVISORS, which must be empty.
    """
    where, row = meta.where, ROWS_OF_HF[meta.prefix.removesuffix(".")]
    if factors:
        raise UsageError(f"{where} has a {min(factors)}, which specjax does not support for Gemma")
    layers, width = meta.size("block_count", maximum=LAYERS), meta.size("embedding_length", maximum=WIDTH)
    heads, kv_heads = (meta.size(f"attention.head_count{kind}", maximum=HEADS) for kind in ("", "_kv"))
    head_dim = meta.size("attention.key_length", maximum=HEADS)
    check_heads(meta, llama.GGUF_HEADS, heads, kv_heads, head_dim)
    base, scaling = rope.rotary_from_gguf(meta)
    return Gemma3Config(
        vocab_size=llama.gguf_vocab_size(shapes, where),
        width=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=meta.size("feed_forward_length", maximum=ROWS),
        is_global=llama.gguf_global_layers(meta, layers, row.pattern),
        # The first files of Gemma 2 omit the window, because all of its models have the same one.
        window=meta.size("attention.sliding_window", *() if row.qk_norm else (4096,), maximum=UNLIMITED_WINDOW),
        rope_base=base,
        rope_scaling=scaling,
        local_rope_base=meta.number("rope.freq_base_swa", 10_000.0, **rope.BASE) if row.qk_norm else None,
        # The format does not store query_pre_attn_scalar. Only in the 27B models does it differ from head_dim.
        query_scale=(width / heads if layers == row.layers_of_27b else head_dim) ** -0.5,
        norm_eps=meta.number("attention.layer_norm_rms_epsilon", maximum=1.0),
        tied="output.weight" not in shapes,
        qk_norm=row.qk_norm,
        attention_softcap=meta.number("attn_logit_softcapping", row.attention_softcap),
        logit_softcap=meta.number("final_logit_softcapping", row.logit_softcap),
        max_positions=meta.size("context_length"),
        **options,
    )
