"""LFM2 against the classes of transformers."""

import pytest

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 256, "block_multiple_of": 16,
}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"conv_bias": True, "block_auto_adjust_ff_dim": False}])
def test_logits(check_parity, changes):
    kinds = ["conv", "conv", "full_attention"]
    make = lambda: transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**SIZES, layer_types=kinds, **changes))
    config, *_ = check_parity(make)
    assert config.mlp_width == (48 if changes else 32) and config.tied
