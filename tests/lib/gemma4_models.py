"""Tiny Gemma 4 models of transformers in the published forms of their config, with random weights."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "max_position_embeddings": 256,
    "final_logit_softcapping": 3.0, "initializer_range": 0.15,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]
FORMS = {
    "small": {  # as E2B and E4B
        "num_hidden_layers": 6, "layer_types": LAYERS * 3, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "num_key_value_heads": 1,
    },
    "large": {  # as 31B
        "num_hidden_layers": 4, "layer_types": LAYERS * 2, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
    },
}  # fmt: skip


def gemma4(form, **changes):
    """Return a model. The scales of its layers, which are buffers, differ too."""
    model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**SIZES | FORMS[form] | changes))
    for i, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(0.7 + 0.1 * i)
    return model
