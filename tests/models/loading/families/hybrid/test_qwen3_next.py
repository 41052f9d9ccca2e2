"""Qwen3-Next against the classes of transformers."""

import pytest
from hybrid_models import qwen3_next

from specjax.errors import UsageError
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.formats import hf


@pytest.mark.parametrize("stacked", [False, True])
def test_logits(check_parity, stacked):
    config, *_ = check_parity(qwen3_next, stacked=stacked)
    assert config.model_type == "qwen3_next" and config.gated_delta.num_value_heads == 6


@pytest.mark.parametrize("changes", [{}, {"num_experts": 4, "decoder_sparse_step": 2}, {"num_experts": 4}])
def test_experts_are_refused(changes):
    fields = {"model_type": "qwen3_next", "num_hidden_layers": 4, **changes}
    number = f"{changes.get('num_experts', 512)} experts in {2 if 'decoder_sparse_step' in changes else 4} of its 4"
    with pytest.raises(UsageError, match=number):
        hf.parse_config(ConfigFields(fields, "config.json"), dtype="float32")
