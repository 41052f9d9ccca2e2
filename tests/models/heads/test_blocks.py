"""The reach of a head's attention in texts that are longer than those of its training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from head_runs import features_of, random_params, said_of
from tiers import those
from toy import tiny_llama

from specjax.models.heads.contract import DraftHead
from specjax.models.heads.kinds import KINDS


@pytest.mark.parametrize("kind", those(["eagle"], ["eagle", "dflash"]))
def test_no_distance_exceeds_the_trained_length(kind):
    """The texts have seven and four tokens, and the head was trained for three."""
    target = tiny_llama()
    config = KINDS[kind].of_target(target.model.config)
    if kind == "dflash":
        config = replace(config, layer=replace(config.layer, num_layers=1), block_size=5, taps=config.taps[:1])
    params, features = random_params(kind, config), features_of(target)

    def logits(**changes):
        head = KINDS[kind].head(replace(config, layer=replace(config.layer, **changes)))
        return said_of(DraftHead(head, params), target, features)

    short = logits(max_positions=3)
    assert np.abs(short - logits(max_positions=256)).max() > 1e-3
    if kind == "eagle":
        np.testing.assert_array_equal(short, logits(max_positions=256, window=3))
