"""Qwen3.5 against the classes of transformers."""

import pytest

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.mark.parametrize("stacked", [False, True])
def test_logits(check_parity, stacked):
    make = lambda: transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SIZES))
    config, *_ = check_parity(make, stacked=stacked)
    assert config.period == 4 and config.rotary_dim == 4 and [kind.attends for kind in config.kinds] == [0, 0, 0, 1]
