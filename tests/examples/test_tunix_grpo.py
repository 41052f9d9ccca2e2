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
    """Compare the means of two seeds at the beginning and the end. Samples differ, as the random numbers do."""
    pytest.importorskip("tunix", reason="google-tunix is not installed")
    main = module_at(FILE).main
    run = lambda engine, seed: main(["--updates", "10", "--engine", engine, "--seed", str(seed)])
    runs = {engine: [run(engine, seed) for seed in range(2)] for engine in ("specjax", "vanilla")}
    rewards = {engine: np.array([[one.reward for one in history] for history in runs[engine]]) for engine in runs}
    for part in (slice(0, 3), slice(-3, None)):
        ours, theirs = (rewards[engine][:, part].mean() for engine in ("specjax", "vanilla"))
        assert abs(ours - theirs) < 0.15
    assert rewards["vanilla"][:, -3:].mean() > rewards["vanilla"][:, :3].mean() + 0.2
    passes = lambda histories: np.mean([1 / one.tokens_per_pass for history in histories for one in history])
    assert passes(runs["specjax"]) < passes(runs["vanilla"]) == 1
