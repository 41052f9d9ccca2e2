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


def test_the_reward_curve_is_that_of_the_own_engine_of_tunix():
    """Compare the means over seeds at the beginning and the end. Samples differ, as the random numbers do."""
    pytest.importorskip("tunix", reason="google-tunix is not installed")
    main = module_at(FILE).main
    runs = {
        engine: [main(["--updates", "14", "--engine", engine, "--seed", str(seed)]) for seed in range(3)]
        for engine in ("specjax", "vanilla")
    }
    curve = {
        engine: np.array([[one.reward for one in history] for history in histories])
        for engine, histories in runs.items()
    }
    for part in (slice(0, 3), slice(-3, None)):
        ours, theirs = (curve[engine][:, part].mean(1) for engine in ("specjax", "vanilla"))
        spread = np.sqrt((ours.var(ddof=1) + theirs.var(ddof=1)) / len(ours))
        assert abs(ours.mean() - theirs.mean()) < 3 * spread + 0.05
    passes = lambda histories: np.mean([1 / one.tokens_per_pass for history in histories for one in history])
    assert passes(runs["specjax"]) < passes(runs["vanilla"]) == 1
