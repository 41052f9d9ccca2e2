"""GGUF files of tiny gpt-oss, GLM-4.5 and DeepSeek models, by the rules of llama.cpp's converter."""

import numpy as np
import pytest
from gguf_files import split_experts

gguf = pytest.importorskip("gguf")

ARCHITECTURES = {
    "gpt_oss": "gpt-oss", "glm4_moe": "glm4moe", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
}  # fmt: skip

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.sinks": "attn_sinks", "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp", "mlp.gate.e_score_correction": "exp_probs_b",
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    **{f"mlp.experts.{part}": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
}  # fmt: skip
"""Names of modules of transformers and of a GGUF file, without the layer."""

VALUE_TYPES = {
    int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32, bool: gguf.GGUFValueType.BOOL,
}  # fmt: skip


def write(model, file, kind="F32", *, joined=False, without=(), changes=None, module=False):
    """Write a torch model as GGUF.

    kind: the format of matrices whose rows it can store.
    joined: the form of earlier converters of DeepSeek, with one matrix for keys and values.
    without: fields that the file lacks, without the architecture. changes: fields with other values.
    module: True if the last layer is a module for multi-token prediction, which then has a projection.
    """
    c = model.config
    arch = ARCHITECTURES[c.model_type]
    writer = gguf.GGUFWriter(str(file), arch)
    write_metadata(writer, c, joined=joined)
    metadata = writer.kv_data[0]
    for field in without:
        del metadata[f"{arch}.{field}"]
    for field, value in (changes or {}).items():
        metadata[f"{arch}.{field}"] = gguf.GGUFValue(value, VALUE_TYPES[type(value)])
    if module:
        writer.add_nextn_predict_layers(1)
        writer.add_tensor(f"blk.{c.num_hidden_layers - 1}.nextn.eh_proj.weight", np.ones((2, 2), np.float32))
    tensors = model.state_dict()
    for name, parameter in (tensors if arch == "gpt-oss" else split_experts(tensors)).items():
        for stored, values in converted(name, parameter.float().numpy(), c, joined=joined):
            has_blocks = values.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0] == 0
            is_matrix = values.ndim > 1 and "_inp" not in stored and not stored.endswith("bias")
            quant = gguf.GGMLQuantizationType[kind if is_matrix and has_blocks else "F32"]
            data = gguf.quants.quantize(np.ascontiguousarray(values, np.float32), quant)
            writer.add_tensor(stored, data, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def converted(name, values, c, *, joined):
    """Yield the tensors of a file for one of transformers."""
    name = name.replace("e_score_correction_bias", "e_score_correction.bias").replace("_proj_bias", "_proj.bias")
    module, _, leaf = name.rpartition(".")
    if name.endswith(("sinks", "gate_up_proj", "down_proj", "experts.gate", "experts.up", "experts.down")):
        module, leaf = name, "weight"  # a parameter of its own
    prefix, is_split = "", c.model_type == "gpt_oss" and ".experts." in name
    if ".layers." in name:
        _, _, layer, module = module.split(".", 3)
        prefix = f"blk.{layer}."
    if is_split:  # gates are the even outputs, and matrices are [in, out]
        values = values.swapaxes(1, 2) if leaf == "weight" else values
        parts = {"down": values} if "down_proj" in module else {"gate": values[:, ::2], "up": values[:, 1::2]}
        yield from ((f"{prefix}ffn_{part}_exps.{leaf}", x) for part, x in parts.items())
    elif module.endswith("kv_b_proj"):
        if joined:
            yield f"{prefix}attn_kv_b.weight", values
            return
        by_head = values.reshape(c.num_attention_heads, -1, values.shape[-1])
        keys, values = np.split(by_head, [c.qk_nope_head_dim], 1)
        yield f"{prefix}attn_k_b.weight", keys.swapaxes(1, 2)
        yield f"{prefix}attn_v_b.weight", values
    elif module == "post_attention_layernorm":
        local = "ffn_norm" if ARCHITECTURES[c.model_type] == "deepseek2" else "post_attention_norm"
        yield f"{prefix}{local}.{leaf}", values
    else:
        yield f"{prefix}{NAMES[module]}.{leaf}", values


def write_metadata(writer, c, *, joined):
    """Write the metadata and a tokenizer."""
    is_deepseek = ARCHITECTURES[c.model_type] == "deepseek2"
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(1 if is_deepseek and not joined else c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    rope = c.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(float(rope["beta_fast"]))
        writer.add_rope_scaling_yarn_beta_slow(float(rope["beta_slow"]))
    writer.add_expert_count(getattr(c, "num_local_experts" if c.model_type == "gpt_oss" else "n_routed_experts"))
    writer.add_expert_used_count(c.num_experts_per_tok)
    if c.model_type == "gpt_oss":
        writer.add_key_length(c.head_dim)
        writer.add_value_length(c.head_dim)
        writer.add_sliding_window(c.sliding_window)
        writer.add_expert_feed_forward_length(c.intermediate_size)
    else:
        _write_shared(writer, c)
    if is_deepseek:
        _write_latent(writer, c, joined=joined)
    elif c.model_type == "glm4_moe":
        writer.add_key_length(c.head_dim)
        writer.add_value_length(c.head_dim)
        writer.add_rope_dimension_count(int(c.head_dim * rope["partial_rotary_factor"]))
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"w{i}" for i in range(c.vocab_size)])
    writer.add_token_scores([0.0] * c.vocab_size)
    writer.add_eos_token_id(2)


def _write_shared(writer, c):
    """Write the fields of the router, of the shared MLP, and of dense layers."""
    writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    writer.add_expert_shared_count(c.n_shared_experts)
    writer.add_leading_dense_block_count(c.first_k_dense_replace)
    writer.add_expert_weights_scale(c.routed_scaling_factor)
    writer.add_expert_group_count(c.n_group)
    writer.add_expert_group_used_count(c.topk_group)
    is_softmax, gating = c.model_type == "deepseek_v2", gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(gating.SOFTMAX if is_softmax else gating.SIGMOID)
    if c.norm_topk_prob and not is_softmax:
        writer.add_expert_weights_norm(True)


def _write_latent(writer, c, *, joined):
    """Write the sizes of latent attention. Earlier converters have the sizes of heads under the plain names."""
    key_dim = c.qk_nope_head_dim + c.qk_rope_head_dim
    if c.q_lora_rank is not None:
        writer.add_q_lora_rank(c.q_lora_rank)
    writer.add_kv_lora_rank(c.kv_lora_rank)
    writer.add_rope_dimension_count(c.qk_rope_head_dim)
    if joined:
        writer.add_key_length(key_dim)
        writer.add_value_length(c.v_head_dim)
    else:
        writer.add_key_length(c.kv_lora_rank + c.qk_rope_head_dim)
        writer.add_value_length(c.kv_lora_rank)
        writer.add_key_length_mla(key_dim)
        writer.add_value_length_mla(c.v_head_dim)
    if c.rope_parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_yarn_log_mul(0.1 * c.rope_parameters["mscale_all_dim"])
