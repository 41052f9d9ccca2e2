"""Qwen3-Next against the classes of transformers."""

import pytest
from hybrid_models import qwen3_next


@pytest.mark.parametrize("stacked", [False, True])
def test_logits(check_parity, stacked):
    config, *_ = check_parity(qwen3_next, stacked=stacked)
    assert config.model_type == "qwen3_next" and config.gated_delta.num_value_heads == 6
