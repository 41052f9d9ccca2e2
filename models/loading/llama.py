"""Llama, Mistral, Qwen2 and Qwen3: names of their weights, and their configurations in both formats."""

from __future__ import annotations

from typing import Any

from specjax.errors import UsageError
from specjax.models.llama import LlamaConfig
from specjax.models.loading import rope
from specjax.models.loading.assembly import Stored, Weight
from specjax.models.loading.fields import HEADS, LAYERS, ROWS, WIDTH, Fields, check_heads
from specjax.reading import shown

HF_TYPES = ("llama", "mistral", "qwen2", "qwen3")
GGUF_TYPES = ("llama", "qwen2", "qwen3")

HF_HEADS = "num_attention_heads", "num_key_value_heads", "head_dim"
GGUF_HEADS = "attention.head_count", "attention.head_count_kv", "attention.key_length"

WEIGHTS = (
    Weight("embed.weight", "model.embed_tokens.weight", "token_embd.weight"),
    Weight("norm.weight", "model.norm.weight", "output_norm.weight"),
    Weight("head.weight", "lm_head.weight", "output.weight"),
    Weight("layers.*.attention_norm.weight", "model.layers.*.input_layernorm.weight", "blk.*.attn_norm.weight"),
    Weight("layers.*.attention.q.weight", "model.layers.*.self_attn.q_proj.weight", "blk.*.attn_q.weight"),
    Weight("layers.*.attention.k.weight", "model.layers.*.self_attn.k_proj.weight", "blk.*.attn_k.weight"),
    Weight("layers.*.attention.v.weight", "model.layers.*.self_attn.v_proj.weight", "blk.*.attn_v.weight"),
    Weight("layers.*.attention.o.weight", "model.layers.*.self_attn.o_proj.weight", "blk.*.attn_output.weight"),
    Weight("layers.*.attention.q.bias", "model.layers.*.self_attn.q_proj.bias", "blk.*.attn_q.bias"),
    Weight("layers.*.attention.k.bias", "model.layers.*.self_attn.k_proj.bias", "blk.*.attn_k.bias"),
    Weight("layers.*.attention.v.bias", "model.layers.*.self_attn.v_proj.bias", "blk.*.attn_v.bias"),
    Weight("layers.*.attention.q_norm.weight", "model.layers.*.self_attn.q_norm.weight", "blk.*.attn_q_norm.weight"),
    Weight("layers.*.attention.k_norm.weight", "model.layers.*.self_attn.k_norm.weight", "blk.*.attn_k_norm.weight"),
    Weight("layers.*.mlp_norm.weight", "model.layers.*.post_attention_layernorm.weight", "blk.*.ffn_norm.weight"),
    Weight("layers.*.mlp.gate.weight", "model.layers.*.mlp.gate_proj.weight", "blk.*.ffn_gate.weight"),
    Weight("layers.*.mlp.up.weight", "model.layers.*.mlp.up_proj.weight", "blk.*.ffn_up.weight"),
    Weight("layers.*.mlp.down.weight", "model.layers.*.mlp.down_proj.weight", "blk.*.ffn_down.weight"),
)


def stored_hf(config: LlamaConfig) -> dict[str, Stored]:
    """By parameter path: what a Hugging Face checkpoint keeps."""
    return {w.path: Stored(w.hf) for w in WEIGHTS}


def stored_gguf(config: LlamaConfig, arch: str) -> dict[str, Stored]:
    """By parameter path: what a GGUF keeps. Of "llama" files q and k are permuted, to rotate neighbouring rows."""
    heads = {"q": config.num_heads, "k": config.num_kv_heads} if arch == "llama" else {}
    return {w.path: Stored(w.gguf, heads=heads.get(w.path.split(".")[-2], 0)) for w in WEIGHTS}


