"""The winner by hand, among the samples that `decode` draws."""

import jax.numpy as jnp
import numpy as np
import pytest
import texts as lib

from specjax import UsageError, decode, drafters
from specjax.collaborate.methods.first_finish import winners

LARGE = lib.history(1)


def test_winners_by_hand():
    lengths = jnp.array([[9, 4, 7], [5, 5, 8], [9, 9, 9], [4, 4, 4]])
    ended = jnp.array([[1, 1, 1], [1, 1, 1], [0, 0, 0], [1, 1, 0]], bool)
    mean = jnp.array([[-1.0, -9, -1], [-2, -1, 0], [-3, -1, -2], [-1, -1, 0]])
    assert winners(lengths, ended, mean).tolist() == [1, 1, 1, 0]


def test_the_shortest_of_the_samples_wins():
    samples = decode(
        LARGE, "autoregressive", lib.PROMPTS, key=lib.KEYS, max_new_tokens=12, temperature=1.0, eos=5, logprobs=True,
        samples_per_prompt=3,
    )  # fmt: skip
    result = lib.run("first_finish")
    lengths, ended = np.asarray(samples.lengths).reshape(3, 3), np.asarray(samples.hit_eos).reshape(3, 3)
    mean = np.asarray(samples.logprobs).sum(1).reshape(3, 3) / lengths
    finished = 0
    for row in range(3):
        if ended[row].any():
            shortest = lengths[row][ended[row]].min()
            # nobody goes on behind the shortest: all tokens together are n times its length
            assert result.log.lengths[row].tolist() == [shortest] * 3 and result.passes[row].tolist() == [3 * shortest]
            order = [i for i in range(3) if ended[row, i] and lengths[row, i] == shortest]
            finished += 1
        else:
            order = range(3)
            assert result.log.lengths[row].tolist() == [12] * 3
        winner = max(order, key=lambda i: mean[row, i])
        assert result.log.winner[row] == winner
        assert result.to_lists()[row] == samples.to_lists()[3 * row + winner]
    assert finished >= 2


def test_with_drafts_the_winner_is_the_same():
    plain = lib.run("first_finish")
    drafted = lib.run("first_finish", drafter=drafters.two_model(lib.alike(1), 3), sampling="coupled")
    assert drafted.to_lists() == plain.to_lists() and drafted.log.winner.tolist() == plain.log.winner.tolist()
    assert (drafted.passes < plain.passes).all()


def test_one_sample_is_plain_sampling():
    assert lib.run("first_finish", samples=1).to_lists() == lib.plain(LARGE, temperature=1.0, eos=5)


def test_what_is_wrong_is_one_sentence():
    with pytest.raises(UsageError, match=r"temperature must be above 0, not 0\.0: samples drawn at 0 are equal"):
        lib.run("first_finish", temperature=0.0)
