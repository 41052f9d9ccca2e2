"""Configs of the Llama family whose fields contradict each other."""

import pytest

from specjax.errors import UsageError
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.formats.hf import parse_config

SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_windows_that_a_flag_denies(kind):
    """The class of transformers has no window with that flag, and then no mask for windowed layers."""
    fields = {"model_type": kind, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    read = lambda **changes: parse_config(
        ConfigFields(fields | {"num_hidden_layers": 2, **changes}, "config.json"), dtype="float32"
    )[0]
    with pytest.raises(UsageError, match="has use_sliding_window false, and layer_types with windows; make them agree"):
        read(**SLIDING, use_sliding_window=False)
    assert read(**SLIDING, use_sliding_window=True).is_global == (True, False)
    full = read(layer_types=["full_attention"] * 2, sliding_window=5, use_sliding_window=False)
    assert full.window is None and full.is_global is None
