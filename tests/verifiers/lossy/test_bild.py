"""BiLD: the golden trace, fallback and rollback."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import block_distribution, without_replacement
from lossy import GOLDEN, INF, fall_back, random_chains, rollback_core, standard_core
from toy import DRAFT_ROWS, TARGET_ROWS, joint_distribution, markov, template

from specjax import stream, trees
from specjax.drafters import two_model
from specjax.trees import operations
from specjax.types import TokenTree
from specjax.verifiers import rollback
from specjax.verifiers.verifier import distribution

pytestmark = pytest.mark.usefixtures("quick_compilation")


def bild_case():
    """The golden trace: distribution rows of the small model with the given maxima, and the large model's losses."""
    case = GOLDEN["bild"]
    row = lambda top: np.log([top, *[(1 - top) / 2] * 2])
    tokens = jnp.zeros((1, 4), jnp.int32)
    small = jnp.asarray(np.stack([row(x) for x in (*case["small_argmax_prob"], 0.9)]), jnp.float32)[None]
    large = jnp.asarray(np.stack([row(np.exp(-x)) for x in (*case["nll_large_of_small_tokens"], 0.2, 0.2)]))[None]
    return case, operations.chain(tokens, jnp.ones((1, 4), bool), small), large.at[:, 1, 2].add(1e-3)


def test_bild_trace_is_golden():
    case, tree, large = bild_case()
    fallback_tree = fall_back(tree, case["alpha_fb"])
    assert int(fallback_tree.valid.sum()) - 1 == case["fallback_before_token"]
    end = rollback_core(jnp.zeros((1, 4)), fallback_tree, large, alpha=case["alpha_rb"])
    assert int(end.num_nodes[0]) - 1 == case["rollback_index"] == case["kept_small_tokens"]
    np.testing.assert_array_equal(end.residual[0], [0, 0, 1])  # the large argmax
    sampled = rollback_core(jnp.zeros((1, 4)), fallback_tree, large, alpha=case["alpha_rb"], sample=True)
    np.testing.assert_allclose(sampled.residual[0], np.exp(large[0, 1]) / np.exp(large[0, 1]).sum(), atol=1e-6)
    late = rollback_core(jnp.zeros((1, 4)), fallback_tree, large, alpha=7.0)
    assert int(late.num_nodes[0]) == 3 and int(jnp.argmax(late.residual)) == 0  # cut by fallback, then one appended
    assert int(rollback_core(jnp.zeros((1, 4)), tree, large, alpha=7.0).num_nodes[0]) == 4


def test_fallback_ends():
    _, tree, _ = bild_case()
    np.testing.assert_array_equal(fall_back(tree, 0.0).valid, tree.valid)
    assert fall_back(tree, 1.01).valid.tolist() == [[True, False, False, False]]  # every token from the large model
    sure, unsure = [0.8, 0.2], [0.5, 0.5]
    distributions = jnp.array([[sure, unsure, sure, sure, unsure, sure]])
    branched = TokenTree(
        jnp.zeros((1, 6), jnp.int32), jnp.array([[-1, 0, 0, 1, 2, 3]]), jnp.ones((1, 6), bool), jnp.log(distributions)
    )
    assert fall_back(branched, 0.6).valid.tolist() == [[True, True, True, False, True, False]]


def test_fallback_keeps_an_exact_rule_exact():
    """It reads the distribution, never the token drawn."""
    rows = np.array([[0.7, 0.1, 0.2], [0.4, 0.4, 0.2], [0.2, 0.6, 0.2]], np.float32)
    drafts, weights = without_replacement(rows, 0, template((1, 1)))
    drafts = fall_back(drafts, 0.5)  # drafts nothing below token 1
    np.testing.assert_array_equal(drafts.valid[:, 2], drafts.tokens[:, 1] != 1)
    joint, accepted = block_distribution(standard_core, drafts, weights, TARGET_ROWS, 2)
    np.testing.assert_allclose(joint, joint_distribution(TARGET_ROWS, 0, 3), atol=1e-6)
    assert accepted[2] > 0.1


