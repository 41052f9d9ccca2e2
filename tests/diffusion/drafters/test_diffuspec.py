"""DiffuSpec: its path search and its lengths, as the card works them out."""

import jax.numpy as jnp
import numpy as np

from specjax.diffusion.drafters import diffuspec
from specjax.diffusion.drafters.diffuspec import State, lattice, search, trigram
from specjax.types import Context, Verdict

A, B, C, D, END = range(5)
FIRST, SECOND = [0.6, 0.4, 0, 0, 0], [0, 0, 0.55, 0.45, 0]
AFTER = np.full((5, 5), 1e-9)  # of the second token of a pair
AFTER[END, [A, B]], AFTER[A, [C, D]], AFTER[B, [C, D]] = 0.5, (0.1, 0.9), (0.8, 0.2)


def path(rows, *, blend=0.5, beams=3, choices=4, mass=1.0, eos=(), limit=None):
    with np.errstate(divide="ignore"):
        words = lattice(jnp.log(jnp.array([rows], jnp.float32)), mass, choices, eos)
    say = lambda suffix, token: jnp.log(jnp.array(AFTER))[suffix[..., 1:], token[:, None]]
    suffix, limit = jnp.full((1, 2), END), jnp.array([len(rows) if limit is None else limit])
    tokens, count = search(words, suffix, limit, say, beams, blend, eos)
    return tokens[0, : int(count[0])].tolist()


def test_the_words_that_go_together_win():
    assert path([FIRST, SECOND]) == [A, D]  # -1.0539; bc -1.2152, bd -2.0087, ac -2.0522
    assert path([FIRST, SECOND], blend=1.0) == [A, C]
    assert path([FIRST, SECOND], beams=1, choices=1) == [A, C]
    assert path([FIRST, SECOND], blend=0.0) == [A, D]
    # More weight on c lets bc win: -1.2152 + .5 log(.99 / .55) = -.92, and ad has -1.0539 + .5 log(.01 / .45) = -2.96.
    assert path([FIRST, [0, 0, 0.99, 0.01, 0]]) == [B, C]
    assert path([FIRST, SECOND], limit=1) == [A]


def test_a_word_is_judged_by_the_two_before_it():
    """Each is the last but one, plus one: behind 0 1 come 1 2 2 3."""
    words = lattice(jnp.log(jnp.full((1, 4, 5), 0.2)), 1.0, 5, ())
    say = lambda suffix, token: jnp.log(jnp.where(token[:, None] == suffix[..., :1] + 1, 0.9, 0.1))
    tokens, _ = search(words, jnp.array([[0, 1]]), jnp.array([4]), say, 1, 0.0, ())
    assert tokens[0].tolist() == [1, 2, 2, 3]


def test_a_path_that_ends_stays_and_competes():
    rows = [[0.5, 0, 0, 0, 0.4], SECOND]
    AFTER[END, END] = 0.5
    assert path(rows, eos=(END,), choices=1) == [END]  # .5 log(.4 * .5) = -.80 beats -.69 for a, and -1.94 with c
    assert path(rows, choices=1) == [A, C]
    AFTER[END, END] = 1e-9


def test_a_lattice_has_the_mass_and_every_eos():
    rows = jnp.log(jnp.array([[[0.5, 0.3, 0.15, 0.04, 0.01]]]))
    words = lattice(rows, 0.8, 4, (END,))
    have = lambda words: words.token[0, 0][words.logprob[0, 0] > -jnp.inf].tolist()
    assert have(words) == [A, B, END] and have(lattice(rows, 0.81, 4, ())) == [A, B, C]
    assert have(lattice(rows, 1.0, 5, (END,))) == [A, B, C, D, END]  # once


def test_trigrams_are_counted_in_the_text_alone():
    context = Context(jnp.array([[1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2, 4]]), jnp.array([9]))
    scores = trigram(context, 10, jnp.array([[[1, 2], [3, 3]]]), jnp.array([[3, 4, 5]]))
    expected = np.log([[[3 / 13, 2 / 13, 1 / 13], [0.1, 0.1, 0.1]]])
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


def test_lengths_follow_what_was_drafted_and_accepted():
    drafter = diffuspec(None, num_tokens=30, min_tokens=20, grow=10, rate=0.5)
    nothing = jnp.zeros((2,))
    state = State((), jnp.array([30, 30]), nothing, nothing, jnp.array([0, 0]))
    lengths = []
    for num_drafted, accepted in ((30, 30), (25, 4), (12, 4), (20, 20)):
        state = state._replace(last=jnp.array([num_drafted, num_drafted]))
        verdict = Verdict(None, jnp.array([accepted + 1, 0]), None)  # the second row has ended
        state = drafter.update((), state, (), verdict)
        lengths.append(state.length.tolist())
    assert lengths == [[25, 30], [20, 30], [20, 30], [20, 30]]
