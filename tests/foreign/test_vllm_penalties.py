"""The cases of vLLM's penalties, biases, minimum lengths, masks and bad words.

Source: vLLM (Apache-2.0), `tests/v1/sample/`: `test_sampler.py` at 0c58681, `test_penalties_state.py` at 459a81d,
`test_penalty_bincount_oob.py` at e793f23 and `test_logit_bias_oob.py` at 6a69108. Inputs and outcomes are facts of
them; the code is ours.

Conventions agree: repetition counts the prompt and the decoded text, presence and frequency only the decoded text, and
bad words are matched in the decoded text. A token outside of the vocabulary is refused before anything runs, where vLLM
ignores it. Allowed tokens are a ban of all others.

Cases without meaning here: pool growth, disabled stages of a pipeline, and swaps of rows, which are `serve`'s.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import markov

from specjax import Request, UsageError, decode, drafters, processors, serve
from specjax.numerics.sampling import warp
from specjax.processors import pipeline
from specjax.trees import operations
from specjax.types import Sampling, TokenTree

VOCAB, BATCH, FLAT = 1024, 32, 1e-2


@functools.partial(jax.jit, static_argnames="vocab")
def states_after(built, prompts, lengths, texts, counts, vocab):
    states = pipeline.init_states(built, prompts, lengths, vocab)
    return pipeline.update_states(built, states, texts, counts)


def processed(built, states, tree, logits):
    above = operations.ancestor_mask(tree.parents, tree.valid)
    return pipeline.process(built, states, tree, above, logits)


@functools.partial(jax.jit, static_argnames="vocab")
def processed_after(built, prompts, lengths, texts, counts, tree, logits, vocab):
    return processed(built, states_after(built, prompts, lengths, texts, counts, vocab), tree, logits)


def padded(lists, width=1):
    """Return lists of ids as int32[B, L], with L at least `width`, and their lengths."""
    rows = np.zeros((len(lists), max(width, *map(len, lists))), np.int32)
    for row, ids in zip(rows, lists, strict=True):
        row[: len(ids)] = ids
    return rows, np.array([len(ids) for ids in lists], np.int32)


def chain_of(drafts):
    tokens, count = padded([[0, *drafted] for drafted in drafts])
    place = np.arange(tokens.shape[1], dtype=np.int32)
    return TokenTree(tokens, np.broadcast_to(place - 1, tokens.shape), place < count[:, None])


def apply(built, prompts, texts, logits=None, vocab=VOCAB):
    """Return the processed logits [B, 1, V] after prompts and decoded texts."""
    tree = chain_of([[] for _ in texts])
    if logits is None:
        logits = np.full((*tree.tokens.shape, vocab), FLAT, np.float32)
    return np.asarray(processed_after(built, *padded(prompts), *padded(texts, 20), tree, logits, vocab))


def random_lists(rng, low, high, vocab=VOCAB, batch=BATCH):
    return [rng.integers(0, vocab, rng.integers(low, high)).tolist() for _ in range(batch)]


@pytest.fixture(scope="module")
def prompts():
    return random_lists(np.random.default_rng(0), 1, 64)


@pytest.fixture(scope="module")
def texts():
    return random_lists(np.random.default_rng(1), 20, 21)


def test_minimum_lengths(prompts, texts):
    """The texts have 20 tokens. Rows with a minimum above 20 ban the ends, and the rest do not."""
    rng = np.random.default_rng(2)
    ends = rng.choice(VOCAB - 1, 9, replace=False)
    minimum = np.where(np.arange(BATCH) % 3 == 0, rng.integers(21, 40, BATCH), rng.integers(0, 21, BATCH))
    ours = apply((processors.min_length(minimum, ends),), prompts, texts)[:, 0]
    expected = np.full((BATCH, VOCAB), False)
    expected[np.ix_(minimum > 20, ends)] = True
    np.testing.assert_array_equal(np.isneginf(ours), expected)


@pytest.mark.parametrize("strength", [-2.0, 2.0])
def test_presence(prompts, texts, strength):
    ours = apply((processors.presence(strength),), prompts, texts)[:, 0]
    for row, text in zip(ours, texts, strict=True):
        largest, smallest = row.argmax(), row.argmin()
        assert (smallest in text) == (strength > 0) and (largest in text) == (strength < 0)


@pytest.mark.parametrize("strength", [-2.0, 2.0])
def test_frequency(prompts, strength):
    rng = np.random.default_rng(3)
    distinct = [rng.choice(VOCAB, rng.integers(1, 10), replace=False).tolist() for _ in range(BATCH)]
    weighted = [[token for place, token in enumerate(ids) for _ in range(place + 1)] for ids in distinct]
    ours = apply((processors.frequency(strength),), prompts, weighted)[:, 0]
    for row, ids in zip(ours, distinct, strict=True):
        first, last = (row.argmin(), row.argmax()) if strength > 0 else (row.argmax(), row.argmin())
        assert first == ids[-1] and last not in ids


@pytest.mark.parametrize("strength", [0.1, 1.9])
def test_repetition(prompts, texts, strength):
    ours = apply((processors.repetition(strength),), prompts, texts)[:, 0]
    for row, prompt, text in zip(ours, prompts, texts, strict=True):
        largest, smallest, present = row.argmax(), row.argmin(), {*prompt, *text}
        assert (smallest in present) == (strength > 1) and (largest in present) == (strength < 1)
    only_prompt = apply((processors.repetition(strength),), prompts, [[] for _ in texts])[:, 0]
    for row, prompt in zip(only_prompt, prompts, strict=True):
        assert set(np.flatnonzero(row != np.float32(FLAT))) == set(prompt)


def test_biases_and_masks(prompts, texts):
    make = functools.partial(processors.bias, room=VOCAB)  # one program for all
    for value in (-0.1, 1.2):
        ours = apply((make([{row: value} for row in range(BATCH)]),), prompts, texts)[:, 0]
        np.testing.assert_allclose(ours, FLAT + value * np.eye(BATCH, VOCAB), rtol=1e-6)
    for number in (0, 1, 2):  # every other row bans some tokens from its own number on
        bans = [{row + i: -np.inf for i in range(number)} if row % 2 == 0 else {} for row in range(BATCH)]
        ours = apply((make(bans),), prompts, texts)[:, 0]
        expected = [[row % 2 == 0 and row <= token < row + number for token in range(VOCAB)] for row in range(BATCH)]
        np.testing.assert_array_equal(np.isneginf(ours), expected)
    bans = dict.fromkeys({*range(VOCAB)} - {5}, -np.inf)
    first, second, *_ = apply((make([bans, *[{}] * (BATCH - 1)]),), prompts, texts)[:, 0]
    assert first[5] == np.float32(FLAT) and np.isneginf(np.delete(first, 5)).all() and np.isfinite(second).all()


def test_min_p():
    logits = np.full((BATCH, VOCAB), FLAT, np.float32)
    logits[:, 0] = 10
    for share in (0.0, 0.1):
        ours = np.asarray(jax.jit(warp)(logits, Sampling(jnp.ones(()), min_p=jnp.float32(share))))
        assert np.isfinite(ours[:, 0]).all() and (np.isneginf(ours[:, 1:]) == (share > 0)).all()


def banned_by(words, text):
    """Return the last tokens of the words whose beginning ends the text."""
    return {word[-1] for word in words if len(word) <= len(text) + 1 and text[len(text) + 1 - len(word) :] == word[:-1]}


@pytest.mark.parametrize("lengths", [(1,), (1, 3), (2, 2)])
def test_bad_words(prompts, texts, lengths):
    rng, texts = np.random.default_rng(4), [[*text] for text in texts]
    words = [[rng.integers(0, VOCAB, length).tolist() for length in lengths] for _ in range(BATCH)]
    for row in range(0, BATCH, 2):
        beginning = words[row][-1][:-1]
        texts[row][len(texts[row]) - len(beginning) :] = beginning
    words[3] = []
    ours = apply((processors.bad_words(words, longest=3),), prompts, texts)[:, 0]
    for row, of_row, text in zip(ours, words, texts, strict=True):
        assert set(np.flatnonzero(np.isneginf(row))) == banned_by(of_row, text)
    assert np.isneginf(ours[2]).any() and not np.isneginf(ours[3]).any()


def test_bad_words_are_not_matched_in_the_prompt():
    prompts, texts = [[4, 5]] * BATCH, [[] if row % 2 else [5] for row in range(BATCH)]
    words = processors.bad_words([[[5, 6]]] * BATCH, longest=3)
    ours = apply((words,), [[*prompt, *[5] * 61] for prompt in prompts], texts)[:, 0]
    assert not np.isneginf(ours[1::2]).any() and (np.isneginf(ours[::2]) == (np.arange(VOCAB) == 6)).all()


REPETITION, FREQUENCY, PRESENCE = (1.0, 1.05, 1.5), (0.0, 0.2, 1.1), (0.0, 0.5, -0.4)


def reference(logits, prompt, text, repetition, frequency, presence):
    """Return the penalised logits of one row, in float64."""
    counts = np.bincount(np.asarray(text, int), minlength=len(logits))
    present = (counts > 0) | (np.bincount(np.asarray(prompt, int), minlength=len(logits)) > 0)
    logits = np.where(present, np.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - frequency * counts - presence * (counts > 0)


def penalties(rng, batch):
    """Return the penalties of some rows, and the processors in vLLM's order."""
    values = [rng.choice(choices, batch) for choices in (REPETITION, FREQUENCY, PRESENCE)]
    make = processors.repetition, processors.frequency, processors.presence
    return values, tuple(function(value) for function, value in zip(make, values, strict=True))


