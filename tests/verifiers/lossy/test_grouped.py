"""Grouped speculative decoding: golden values, and its clusters against plain Python."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from lossy import (
    GOLDEN,
    INF,
    P5,
    Q5,
    grouped_core,
    one_step,
    random_chains,
    static_core,
    tv,
)

from specjax.verifiers.exact.standard import residual_of_chain
from specjax.verifiers.lossy.grouped import window
from specjax.verifiers.verifier import distribution

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("size", [0, 2, 4])
def test_grouped_is_golden(size):
    case = GOLDEN["gsd_dynamic"][f"G={size}"]
    accept, output = one_step(functools.partial(grouped_core, max_gap=INF, size=size), P5, Q5)
    np.testing.assert_allclose(accept, case["accept_prob"], atol=2e-6)
    np.testing.assert_allclose(accept @ Q5, case["acceptance"], atol=2e-6)
    np.testing.assert_allclose(output, case["output"], atol=2e-6)
    np.testing.assert_allclose(tv(output, P5), case["tv_to_target"], atol=2e-6)
    ids, member = window(jnp.log(jnp.asarray(P5, jnp.float32))[None, None].repeat(5, 1), jnp.arange(5)[None], size)
    clusters = [np.sort(np.asarray(i)[np.asarray(m)]).tolist() for i, m in zip(ids[0], member[0], strict=True)]
    assert clusters == case["clusters"]


def test_grouped_clusters_equal_plain_python():
    """The clusters agree with a gap and embedding distances, and with tokens without mass."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(8), 2)
    p[3] = 0
    p /= p.sum()
    embeddings = rng.normal(size=(8, 2))
    core = functools.partial(grouped_core, max_gap=0.12, embeddings=jnp.asarray(embeddings), max_distance=4.0, size=6)
    with np.errstate(divide="ignore"):
        accept, _ = one_step(core, p, q)
    order = np.argsort(-p, kind="stable").tolist()
    expected, plain = np.zeros(8), np.minimum(1, p / q)
    for x in range(8):
        i = order.index(x)
        cluster = [
            y
            for y in order[max(0, i - 3) : i + 4]
            if y == x
            or (p[y] > 0 < p[x] and abs(p[y] - p[x]) <= 0.12 and ((embeddings[y] - embeddings[x]) ** 2).sum() <= 4.0)
        ]
        expected[x] = min(1, p[cluster].sum() / q[cluster].sum())
    np.testing.assert_allclose(accept, expected, atol=2e-6)
    assert accept[3] == 0 and np.abs(expected - plain).max() > 0.05


def test_one_cluster_accepts_everything():
    u, tree, logits = random_chains()
    for core in (functools.partial(grouped_core, max_gap=INF, size=12),
                 functools.partial(static_core, clusters=jnp.full(6, 5))):  # fmt: skip
        end = core(u, tree, logits)
        np.testing.assert_array_equal(end.num_nodes, tree.valid.sum(1))
        np.testing.assert_allclose(end.residual, distribution(logits, end.node), atol=2e-6)


def test_fixed_clusters_keep_the_law_of_the_clusters():
    case = GOLDEN["gsd_static_partition"]
    clusters = jnp.array([3, 3, 1, 1, 1])
    core = functools.partial(static_core, clusters=clusters)

    def with_token_residual(u, tree, logits):
        """The residual of the dynamic rule, which does not keep it."""
        end = core(u, tree, logits)
        return end._replace(residual=residual_of_chain(tree, end.node, distribution(logits, end.node)))

    for rule, golden in ((core, case["cluster_residual"]), (with_token_residual, case["token_residual"])):
        accept, output = one_step(rule, P5, Q5)
        np.testing.assert_allclose(accept @ Q5, golden["acceptance"], atol=2e-6)
        np.testing.assert_allclose(output, golden["output"], atol=2e-6)
        mass = [output[c].sum() for c in case["clusters"]]
        np.testing.assert_allclose(mass, golden["cluster_mass_of_output"], atol=2e-6)
    accept, _ = one_step(functools.partial(static_core, clusters=jnp.arange(5)), P5, Q5)
    np.testing.assert_allclose(accept @ Q5, case["sd_acceptance"], atol=2e-6)


def test_fixed_clusters_accept_no_less_than_the_standard_rule_on_average():
    """1 - TV of the clusters >= 1 - TV of the tokens; a single token can be accepted less."""
    p, q = np.random.default_rng(0).dirichlet(np.ones(6), 2)
    clusters = np.array([2, 0, 1, 2, 1, 0])
    accept, _ = one_step(functools.partial(static_core, clusters=jnp.asarray(clusters)), p, q)
    mass = lambda x: np.bincount(clusters, x, 3)
    np.testing.assert_allclose(accept @ q, 1 - tv(mass(p), mass(q)), atol=2e-6)
    assert accept @ q > 1 - tv(p, q) + 1e-3
    assert (accept < np.minimum(1, p / q) - 1e-3).any()
