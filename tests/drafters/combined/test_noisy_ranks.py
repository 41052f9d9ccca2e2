"""Ranks by the noise of the target's draws: the noise itself, chances against frequencies, and texts of `auto`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import markov

from specjax import decode
from specjax.drafters import auto
from specjax.drafters.combined import noisy_ranks
from specjax.numerics import sampling
from specjax.retrieval.rollouts import likeliest_copy
from specjax.types import Context, Sampling

ROWS, VOCAB, STORED = 2000, 40, 8


def context_of(temperature=1.0, rows=ROWS, length=7):
    keys = sampling.row_keys(3, rows)
    tokens, lengths = jnp.zeros((rows, 12), jnp.int32), jnp.full((rows,), length)
    return Context(tokens, lengths, Sampling(jnp.float32(temperature)), keys)


def draws_of(context, depth, log_p):
    """Return the target's draw int32[B] after a node at `depth`, from log p [V]."""
    keys = sampling.node_keys(context.noise, context.length, jnp.full((len(context.length), 1), depth))[:, 0]
    return np.asarray(sampling.draw(keys, jnp.broadcast_to(log_p / context.sampling.temperature, (len(keys), VOCAB))))


def test_the_noise_of_a_token_is_that_of_the_targets_draw():
    context, tokens = context_of(rows=3), jnp.array([[[5, 0], [39, 7]]] * 3)
    ours = noisy_ranks.noise_at(context, np.array([2, 0]), tokens)
    keys = sampling.node_keys(context.noise, context.length, jnp.array([[2, 0]] * 3))
    np.testing.assert_array_equal(
        ours, np.take_along_axis(np.asarray(sampling.noise(keys, VOCAB)), np.asarray(tokens), 2)
    )
    greedy = context._replace(sampling=Sampling(jnp.array([0.0, 1.0, 0.0])))
    assert (np.asarray(noisy_ranks.noise_at(greedy, np.array([2, 0]), tokens)) != 0).any((1, 2)).tolist() == [0, 1, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_chance_of_a_stored_token_is_the_frequency_of_its_draw(temperature):
    """The stored probabilities are exact here, so the first candidate is right exactly as often as its chance."""
    log_p = jax.nn.log_softmax(jnp.asarray(np.random.default_rng(0).normal(0, 2, VOCAB), jnp.float32))
    log_q, tokens = jax.lax.top_k(log_p, STORED)
    context, depth = context_of(temperature), 2
    drawn = draws_of(context, depth, log_p)

    def hits_and_chances(depth):
        stored = [jnp.broadcast_to(x, (ROWS, 1, STORED)) for x in (tokens, log_q)]
        ranked = noisy_ranks.rank_candidates(context, np.array([depth]), *stored)
        assert (np.sort(ranked.tokens[:, 0], 1) == np.sort(tokens)).all()
        return np.asarray(ranked.tokens[:, 0]) == drawn[:, None], np.asarray(ranked.chance[:, 0])

    hits, chances = hits_and_chances(depth)
    stored_mass = np.isin(drawn, tokens).mean()
    assert hits[:, 0].mean() == stored_mass > jnp.exp(log_q[0]) + 0.1  # only a token that is not stored beats the first
    assert not hits[:, 1:].any()
    if temperature == 1:  # the second factor is the probability that no other token wins
        noise = noisy_ranks.noise_at(context, np.array([depth]), jnp.broadcast_to(tokens, (ROWS, 1, STORED)))[:, 0]
        best = (np.asarray(log_q, np.float64) + np.asarray(noise)).max(1)
        wins = np.exp(-(1 - np.exp(np.asarray(log_q, np.float64)).sum()) * np.exp(-best))
        assert abs(wins.mean() - stored_mass) < 0.02 and (chances[:, 0] <= wins + 1e-5).all()
    is_likely = chances[:, 0] > np.median(chances[:, 0])
    assert hits[is_likely, 0].mean() > hits[~is_likely, 0].mean() + 0.1
    wrong, _ = hits_and_chances(depth + 1)  # a mutant: the noise of another position
    assert wrong[:, 0].mean() < stored_mass - 0.2


def test_unknown_candidates_come_last():
    tokens, log_q = jnp.array([[[-1, 4, -1]]]), jnp.array([[[-jnp.inf, -0.5, -0.1]]])
    ranked = noisy_ranks.rank_candidates(context_of(rows=1), np.array([0]), tokens, log_q)
    assert ranked.tokens.tolist() == [[[4, -1, -1]]] and (ranked.chance[0, 0, 1:] == 0).all()


def test_votes_and_noise_decide_together():
    """Six places vote for token 5 and two for token 6: the noise decides as in a race of both, as NumPy computes it."""
    text = [1, 5] * 6 + [1, 6] * 2 + [1]
    tokens, length = jnp.array([text + [0] * 3]), jnp.array([len(text)])
    share = {5: 6, 6: 2}
    for noise in ([0.0, 0.0], [-1.0, 0.5], [-1.0, 0.0], [2.0, 2.0]):
        of_token = jnp.zeros(9).at[jnp.array([5, 6])].set(jnp.array(noise))
        copy = likeliest_copy(tokens, length, 1, max_match=1, noise=lambda t, of_token=of_token: of_token[t])
        score = {t: votes / 9 * np.exp(of_token[t]) for t, votes in share.items()}
        best = max(score, key=score.get)
        assert copy.tokens.tolist() == [[best]]
        np.testing.assert_allclose(
            copy.chance, [[score[best] / sum(score.values()) * np.exp(-1 / 9 / score[best])]], rtol=1e-5
        )


def test_coupled_drafts_save_passes_and_the_text_is_that_of_plain_sampling():
    rows = np.random.default_rng(1).dirichlet(np.full(30, 0.3), 30).astype(np.float32)
    target, drafter = markov(rows), auto(30, widths=(1, 4), costs=(1.0, 1.05))
    settings = dict(key=2, max_new_tokens=150, temperature=1.0)
    passes = {}
    for mode in ("speculative", "coupled"):
        result = decode(target, drafter, [[0], [1]], sampling=mode, **settings)
        assert result.to_lists() == decode(target, "autoregressive", [[0], [1]], **settings).to_lists()
        passes[mode] = int(result.stats.target_passes.sum())
    assert passes["coupled"] < 0.85 * passes["speculative"]
