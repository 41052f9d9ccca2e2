"""Typical acceptance: golden thresholds, and the longest run against plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lossy import GOLDEN, longest_run, random_chains, typical_core

from specjax.numerics.sampling import draw
from specjax.trees import operations
from specjax.types import TokenTree
from specjax.verifiers.lossy.typical import _log_threshold, typical

pytestmark = pytest.mark.usefixtures("quick_compilation")


@jax.jit
def _typical_on_each_token(p, epsilon, delta):
    tokens = jnp.stack([jnp.zeros(8, jnp.int32), jnp.arange(8)], 1)
    logits = jnp.log(jnp.broadcast_to(p, (8, 2, 8)))
    tree = operations.chain(tokens, jnp.ones((8, 2), bool))
    end = typical_core(jnp.zeros((8, 2)), tree, logits, epsilon=epsilon, delta=delta)
    return end.num_nodes == 2, jnp.exp(_log_threshold(logits[0, 0], epsilon, delta))


def accepted_tokens(p, epsilon=0.09, delta=0.3):
    """Return which tokens are accepted as the only draft below a node with the distribution p, and the threshold."""
    accepted, threshold = _typical_on_each_token(jnp.array([*p, *[0.0] * (8 - len(p))]), epsilon, delta)
    return np.flatnonzero(accepted).tolist(), float(threshold)


def test_typical_threshold_and_accepted_tokens_are_golden():
    flat = GOLDEN["medusa_typical_flat8"]
    flat |= {"p": [flat["p_token"]] * 8, "accepted_tokens": list(range(8)), "entropy_nats": np.log(8)}
    for case in (GOLDEN["medusa_typical"], GOLDEN["medusa_typical_peaked"], flat):
        accepted, threshold = accepted_tokens(case["p"])
        assert accepted == case["accepted_tokens"]
        np.testing.assert_allclose(threshold, case["threshold"], atol=1e-6)
        np.testing.assert_allclose(-np.log(accepted_tokens(case["p"], 1.0, 1.0)[1]), case["entropy_nats"], atol=1e-6)
    assert accepted_tokens([0.0, 1.0, 0.0]) == ([1], pytest.approx(0.09))  # greedy
    assert accepted_tokens([0.5, 0.5], 0.5, 9.0)[0] == []  # strict
    assert accepted_tokens([0.5, 0.5], 0.49, 9.0)[0] == [0, 1]


def test_typical_draws_the_next_token_from_p_with_the_key_of_the_last_node():
    u, tree, logits = random_chains()
    keys = jax.random.split(jax.random.key(5), tree.tokens.shape)
    verify = jax.jit(typical(0.2, 0.4))
    verdict = verify(keys, tree, logits)
    rows, last = np.arange(len(u)), np.asarray(verdict.num_nodes) - 1
    np.testing.assert_array_equal(verdict.next_token, jax.jit(draw)(keys[rows, last], logits[rows, last]))
    again = verify(jax.random.split(jax.random.key(6), tree.tokens.shape), tree, logits)
    np.testing.assert_array_equal(verdict.path, again.path)  # acceptance is deterministic
    assert (verdict.next_token != again.next_token).any()
    assert typical(0.2, 0.4) is typical(0.2, 0.4) and typical() is not typical(0.2, 0.4)


def test_longest_run_equals_plain_python():
    rng = np.random.default_rng(0)
    batch, n = 256, 9
    parents = np.array([[-1] + [rng.integers(0, i) for i in range(1, n)] for _ in range(batch)], np.int32)
    valid, passes = rng.uniform(size=(2, batch, n)) < 0.8
    valid[:, 0], passes[:, 0] = True, rng.uniform(size=batch) < 0.5  # the root's own entry is not read
    for b, i in np.ndindex(batch, n):
        valid[b, i] &= i == 0 or valid[b, parents[b, i]]
    log_p = -rng.integers(1, 4, (batch, n)).astype(np.float32)  # ties
    log_p[:, 0], log_p[rng.uniform(size=(batch, n)) < 0.1] = 0, -np.inf
    log_p[:, 0] = 0
    tree = TokenTree(jnp.zeros((batch, n), jnp.int32), jnp.asarray(parents), jnp.asarray(valid))
    path, num_nodes, last = jax.device_get(longest_run(tree, passes, log_p))
    for b in range(batch):
        runs = {0: ([0], 0.0)}
        for i in range(1, n):
            if parents[b, i] in runs and valid[b, i] and passes[b, i]:
                ancestors, total = runs[parents[b, i]]
                runs[i] = ([*ancestors, i], total + log_p[b, i])
        best = max(runs.values(), key=lambda run: (len(run[0]), run[1]))[0]  # the first of equals
        assert path[b].tolist() == best + [-1] * (n - len(best))
        assert int(num_nodes[b]) == len(best) and int(last[b]) == best[-1]
