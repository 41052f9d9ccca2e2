"""The card's tests of Superposed Decoding (A12)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_llama

from specjax import UsageError, decode
from specjax.drafters import early_exit, superposed
from specjax.engine.prefill import prefill
from specjax.types import Context, Mixture


def context(target):
    tokens = jnp.zeros((2, 260), jnp.int32).at[:, :4].set(jnp.array([[3, 1, 4, 1], [5, 9, 2, 6]]))
    length = jnp.array([4, 3])
    cache = prefill(
        target.model, target.params, target.model.init_cache(target.params, None, 2, 260), tokens, length - 1
    )
    return Context(tokens, length, cache=cache, target=target)


def propose(drafter, target, limit):
    run = jax.jit(lambda drafter, context: drafter.propose(drafter.params, None, (), context, jnp.array(limit))[0])
    return run(drafter, context(target))


def test_one_draft_is_greedy_decoding():
    target = tiny_llama(layers=3)
    ours = propose(superposed(target, 2, num_tokens=4, drafts=1), target, [4, 2])
    theirs = propose(early_exit(target, 2, num_tokens=4), target, [4, 2])
    for a, b in zip(ours[:3], theirs[:3], strict=True):
        np.testing.assert_array_equal(jnp.where(ours.valid, a, 0), jnp.where(theirs.valid, b, 0))


def test_all_layers_accept_their_own_greedy_text():
    target = tiny_llama()
    for drafts in (1, 3):  # beside others, the likeliest draft has nearly all of the weight
        drafter = superposed(target, 2, num_tokens=3, drafts=drafts, temperature=1e-4)
        result = decode(target, drafter, [[1, 2, 3], [4]], key=jax.random.key(0), max_new_tokens=16)
        assert result.block_efficiency.tolist() == [4.0, 4.0]


def test_a_level_is_one_pass_over_the_mixture():
    """Compute the second level by hand: the distribution after the mixture of two tokens, and the best two sums."""
    target = tiny_llama()
    tree = propose(superposed(target, 2, num_tokens=2, drafts=2, candidates=5, temperature=1.0), target, [2, 1])
    ctx = context(target)
    look = jax.jit(
        lambda tokens, mask: target.model.forward(
            target.params, tokens, ctx.cache, positions=ctx.length[:, None] - 1 + jnp.arange(2),
            mask=jnp.broadcast_to(jnp.tril(jnp.ones((2, 2), bool)), (2, 2, 2)),
        )[0].logits
    )  # fmt: skip
    root = tree.tokens[:, 0]
    one = lambda ids, weights: Mixture(jnp.stack([jnp.stack([root, root], 1), ids], 1), weights)
    ones = jnp.array([[[1.0, 0.0], [0.5, 0.5]]] * 2)
    logits = look(one(tree.tokens[:, 1:3], ones), None)
    log_p, first = jax.lax.top_k(logits[:, 0], 5)
    log_p = jax.nn.log_softmax(log_p, -1)
    np.testing.assert_array_equal(tree.tokens[:, 1:3], first[:, :2])
    logits = look(one(first[:, :2], ones.at[:, 1].set(jax.nn.softmax(log_p[:, :2], -1))), None)
    value, second = jax.lax.top_k(logits[:, 1], 5)
    total = log_p[:, :2, None] + jax.nn.log_softmax(value, -1)[:, None]
    place = np.argsort(-np.asarray(total).reshape(2, -1), 1)[:, :2]
    np.testing.assert_array_equal(tree.parents[0, 3:], 1 + place[0] // 5)
    np.testing.assert_array_equal(tree.tokens[0, 3:], np.asarray(second)[0, place[0] % 5])
    assert tree.valid.tolist() == [[True] * 5, [True] * 3 + [False] * 2]


def test_equal_tokens_are_one_token():
    target = tiny_llama()
    look = lambda tokens: (
        target.model.forward(
            target.params,
            tokens,
            target.model.init_cache(target.params, None, 1, 8),
            positions=jnp.array([[0]]),
            mask=jnp.ones((1, 1, 1), bool),
        )[0].logits
    )
    same = look(Mixture(jnp.array([[[7, 7, 7]]]), jnp.array([[[0.5, 0.25, 0.25]]])))
    np.testing.assert_allclose(same, look(jnp.array([[7]])), atol=1e-6)
    assert float(jnp.abs(look(Mixture(jnp.array([[[7, 8]]]), jnp.array([[[0.5, 0.5]]]))) - same).max()) > 1e-2


def test_bad_settings():
    for options, message in (
        ({"exit_layer": 3}, "exit_layer must be from 1 to 2"),
        ({"drafts": 0}, "num_tokens and drafts must be at least 1"),
        ({"drafts": 4, "candidates": 3}, "candidates must be at least the number of drafts, 4"),
        ({"temperature": 0.0}, "temperature must be above 0"),
    ):
        with pytest.raises(UsageError, match=message):
            superposed(tiny_llama(), **options)
