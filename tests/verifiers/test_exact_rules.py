"""The rule against enumeration: joint law of several tokens, golden values, and mutants that must be caught."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import block_law, without_replacement
from toy import DRAFT_ROWS, MARKOV, ONE_STEP, TARGET_ROWS, joint_law

from specjax import tree as trees
from specjax.types import TokenTree
from specjax.verifiers.speculative_sampling import descend, speculative_sampling

module = importlib.import_module("specjax.verifiers.speculative_sampling")  # the package names the function

SHAPES = {
    "chain_sd_L2": (1, 1),
    "chain_sd_L3": (1, 1, 1),
    "rsd_c_2_1": (2, 1),
    "rsd_c_2_2": (2, 2),
    "rsd_c_3_3": (3, 3),
}


def template(branching):
    paths, level = [], [()]
    for width in branching:
        level = [(*path, rank) for path in level for rank in range(width)]
        paths += level
    return trees.Template(paths)


def law_of(core, name):
    """(largest error of the joint law, law of the number accepted) of a rule on a golden tree."""
    branching = SHAPES[name]
    drafts, weights = without_replacement(DRAFT_ROWS, 0, template(branching))
    law, accepted = block_law(core, drafts, weights, TARGET_ROWS, len(branching))
    return np.abs(law - joint_law(TARGET_ROWS, 0, len(branching) + 1)).max(), accepted


@pytest.mark.parametrize("name", ["chain_sd_L2", "chain_sd_L3", "rsd_c_2_1", "rsd_c_2_2"])
def test_joint_law_is_the_targets_and_matches_the_golden_table(name):
    error, accepted = law_of(descend, name)
    golden = MARKOV[name]
    assert error < 1e-6
    expected = [golden["accepted_length_pmf"].get(str(i), 0.0) for i in range(len(accepted))]
    np.testing.assert_allclose(accepted, expected, atol=2e-6)
    tokens = (accepted * (1 + np.arange(len(accepted)))).sum()
    np.testing.assert_allclose(tokens, golden["expected_tokens_per_iteration"], atol=5e-6)


def mutant_skipped_residual(u, tree, logits):
    """After a rejection the next token is drawn from p, not from the residual."""
    end = descend(u, tree, logits)
    return end._replace(residual=jax.nn.softmax(jnp.take_along_axis(logits, end.node[:, None, None], 1)[:, 0], -1))


def mutant_sorted_siblings(u, tree, logits):
    """Tests siblings in order of q instead of draft order."""
    q = jnp.take_along_axis(
        jnp.take_along_axis(tree.logits, jnp.maximum(tree.parents, 0)[:, :, None], 1), tree.tokens[:, :, None], 2
    )[:, :, 0]
    swap = (tree.parents[:, 1] == tree.parents[:, 2]) & (q[:, 2] > q[:, 1])
    order = jnp.where(swap[:, None], jnp.array([0, 2, 1, 5, 6, 3, 4]), jnp.arange(7))
    take = lambda x: jnp.take_along_axis(x, order.reshape(order.shape + (1,) * (x.ndim - 2)), 1)
    place = jnp.argsort(order, 1)
    parents = take(tree.parents)
    parents = jnp.where(parents < 0, -1, jnp.take_along_axis(place, jnp.maximum(parents, 0), 1))
    end = descend(u, TokenTree(take(tree.tokens), parents, take(tree.valid), take(tree.logits)), take(logits))
    path = jnp.where(end.path >= 0, jnp.take_along_axis(order, jnp.maximum(end.path, 0), 1), -1)
    return end._replace(path=path)


def mutant_replaced_q(u, tree, logits):
    """Believes that the draft was drawn at temperature 2."""
    return descend(u, tree._replace(logits=tree.logits / 2), logits)


def mutant_with_replacement(u, tree, logits):
    """Forgets that a rejected sibling cannot be drawn again."""

    def keep(x, fallback):
        return jnp.where((x == 0).any(-1, keepdims=True) & (fallback is x), x, original(x, fallback))

    original = module._normalise
    module._normalise = lambda x, fallback: x if fallback is x else original(x, fallback)
    try:
        return descend(u, tree, logits)
    finally:
        module._normalise = original


@pytest.mark.parametrize(
    ("mutant", "name", "least_error"),
    [
        (mutant_skipped_residual, "chain_sd_L2", 0.02),  # seen 0.06
        (mutant_sorted_siblings, "rsd_c_2_2", 0.02),  # the card says 0.054
        (mutant_replaced_q, "rsd_c_2_2", 0.005),
        (mutant_with_replacement, "rsd_c_2_2", 0.002),
    ],
)
def test_enumeration_catches_mutants(mutant, name, least_error):
    error, _ = law_of(mutant, name)
    assert error > least_error, error


def test_dropping_weak_drawn_siblings_is_caught():
    """valid must not depend on the token drawn: dropping drawn siblings with q < 0.25 biases the law (card: 0.039)."""
    drafts, weights = without_replacement(DRAFT_ROWS, 0, template((2, 2)))
    q = np.exp(np.asarray(drafts.logits))
    tokens, parents = np.asarray(drafts.tokens), np.asarray(drafts.parents)
    rows = np.arange(len(tokens))[:, None]
    keep = q[rows, np.maximum(parents, 0), tokens] >= 0.25
    keep[:, 0] = True
    keep[:, 3:] &= np.take_along_axis(keep, parents[:, 3:], 1)
    law, _ = block_law(descend, drafts._replace(valid=jnp.asarray(keep)), weights, TARGET_ROWS, 2)
    assert np.abs(law - joint_law(TARGET_ROWS, 0, 3)).max() > 0.02


@pytest.mark.parametrize(
    ("case", "children"), [("multi_draft", 1), ("multi_draft", 2), ("multi_draft", 3), ("multi_draft_hard", 2)]
)
def test_one_step_acceptance_is_golden(case, children):
    if case == "multi_draft":
        p, q = ONE_STEP["p"], ONE_STEP["q"]
        golden = 0.75 if children == 1 else ONE_STEP[case][f"n={children}"]["rrs_without_replacement"]["accept_test"]
    else:
        p, q = ONE_STEP[case]["p"], ONE_STEP[case]["q"]
        golden = ONE_STEP[case][f"n={children}"]["rrs_without"]
    vocab = len(p)
    target, draft = (np.tile(np.array(x, np.float32), (vocab, 1)) for x in (p, q))
    drafts, weights = without_replacement(draft, 0, template((children,)))
    law, accepted = block_law(descend, drafts, weights, target, 1)
    np.testing.assert_allclose(accepted[1], golden, atol=2e-6)
    np.testing.assert_allclose(law, joint_law(target, 0, 2), atol=1e-6)


def test_children_that_cover_the_vocabulary_are_always_accepted():
    drafts, _ = without_replacement(DRAFT_ROWS, 0, template((3, 3)))
    u = jax.random.uniform(jax.random.key(0), drafts.tokens.shape)
    end = descend(u, drafts, jnp.log(jnp.asarray(TARGET_ROWS))[drafts.tokens])
    assert int(end.num_nodes.min()) == 3


def one_token(p, q, token, u):
    tree = trees.chain(jnp.array([[0, token]]), jnp.ones((1, 2), bool), jnp.log(jnp.array([[q, q]], jnp.float32)))
    return descend(jnp.array([[0.0, u]]), tree, jnp.log(jnp.array([[p, p]], jnp.float32)))


def test_edges():
    same = one_token([0.5, 0.5], [0.5, 0.5], 0, 0.999999)  # q = p: always accepted
    assert int(same.num_nodes[0]) == 2
    apart = one_token([1.0, 0.0], [0.0, 1.0], 1, 0.0)  # p(x) = 0 is rejected even at u = 0
    assert int(apart.num_nodes[0]) == 1
    np.testing.assert_allclose(apart.residual[0], [1.0, 0.0])
    bug = one_token([0.5, 0.5], [1.0, 0.0], 1, 0.0)  # q(x) = 0: rejected, p untouched
    assert int(bug.num_nodes[0]) == 1
    np.testing.assert_allclose(bug.residual[0], [0.5, 0.5])


def test_residual_is_golden():
    end = one_token(ONE_STEP["p"], ONE_STEP["q"], 1, 0.99)
    np.testing.assert_allclose(end.residual[0], ONE_STEP["sd_residual"], atol=1e-6)


def test_permuting_the_vocabulary_permutes_the_verdict():
    rng = np.random.default_rng(0)
    p, q = rng.normal(size=(2, 1, 3, 8)).astype(np.float32)
    permutation = rng.permutation(8)
    inverse = np.argsort(permutation)
    tokens = np.array([[1, 5, 2]], np.int32)
    u = jnp.asarray(rng.uniform(size=(1, 3)), jnp.float32)
    plain = descend(u, trees.chain(jnp.asarray(tokens), jnp.ones((1, 3), bool), jnp.asarray(q)), jnp.asarray(p))
    moved_tree = trees.chain(jnp.asarray(inverse[tokens]), jnp.ones((1, 3), bool), jnp.asarray(q[..., permutation]))
    moved = descend(u, moved_tree, jnp.asarray(p[..., permutation]))
    np.testing.assert_array_equal(plain.path, moved.path)
    np.testing.assert_allclose(np.asarray(plain.residual)[..., permutation], moved.residual, atol=1e-6)


def test_point_mass_trees_are_refused():
    tree = trees.chain(jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool))
    with pytest.raises(ValueError, match="sample_and_match"):
        speculative_sampling(jax.random.split(jax.random.key(0), (1, 2)), tree, jnp.zeros((1, 2, 4)))
