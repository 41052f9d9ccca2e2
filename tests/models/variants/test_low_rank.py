"""Low-rank updates of a model's weights."""

import jax
import pytest
import toy

from specjax.errors import UsageError
from specjax.models.variants.low_rank import apply_lora, init_lora
from specjax.numerics.quantized_array import WeightFormat


def test_updates_of_quantised_weights_are_refused():
    """Otherwise the update of a model in floats would silently change nothing."""
    plain = toy.tiny_llama(layers=2)
    target, lora = toy.quantized(plain, WeightFormat()), init_lora(plain, jax.random.key(0))
    for call in (lambda: apply_lora(target, lora), lambda: init_lora(target, jax.random.key(0))):
        with pytest.raises(UsageError, match=r"low-rank updates change float weights only; load it without quantize"):
            call()
