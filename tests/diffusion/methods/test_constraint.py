"""Texts within a language, against all words of it."""

import itertools

import hand_made
import jax.numpy as jnp
import numpy as np
import pytest
import toy_denoisers as toys

import specjax
from specjax import UsageError
from specjax.diffusion import Canvas, methods
from specjax.diffusion.methods.constraint import TokenAutomaton, constraint
from specjax.diffusion.rules import threshold

OPENS, CLOSES, A, EOS = range(4)
BRACKETS = TokenAutomaton([[1, -1, 0, -1], [2, 0, 1, -1], [-1, 1, 2, -1]], [True, False, False]).closed(EOS)


def over(automaton, vocab):
    """Return the automaton over a larger vocabulary, whose further tokens no word has."""
    table = np.asarray(automaton.transitions)
    return TokenAutomaton(np.pad(table, ((0, 0), (0, vocab - table.shape[1])), constant_values=-1), automaton.accepting)


def parts_of(automaton):
    procedure = constraint(toys.frozen([0.5]), automaton=over(automaton, 12), block=None)
    return procedure.score, procedure.rule


def seen(canvas_tokens):
    """A window over all of a canvas; None: open."""
    opened = jnp.array([[token is None for token in row] for row in canvas_tokens])
    tokens = jnp.array([[0 if token is None else token for token in row] for row in canvas_tokens])
    batch, size = tokens.shape
    start = jnp.zeros(batch, jnp.int32)
    canvas = Canvas(tokens, opened, start, start + size, start, jnp.full((batch, size), -1), start)
    return hand_made.window(opened, tokens=tokens, start=0)._replace(canvas=canvas)


def feasible(automaton, *rows):
    score, _ = parts_of(automaton)
    view = seen(rows)
    logits, _ = score.transform(score.params, (), jnp.zeros((len(rows), len(rows[0]), 12)), view)
    return [[np.flatnonzero(column > -1).tolist() for column in row] for row in np.asarray(logits)]


def accepts(automaton, word):
    state = 0
    for token in word:
        state = np.asarray(automaton.transitions)[state, token]
        if state < 0:
            return False
    return bool(automaton.accepting[state])


def test_brackets_by_hand():
    four = feasible(BRACKETS, [OPENS, None, None, None])[0]
    assert four[1:] == [[OPENS, CLOSES, A], [OPENS, CLOSES, A, EOS], [CLOSES, A, EOS]]
    pair, alone = feasible(BRACKETS, [OPENS, None], [None, None])
    assert pair[1] == [CLOSES] and alone == [[OPENS, A, EOS], [CLOSES, A, EOS]]


def test_of_random_automata_it_is_what_enumeration_says():
    rng = np.random.default_rng(0)
    for _ in range(6):
        automaton = TokenAutomaton(rng.integers(-1, 4, (4, 3)), rng.random(4) < 0.4)
        words = [word for word in itertools.product(range(3), repeat=4) if accepts(automaton, word)]
        if not words:
            continue
        word = words[rng.integers(len(words))]
        row = [token if rng.random() < 0.4 else None for token in word]
        fit = [w for w in words if all(a in (None, b) for a, b in zip(row, w, strict=True))]
        expected = [sorted({w[i] for w in fit}) for i in range(4)]
        ours = feasible(automaton, row)[0]
        assert [ours[i] for i in range(4) if row[i] is None] == [expected[i] for i in range(4) if row[i] is None]


def test_what_is_feasible_alone_is_not_decided_together():
    _, rule = parts_of(BRACKETS)
    view = seen([[None, None], [None, None]])
    proposal = hand_made.proposal([[0.96, 0.97], [0.96, 0.97]], [[OPENS, A], [A, A]], narrow=True)
    take, _, _ = rule.select(rule.params, (), proposal, view, jnp.ones(2, int))
    assert hand_made.places(take) == [[1], [0, 1]]


def test_every_text_is_a_word():
    denoiser, count = toys.full(), 9
    rng = np.random.default_rng(1)
    table = np.where(rng.random((5, 64)) < 0.85, -1, rng.integers(0, 5, (5, 64)))
    automaton = TokenAutomaton(table, np.arange(5) == 3).closed(60)
    prompts = [[int(token)] for token in rng.integers(0, 60, 200)]
    run = lambda method: specjax.denoise(
        denoiser, method, prompts, key=0, max_new_tokens=count, temperature=1.2, eos=60
    )
    result = run(methods.constraint(denoiser, automaton=automaton, block=4, tau=0.15))
    texts = result.to_lists()
    assert all(accepts(automaton, text) for text in texts)
    assert len({tuple(text) for text in texts}) > 25 and np.any(result.stats.target_passes < result.lengths)
    assert not all(accepts(automaton, text) for text in run(methods.fast_dllm(denoiser)).to_lists())


def test_the_language_of_all_words_is_the_threshold_rule():
    denoiser, settings = toys.full(), {"key": 2, "max_new_tokens": 14, "temperature": 0.7}
    method = methods.constraint(denoiser, automaton=TokenAutomaton(np.zeros((1, 64), int), [True]), tau=0.04)
    ours = specjax.denoise(denoiser, method, [[1, 2, 3]], **settings)
    plain = specjax.denoise(denoiser, method.replace(rule=threshold(0.04), score=None), [[1, 2, 3]], **settings)
    assert ours.to_lists() == plain.to_lists() and ours.decided_at.tolist() == plain.decided_at.tolist()
    assert ours.stats.target_passes[0] < 14


def test_what_it_refuses():
    denoiser = toys.full()
    pairs = TokenAutomaton(np.array([[1] * 64, [0] * 64]), [True, False])
    for automaton, words in (
        (None, "give automaton="), (pairs._replace(accepting=[True]), r"have the shape \[1, 64\], not \[2, 64\]"),
        (pairs._replace(transitions=np.full((2, 64), 2)), "one of the 2 states"), (pairs, "no word of 5 tokens"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            method = methods.constraint(denoiser, automaton=automaton)
            specjax.denoise(denoiser, method, [[1]], key=0, max_new_tokens=5)
    with pytest.raises(UsageError, match="full attention"):
        methods.constraint(toys.causal(), automaton=pairs)
