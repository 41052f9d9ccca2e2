"""Top-beta acceptance: the card's cases, ranks against a sort, and its two ends."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import without_replacement
from lossy import INF, output_tv, random_chains, top_beta_core
from toy import DRAFT_ROWS, TARGET_ROWS, template

from specjax import UsageError
from specjax.trees import operations
from specjax.verifiers.lossy.top_beta import rank_and_gap, top_beta

pytestmark = pytest.mark.usefixtures("quick_compilation")


@jax.jit
def _on_each_token(log_p, beta, tau):
    n = len(log_p)
    tree = operations.chain(jnp.stack([jnp.zeros(n, jnp.int32), jnp.arange(n)], 1), jnp.ones((n, 2), bool))
    return top_beta_core(jnp.zeros((n, 2)), tree, jnp.broadcast_to(log_p, (n, 2, n)), beta=beta, tau=tau)


def accepted_tokens(log_p, beta, tau):
    """Return which tokens are accepted as the only draft below a node with these log-probabilities."""
    return np.flatnonzero(_on_each_token(jnp.array(log_p), beta, tau).num_nodes == 2).tolist()


def test_the_cards_accepted_sets():
    log_p = [-0.1, -2.5, -4.0, -5.0]
    assert accepted_tokens(log_p, 3, 3.0) == [0, 1]
    assert accepted_tokens(log_p, 3, 3.95) == [0, 1, 2]
    assert accepted_tokens(log_p, 2, INF) == [0, 1]
    assert accepted_tokens(log_p, 1, INF) == [0]  # beta = 1: greedy
    assert accepted_tokens([-1.0, -0.5, -0.5, -2.0], 4, 0.0) == [1, 2]  # tau = 0: the argmax and its ties
    assert accepted_tokens([-1.0, -0.5, -0.5, -2.0], 1, INF) == [1, 2]  # no rank tells them apart
    assert accepted_tokens([-INF, -0.5, -INF, -1.0], 4, 9.0) == [1, 3]
    assert (_on_each_token(jnp.array(log_p), 3, 3.0).residual.argmax(-1) == 0).all()  # the target's best follows


def test_ranks_are_those_of_a_sort():
    _, tree, logits = random_chains(seed=4)
    rank, gap = jax.device_get(jax.jit(rank_and_gap)(logits, tree))
    logits, tokens = np.asarray(logits), np.asarray(tree.tokens)
    for b, i in np.ndindex(tokens.shape[0], tokens.shape[1] - 1):
        order = np.argsort(-logits[b, i], kind="stable").tolist()
        assert order.index(tokens[b, i + 1]) == rank[b, i + 1]
        assert gap[b, i + 1] == logits[b, i].max() - logits[b, i, tokens[b, i + 1]]


@pytest.mark.parametrize(("beta", "tau"), [(1, INF), (3, 0.0)])
@pytest.mark.parametrize("branching", [(1, 1, 1), (2, 2)])
def test_the_strict_ends_are_greedy_for_any_draft(beta, tau, branching):
    drafts, _ = without_replacement(DRAFT_ROWS, 0, template(branching))
    logits = np.log(TARGET_ROWS)[np.asarray(drafts.tokens)]
    end = jax.device_get(top_beta_core(jnp.zeros(drafts.tokens.shape), drafts, logits, beta=beta, tau=tau))
    text = np.take_along_axis(np.asarray(drafts.tokens), np.maximum(end.path, 0), 1)
    for row, count, following in zip(text, end.num_nodes, end.residual.argmax(-1), strict=True):
        emitted = [*row[: int(count)].tolist(), int(following)]
        assert all(TARGET_ROWS[a].argmax() == b for a, b in itertools.pairwise(emitted))
    assert len(np.unique(end.num_nodes)) > 1


def test_the_loose_end_keeps_the_draft():
    u, tree, logits = random_chains()
    logits = logits.at[:, 2, 3].set(-jnp.inf)
    np.testing.assert_array_equal(top_beta_core(u, tree, logits, beta=6, tau=INF).num_nodes, tree.valid.sum(1))
    tight = top_beta_core(u, tree, logits, beta=2, tau=1.0)
    np.testing.assert_array_less(tight.num_nodes - 1, tree.valid.sum(1))
    assert len(np.unique(tight.num_nodes)) == 5


def test_distance_from_the_target():
    """An argmax never has the distribution of p; between the ends the text is a mixture of two models."""
    distance, tokens = output_tv(lambda beta, *x: top_beta_core(*x, beta=beta, tau=INF), [1, 2, 3])
    np.testing.assert_allclose([distance, tokens], [[0.5, 0.331, 0.497], [1.39, 1.96, 3.0]], atol=2e-6)
    distance, tokens = output_tv(lambda tau, *x: top_beta_core(*x, beta=3, tau=tau), [0.0, 1.0, INF])
    np.testing.assert_allclose([distance, tokens], [[0.5, 0.464, 0.497], [1.39, 2.88, 3.0]], atol=2e-6)


def test_bad_settings():
    assert top_beta() is top_beta() and top_beta().guarantee == "lossy"
    with pytest.raises(UsageError, match="beta must be at least 1"):
        top_beta(0)
    with pytest.raises(UsageError, match="tau must be at least 0"):
        top_beta(5, -1.0)
