"""Sequoia's uniform continuation: exact by enumeration, and where it accepts more than recursive rejection."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import block_distribution, draft, without_replacement
from rules import module
from scipy.stats import chisquare
from toy import DRAFT_ROWS, TARGET_ROWS, chi_square, joint_distribution, markov, sampled_triples, template

from specjax import decode, trees, verifiers
from specjax.drafters import two_model
from specjax.types import Context, Sampling
from specjax.verifiers.descent import Rule, descend

sequoia = module("sequoia")
recursive_rejection = module("recursive_rejection").core
NARROW = np.array([[1, 0, 0], [0.5, 0.5, 0], [0, 0.4, 0.6]], np.float32)  # rows that run out of tokens


@functools.cache
def drafts(*branching):
    """Every outcome of drawing without replacement from `NARROW`, then uniformly from what is left."""
    shape, outcomes = template(branching), [((0,), 1.0)]
    for node in range(1, shape.num_nodes):
        parent = int(shape.parents[node])
        siblings = [i for i in range(1, node) if shape.parents[i] == parent]
        longer = []
        for tokens, weight in outcomes:
            free = [t for t in range(3) if t not in {tokens[i] for i in siblings}]
            distribution = {t: float(NARROW[tokens[parent], t]) for t in free}
            if sum(distribution.values()) == 0:
                distribution = dict.fromkeys(free, 1.0)
            total = sum(distribution.values())
            longer += [((*tokens, t), weight * w / total) for t, w in distribution.items() if w > 0]
        outcomes = longer
    tokens = np.array([t for t, _ in outcomes], np.int32)
    return draft(NARROW, tokens, shape.parents), np.array([w for _, w in outcomes])


def distribution_of(core, *branching):
    """(largest error of the joint distribution, distribution of the number accepted)."""
    joint, accepted = block_distribution(core, *drafts(*branching), TARGET_ROWS, len(branching))
    return np.abs(joint - joint_distribution(TARGET_ROWS, 0, len(branching) + 1)).max(), accepted


@pytest.mark.parametrize("branching", [(2,), (2, 2), (3, 1)])
def test_the_law_is_the_targets_and_more_is_accepted(branching):
    error, accepted = distribution_of(sequoia.core, *branching)
    assert error < 1e-6
    error, without = distribution_of(recursive_rejection, *branching)
    assert error < 1e-6  # there the tokens beyond the distribution are passed over
    depth = np.arange(len(accepted))
    assert accepted @ depth > without @ depth + 0.1


def test_one_step_by_hand():
    """p = (.5, .3, .2), q = (1, 0, 0): .5 for the first child; then d is (0, .5, .5) and r (0, .6, .4): .5 + .4."""
    _, accepted = distribution_of(sequoia.core, 2)
    np.testing.assert_allclose(accepted, [0.5 * 0.1, 0.95], atol=1e-6)
    _, accepted = distribution_of(sequoia.core, 3)
    np.testing.assert_allclose(accepted, [0, 1], atol=1e-6)  # the whole vocabulary


def test_without_exhaustion_it_is_recursive_rejection():
    tree, _ = without_replacement(DRAFT_ROWS, 0, template((2, 2)))
    logits = jnp.log(jnp.asarray(TARGET_ROWS))[tree.tokens]
    for seed in range(3):
        u = jax.random.uniform(jax.random.key(seed), tree.tokens.shape)
        ours, theirs = sequoia.core(u, tree, logits), recursive_rejection(u, tree, logits)
        np.testing.assert_array_equal(ours.path, theirs.path)
        np.testing.assert_allclose(ours.residual, theirs.residual, atol=1e-6)


def uniform_over_everything(r, d, token):
    """A mutant: goes on as if tokens that were tried could come again."""
    residual, following = sequoia._reject(r, d, token)
    exhausted = (
        jnp.all(d <= 0, -1, keepdims=True) | jnp.all(sequoia.without(jnp.maximum(d, 0), token) == 0, -1)[:, None]
    )
    return residual, jnp.where(exhausted, 1 / d.shape[-1], following)


def test_enumeration_catches_a_mutant():
    mutant = functools.partial(descend, Rule(enter=sequoia._enter, reject=uniform_over_everything))
    assert distribution_of(mutant, 2)[0] > 0.02


def test_siblings_are_drawn_so():
    """q = (.7, .3, 0, 0, 0) and 4 children: both tokens of q, then two of the others, each order as likely."""
    count, row = 12_000, jnp.log(jnp.array([0.7, 0.3, 0, 0, 0]))
    root = jnp.zeros((count,), jnp.int32)
    context = Context(root[:, None], root + 1, Sampling(jnp.asarray(1.0)))
    builder = trees.branching((4,), "without_replacement_then_uniform")
    feed = lambda *arguments: (_ for _ in ()).throw(AssertionError("one level needs no pass"))
    keys = jax.random.split(jax.random.key(0), count)
    run = lambda: trees.grow(builder, feed, (), root, jnp.tile(row, (count, 1)), keys, context, root + 1)[0].tree
    tree = jax.jit(run)()
    assert np.asarray(tree.valid).all()
    orders, counts = np.unique(np.asarray(tree.tokens)[:, 1:], axis=0, return_counts=True)
    assert len(orders) == 2 * 6 and (np.sort(orders[:, :2], 1) == [0, 1]).all()
    expected = np.where(orders[:, 0] == 0, 0.7, 0.3) / 6 * count
    assert chisquare(counts, expected, sum_check=False).pvalue > 1e-3


def test_it_is_the_default_for_such_trees_and_keeps_the_distribution():
    drafter = two_model(markov(NARROW), tree=trees.branching((2, 2), "without_replacement_then_uniform"))
    assert verifiers.exact_verifier(drafter, False) is verifiers.sequoia
    assert chi_square(sampled_triples(drafter, TARGET_ROWS), joint_distribution(TARGET_ROWS, 0, 3)) > 1e-3
    options = {"key": jax.random.key(0), "max_new_tokens": 8, "temperature": 1.0}
    decode(markov(), drafter, [[0, 1]], debug=True, **options)  # a sibling without mass is no violation there
