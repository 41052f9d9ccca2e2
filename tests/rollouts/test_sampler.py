"""Samples of a policy whose weights change: their law, their log-probabilities, and what the drafter learns."""

import jax
import numpy as np
import pytest
from toy import markov, tiny_llama

from specjax import UsageError, decode
from specjax.drafters import auto
from specjax.rollouts import RolloutSampler, RolloutStore
from specjax.rollouts.sampler import grouped, padded_left

PROMPTS = [[1, 2, 3]] * 3 + [[4, 5]] * 3
OPTIONS = {"key": 3, "max_new_tokens": 8, "temperature": 0.8, "top_p": 0.9}


def test_groups_are_read_once_if_they_are_equally_large():
    a, b = (1, 2), (3,)
    assert grouped([a, a, b, b]) == ([a, b], 2)
    assert grouped([a, a, b]) == ([a, a, b], 1)
    assert grouped([a, b, a]) == ([a, b, a], 1)
    assert padded_left([a, b], 3, 9).tolist() == [[9, 1, 2], [9, 9, 3]]


def test_samples_are_those_of_decode_with_the_weights_of_the_call():
    sampler = RolloutSampler("prompt_lookup", max_prompt_length=4)
    for call, seed in enumerate((0, 5)):
        target = tiny_llama(seed=seed)
        samples = sampler.sample(target, PROMPTS, **OPTIONS)
        key = jax.random.fold_in(jax.random.key(3), call)
        expected = decode(
            target, "prompt_lookup", [[1, 2, 3], [4, 5]], samples_per_prompt=3, logprobs="tempered",
            **OPTIONS | {"key": key},
        )  # fmt: skip
        assert [row.tolist() for row in samples.tokens] == expected.to_lists()
        np.testing.assert_allclose(np.stack(samples.logprobs), expected.logprobs, atol=1e-5)
        assert samples.report.tokens == 48 and samples.report.passes <= 48
    assert len({tuple(row) for row in samples.tokens}) > 2


def test_a_second_call_compiles_nothing(caplog):
    sampler = RolloutSampler("token_recycling", max_prompt_length=4)
    weights = [tiny_llama(seed=seed) for seed in range(3)]
    sampler.sample(weights[0], PROMPTS, **OPTIONS)
    with jax.log_compiles():
        for target in weights[1:]:
            sampler.sample(target, [[7], [7], [7], [1, 2], [1, 2], [1, 2]], **OPTIONS)
    assert not any(record.message.startswith("Compiling") for record in caplog.records)


def test_the_drafter_remembers_earlier_rollouts():
    cycle = markov(np.eye(30, dtype=np.float32)[(np.arange(30) + 1) % 30] + 1e-9)
    sampler = RolloutSampler("token_recycling", max_prompt_length=4, logprobs=None)
    reports = [
        sampler.sample(cycle, [[0, 1, 2]] * 2, key=0, max_new_tokens=20, temperature=1.0).report for _ in range(3)
    ]
    assert reports[0].tokens_per_pass + 0.5 < reports[1].tokens_per_pass
    assert reports[2].acceptance[0] > 0.9


def test_bad_prompts_and_an_early_refresh_are_refused():
    sampler = RolloutSampler(max_prompt_length=4)
    for prompts in ([], [[]], [[1] * 5]):
        with pytest.raises(UsageError, match="prompts must have 1 to max_prompt_length"):
            sampler.sample(tiny_llama(), prompts, **OPTIONS)
    with pytest.raises(UsageError, match="no drafter before its first call"):
        sampler.refresh(())


def test_samples_of_a_prompt_are_copied_in_the_next_epoch_and_the_texts_stay_those_of_plain_decoding():
    """Use a policy that nearly repeats its samples; the weights change between the calls."""
    drafter = auto(64, widths=(1, 4), costs=(1.0, 1.1), num_recycled=3)
    settings = OPTIONS | {"max_new_tokens": 16, "temperature": 0.3}
    fresh, plain = (RolloutSampler(choice, max_prompt_length=4) for choice in (drafter, "autoregressive"))
    passes = []
    for seed in (0, 0, 1):
        target = tiny_llama(seed=seed)
        ours, expected = (sampler.sample(target, PROMPTS, **settings) for sampler in (fresh, plain))
        assert [row.tolist() for row in ours.tokens] == [row.tolist() for row in expected.tokens]
        for row, other in zip(ours.logprobs, expected.logprobs, strict=True):
            np.testing.assert_allclose(row, other, atol=4e-5)  # after the temperature, logits reach 100: 8e-6 a unit
        passes.append(ours.report.passes)
    assert passes[1] < 0.75 * passes[0]
    assert len(fresh.store) == 2 and len(plain.store) == 0


def test_a_full_store_keeps_the_latest_samples_and_prompts():
    store = RolloutStore(tokens=8, siblings=1, prompts=2)
    store.add([[1], [1], [2], [1]], [[5, 6, 7], [8, 9], [3], [4, 4]])
    packed = store.pack([[1], [2], [9]])
    assert packed.tokens.tolist() == [[7, -3, 8, 9, -3, 4, 4, -3], [-3] * 6 + [3, -3], [-3] * 8]
    store.add([[7]], [[1]])
    assert len(store) == 2 and (store.pack([[2]]).tokens == -3).all()
    with pytest.raises(UsageError, match="siblings at least 0, not 8, 1 and -1"):
        RolloutStore(tokens=8, siblings=-1, prompts=1)
