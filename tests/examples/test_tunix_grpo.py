"""The example with Tunix: rewards rise, and sampler and trainer mean the same distribution."""

import pathlib

import numpy as np
import pytest
from scripts import module_at

FILE = pathlib.Path(__file__).parents[2] / "examples" / "tunix_grpo.py"


def test_rewards_rise():
    pytest.importorskip("tunix", reason="google-tunix is not installed")
    history = module_at(FILE).main(["--updates", "14"])
    assert len(history) == 14
    assert np.mean([one.reward for one in history[-3:]]) > np.mean([one.reward for one in history[:3]]) + 0.2
    assert max(one.logprob_gap for one in history) < 1e-5
    assert history[-1].tokens_per_pass > history[0].tokens_per_pass >= 1
