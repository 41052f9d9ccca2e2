"""Expected tokens of one pass: against enumeration, and that every rule judges the same trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import patterns, without_replacement
from rules import module
from toy import DRAFT_ROWS, MARKOV, TARGET_ROWS, template

from specjax import UsageError, trees, verifiers
from specjax.analysis import expected_tokens, last_token_model
from specjax.drafters import two_model
from specjax.types import Verdict
from specjax.verifiers import ANY, Verifier

TARGET, DRAFT = last_token_model(TARGET_ROWS), last_token_model(DRAFT_ROWS)
CHAIN = two_model(DRAFT, tree=trees.chain(2))


def one_pass(rule, start):
    """Enumerate a pass: return the expected tokens that it adds after token `start`, and the distribution of the last
    one."""
    core = module(rule).core
    drafts, weights = without_replacement(DRAFT_ROWS, start, template((1, 1)))
    probability, end = patterns(core, drafts, jnp.log(jnp.asarray(TARGET_ROWS))[drafts.tokens])
    probability *= weights[:, None]
    return (probability * end.num_nodes).sum(), (probability[:, :, None] * end.residual).sum((0, 1))


def test_the_mean_is_that_of_the_enumeration():
    """2,000 trees with 8 verdicts each, in two passes; the second begins where the first rule left off."""
    rules = [verifiers.standard, verifiers.block]
    means = expected_tokens(rules, TARGET, CHAIN, [[0]] * 2000, key=jax.random.key(0), passes=2)
    by_start = {rule.name: np.array([one_pass(rule.name, token)[0] for token in range(3)]) for rule in rules}
    places = one_pass("standard", 0)[1]
    for name, golden in (("standard", "chain_sd_L2"), ("block", "block_verification_L2")):
        assert means[name].shape == (2000, 2)
        np.testing.assert_allclose(
            by_start[name][0], MARKOV[golden]["expected_tokens_per_iteration"], atol=5e-6
        )  # the oracle itself
        error = means[name].std(0) / 2000**0.5
        assert (abs(means[name].mean(0) - [by_start[name][0], places @ by_start[name]]) < 4 * error).all()
        assert (error < 0.02).all()
    gain = means["block"] - means["standard"]
    error = gain.std(0) / 2000**0.5
    assert (abs(gain.mean(0) - [0.05, places @ (by_start["block"] - by_start["standard"])]) < 4 * error).all()
    assert (error < 0.01).all() and (error < means["block"].std(0) / 2000**0.5).all()  # on the same drafts: surer
    assert abs(means["block"][:, 1].mean() - by_start["block"][0]) > 0.1  # the second pass is elsewhere


def which_tree(name):
    """A rule whose number of tokens is the drafted tree as a number."""

    def rule(keys, tree, logits):
        code = jnp.sum(tree.tokens * 3 ** jnp.arange(tree.tokens.shape[1]), 1)
        return Verdict(jnp.zeros_like(tree.tokens), code, code)

    return Verifier(name, rule, ANY, "lossy", "says which tree it judges")


def test_every_rule_judges_the_same_tree_in_every_draw():
    run = lambda *rules: expected_tokens(rules, TARGET, CHAIN, [[0]] * 64, key=jax.random.key(1), passes=3)
    means = run(verifiers.standard, which_tree("a"), verifiers.block, which_tree("b"))
    np.testing.assert_array_equal(means["a"], means["b"])
    np.testing.assert_array_equal(means["a"], np.round(means["a"]))  # one tree in all draws
    assert all(len(set(column)) > 8 for column in means["a"].T[1:])  # not one tree in all rows
    alone = run(verifiers.standard, which_tree("a"))
    np.testing.assert_array_equal(alone["a"], means["a"])  # the other rules have no say in where it goes on
    np.testing.assert_array_equal(alone["standard"], means["standard"])
    other = run(verifiers.block, which_tree("a"))
    np.testing.assert_array_equal(other["a"][:, 0], means["a"][:, 0])
    assert (other["a"][:, 1:] != means["a"][:, 1:]).any()  # the first one has


def test_a_rule_that_is_not_valid_for_the_drafts_is_refused():
    rules = [verifiers.spectr, verifiers.recursive_rejection]
    drafter = two_model(DRAFT, tree=trees.independent_paths(2, 2))
    with pytest.raises(UsageError, match="recursive_rejection is not valid for drafts drawn with_replacement"):
        expected_tokens(rules, TARGET, drafter, [[0]], key=jax.random.key(0))


def test_at_temperature_zero_tokens_are_counted():
    """The target goes round 0, 1, 2; the draft stays at 2."""
    row = lambda *best: last_token_model(np.eye(3)[list(best)] * 0.8 + 0.2 / 3)
    means = expected_tokens(
        [verifiers.greedy], row(1, 2, 0), two_model(row(1, 2, 2), tree=trees.chain(3)), [[0], [1], [0, 2]],
        key=jax.random.key(0), passes=3, temperature=0.0,
    )  # fmt: skip
    assert means["greedy"].tolist() == [[3, 3, 3], [2, 3, 3], [1, 3, 3]]
