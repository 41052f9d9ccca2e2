"""Tiny Qwen3.5, Qwen3-Next and LFM2 models of transformers, with random weights."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "max_position_embeddings": 256,
}  # fmt: skip
LFM2_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 256, "block_multiple_of": 16,
    "layer_types": ["conv", "conv", "full_attention"],
}  # fmt: skip


def qwen3_5(**changes):
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SIZES | changes))


def qwen3_next(**changes):
    config = transformers.Qwen3NextConfig(**{**SIZES, "num_experts": 0, **changes})
    return transformers.Qwen3NextForCausalLM(config)


def lfm2(**changes):
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**LFM2_SIZES | changes))


MAKERS = {"qwen3_5": qwen3_5, "qwen3_next": qwen3_next, "lfm2": lfm2}


def varied(make, **changes):
    """Return a model whose vectors are random too, because some constants have no effect at their initial values."""
    torch.manual_seed(0)
    model = make(**changes).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model
