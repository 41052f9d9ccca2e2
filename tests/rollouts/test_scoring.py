"""Scores of finished texts: their values by float64, their bits in other batches, and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_llama

from specjax import Target, UsageError, decode
from specjax.rollouts import score

TARGET = tiny_llama()
PROMPTS, SAMPLES = [[1, 2, 3], [4, 5], [6]], [[7, 8, 9, 1], [2], np.array([3, 1])]


def logits_of(text):
    """Return the logits float64[T, V] of one pass over a text."""
    size, model = len(text), TARGET.model
    output, _ = model.forward(
        TARGET.params, jnp.array([text]), model.init_cache(TARGET.params, None, 1, 1),
        positions=jnp.arange(size)[None], mask=jnp.tril(jnp.ones((1, size, size), bool)),
    )  # fmt: skip
    return np.asarray(output.logits[0], np.float64)


@pytest.mark.parametrize("form", ["raw", "tempered", "processed"])
def test_scores_are_those_of_one_pass(form):
    settings = {"temperature": np.array([0.5, 1.0, 2.0]), "top_k": 50}
    scores = score(TARGET, PROMPTS, SAMPLES, form=form, **settings)
    for row, (prompt, sample) in enumerate(zip(PROMPTS, SAMPLES, strict=True)):
        logits = logits_of([*prompt, *sample])[len(prompt) - 1 : -1]
        if form == "processed":
            logits[logits < np.sort(logits, 1)[:, -50, None]] = -np.inf
        logits = logits if form == "raw" else logits / settings["temperature"][row]
        log_p = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        log_p -= logits.max(1, keepdims=True)
        expected = log_p[np.arange(len(sample)), np.asarray(sample)]
        np.testing.assert_allclose(scores[row], expected, atol=2e-5)
        assert scores[row].dtype == np.float32


def test_a_greedy_token_has_probability_1_in_the_processed_form_only():
    greedy = decode(TARGET, "autoregressive", PROMPTS, key=0, max_new_tokens=3).to_lists()
    assert all((row == 0).all() for row in score(TARGET, PROMPTS, greedy, form="processed"))
    raw, tempered = (score(TARGET, PROMPTS, greedy, form=form, temperature=0.0) for form in ("raw", "tempered"))
    np.testing.assert_array_equal(np.concatenate(raw), np.concatenate(tempered))
    assert (np.concatenate(raw) < 0).all()


def test_the_bits_of_a_text_do_not_depend_on_its_batch_and_a_second_call_compiles_nothing(caplog):
    together = score(TARGET, PROMPTS, SAMPLES, length=20)
    alone = [score(TARGET, [p], [s], length=20)[0] for p, s in zip(PROMPTS, SAMPLES, strict=True)]
    for ours, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(ours, other)
    pairs = score(TARGET, [[1], [2]], [[3], [4], [5], [6]], length=20)
    np.testing.assert_array_equal(pairs[1], score(TARGET, [[1]], [[4]], length=20)[0])
    other_weights = Target(TARGET.model, tiny_llama(seed=4).params)  # may compile what makes them
    with jax.log_compiles():
        score(other_weights, [[9, 9]] * 3, [[1], [2, 3], []], length=20)
    assert not any(record.message.startswith("Compiling") for record in caplog.records)


def test_bad_texts_are_refused():
    for prompts, samples in (([[1], [2]], [[3]] * 3), ([[1]], []), ([], [])):
        with pytest.raises(UsageError, match="each prompt must have the same number of samples"):
            score(TARGET, prompts, samples)
    for prompts, samples in (([[]], [[3]]), ([[1]], [[2] * 9])):
        with pytest.raises(UsageError, match="texts must have at most 8 tokens"):
            score(TARGET, prompts, samples, length=8)
    with pytest.raises(UsageError, match="form must be raw, tempered or processed"):
        score(TARGET, [[1]], [[2]], form="log")
