"""Small mixtures of experts of transformers with random weights, in the form of published files."""

import pytest
from hybrid_models import torch, varied

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts_per_tok": 2, "max_position_embeddings": 256, "initializer_range": 0.1, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def qwen3_moe(**changes):
    """Return a Qwen3-MoE, whose first layer is dense."""
    sizes = {"num_experts": 8, "moe_intermediate_size": 16, "intermediate_size": 48, "head_dim": 16}
    fields = SIZES | sizes | {"mlp_only_layers": [0], "norm_topk_prob": True} | changes
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**fields))


def mixtral(**changes):
    """Return a Mixtral."""
    fields = SIZES | {"num_local_experts": 8, "intermediate_size": 16} | changes
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**fields))


def olmoe(**changes):
    """Return an OLMoE."""
    fields = SIZES | {"num_experts": 8, "intermediate_size": 16} | changes
    return transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**fields))


MAKERS = {"qwen3_moe": qwen3_moe, "mixtral": mixtral, "olmoe": olmoe}


def save(kind, folder, **changes):
    """Write a model to a folder, and return it."""
    model = varied(MAKERS[kind], **changes)
    model.save_pretrained(folder)
    return model


def logits_of(model, tokens):
    """Return the logits of a model of transformers as an array."""
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()
