"""Tests of the draft cache, the draft distribution and the state between steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare
from tiers import exhaustive
from toy import compiled, tiny_llama

from specjax import UsageError, decode
from specjax.drafters import two_model
from specjax.numerics import sampling
from specjax.types import Context, Sampling, Verdict


@jax.jit
def last_logits(target, tokens, length):
    """Return logits of `target` after the first `length` of tokens int[B, T], in one new pass."""
    batch, t = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(t), (batch, t))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)), (batch, t, t))
    cache = target.model.init_cache(target.params, None, batch, t)
    output, _ = target.model.forward(target.params, tokens, cache, positions=positions, mask=mask)
    return output.logits[:, length - 1]


@pytest.mark.parametrize(
    ("length", "lag"), [(1, 2), (2, 4), *(exhaustive(*x) for x in ((1, 4), (2, 2), (5, 2), (5, 4)))]
)
def test_drafts_are_what_a_fresh_pass_predicts(length, lag):
    """Compare the cache with a new pass over the text, after steps that accepted all, none or one."""
    target = tiny_llama(seed=3)
    drafter = compiled(two_model(target, 3, lag=lag))
    text = np.random.default_rng(0).integers(0, 64, (2, 200), np.int32)
    state = drafter.init(drafter.params, Context(jnp.asarray(text), jnp.full(2, length)))
    for accepted in (3, 0, 1, 3):
        context = Context(jnp.asarray(text), jnp.full(2, length))
        tree, state = drafter.propose(drafter.params, None, state, context, jnp.full(2, 3))
        grown = text.copy()
        for depth in range(1, 4):
            wanted = np.argmax(last_logits(target, grown[:, :32], length + depth - 1), -1)
            np.testing.assert_array_equal(tree.tokens[:, depth], wanted)
            grown[:, length + depth - 1] = wanted
        path = np.where(np.arange(4) <= accepted, np.arange(4), -1)
        verdict = Verdict(np.stack([path, path]), np.full(2, accepted + 1), np.zeros(2, np.int32))
        state = drafter.update(drafter.params, state, (), verdict)
        text[:, length : length + accepted] = grown[:, length : length + accepted]
        length += accepted + 1  # and one token of the target's, here the random text's


def test_what_was_decoded_without_drafts_is_read_before_the_next():
    """Run twenty plain steps, which need more than one pass to catch up; drafts equal those of a new pass."""
    target = tiny_llama(seed=3)
    drafter = compiled(two_model(target, 3))
    text, lengths = np.random.default_rng(0).integers(0, 64, (2, 200), np.int32), np.array([5, 1])
    state = drafter.init(drafter.params, Context(jnp.asarray(text), jnp.asarray(lengths)))
    for _ in range(20):
        tree, drafted = drafter.propose(
            drafter.params, None, state, Context(jnp.asarray(text), jnp.asarray(lengths)), jnp.zeros(2, int)
        )
        assert tree.valid.sum() == 2
        state = drafter.update(
            drafter.params, drafted, (), Verdict(np.array([[0, -1, -1, -1]] * 2), np.ones(2, int), np.zeros(2, int))
        )
        lengths = lengths + 1
    assert state.num_cached.tolist() == [3, 0]
    tree, _ = drafter.propose(
        drafter.params, None, state, Context(jnp.asarray(text), jnp.asarray(lengths)), jnp.full(2, 3)
    )
    for depth in range(1, 4):
        for row, length in enumerate(lengths):
            wanted = np.argmax(last_logits(target, text[:, :32], length + depth - 1)[row])
            assert tree.tokens[row, depth] == wanted
            text[row, length + depth - 1] = wanted


def test_tokens_have_the_law_that_is_reported():
    model = tiny_llama(seed=3, vocab=64)
    drafter = two_model(model, 2)
    batch = 2000
    tokens = jnp.broadcast_to(jnp.arange(1, 9), (batch, 8))
    settings = Sampling(jnp.float32(1.5), jnp.int32(5))
    context = Context(jnp.pad(tokens, ((0, 0), (0, 140))), jnp.full((batch,), 8), settings)
    keys = jax.random.split(jax.random.key(1), batch)
    propose = jax.jit(lambda drafter: drafter.propose(
        drafter.params, keys, drafter.init(drafter.params, context), context, jnp.full((batch,), 2)
    )[0])  # fmt: skip
    tree = propose(drafter)
    distribution = np.asarray(jax.nn.softmax(tree.logits[0, 0]))
    assert (distribution > 0).sum() == 5
    wanted = jax.nn.softmax(sampling.warp(last_logits(model, tokens[:1], 8), settings))[0]
    np.testing.assert_allclose(distribution, wanted, atol=1e-5)
    counts = np.bincount(tree.tokens[:, 1], minlength=64)
    assert counts[distribution == 0].sum() == 0
    assert chisquare(counts[distribution > 0], distribution[distribution > 0] * batch, sum_check=False).pvalue > 1e-3
    second = np.asarray(jax.nn.softmax(tree.logits[:, 1], -1))  # its own distribution per first token
    token = np.asarray(tree.tokens[:, 2])
    assert (np.take_along_axis(second, token[:, None], 1) > 0).all()


@pytest.mark.parametrize("temperature", [exhaustive(0.0), 1.0])
def test_the_target_as_its_own_draft_is_always_accepted(temperature):
    model = tiny_llama()
    result = decode(
        model,
        two_model(model, 3),
        [[1, 2, 3], [4]],
        key=jax.random.key(0),
        max_new_tokens=16,
        temperature=temperature,
    )
    assert result.stats.target_passes.tolist() == [4, 4]
    assert result.block_efficiency.tolist() == [4.0, 4.0]


def test_bad_budget():
    with pytest.raises(UsageError, match="num_tokens must be at least 1"):
        two_model(tiny_llama(), 0)
