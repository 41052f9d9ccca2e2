"""Samples of a policy whose weights change: their law, their log-probabilities, and what the drafter learns."""

import dataclasses

import jax
import numpy as np
import pytest
from toy import markov, tiny_llama

from specjax import UsageError, decode
from specjax.costs import Curve
from specjax.drafters import auto
from specjax.rollouts import RolloutSampler, RolloutStore, score
from specjax.rollouts import sampler as sampler_file
from specjax.rollouts.sampler import group_rows, grouped, padded_left

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


def test_settings_may_differ_by_row_and_groups_with_equal_ones_are_read_once():
    sampler, plain = (RolloutSampler(name, max_prompt_length=4) for name in ("prompt_lookup", "autoregressive"))
    heat = np.array([0.5, 0.5, 0.5, 1.0, 1.0, 1.0])
    ours = sampler.sample(tiny_llama(), PROMPTS, **OPTIONS | {"temperature": heat})
    expected = decode(
        tiny_llama(), "autoregressive", [[1, 2, 3], [4, 5]], samples_per_prompt=3,
        **OPTIONS | {"temperature": heat[::3], "key": jax.random.fold_in(jax.random.key(3), 0)},
    )  # fmt: skip
    assert [row.tolist() for row in ours.tokens] == expected.to_lists()
    mixed = np.array([0.5, 1.0, 0.5, 1.0, 1.0, 1.0])
    distinct, samples, settings = group_rows([(1,)] * 6, {"temperature": mixed, "eos": [5, 6]})
    assert (len(distinct), samples, settings["eos"]) == (6, 1, [5, 6])
    assert settings["temperature"].tolist() == mixed.tolist()
    plain.sample(tiny_llama(), PROMPTS, **OPTIONS | {"temperature": mixed})
    with pytest.raises(UsageError, match=r"temperature must be one number or one per prompt, 6; .* shape \(2,\)"):
        sampler.sample(tiny_llama(), PROMPTS, **OPTIONS | {"temperature": [0.5, 1.0]})


def test_the_default_temperature_is_1():
    prompts = [np.array([1, 2, 3])] * 3
    settings = {"key": 3, "max_new_tokens": 6, "eos": ()}
    ours, hot = (
        RolloutSampler("autoregressive", max_prompt_length=4).sample(tiny_llama(), prompts, **settings | more)
        for more in ({}, {"temperature": 1.0})
    )
    assert [row.tolist() for row in ours.tokens] == [row.tolist() for row in hot.tokens]
    assert len({tuple(row.tolist()) for row in ours.tokens}) > 1


def test_scores_do_not_depend_on_the_drafts_to_the_bit():
    policy = tiny_llama()
    settings = {"key": 3, "max_new_tokens": 16, "temperature": 0.3}
    drafter = auto(64, widths=(1, 4), costs=(1.0, 1.1), num_recycled=3)
    samplers = [RolloutSampler(name, max_prompt_length=4, rescore=True) for name in (drafter, "autoregressive")]
    for _ in range(2):
        ours, plain = (sampler.sample(policy, PROMPTS, **settings) for sampler in samplers)
        for row, other in zip(ours.logprobs, plain.logprobs, strict=True):
            np.testing.assert_array_equal(row, other)
    assert ours.report.passes < plain.report.passes
    expected = score(policy, PROMPTS, ours.tokens, temperature=0.3, length=20)
    np.testing.assert_array_equal(np.concatenate(expected), np.concatenate(ours.logprobs))


def test_auto_decides_by_measured_costs(monkeypatch):
    """Costs are measured once per number of rows, and rounded up."""
    batches = []

    def measure(target, widths, batch, *more):
        batches.append(batch)
        return Curve(tuple(widths), (1.0, *[20.0 if batch > 1 else 1.01] * (len(widths) - 1)))

    monkeypatch.setattr(sampler_file, "measured", measure)
    sampler, target = RolloutSampler(max_prompt_length=4, measure_costs=True), tiny_llama()
    widths = [sampler._drafter_for(target, rows, 8).pass_widths(rows, target) for rows in (2, 1, 2)]
    assert batches == [2, 1] and widths == [[1], [1, 4, 8, 16], [1]]
    assert sampler._costs[1].costs == (1.0, 1.05, 1.05, 1.05, 1.05)


def test_the_default_of_a_target_that_accepts_only_chains_drafts_chains():
    target = tiny_llama()
    model = target.model._replace(capabilities=target.model.capabilities._replace(trees=False))
    sampler = RolloutSampler(None, max_prompt_length=4)
    samples = sampler.sample(dataclasses.replace(target, model=model), PROMPTS, **OPTIONS)
    assert samples.report.tokens == 48


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


def test_samples_per_prompt_repeat_prompts_and_settings():
    settings = {"key": 3, "max_new_tokens": 5}
    short, long = (RolloutSampler("autoregressive", max_prompt_length=4) for _ in range(2))
    ours = short.sample(tiny_llama(), [[1, 2, 3], [4, 5]], samples_per_prompt=3, temperature=[0.5, 0.9], **settings)
    other = long.sample(tiny_llama(), PROMPTS, temperature=[0.5] * 3 + [0.9] * 3, **settings)
    assert [row.tolist() for row in ours.tokens] == [row.tolist() for row in other.tokens]


def test_samples_as_arrays_and_the_texts_that_were_cut():
    eos = list(range(40))
    samples = RolloutSampler("autoregressive", max_prompt_length=4).sample(tiny_llama(), PROMPTS, **OPTIONS, eos=eos)
    assert samples.hit_eos.tolist() == [int(row[-1]) in eos for row in samples.tokens] and samples.hit_eos.any()
    tokens, mask, logprobs = samples.padded(9, padding=63)
    for row, (text, log_p) in enumerate(zip(samples.tokens, samples.logprobs, strict=True)):
        assert tokens[row].tolist() == text.tolist() + [63] * (9 - len(text)) and mask[row].sum() == len(text)
        np.testing.assert_array_equal(logprobs[row], np.pad(log_p, (0, 9 - len(text))))
    with pytest.raises(UsageError, match="size must be at least the length of the longest sample"):
        samples.padded(0)


def test_settings_that_a_sampler_does_not_have_are_refused():
    with pytest.raises(UsageError, match="no setting logprobs; choose from temperature"):
        RolloutSampler(max_prompt_length=4).sample(tiny_llama(), PROMPTS, **OPTIONS, logprobs=True)