def test_penalties_over_random_episodes():
    """Commits of 0 to 3 tokens per row in 12 steps, drafts of 0 to 5 tokens, and the token after the draft."""
    rng, vocab, batch = np.random.default_rng(5), 2048, 8
    values, built = penalties(rng, batch)
    prompts, texts = random_lists(rng, 1, 51, vocab, batch), [[] for _ in range(batch)]
    states = states_after(built, *padded(prompts), *padded(texts, 3), vocab)

    @jax.jit
    def step(states, tree, logits, tokens, counts):
        return processed(built, states, tree, logits), pipeline.update_states(built, states, tokens, counts)

    for _ in range(12):
        drafts = [rng.choice([1, 2, 3, vocab - 1], rng.integers(0, 6)).tolist() for _ in range(batch)]
        drafts[0] = [7, 7, 7, 2, 7]  # so that all trees have five nodes
        logits = rng.normal(size=(batch, 6, vocab)).astype(np.float32)
        tokens, counts = rng.choice([1, 2, 3, 7, vocab - 1], (batch, 3)), rng.integers(0, 4, batch)
        ours, states = step(states, chain_of(drafts), logits, tokens.astype(np.int32), counts.astype(np.int32))
        ours = np.asarray(ours)
        for row in range(batch):
            for place in range(len(drafts[row]) + 1):
                settings = (value[row] for value in values)
                text = texts[row] + drafts[row][:place]
                expected = reference(logits[row, place].astype(np.float64), prompts[row], text, *settings)
                np.testing.assert_allclose(ours[row, place], expected, rtol=1e-5, atol=1e-4)
        texts = [text + row[:count].tolist() for text, row, count in zip(texts, tokens, counts, strict=True)]


