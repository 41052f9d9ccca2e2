"""Tokens per pass without decoding: the passes that a decoder needs, also for a sampled chain."""

import functools
import itertools

import numpy as np
import pytest
from training_runs import DEPTHS, head_of, recipe, target, texts

import specjax
from specjax.training.data.packing import TrainingText
from specjax.training.loop.trainer import train
from specjax.training.measure.acceptance_eval import expected_passes, measure_acceptance

ROWS, NEW, TEMPERATURE = 64, 24, 0.8


def test_expected_passes_are_those_of_all_outcomes():
    """A sum over all outcomes of all rounds, worked out forwards."""
    accepted = np.random.default_rng(0).uniform(size=(5, 2))

    def mean(at: int) -> float:
        if at >= len(accepted):
            return 0.0
        p = [1 - accepted[at, 0], accepted[at, 0] * (1 - accepted[at, 1]), accepted[at].prod()]
        return 1 + sum(share * mean(at + count + 1) for count, share in enumerate(p))

    assert expected_passes(accepted) == pytest.approx(mean(0), rel=1e-12)
    certain = np.array(list(itertools.islice(itertools.cycle([[1.0, 1.0], [0.0, 1.0]]), 6)))
    assert expected_passes(certain) == 3  # of 3, 1 and 2 tokens


@functools.cache
def half_trained():
    return train(target(), head_of("medusa"), texts(), recipe=recipe("medusa"), epochs=60, rows=2, length=64)


@functools.cache
def sampled():
    """Return texts that a decoder with the head sampled, and its target passes per text."""
    prompts = [list(texts()[0].tokens[:6])] * ROWS
    drafter = specjax.make_drafter("medusa", target(), half_trained(), num_tokens=DEPTHS)
    result = specjax.decode(target(), drafter, prompts, key=7, max_new_tokens=NEW, temperature=TEMPERATURE)
    written = [TrainingText((*prompt, *text), 6) for prompt, text in zip(prompts, result.to_lists(), strict=True)]
    return written, np.asarray(result.stats.target_passes)


def test_a_sampled_chain_takes_the_passes_that_are_predicted():
    written, passes = sampled()
    measure = functools.partial(measure_acceptance, target(), half_trained(), written, depths=DEPTHS, rows=8, length=32)
    measured = measure(temperature=TEMPERATURE)
    spread = 3 * np.std(passes) * ROWS**0.5
    assert measured.tokens == ROWS * NEW and 1.1 < measured.per_pass < DEPTHS
    assert measured.passes == pytest.approx(float(passes.sum()), abs=spread)
    for other in (3.0, 10.0):  # the measurement of another temperature is another number
        assert abs(measure(temperature=other).passes - passes.sum()) > spread
