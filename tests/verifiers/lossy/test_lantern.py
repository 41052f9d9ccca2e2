"""LANTERN: golden values, plain Python, and what it lends."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lossy import (
    GOLDEN,
    NEAREST,
    NEIGHBOURS6,
    P5,
    Q5,
    lantern_core,
    one_step,
    random_chains,
    surrogate,
    tv,
)

from specjax import UsageError
from specjax.types import TokenTree
from specjax.verifiers import greedy, nearest_codes
from specjax.verifiers.lossy import lantern as lossy_lantern
from specjax.verifiers.lossy.lantern import core, lantern

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize(("k", "delta"), [(0, 0.0), (2, 0.25), (4, 0.45)])
def test_lantern_is_golden(k, delta):
    case = GOLDEN["lantern"][f"k={k},delta={delta}"]
    accept, output = one_step(lambda *x: lantern_core(*x, NEAREST[:, :k], delta), P5, Q5)
    np.testing.assert_allclose(accept, case["accept_prob_per_token"], atol=2e-6)
    np.testing.assert_allclose(accept @ Q5, case["acceptance"], atol=2e-6)
    np.testing.assert_allclose(output, case["output"], atol=2e-6)
    np.testing.assert_allclose(tv(output, P5), case["tv_to_target"], atol=2e-6)
    p = jnp.tile(jnp.asarray(P5, jnp.float32), (5, 1))
    lent = surrogate(p, jnp.arange(5), jnp.asarray(NEAREST[:, :k]), delta, 0.0, 0)
    for x, used in enumerate(case["neighbourhood_used"]):
        assert np.flatnonzero(lent[x] == 0).tolist() == sorted(used)
        np.testing.assert_allclose(lent[x, x], P5[x] + P5[used].sum(), atol=1e-6)
        assert tv(np.asarray(lent[x]), P5) <= delta + 1e-6


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, 2.0, 4.0])
def test_lantern_relative_bound_equals_plain_python(share):
    """LANTERN++: the neighbours may add at most (lambda - 1) p(x)."""
    lent = surrogate(jnp.tile(jnp.asarray(P5, jnp.float32), (5, 1)), jnp.arange(5), jnp.asarray(NEAREST), 0.0, share, 0)
    expected = np.tile(P5, (5, 1))
    for x in range(5):
        total = 0.0
        for y in NEAREST[x]:
            total += P5[y]
            if total > share * P5[x]:
                break
            expected[x, x], expected[x, y] = expected[x, x] + P5[y], 0.0
    np.testing.assert_allclose(lent, expected, atol=1e-6)


def test_lantern_relative_arguments():
    assert [float(x) for x in lantern(NEAREST, 3.0, relative=True).params[1:3]] == [0.0, 2.0]
    assert float(lantern(NEAREST, 0.25).params[1]) == 0.25
    with pytest.raises(UsageError, match="at least 1"):
        lantern(NEAREST, 0.1, relative=True)


def test_lantern_accepts_more_the_larger_delta_and_all_at_one():
    u, tree, logits = random_chains()
    core = jax.jit(lambda delta: lantern_core(u, tree, logits, NEIGHBOURS6, delta).num_nodes)
    lengths = [np.asarray(core(delta)) for delta in (0.0, 0.05, 0.15, 0.3, 0.5, 0.8, 1.0)]
    for low, high in itertools.pairwise(lengths):
        assert (high >= low).all() and (high > low).any()
    np.testing.assert_array_equal(lengths[-1], tree.valid.sum(1))


def test_lantern_point_masses_take_out_the_token_and_what_it_borrowed():
    """The one-hot setting of EAGLE-2: token 0 (p .3) borrows from 1 (.22); rejected, both are gone."""
    tree = TokenTree(jnp.array([[2, 0, 1, 3]]), jnp.array([[-1, 0, 0, 0]]), jnp.ones((1, 4), bool))
    logits = jnp.log(jnp.asarray(P5, jnp.float32))[None, None].repeat(4, 1)
    core = jax.jit(lambda u: lantern_core(u, tree, logits, NEAREST, 0.25))
    run = lambda *u: core(jnp.array([[0.0, *u]]))
    assert run(0.5, 1.0, 1.0).path[0, :2].tolist() == [0, 1]  # 0.5 < 0.3 + 0.22
    residual = np.array([0, 0, 0.2, 0.16, 0.12]) / 0.48
    end = run(0.53, 0.0, 0.99)  # token 1 has nothing left: rejected at u = 0. Then 3 borrows from 4: no more than 0.25
    assert end.num_nodes[0] == 1
    np.testing.assert_allclose(
        end.residual[0], np.array([0, 0, residual[2], 0, residual[4]]) / (residual[2] + residual[4]), atol=1e-6
    )
    assert run(0.53, 0.0, 0.3).path[0, :2].tolist() == [0, 3]  # 0.3 < 0.16 / 0.48


def test_lantern_offset_shifts_the_table():
    p = jnp.tile(jnp.array([0.1, 0.1, *(P5 * 0.8)], jnp.float32), (7, 1))
    lent = surrogate(p, jnp.arange(7), jnp.asarray(NEAREST[:, :2]), 0.25, 0.0, 2)
    within = surrogate(p[:5, 2:], jnp.arange(5), jnp.asarray(NEAREST[:, :2]), 0.25, 0.0, 0)
    np.testing.assert_array_equal(lent[:2], p[:2])  # tokens without a row borrow nothing
    np.testing.assert_array_equal(lent[2:, 2:], within)
    np.testing.assert_array_equal(lent[2:, :2], p[2:, :2])
    assert (within != p[:5, 2:]).any()


@pytest.mark.parametrize("relative", [False, True])
def test_greedy_lantern_equals_plain_python(relative):
    """x is accepted while it is the argmax of p^x, and then argmax p follows; with the golden table's P5 and others."""
    _, tree, logits = random_chains(seed=5)
    delta = 2.0 if relative else 0.3
    params = lantern(NEIGHBOURS6, delta, relative=relative, sample=False).params
    u = jnp.zeros(tree.tokens.shape)
    end = jax.device_get(jax.jit(core, static_argnames="sample")(u, tree, logits, *params, sample=False))
    p = np.asarray(jax.nn.softmax(logits, -1), np.float64)
    tokens, valid = np.asarray(tree.tokens), np.asarray(tree.valid)
    for row in range(len(tokens)):
        count = 1
        while count < tokens.shape[1] and valid[row, count]:
            law, x = p[row, count - 1], tokens[row, count]
            lent, total = law.copy(), 0.0
            for y in np.asarray(NEIGHBOURS6)[x]:
                total += law[y]
                if total > ((delta - 1) * law[x] if relative else delta):
                    break
                lent[x], lent[y] = lent[x] + law[y], 0
            if lent.argmax() != x:
                break
            count += 1
        assert end.num_nodes[row] == count and end.residual[row].argmax() == p[row, count - 1].argmax()
    exact = core(u, tree, logits, *lantern(NEIGHBOURS6, 0.0, sample=False).params, sample=False)
    greedy_count = jax.device_get(greedy(jax.random.split(jax.random.key(0), len(tokens)), tree, logits)).num_nodes
    np.testing.assert_array_equal(exact.num_nodes, greedy_count)
    assert (end.num_nodes >= greedy_count).all() and (end.num_nodes > greedy_count).any()


def test_nearest_codes(monkeypatch):
    """Codes with one vector are neighbours of each other at distance 0, and no code is its own."""
    monkeypatch.setattr(lossy_lantern, "BLOCK", 3)
    codebook = np.random.default_rng(0).normal(size=(11, 4))
    codebook[7] = codebook[2]
    near = nearest_codes(codebook, 10)
    distance = np.sum((codebook[:, None] - codebook) ** 2, -1)
    assert near[2, 0] == 7 and near[7, 0] == 2
    assert (np.sort(np.column_stack([near, np.arange(11)]), 1) == np.arange(11)).all()
    assert (np.diff(np.take_along_axis(distance, near, 1), axis=1) >= -1e-6).all()
    with pytest.raises(UsageError, match="count is 11, but a code has only 10 neighbours; lower it"):
        nearest_codes(codebook, 11)
    with pytest.raises(UsageError, match=r"the shape \[4\], which must be"):
        nearest_codes(codebook[0], 2)
