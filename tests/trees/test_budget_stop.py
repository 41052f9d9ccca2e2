"""DSpark's scheduler for padded batches: the joint text of two rows by enumeration, and the best of all lengths."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import UsageError, trees
from specjax.trees import stops
from specjax.trees.contracts import Parents
from specjax.types import Context, DraftOutput, Sampling

OUTCOMES = np.array(list(itertools.product(range(2), repeat=4))).reshape(16, 2, 2)  # tokens x_1 x_2 of two rows


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.vmap, in_axes=(None, 0, None, None))
def draft_lengths(builder, tokens, confidence, costs):
    """Return the lengths int32[R] of chains with given tokens int32[R, D].

    Args: confidence: float32[R, D, V], of the next token, by the number of tokens before it and the last of them.
    """
    rows = len(tokens)
    root = jnp.zeros(rows, jnp.int32)

    def forced(parents, k, *, noisy=True):
        drawn = jnp.take_along_axis(tokens, parents.ids, 1)[:, :, None]
        return drawn, jnp.zeros(drawn.shape)

    def output(token, depth):
        chance = confidence[jnp.arange(rows)[:, None], jnp.minimum(depth, tokens.shape[1] - 1), token]
        return DraftOutput(jnp.zeros((*token.shape, 2)), chance)

    feed = lambda memory, frontier: (memory, output(frontier.tokens, frontier.depth))
    first = jax.tree.map(lambda x: x[:, 0], output(root[:, None], jnp.zeros((rows, 1), jnp.int32)))
    context = Context(root[:, None], root + 1, Sampling(jnp.float32(1.0)))
    keys, limit = jax.random.split(jax.random.key(0), rows), jnp.full(rows, builder.max_depth)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parents, "best", forced)
        tree = trees.grow(builder, feed, (), root, first, keys, context, limit, pass_costs=costs)[0].tree
    return jnp.sum(tree.valid, 1) - 1


def retrospective(tokens, confidence, costs):
    """Return the lengths of a search over all lengths once all tokens and confidences are drawn: the mutant."""
    lengths = []
    for row_tokens in tokens:
        previous = np.concatenate([np.zeros((len(row_tokens), 1), int), row_tokens[:, :-1]], 1)
        chance = np.take_along_axis(confidence, previous[:, :, None], 2)[:, :, 0]
        total = np.concatenate([[len(chance)], len(chance) + np.cumsum(np.cumprod(chance, 1).sum(0))])
        lengths.append([int(np.argmax(total / costs))] * len(chance))
    return np.array(lengths)


def text_of(x, length, p, q):
    """Return the law float64[2, 2] of two tokens if the standard rule verifies the first `length` drafted tokens x."""
    residual = lambda p, q: (lambda z: z / z.sum() if z.sum() > 0 else p)(np.maximum(p - q, 0))
    (p1, p2), (q1, q2), law = p, q, np.zeros((2, 2))
    if length == 0:
        return p1[:, None] * p2
    first = min(1, p1[x[0]] / q1[x[0]])
    law += (1 - first) * residual(p1, q1)[:, None] * p2
    if length == 1:
        law[x[0]] += first * p2[x[0]]
        return law
    p2, q2 = p2[x[0]], q2[x[0]]
    second = min(1, p2[x[1]] / q2[x[1]])
    law[x[0], x[1]] += first * second
    law[x[0]] += first * (1 - second) * residual(p2, q2)
    return law


def joint_error(lengths_of, cases=30):
    """Return the largest error of the joint law of two tokens of two rows, and all lengths that occur."""
    rng, worst, lengths_seen = np.random.default_rng(2), 0.0, set()
    draw = lambda *shape: rng.dirichlet(np.ones(2), shape)
    for _ in range(cases):
        p, q = ([(draw(), draw(2)) for _ in range(2)] for _ in range(2))
        confidence = rng.uniform(0, 1, (2, 2, 2)).astype(np.float32)
        costs = np.cumsum([1, *rng.uniform(0, 0.8, 2)]).astype(np.float32)
        lengths = np.asarray(lengths_of(OUTCOMES, confidence, costs))
        text = 0.0
        for x, length in zip(OUTCOMES, lengths, strict=True):
            weight = np.prod([q[r][0][x[r][0]] * q[r][1][x[r][0], x[r][1]] for r in range(2)])
            text = text + weight * np.einsum("ab,cd->abcd", *(text_of(x[r], length[r], p[r], q[r]) for r in range(2)))
        wanted = np.einsum("ab,cd->abcd", *(p[r][0][:, None] * p[r][1] for r in range(2)))
        worst = max(worst, np.abs(text - wanted).max())
        lengths_seen |= set(lengths.ravel().tolist())
    return worst, lengths_seen


CHAIN = trees.chain(2, stop=stops.budget())


def test_the_joint_text_of_two_rows_is_unchanged():
    error, lengths = joint_error(functools.partial(draft_lengths, CHAIN))
    assert error < 1e-12 and lengths == {0, 1, 2}


def test_a_search_afterwards_is_caught():
    assert joint_error(retrospective, cases=120)[0] > 0.05


def test_the_counterexample_of_the_paper():
    """At 1, .5 and .45 steps per second, a search afterwards writes token 0 with .85 in place of .7."""
    p, q = (np.array([0.7, 0.3]), np.full((2, 2), 0.5)), (np.full(2, 0.5), np.full((2, 2), 0.5))
    tokens = np.array(list(itertools.product(range(2), repeat=2)))[:, None]
    confidence = np.array([[[0.8, 0.8], [0.9, 0.0]]], np.float32)
    costs = (1 / np.array([1, 0.5, 0.45])).astype(np.float32)
    first = []
    for lengths in (draft_lengths(CHAIN, tokens, confidence, costs), retrospective(tokens, confidence, costs)):
        texts = [text_of(x[0], length[0], p, q) for x, length in zip(tokens, np.asarray(lengths), strict=True)]
        first.append(float(np.mean(texts, 0)[0].sum()))
    np.testing.assert_allclose(first, [0.7, 0.85], atol=1e-6)


def test_steady_confidences_choose_the_best_of_all_lengths():
    """The costs are those of widths: they are equal within a width, and may jump behind it."""
    builder, rng, lengths_seen = trees.chain(6, stop=stops.budget()), np.random.default_rng(0), set()
    for _ in range(40):
        chance = rng.uniform(0.2, 0.98, 3)
        costs = np.cumsum([1, *(rng.uniform(0, 1, 6) * (rng.uniform(size=6) < 0.4))]).astype(np.float32)
        confidence = np.broadcast_to(chance[:, None, None], (3, 6, 2)).astype(np.float32)
        lengths = np.asarray(draft_lengths(builder, np.zeros((1, 3, 6), np.int32), confidence, costs))[0]
        tokens = 3 + np.concatenate([[0], np.cumsum(np.cumprod(np.repeat(chance[:, None], 6, 1), 1).sum(0))])
        best = np.flatnonzero(np.isclose(tokens / costs, (tokens / costs).max(), rtol=1e-6))[0]
        assert lengths.tolist() == [best] * 3
        lengths_seen.add(int(best))
    assert len(lengths_seen) > 3


def test_drafters_without_costs_are_refused():
    with pytest.raises(UsageError, match="budget needs the costs of passes"):
        draft_lengths(CHAIN, OUTCOMES, np.ones((2, 2, 2), np.float32), None)