def config_from_hf(hf: Fields, **options) -> LlamaConfig:
    """`hf`: config.json of one of HF_TYPES. `options`: dtype, stacked, cache_dtype, cache_lanes, name."""
    kind, where = hf.text("model_type"), hf.where
    for field in ("attention_bias", "mlp_bias"):
        if hf.flag(field):
            raise UsageError(f"{where} sets {field}, which specjax does not support")
    if hf.text("hidden_act", "silu") != "silu":
        raise UsageError(f"{where} has hidden_act {shown(hf.text('hidden_act'))}; specjax supports silu only")
    base, scaling = rope.from_hf(hf)
    width, heads = hf.size("hidden_size", most=WIDTH), hf.size("num_attention_heads", most=HEADS)
    kv_heads = hf.size("num_key_value_heads", heads, most=HEADS)
    head_dim = hf.size("head_dim", 128 if kind == "qwen3" else width // heads, most=HEADS)
    check_heads(hf, HF_HEADS, heads, kv_heads, head_dim)
    return LlamaConfig(
        vocab_size=hf.size("vocab_size", most=ROWS),
        width=width,
        num_layers=hf.size("num_hidden_layers", most=LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=hf.size("intermediate_size", most=ROWS),
        rope_base=base,
        rope_scaling=scaling,
        norm_eps=hf.number("rms_norm_eps", 1e-6, most=1.0),
        tied=hf.flag("tie_word_embeddings"),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        window=_window(hf),
        max_positions=hf.size("max_position_embeddings"),
        **options,
    )


def config_to_hf(c: LlamaConfig) -> dict[str, Any]:
    """What `config_from_hf` reads."""
    kind = "qwen3" if c.qk_norm else "qwen2" if c.qkv_bias else "mistral" if c.window else "llama"
    return {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "intermediate_size": c.mlp_width,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        **rope.to_hf(c.rope_base, c.rope_scaling),
        "sliding_window": c.window,
        "use_sliding_window": c.window is not None,
        "layer_types": [("sliding_attention" if c.window else "full_attention")] * c.num_layers,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": c.max_positions,
        "tie_word_embeddings": c.tied,
        "torch_dtype": c.dtype,
    }


def _window(hf: Fields) -> int | None:
    """Mistral windows every layer; Qwen only the layers from `max_window_layers` on, and only if asked."""
    layers, kind = hf.size("num_hidden_layers"), hf.text("model_type")
    types = set(hf.array("layer_types", str))
    if types:
        windowed = types != {"full_attention"}
        mixed = len(types) > 1
    elif kind == "mistral":
        windowed, mixed = True, False
    else:
        first = hf.size("max_window_layers", 28, least=0)
        windowed = kind != "llama" and hf.flag("use_sliding_window") and first < layers
        mixed = windowed and first > 0
    if mixed:
        raise UsageError(
            f"{hf.where} mixes windowed and full attention layers, which specjax supports for Gemma 3 only"
        )
    # Mistral 0.1 is the only one whose window is the default; later ones say null.
    default = None if "sliding_window" in hf.values else 4096
    return hf.size("sliding_window", default) if windowed else None


def config_from_gguf(meta: Fields, shapes: dict[str, tuple[int, ...]], factors, **options) -> LlamaConfig:
    """`meta`: of a file of one of GGUF_TYPES. `shapes`: of its tensors. `factors`: its rope_freqs.weight, or None."""
    arch, where = meta.prefix.removesuffix("."), meta.where
    if meta.size("expert_count", 0, least=0):
        raise UsageError(f"{where} is a mixture of experts, which specjax does not support")
    width, heads = meta.size("embedding_length", most=WIDTH), meta.size("attention.head_count", most=HEADS)
    kv_heads = meta.size("attention.head_count_kv", heads, most=HEADS)
    rotated = meta.size("rope.dimension_count", width // heads, most=HEADS)
    head_dim = meta.size("attention.key_length", rotated, most=HEADS)
    check_heads(meta, GGUF_HEADS, heads, kv_heads, head_dim)
    base, scaling = rope.from_gguf(meta)
    if factors is not None:
        scaling = rope.llama3_from_factors(factors, head_dim, base, where)
    return LlamaConfig(
        vocab_size=vocabulary_of(shapes, where),
        width=width,
        num_layers=meta.size("block_count", most=LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=meta.size("feed_forward_length", most=ROWS),
        rope_base=base,
        rope_scaling=scaling,
        norm_eps=meta.number("attention.layer_norm_rms_epsilon", most=1.0),
        tied="output.weight" not in shapes,
        qkv_bias=arch == "qwen2",
        qk_norm=arch == "qwen3",
        window=meta.size("attention.sliding_window", None),
        max_positions=meta.size("context_length"),
        **options,
    )


def vocabulary_of(shapes: dict[str, tuple[int, ...]], where: str) -> int:
    """Rows of the embedding: GGUF does not state the size of the vocabulary."""
    shape = shapes.get("token_embd.weight", ())
    if len(shape) != 2 or not 1 <= shape[0] <= ROWS:
        raise UsageError(f"{where} has no token_embd.weight of two dimensions, so the vocabulary is unknown")
    return shape[0]
