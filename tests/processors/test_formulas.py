"""The rules themselves: against transformers and hand-worked numbers."""

import jax.numpy as jnp
import numpy as np
import pytest
from processed import begun, in_a_tree
from toy import tiny_llama

from specjax import UsageError, decode, drafters, processors
from specjax.processors.bad_words import encode_words
from specjax.types import TokenTree

VOCAB = 8
PROMPT, LENGTH = np.array([[1, 3, 3, 5, 7]], np.int32), np.array([4], np.int32)  # the last is no part of it
LOGITS = np.array([1.0, -1.0, 0.0, 2.0, -2.0, 0.5, -0.5, 3.0], np.float32)


def after(processor, new=()):
    """The processed logits after the prompt and some new tokens."""
    state = begun(processor, PROMPT, LENGTH, VOCAB)
    if new:
        state = processor.update(processor.params, state, np.array([new], np.int32), np.array([len(new)]))
    alone = TokenTree(jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), -1), jnp.ones((1, 1), bool))
    return np.asarray(in_a_tree(processor, state, alone, jnp.asarray(LOGITS)[None, None]))[0, 0]


def test_penalties_and_biases_are_those_of_transformers():
    torch, of = pytest.importorskip("torch"), pytest.importorskip("transformers.generation.logits_process")
    ids, scores = torch.tensor([[1, 3, 3, 5, 4, 4]]), torch.tensor(LOGITS)[None]
    wanted = of.RepetitionPenaltyLogitsProcessor(1.3)(ids, scores)[0].numpy()
    np.testing.assert_allclose(after(processors.repetition(1.3), [4, 4]), wanted, rtol=1e-6)
    wanted = of.SequenceBiasLogitsProcessor([[[2], 1.5], [[7], -4.0]])(ids, scores)[0].numpy()
    np.testing.assert_allclose(after(processors.bias({2: 1.5, 7: -4.0}), [4]), wanted)
    wanted = of.NoBadWordsLogitsProcessor([[2], [7]], eos_token_id=0)(ids, scores)[0].numpy()
    np.testing.assert_array_equal(after(processors.ban([2, 7]), [4]), wanted)
    words = [[2], [4, 4, 6], [4, 7], [3, 4, 1], [5, 4, 4, 0]]  # the last one begins in the prompt
    wanted = of.NoBadWordsLogitsProcessor(words[:-1], eos_token_id=0)(ids, scores)[0].numpy()
    assert np.isneginf(wanted[[2, 6, 7]]).all() and np.isneginf(wanted).sum() == 3
    np.testing.assert_array_equal(after(processors.bad_words(words), [4, 4]), wanted)


def test_penalties_of_what_was_decoded():
    """The prompt's tokens 1, 3 and 5 do not count."""
    change = after(processors.presence(0.5), [3, 6, 6]) - LOGITS
    np.testing.assert_allclose(change, [0, 0, 0, -0.5, 0, 0, -0.5, 0])
    change = after(processors.frequency(0.5), [3, 6, 6]) - LOGITS
    np.testing.assert_allclose(change, [0, 0, 0, -0.5, 0, 0, -1.0, 0])


def test_allowed_tokens_by_place():
    """Places count from the end of the prompt. Behind the last one, everything is allowed."""
    layout = processors.by_place([range(2, 5), [6]], [0, 1, 0])
    for new, allowed in (((), [2, 3, 4]), ((2,), [6]), ((2, 6), [2, 3, 4]), ((2, 6, 3), range(VOCAB))):
        assert np.flatnonzero(np.isfinite(after(layout, new))).tolist() == list(allowed)
    assert processors.forced_tokens(layout) == (-1, 6, -1)
    with pytest.raises(UsageError, match="give the result of by_place"):
        processors.forced_tokens(processors.ban([6]))


def test_phases_of_images():
    """An image of two codes begins in the prompt, and another one later."""
    phases = processors.image_phases([1, 2], 5, 6, 2)  # the prompt ends with 5
    text = [0, 3, 4, 5, 6, 7]
    for new, allowed in (
        ((), [1, 2]), ((1,), [1, 2]), ((1, 1), [6]), ((1, 1, 6), text), ((1, 1, 6, 3, 5), [1, 2]),
        ((1, 1, 6, 3, 5, 2, 2), [6]),
    ):  # fmt: skip
        assert np.flatnonzero(np.isfinite(after(phases, new))).tolist() == allowed


def test_forced_tokens():
    """A forced place has one token, and other places have all."""
    ending = processors.forced({1: 6, 2: 0})
    for new, allowed in (((), range(VOCAB)), ((2,), [6]), ((2, 6), [0]), ((2, 6, 0), range(VOCAB))):
        assert np.flatnonzero(np.isfinite(after(ending, new))).tolist() == list(allowed)