@pytest.mark.parametrize("branching", [(1, 1, 1), (2, 2)])
def test_rollback_below_ln2_is_greedy_for_any_draft(branching):
    rows = np.array([[0.51, 0.45, 0.04], [0.1, 0.3, 0.6], [0.05, 0.9, 0.05]], np.float32)
    drafts, _ = without_replacement(DRAFT_ROWS, 0, template(branching))
    logits = np.log(rows)[np.asarray(drafts.tokens)]
    end = jax.device_get(rollback_core(jnp.zeros(drafts.tokens.shape), drafts, logits, alpha=0.69))
    text = np.take_along_axis(np.asarray(drafts.tokens), np.maximum(end.path, 0), 1)
    for row, count, following in zip(text, end.num_nodes, end.residual.argmax(-1), strict=True):
        emitted = [*row[: int(count)].tolist(), int(following)]
        assert all(rows[a].argmax() == b for a, b in itertools.pairwise(emitted))
    depth = np.bincount(end.num_nodes, minlength=len(branching) + 2)
    assert (depth[1:] > 0).all()


def test_rollback_of_a_model_that_agrees_never_happens():
    u, tree, logits = random_chains()
    agreeing = jnp.concatenate([tree.tokens[:, :1], jnp.argmax(logits, -1)[:, :-1].astype(jnp.int32)], 1)
    same = operations.chain(agreeing, jnp.ones_like(tree.valid))
    worst = -float(jnp.log(distribution(logits).max(-1)).min())
    assert (rollback_core(u, same, logits, alpha=worst + 1e-5).num_nodes == 5).all()
    assert (rollback_core(u, same, logits, alpha=worst / 2).num_nodes < 5).any()
    zero = logits.at[:, 1].set(jnp.where(jnp.arange(6) == tree.tokens[:, 2, None], -jnp.inf, logits[:, 1]))
    end = rollback_core(u, tree, zero, alpha=INF)  # also what the target could never draw
    np.testing.assert_array_equal(end.num_nodes, tree.valid.sum(1))


def test_keep_argmax_keeps_what_the_target_would_have_said():
    u, tree, logits = random_chains()
    agreeing = jnp.concatenate([tree.tokens[:, :1], jnp.argmax(logits, -1)[:, :-1].astype(jnp.int32)], 1)
    same = operations.chain(agreeing, jnp.ones_like(tree.valid))
    assert (rollback_core(u, same, logits, alpha=0.0).num_nodes < 5).all()
    assert (rollback_core(u, same, logits, alpha=0.0, keep_argmax=True).num_nodes == 5).all()
    other = same._replace(tokens=same.tokens.at[:, 2].set(jnp.argmin(logits[:, 1], -1)))
    assert (rollback_core(u, other, logits, alpha=0.0, keep_argmax=True).num_nodes == 2).all()


def test_the_published_setting_drafts_greedily_and_falls_back():
    """On the toy: token 0's best follower has 0.4 of the draft's mass, those of 1 and 2 have 0.4 and 0.6."""
    drafter = two_model(markov(DRAFT_ROWS), tree=trees.bild(3, fallback=0.5))
    step = next(
        stream(markov(), drafter, [[0], [2]], key=jax.random.key(0), max_new_tokens=9, temperature=1.0,
               verifier=rollback())
    )  # fmt: skip
    assert trees.bild() is trees.parse("bild:10") and trees.parse("bild:3,fallback=.5") is trees.bild(3, 0.5)
    assert trees.bild().max_depth == 10 and trees.bild().draws == "point_mass"
    assert step.accepted.tolist() == [0, 1]  # below 2 the likeliest, 1, below which it is not sure
    assert [tokens[0] for tokens in step.tokens] == [int(TARGET_ROWS[0].argmax()), 1]
