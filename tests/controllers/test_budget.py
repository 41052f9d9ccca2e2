"""The budget of a batch from past confidences: the joint law of two rows, the rule, and the temperatures."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heads import tiny_head
from toy import tiny_llama

from specjax import UsageError, controllers, decode, make_drafter
from specjax.controllers.budget import BINS, GRID, budget, init_scaling, scale, update_scaling
from specjax.drafters import autoregressive, two_model
from specjax.trees import stops
from specjax.types import Info

V = 2
COSTS = (1.0, 1.45, 1.7)
CHAIN = budget((0, 1, 2), costs=COSTS, smoothing=1.0, own_after=1, margin=1.0, scales=False)


def start_of(rows):
    """Return the state of rows that draft two tokens next."""
    return CHAIN.init(rows)._replace(depth=jnp.int32(2))


def info_of(confidence, accepted, depth):
    """Return a step of rows with confidences float32[B, D] that drafted `depth` tokens and accepted int32[B]."""
    zero = jnp.zeros_like(accepted)
    drafted = jnp.broadcast_to(jnp.asarray(depth, jnp.int32), accepted.shape)
    return Info(
        zero[:, None], accepted + 1, accepted, drafted, drafted, zero == 0, zero > 0, confidence=jnp.asarray(confidence)
    )  # fmt: skip


@jax.jit
@jax.vmap
def next_limits(confidence, accepted, depth):
    """Return the limits int32[S, R] after a first step, for confidences float32[S, R, 2] and accepted int32[S, R]."""
    return CHAIN.limit(CHAIN.update(start_of(confidence.shape[0]), info_of(confidence, accepted, depth)))


def blocks(token, limit, p, q):
    """Return (probability, drafted tokens, emitted tokens) of all outcomes of a step after `token`.

    Two tokens are always drafted, and the first `limit` of them are verified by the standard rule.
    """
    outcomes = []
    for x in itertools.product(range(V), repeat=2):
        weight, last = q[token, x[0]] * q[x[0], x[1]], token
        for depth in range(limit + 1):
            if depth == limit:
                outcomes += [(weight * p[last, y], x, (*x[:depth], y)) for y in range(V)]
                break
            accept = min(1, p[last, x[depth]] / q[last, x[depth]])
            left = np.maximum(p[last] - q[last], 0)
            if accept < 1:
                outcomes += [(weight * (1 - accept) * left[y] / left.sum(), x, (*x[:depth], y)) for y in range(V)]
            weight, last = weight * accept, x[depth]
    return outcomes


def law_of(text, limit, p, q, length):
    """Return the law float64[V] * length of a text that starts with `text`, after a second step with this limit."""
    law = np.zeros((V,) * length)

    def extend(tokens, weight):
        if len(tokens) >= length:
            law[tuple(tokens[:length])] += weight
            return
        for y in range(V):
            extend((*tokens, y), weight * p[tokens[-1], y])

    if len(text) >= length:
        extend(text, 1.0)
        return law
    for weight, _, emitted in blocks(text[-1], limit, p, q):
        extend((*text, *emitted), weight)
    return law


def confidences(chance, x):
    """Return float32[R, 2]: the confidences in two drafted tokens of each row, the second after the first one."""
    return np.array([(row[0], row[1 + tokens[0]]) for row, tokens in zip(chance, x, strict=True)], np.float32)


def joint_error(looks_ahead, cases=25):
    """Return the largest error of the joint law of three tokens of two rows, and the limits that occur.

    looks_ahead: choose the first limit by the confidences of the draft that it limits, which is the mutant.
    """
    rng, worst, limits_seen = np.random.default_rng(3), 0.0, set()
    for _ in range(cases):
        p, q = (rng.dirichlet(np.ones(V), (2, V)) for _ in range(2))
        chance = rng.uniform(0, 1, (2, 1 + V))  # of the first token, and of the second after each first one
        first = int(CHAIN.limit(start_of(2))[0])
        drafts = list(itertools.product(itertools.product(range(V), repeat=2), repeat=2))
        ahead = {}
        if looks_ahead:
            confidence = np.array([confidences(chance, x) for x in drafts])
            none = np.zeros((len(drafts), 2), np.int32)
            ahead = dict(zip(drafts, np.asarray(next_limits(confidence, none, none[:, 0] + 2)), strict=True))
        outcomes = []
        for x in drafts:
            limit = int(ahead[x][0]) if looks_ahead else first
            rows = [[o for o in blocks(0, limit, p[r], q[r]) if o[1] == x[r]] for r in range(2)]
            outcomes += [(x, limit, a, b) for a, b in itertools.product(*rows)]
        confidence = np.array([confidences(chance, x) for x, *_ in outcomes])
        accepted = np.array([(len(a[2]) - 1, len(b[2]) - 1) for _, _, a, b in outcomes], np.int32)
        limits = np.asarray(next_limits(confidence, accepted, np.array([o[1] for o in outcomes])))
        law = 0.0
        for (_, _, a, b), (limit, _) in zip(outcomes, limits, strict=True):
            second = [law_of(o[2], int(limit), p[r], q[r], 3) for r, o in enumerate((a, b))]
            law = law + a[0] * b[0] * np.einsum("abc,def->abcdef", *second)
            limits_seen.add(int(limit))
        plain = [np.einsum("a,ab,bc->abc", p[r][0], p[r], p[r]) for r in range(2)]
        worst = max(worst, np.abs(law - np.einsum("abc,def->abcdef", *plain)).max())
    return worst, limits_seen


def test_the_joint_text_of_two_rows_is_unchanged():
    error, limits = joint_error(looks_ahead=False)
    assert error < 1e-12 and limits == {0, 1, 2}


def test_a_budget_from_the_confidences_of_the_same_draft_is_caught():
    assert joint_error(looks_ahead=True)[0] > 0.05


def test_the_depth_is_the_best_for_past_confidences():
    """The budget is compared with all depths, for rows with steady confidences."""
    rng, depths_chosen = np.random.default_rng(0), set()
    for _ in range(20):
        costs = tuple(float(x) for x in np.cumsum([1, *rng.uniform(0, 0.9, 4)]))
        chance = rng.uniform(0.1, 0.98, (3, 4)).astype(np.float32)
        controller = budget((0, 1, 2, 3, 4), costs=costs, smoothing=1.0, own_after=1, margin=1.0, scales=False)
        state = controller.update(controller.init(3), info_of(chance, jnp.zeros(3, jnp.int32), 4))
        tokens = 3 + np.concatenate([[0], np.cumsum(np.cumprod(chance, 1).sum(0))])
        assert int(state.depth) == int(np.argmax(tokens / np.asarray(costs)))
        depths_chosen.add(int(state.depth))
    assert len(depths_chosen) > 2


def drawn(chance, rounds, seed=0):
    """Return how many tokens int32[rounds, B] are accepted if token j is with probability `chance` [rounds, B, K]."""
    right = np.random.default_rng(seed).uniform(size=chance.shape) < chance
    return np.cumprod(right, 2).sum(2).astype(np.int32)


@pytest.mark.parametrize(("temperature", "low", "high"), [(1.0, 0.75, 1.35), (2.0, 1.5, 2.7), (0.5, 0.35, 0.71)])
def test_temperatures_calibrate_the_confidences(temperature, low, high):
    """The true logit of a token is that of its confidence divided by the temperature."""
    rounds, batch, size = 60, 32, 2
    z = np.random.default_rng(1).normal(0.5, 1.5, (rounds, batch, size))
    accepted = drawn(1 / (1 + np.exp(-z / temperature)), rounds)
    step = jax.jit(lambda state, c, a: update_scaling(state, c, a, jnp.ones(c.shape, bool)))
    state = init_scaling(size)
    for c, a in zip((1 / (1 + np.exp(-z))).astype(np.float32), accepted, strict=True):
        state = step(state, jnp.asarray(c), jnp.asarray(a))
    assert all(low <= t <= high for t in np.asarray(state.temperatures).tolist()), state.temperatures
    order = np.asarray(scale(state, jnp.linspace(0.01, 0.99, 50)[:, None] * jnp.ones(size)))
    assert (np.diff(order, axis=0) > 0).all()  # the order of confidences is unchanged


def test_nothing_is_scaled_without_outcomes():
    state = init_scaling(3)
    assert state.gaps.shape == (3, len(GRID), BINS) and state.temperatures.tolist() == [1.0] * 3
    depths_chosen = jnp.zeros((2, 3), bool)
    same = update_scaling(state, jnp.full((2, 3), 0.9), jnp.zeros(2, jnp.int32), depths_chosen)
    assert same.temperatures.tolist() == [1.0] * 3


@pytest.mark.parametrize("stop", [None, stops.budget()])
def test_texts_of_a_confident_head_are_unchanged(stop):
    target = tiny_llama()
    drafter = make_drafter("dspark", target, tiny_head("dspark", target), stop=stop, keep_confidence=True)
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6]]
    plain = decode(target, autoregressive(), prompts, key=0, max_new_tokens=16)
    result = decode(target, drafter, prompts, key=0, max_new_tokens=16, controller=controllers.parse("budget"))
    assert result.to_lists() == plain.to_lists()


@pytest.mark.parametrize(("spec", "deepest"), [("budget", 7), ("budget:12", 12)])
def test_the_deepest_chain_is_that_of_the_text(spec, deepest):
    controller = controllers.parse(spec, costs=(1.0,) * (deepest + 1))
    state = controller.update(controller.init(2), info_of(jnp.full((2, 16), 0.99), jnp.zeros(2, jnp.int32), 16))
    assert int(state.depth) == deepest


def test_drafters_without_confidence_are_refused():
    target = tiny_llama()
    head = make_drafter("dspark", target, tiny_head("dspark", target))
    for drafter in (two_model(target, 2), head):
        with pytest.raises(UsageError, match="the controller budget reads the trained confidence"):
            decode(target, drafter, [[1, 2]], key=0, max_new_tokens=3, controller=budget())
    with pytest.raises(UsageError, match="keep_confidence need a head with a trained confidence"):
        eagle = make_drafter("eagle", target, tiny_head("eagle", target), keep_confidence=True)
        decode(target, eagle, [[1, 2]], key=0, max_new_tokens=3)


def test_a_depth_that_no_chain_has_is_refused():
    """The controller has an entry for each depth, so a large one would exhaust the memory."""
    with pytest.raises(UsageError, match=r'"budget:999999999" is not a controller; .* N of at most 3 digits'):
        controllers.parse("budget:999999999")