def test_a_forced_token_overrules_earlier_processors():
    """Otherwise no token would be possible, and the first one of the vocabulary would be written."""
    options = {"key": 0, "max_new_tokens": 3, "temperature": 1.0}
    rules = [processors.ban([6]), processors.forced({2: 6})]
    text = decode(tiny_llama(vocab=VOCAB), "prompt_lookup", [[1, 2]], processors=rules, **options).to_lists()[0]
    assert text[2] == 6 and 6 not in text[:2]


@pytest.mark.parametrize(
    "processor",
    [
        processors.repetition(1.0),
        processors.presence(0.0),
        processors.frequency(0),
        processors.bias({}),
        processors.bad_words([]),
    ],
    ids=["repetition", "presence", "frequency", "bias", "bad_words"],
)
def test_settings_that_change_nothing(processor):
    np.testing.assert_array_equal(after(processor, [3, 6]), LOGITS)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: processors.repetition(0.0), "the repetition penalty must be above 0, not 0.0"),
        (lambda: processors.presence(np.nan), "the presence penalty must be a number"),
        (lambda: processors.frequency([1.0, np.inf]), "the frequency penalty must be a number"),
        (lambda: processors.bias({-1: 2.0}), "a logit bias needs a token id, not -1"),
        (lambda: processors.bias({1: np.inf}), "the logit bias of token 1 must be a number or -inf, not inf"),
        (lambda: processors.bad_words([[1], []]), "a bad word has no tokens; leave it out"),
        (lambda: processors.bad_words([[1, -2]]), "a bad word needs token ids, not -2"),
        (lambda: processors.forced({}), "forced needs token ids by place, such as {0: 2}, not {}"),
        (lambda: processors.forced({-1: 2}), "forced needs token ids by place"),
        (lambda: processors.by_place([[1], []], [0]), "set 1 must be one or more token ids from 0"),
        (lambda: processors.by_place([3], [0]), "set 0 must be one or more token ids from 0, not 3"),
        (lambda: processors.by_place([[1, [2]]], [0]), "set 0 must be one or more token ids from 0"),
        (lambda: processors.image_phases([], 1, 2, 3), "image_phases needs token ids from 0"),
        (lambda: processors.image_phases([1], 1, 2, 3), "a begin and an end that differ and are no codes"),
        (lambda: processors.image_phases([3], 1, 2, 0), "needs a count of at least 1"),
        (lambda: processors.image_phases(3, 1, 2, 3), "image_phases needs token ids from 0, not codes 3"),
        (lambda: processors.image_phases([[3], [4, 5]], 1, 2, 3), "image_phases needs token ids from 0"),
        (lambda: processors.image_phases([3], 1, 2, "6"), "needs a count of at least 1"),
        (lambda: processors.image_phases([3], 1, 2, 2**31), "needs a count of at least 1"),
        (lambda: processors.by_place([[1]], [0, 1]), "places must be a list of numbers of the 1 sets"),
    ],
)
def test_bad_settings(make, sentence):
    with pytest.raises(UsageError, match=sentence):
        make()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    REFUSALS := [
        ([processors.bias({3: 1.0})], "a logit bias has token 3, outside of the model's vocabulary of 3"),
        ([processors.bad_words([[0, 3]])], "a bad word has token 3, outside of the model's vocabulary of 3"),
        ([processors.bad_words([[2], [1], [0]])], "all 3 tokens of the vocabulary are bad words; leave some out"),
        ([processors.forced({0: 3})], "forced has token 3, outside of the model's vocabulary of 3"),
        ([processors.ban([0, 1, 2])], "all 3 tokens of the vocabulary are banned; ban fewer"),
        ([processors.presence([1.0, 2.0, 3.0])], r"one per prompt, 2; some have the shape \(3,\)"),
        ([processors.repetition], "processors must be a list of specjax.processors"),
        (processors.repetition(1.1), "processors must be a list of specjax.processors"),
    ],
    ids=[f"given{number}-{sentence}" for number, (_, sentence) in enumerate(REFUSALS)],
)
def test_what_does_not_fit(settings, sentence):
    from toy import markov

    with pytest.raises(UsageError, match=sentence):
        decode(markov(), drafters.autoregressive(), [[1], [2]], key=0, max_new_tokens=2, processors=settings)


def test_tokens_of_bad_words():
    """A word has a form after a space, unless the tokenizer has a token of its own for the space."""
    joined = lambda text: [{"a": 1, " a": 2, "b": 3}[piece] for piece in ([" a"] if text[0] == " " else list(text))]
    split = lambda text: [" ab".index(letter) for letter in text]
    assert encode_words(["a"], joined) == encode_words([" a"], joined) == [[1], [2]]
    assert encode_words(["ab", " b"], split) == [[1, 2], [2]]
