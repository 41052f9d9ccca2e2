"""Several samples of a prompt that is read once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_llama, tiny_llama_alike

from specjax import Target, UsageError, decode, drafters, processors, stream, trees
from specjax.engine.prefill import CHUNK
from specjax.numerics.sampling import fold_in, row_keys

PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [5]]
OPTIONS = {"max_new_tokens": 10, "temperature": jnp.array([0.9, 1.3])}
PENALTY = processors.repetition(np.array([1.4, 1.0]))


def separate(drafter, samples, **options):
    """Each sample as a prompt of its own."""
    keys = fold_in(row_keys(jax.random.key(0), 2)[:, None], jnp.arange(samples)).reshape(-1)
    rows = {"temperature": jnp.repeat(OPTIONS["temperature"], samples), "max_new_tokens": 10}
    penalty = processors.repetition(np.repeat([1.4, 1.0], samples))
    prompts = [prompt for prompt in PROMPTS for _ in range(samples)]
    return decode(tiny_llama(), drafter, prompts, key=keys, processors=[penalty], **rows | options)


def test_texts_are_those_of_separate_prompts():
    """Rows of a prompt stand together; drafts of a model, whose cache is copied too, and of what the prompt taught."""
    row_counts, honest = [], tiny_llama()

    def forward(params, tokens, cache, **options):
        if tokens.shape[1] == CHUNK:
            row_counts.append(tokens.shape[0])
        return honest.model.forward(params, tokens, cache, **options)

    target = Target(honest.model._replace(forward=forward), honest.params)
    drafter = drafters.two_model(tiny_llama_alike(), 2)
    options = OPTIONS | {"key": jax.random.key(0), "processors": [PENALTY], "samples_per_prompt": 3}
    ours = decode(target, drafter, PROMPTS, **options)
    assert ours.to_lists() == separate(drafter, 3).to_lists()
    assert len({tuple(text) for text in ours.to_lists()}) == 6 and set(row_counts) == {2}


@pytest.mark.exhaustive
def test_a_stream_of_them():
    options = OPTIONS | {"key": jax.random.key(0), "processors": [PENALTY], "samples_per_prompt": 3}
    texts: list[list[int]] = [[] for _ in range(6)]
    drafter = drafters.two_model(tiny_llama_alike(), tree=trees.parse("2x1"))
    for step in stream(tiny_llama(), drafter, PROMPTS, **options):
        for text, new in zip(texts, step.tokens, strict=True):
            text += new
    assert texts == decode(tiny_llama(), drafter, PROMPTS, **options).to_lists() == separate(drafter, 3).to_lists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["token_recycling", "auto", "prompt_lookup", "lookahead", "suffix", "stand"])
def test_texts_of_drafters_that_learn(name):
    options = OPTIONS | {"key": jax.random.key(0), "processors": [PENALTY], "sampling": "coupled"}
    ours = decode(tiny_llama(), name, PROMPTS, samples_per_prompt=3, **options)
    assert ours.to_lists() == separate(name, 3, sampling="coupled").to_lists()


@pytest.mark.parametrize("samples", [0, 1.5, "two"])
def test_bad_numbers(samples):
    with pytest.raises(UsageError, match="samples_per_prompt must be a whole number of at least 1"):
        decode(tiny_llama(), None, PROMPTS, samples_per_prompt=samples, key=0, max_new_tokens=4)
