"""GGUF files of tiny models with Mamba-2 layers, by the rules of llama.cpp's converter."""

import numpy as np
import pytest
from hybrid_gguf import write_tokenizer

gguf = pytest.importorskip("gguf")

ARCHITECTURES = {
    "mamba2": "mamba2", "bamba": "granitehybrid", "nemotron_h": "nemotron_h", "granitemoehybrid": "granitehybrid",
    "falcon_h1": "falcon-h1",
}  # fmt: skip

NAMES = {
    "embeddings": "token_embd", "embed_tokens": "token_embd", "norm_f": "output_norm", "final_layernorm": "output_norm",
    "lm_head": "output", "in_proj": "ssm_in", "out_proj": "ssm_out", "A_log": "ssm_a", "D": "ssm_d",
    "dt_bias": "ssm_dt.bias", "conv1d": "ssm_conv1d", "mixer.norm": "ssm_norm", "mamba.norm": "ssm_norm",
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
    "up_proj": "ffn_up", "down_proj": "ffn_down", "output_linear": "ffn_down", "input_layernorm": "attn_norm",
    "norm": "attn_norm", "pre_ff_layernorm": "ffn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
"""Names of modules by the end of their names in transformers; the first one that fits counts."""


def write(model, file, kind="F32"):
    """Write a torch model as GGUF."""
    writer = gguf.GGUFWriter(str(file), ARCHITECTURES[model.config.model_type])
    write_metadata(writer, model.config, model.state_dict())
    write_tokenizer(writer, model.config.vocab_size)
    for name, parameter in model.state_dict().items():
        if (name == "lm_head.weight" and model.config.tie_word_embeddings) or name.endswith("mup_vector"):
            continue
        values = folded(name, parameter.float().numpy(), model.config)
        for stored, part in named(name, values, model.config):
            is_matrix = part.ndim == 2 and not any(vector in stored for vector in ("ssm_a", "ssm_d", "norm", "conv1d"))
            quant = gguf.GGMLQuantizationType[kind if is_matrix else "F32"]
            data = gguf.quants.quantize(np.ascontiguousarray(part, np.float32), quant)
            writer.add_tensor(stored, data, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write_metadata(writer, c, tensors):
    kind, get = c.model_type, lambda *names: next(getattr(c, name) for name in names if hasattr(c, name))
    layers = [
        i for i in range(c.num_hidden_layers) if any(f"layers.{i}." in name and "q_proj" in name for name in tensors)
    ]
    writer.add_block_count(c.num_hidden_layers)
    writer.add_embedding_length(c.hidden_size)
    writer.add_context_length(getattr(c, "max_position_embeddings", 1 << 20))
    writer.add_layer_norm_rms_eps(get("layer_norm_epsilon", "rms_norm_eps"))
    heads = get("num_heads", "mamba_num_heads", "mamba_n_heads")
    inner = heads * (c.mamba_head_dim if kind == "nemotron_h" else c.head_dim if kind == "mamba2" else c.mamba_d_head)
    writer.add_ssm_conv_kernel(get("conv_kernel", "mamba_d_conv"))
    writer.add_ssm_state_size(get("state_size", "ssm_state_size", "mamba_d_state"))
    writer.add_ssm_group_count(get("n_groups", "mamba_n_groups"))
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_time_step_rank(heads)
    if kind == "mamba2":
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        return
    writer.add_head_count(c.num_attention_heads)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    per_layer = lambda value, kept: [value if i in kept else 0 for i in range(c.num_hidden_layers)]
    writer.add_head_count_kv(c.num_key_value_heads if kind == "falcon_h1" else per_layer(c.num_key_value_heads, layers))
    if kind in ("nemotron_h", "falcon_h1"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if kind == "nemotron_h":
        mlps = [i for i, name in enumerate(c.layers_block_type) if name == "mlp"]
        writer.add_feed_forward_length(per_layer(c.intermediate_size, mlps))
    else:
        writer.add_feed_forward_length(c.intermediate_size)
    if kind in ("falcon_h1", "bamba", "granitemoehybrid"):
        writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    if kind != "falcon_h1":
        writer.add_rope_dimension_count(head_dim // 2 if kind == "bamba" else head_dim)
        writer.add_rope_scaling_finetuned(kind == "bamba")
    if kind == "granitemoehybrid":
        writer.add_attention_scale(c.attention_multiplier)
        writer.add_embedding_scale(c.embedding_multiplier)
        writer.add_residual_scale(c.residual_multiplier)
        writer.add_logit_scale(c.logits_scaling)
        writer.add_expert_shared_feed_forward_length(c.shared_intermediate_size)


def folded(name, w, c):
    """Return a weight with the factors of Falcon-H1, which GGUF files contain."""
    if c.model_type != "falcon_h1":
        return w
    module = name.rsplit(".", 2)[-2]
    factors = {
        "down_proj": c.mlp_multipliers[1], "gate_proj": c.mlp_multipliers[0], "q_proj": c.attention_in_multiplier,
        "k_proj": c.key_multiplier * c.attention_in_multiplier, "v_proj": c.attention_in_multiplier,
        "o_proj": c.attention_out_multiplier, "out_proj": c.ssm_out_multiplier, "lm_head": c.lm_head_multiplier,
        "embed_tokens": c.embedding_multiplier,
    }  # fmt: skip
    if module == "in_proj":
        inner, state = c.mamba_n_heads * c.mamba_d_head, c.mamba_n_groups * c.mamba_d_state
        parts = np.repeat(c.ssm_multipliers, [inner, inner, state, state, c.mamba_n_heads])
        return w * (c.ssm_in_multiplier * parts)[:, None].astype(np.float32)
    return w * np.float32(factors.get(module, 1.0))


def named(name, w, c):
    """Yield the names and values in the file of a tensor of transformers."""
    fields = name.split(".")
    layer = f"blk.{fields[2]}." if "layers" in fields else ""
    if "input_linear" in name:
        gate, up = np.split(w, 2)
        yield from ((layer + "ffn_gate.weight", gate), (layer + "ffn_up.weight", up))
        return
    base, suffix = (
        (name, "") if fields[-1] in ("A_log", "D", "dt_bias") else (name.rpartition(".")[0], f".{fields[-1]}")
    )
    stored = next(stored for end, stored in NAMES.items() if base == end or base.endswith(f".{end}"))
    stored = "output_norm" if base == "model.norm" else stored
    groups = getattr(c, "n_groups", None) or c.mamba_n_groups
    if stored == "ssm_a":
        w = -np.exp(w)[:, None]
    elif stored == "ssm_d":
        w = w[:, None]
    elif stored == "ssm_norm":
        w = w.reshape(groups, -1)
    elif stored == "ssm_conv1d" and suffix == ".weight":
        w = w[:, 0]
    elif stored in ("attn_q", "attn_k") and ARCHITECTURES[c.model_type] != "falcon-h1":
        heads = c.num_attention_heads if stored == "attn_q" else c.num_key_value_heads
        w = w.reshape(heads, 2, -1, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
    yield layer + stored + suffix, w