def test_penalties_of_a_long_text_and_an_odd_vocabulary():
    rng, vocab, batch = np.random.default_rng(6), 32_003, 3
    values, built = penalties(rng, batch)
    prompts, texts = (random_lists(rng, size, size + 1, vocab, batch) for size in (5000, 2500))
    logits = rng.normal(size=(batch, 1, vocab)).astype(np.float32)
    ours = apply(built, prompts, texts, logits, vocab=vocab)
    for row in range(batch):
        settings = (value[row] for value in values)
        expected = reference(logits[row, 0].astype(np.float64), prompts[row], texts[row], *settings)
        np.testing.assert_allclose(ours[row, 0], expected, rtol=1e-5, atol=1e-4)


def test_a_rule_that_does_not_look_up_the_draft_fails():
    """The negative control: penalties of the committed text only."""
    built = (processors.frequency(1.5),)
    tree, logits = chain_of([[1, 1]]), np.full((1, 3, 8), FLAT, np.float32)

    @jax.jit
    def both(built):
        states = pipeline.init_states(built, jnp.array([[1]]), jnp.array([1]), 8)
        blind = pipeline.process(built, states, tree, jnp.eye(3, dtype=bool)[None], logits)
        return blind, processed(built, states, tree, logits)

    assert not np.allclose(*both(built))


def test_tokens_outside_of_the_vocabulary():
    """They are refused. The last token of the vocabulary counts, in its own row only."""
    rows = np.random.default_rng(7).dirichlet(np.ones(12), 12).astype(np.float32)
    for prompt, built, sentence in (
        ([5, 12], processors.repetition(1.5), "12"),
        ([5], processors.bias({12: 1.0}), "token 12, outside of the model's vocabulary of 12"),
        ([5], processors.bad_words([[1, 12]]), "token 12, outside of the model's vocabulary of 12"),
        ([5], processors.min_length(2, [12]), "token 12, outside of the model's vocabulary of 12"),
    ):
        with pytest.raises(UsageError, match=sentence):
            decode(markov(rows), drafters.autoregressive(), [prompt], key=0, max_new_tokens=2, processors=[built])
    prompts = [[VOCAB - 1] * 63, *[[0] * 63] * (BATCH - 1)]
    ours = apply((processors.repetition(2.0),), prompts, [[] for _ in prompts])[:, 0]
    changed = ours != np.float32(FLAT)
    assert np.flatnonzero(changed[0]).tolist() == [VOCAB - 1]
    assert changed[1:, 0].all() and not changed[1:, 1:].any()


@pytest.mark.exhaustive
def test_a_row_that_is_used_again_has_no_old_counts():
    """Decode a text of 60 equal tokens in one slot of `serve`, and then another request with penalties."""
    rows = np.full((12, 12), 0.01, np.float32) + 0.5 * np.eye(12, dtype=np.float32)[[4] * 12]
    built = [processors.repetition(1.0), processors.frequency(0.0)]
    fresh = [processors.repetition(1.5), processors.frequency(0.9)]
    heavy, second = Request([4], 0, 60), Request([5], 1, 8, processors=fresh)
    options = {"longest_prompt": 2, "max_new_tokens": 60, "temperature": 0.0}
    tokens = [[], []]
    served = serve(markov(rows), drafters.prompt_lookup(3), [heavy, second], slots=1, processors=built, **options)
    for news in served:
        tokens[news.request] += news.tokens
    assert tokens[0] == [4] * 60
    alone = decode(
        markov(rows), drafters.autoregressive(), [[5]], key=1, max_new_tokens=8, temperature=0.0, processors=fresh
    )
    assert tokens[1] == alone.to_lists()[0] and set(tokens[1]) != {4}
