"""The card's tests of Unified Layer Skipping (B4)."""

import depths
import pytest

from specjax import UsageError, adaptive
from specjax.adaptive.unified import kept_layers
from specjax.models import prune_layers


def test_the_cards_layers():
    assert kept_layers(2.0, 32) == (0, 2, 4, 6, 8, 10, 12, 14, 17, 19, 21, 23, 25, 27, 29, 31)
    assert kept_layers(1.0, 5) == (0, 1, 2, 3, 4)
    assert kept_layers(32.0, 32) == (0,)


def test_the_others_are_taken_out():
    model = adaptive.skip_layers(depths.target(), adaptive.unified(2.0))
    assert model.model.capabilities.num_layers == 4 and model.model.name == "llama by unified"
    assert depths.texts(model) == depths.texts(prune_layers(depths.target(), kept_layers(2.0, depths.LAYERS)))


def test_a_model_is_not_slowed_down():
    with pytest.raises(UsageError, match=r"speedup must be at least 1, not 0\.5"):
        adaptive.unified(0.5)
