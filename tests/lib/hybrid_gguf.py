"""GGUF files of tiny Qwen3.5, Qwen3-Next and LFM2 models, by the rules of llama.cpp's converter."""

import numpy as np
import pytest
from gguf_files import split_experts

gguf = pytest.importorskip("gguf")

ARCHITECTURES = {
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next", "lfm2": "lfm2",
}  # fmt: skip

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "model.embedding_norm": "token_embd_norm",
    "lm_head": "output", "input_layernorm": "attn_norm", "operator_norm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm", "ffn_norm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.out_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down", "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out", "conv.conv": "shortconv.conv",
    "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    **{f"mlp.experts.{part}": f"ffn_{part}_exps.weight" for part in ("gate", "up", "down")},
    "conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj",
}  # fmt: skip
"""Names of modules of transformers and of a GGUF file, without the layer."""


def write(model, file, kind="F32", *, module=None, earlier=False):
    """Write a torch model as GGUF.

    kind: the format of matrices whose rows it can store.
    module: tensors of its module for multi-token prediction by their names in Qwen3.5's files, as arrays of NumPy.
    earlier: the form of earlier converters of Qwen3-Next, with one matrix `ssm_in`.
    """
    c = model.config
    writer = gguf.GGUFWriter(str(file), ARCHITECTURES[c.model_type])
    write_metadata(writer, c, modules=int(module is not None))
    for name, values in (module or {}).items():
        writer.add_tensor(module_name(name, c.num_hidden_layers), values + ("norm" in name))
    if module is not None:
        writer.add_uint32(f"{ARCHITECTURES[c.model_type]}.nextn_predict_layers", 1)
    for name, parameter in split_experts(model.state_dict()).items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        for stored, values in converted(name, parameter.float().numpy(), c, earlier):
            is_matrix = (
                values.ndim > 1 and "_inp" not in stored and not stored.endswith(("conv.weight", "conv1d.weight"))
            )
            has_blocks = values.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0] == 0
            quant = gguf.GGMLQuantizationType[kind if is_matrix and has_blocks else "F32"]
            data = gguf.quants.quantize(np.ascontiguousarray(values, np.float32), quant)
            writer.add_tensor(stored, data, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


NEXTN = {
    "mtp.fc": "eh_proj", "mtp.pre_fc_norm_embedding": "enorm", "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head_norm",
}  # fmt: skip


def module_name(name, layer):
    """Return the name in a GGUF file of a tensor of a module, which is the layer after the last one."""
    module = name.removesuffix(".weight")
    local = NAMES[module.removeprefix("mtp.layers.0.")] if module not in NEXTN else f"nextn.{NEXTN[module]}"
    return f"blk.{layer}.{local}.weight"


def write_metadata(writer, c, modules=0):
    """Write the metadata and a tokenizer."""
    attends = [kind == "full_attention" for kind in c.layer_types]
    writer.add_block_count(c.num_hidden_layers + modules)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(getattr(c, "intermediate_size", 512))
    if getattr(c, "num_experts", 0):
        writer.add_expert_count(c.num_experts)
        writer.add_expert_used_count(c.num_experts_per_tok)
        writer.add_expert_feed_forward_length(c.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(c.norm_eps if c.model_type == "lfm2" else c.rms_norm_eps)
    if c.model_type == "lfm2":
        writer.add_head_count_kv([c.num_key_value_heads * attending for attending in attends])
        writer.add_shortconv_l_cache(c.conv_L_cache)
        writer.add_vocab_size(c.vocab_size)
    else:
        writer.add_head_count_kv(c.num_key_value_heads)
        writer.add_key_length(c.head_dim)
        writer.add_value_length(c.head_dim)
        writer.add_ssm_conv_kernel(c.linear_conv_kernel_dim)
        writer.add_ssm_state_size(c.linear_key_head_dim)
        writer.add_ssm_group_count(c.linear_num_key_heads)
        writer.add_ssm_time_step_rank(c.linear_num_value_heads)
        writer.add_ssm_inner_size(c.linear_num_value_heads * c.linear_value_head_dim)
        writer.add_full_attention_interval(4)
        writer.add_rope_dimension_count(int(c.head_dim * c.rope_parameters["partial_rotary_factor"]))
    if c.model_type.startswith("qwen3_5"):
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    write_tokenizer(writer, c.vocab_size)


def write_tokenizer(writer, vocab_size):
    """Write a tokenizer of words."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"w{i}" for i in range(vocab_size)])
    writer.add_token_scores([0.0] * vocab_size)
    writer.add_eos_token_id(2)


def converted(name, w, c, earlier=False):
    """Yield the names and values in the file of a tensor of transformers."""
    fields = name.split(".")
    in_layer = fields[1] == "layers"
    prefix, local = (f"blk.{fields[2]}.", ".".join(fields[3:])) if in_layer else ("", name)
    module, _, suffix = local.rpartition(".") if local.endswith((".weight", ".bias")) else (local, "", "")
    if module == "linear_attn.in_proj_qkvz" and earlier:
        yield prefix + "ssm_in.weight", w
        return
    if module == "linear_attn.in_proj_qkvz":
        yield from ((prefix + stored, values) for stored, values in split_qkvz(w, c))
        return
    stored = prefix + NAMES[module] + (f".{suffix}" if suffix else "")
    if module.endswith("A_log"):
        w = -np.exp(w)
    elif "conv1d" in module or module == "conv.conv":
        w = w[:, 0] if w.ndim == 3 else w
    elif c.model_type != "lfm2" and name.endswith("norm.weight") and "linear_attn" not in name:
        w = w + 1
    yield stored, tiled(module, w, c) if c.model_type.startswith("qwen3_5") else w


def split_qkvz(w, c):
    """Yield the matrices of queries, keys and values, and of the gate, from the rows by key heads."""
    heads, keys = c.linear_num_key_heads, c.linear_key_head_dim
    values = c.linear_num_value_heads // heads * c.linear_value_head_dim
    groups = w.reshape(heads, -1, w.shape[1])
    q, k, v, z = np.split(groups, np.cumsum([keys, keys, values]), axis=1)
    rows = lambda part: part.reshape(-1, w.shape[1])
    yield "attn_qkv.weight", np.concatenate([rows(q), rows(k), rows(v)])
    yield "attn_gate.weight", rows(z)


def tiled(module, w, c):
    """Return a tensor of a gated delta net with its value heads in llama.cpp's order: one of each key head in turn."""
    heads, values = c.linear_num_key_heads, c.linear_value_head_dim
    by_repeat = lambda x, size: np.swapaxes(x.reshape(heads, -1, size, *x.shape[1:]), 0, 1).reshape(x.shape)
    keys = 2 * heads * c.linear_key_head_dim
    if module in ("linear_attn.in_proj_qkv", "linear_attn.conv1d"):
        return np.concatenate([w[:keys], by_repeat(w[keys:], values)])
    if module == "linear_attn.in_proj_z":
        return by_repeat(w, values)
    if module in ("linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.A_log", "linear_attn.dt_bias"):
        return by_repeat(w, 1)
    return by_repeat(w.T, values).T if module == "linear_attn.out_proj" else w
