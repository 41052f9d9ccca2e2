"""Losses: values and gradients worked by hand, against differences, at their limits, and under masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import those

from specjax.training.objectives import losses
from specjax.training.objectives.losses import LOSSES

P, Q = np.array([0.5, 0.3, 0.2], np.float32), np.array([0.2, 0.5, 0.3], np.float32)
ONE = jnp.ones((1,))
VALUES = {
    "ce": 1.609438, "soft_ce": 1.253458, "kl": 0.223805, "rkl": 0.193794, "jsd": 0.050875, "tv": 0.3, "nla": 0.356675,
}  # fmt: skip
GRADIENTS = {
    "ce": (-0.8, 0.5, 0.3),
    "soft_ce": (-0.3, 0.2, 0.1),
    "kl": (-0.3, 0.2, 0.1),
    "rkl": (-0.222017, 0.158516, 0.063501),
    "jsd": (-0.061396, 0.042200, 0.019196),
    "tv": (-0.16, 0.10, 0.06),
    "nla": (-0.228571, 0.142857, 0.085714),
    "tvd++": (-0.4, 0.25, 0.15),
}
TEACHER = jax.random.normal(jax.random.key(1), (5, 7)) * 2
DRAFT = jax.random.normal(jax.random.key(2), (5, 7)) * 2
LABEL, WEIGHT = jnp.array([0, 3, 6, 2, 2]), jnp.array([1.0, 0.0, 1.0, 1.0, 0.0])


def every(draft=DRAFT, teacher=TEACHER, label=LABEL, weight=WEIGHT):
    """Return (value, (derivative by draft, by teacher)) of the weighted sum by name, of all losses at once, to compile
    once."""
    return _every(draft, teacher, label, weight)


@jax.jit
def _every(draft, teacher, label, weight):
    total = lambda loss: lambda draft, teacher: jnp.sum(weight * loss(draft, teacher, label, weight))
    return {name: jax.value_and_grad(total(loss), (0, 1))(draft, teacher) for name, loss in LOSSES.items()}


def gradient_of(name, draft):
    return every(draft)[name][1][0]


def of_one(name, p=P, q=Q):
    """(value, gradient) of one place whose label is token 0."""
    value, (gradient, _) = every(jnp.log(q)[None], jnp.log(p)[None], jnp.zeros(1, jnp.int32), ONE)[name]
    return float(value), np.asarray(gradient[0])


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_those_worked_by_hand(name):
    value, gradient = of_one(name)
    if name in VALUES:
        assert value == pytest.approx(VALUES[name], abs=1e-5)
    share = np.exp(-3 * 0.7)
    hybrid = share * np.array(GRADIENTS["kl"]) + (1 - share) * np.array(GRADIENTS["tv"])
    np.testing.assert_allclose(gradient, GRADIENTS.get(name, hybrid), atol=2e-6)
    assert abs(gradient.sum()) < 1e-6


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"tvd++", "lk_hybrid"}))
def test_gradients_are_differences(name):
    """The gradient is the slope of the value, for losses whose values are what their gradients belong to."""
    loss = lambda draft: every(draft)[name][0]
    direction = jax.random.normal(jax.random.key(3), DRAFT.shape)
    step = 3e-3
    slope = (loss(DRAFT + step * direction) - loss(DRAFT - step * direction)) / (2 * step)
    assert float(slope) == pytest.approx(float(jnp.vdot(gradient_of(name, DRAFT), direction)), rel=5e-3, abs=2e-3)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"ce"}))
def test_a_draft_like_the_target_has_nothing_to_learn(name):
    np.testing.assert_allclose(gradient_of(name, TEACHER + 3.0), 0, atol=2e-6)
    if name not in ("soft_ce", "tvd++"):
        np.testing.assert_allclose(every(TEACHER + 3.0)[name][0], 0, atol=5e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_what_does_not_count_changes_nothing(name):
    other = jnp.where(WEIGHT[:, None] > 0, DRAFT, -DRAFT)
    value, (draft, teacher) = every()[name]
    changed = other, jnp.where(WEIGHT[:, None] > 0, TEACHER, 0.0), jnp.where(WEIGHT > 0, LABEL, 1)
    again, (same, _) = every(*changed)[name]
    assert float(value) == float(again)
    np.testing.assert_array_equal(draft, same)
    assert not np.asarray(draft)[np.asarray(WEIGHT) == 0].any() and np.asarray(draft)[0].any()
    np.testing.assert_array_equal(teacher, 0)  # the target learns nothing


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"ce"}))
def test_tokens_that_the_target_excludes_give_numbers(name):
    """p of a truncated distribution: zeros, which give no NaN, and draw q away from there."""
    value, gradient = of_one(name, np.array([0.6, 0.4, 0.0], np.float32), np.ones(3, np.float32))
    assert np.isfinite(value) and np.isfinite(gradient).all() and gradient[2] > 0.01


def test_jensen_shannon_is_either_divergence_at_its_ends():
    z, p = DRAFT[:1], TEACHER[:1]
    near = lambda beta: float(losses.jensen_shannon(z, p, LABEL[:1], ONE, beta=beta)[0])
    assert near(1e-3) / 1e-3 == pytest.approx(float(LOSSES["kl"](z, p, LABEL[:1], ONE)[0]), rel=0.02)
    assert near(1 - 1e-3) / 1e-3 == pytest.approx(float(LOSSES["rkl"](z, p, LABEL[:1], ONE)[0]), rel=0.02)


def test_total_variation_is_how_often_a_draft_is_rejected():
    p, q = jax.nn.softmax(TEACHER), jax.nn.softmax(DRAFT)
    np.testing.assert_allclose(LOSSES["tv"](DRAFT, TEACHER, LABEL, WEIGHT), 1 - jnp.minimum(p, q).sum(-1), atol=1e-6)


def test_targets_that_are_certain_make_soft_cross_entropy_the_hard_one():
    certain = jnp.log(jax.nn.one_hot(LABEL, 7))
    for name in ("soft_ce", "kl"):
        np.testing.assert_allclose(
            LOSSES[name](DRAFT, certain, LABEL, WEIGHT), LOSSES["ce"](DRAFT, None, LABEL, WEIGHT), atol=1e-6
        )


def test_normalised_variation_is_total_variation_over_the_deviation_of_the_batch():
    p, q = jax.nn.softmax(TEACHER), jax.nn.softmax(DRAFT)
    mean = float(jnp.sum(WEIGHT * jnp.sum(q * (p > q), -1)) / WEIGHT.sum())
    deviation = np.sqrt(mean - mean**2)
    np.testing.assert_allclose(gradient_of("tvd++", DRAFT) * deviation, gradient_of("tv", DRAFT), atol=1e-6)
    assert deviation < 0.49, "a deviation that is left out must show"


def test_normalised_variation_at_its_floor():
    np.testing.assert_allclose(gradient_of("tvd++", TEACHER), 0, atol=1e-6)
    far = jnp.array([[60.0, 0.0, 0.0]])  # q has no mass where p is larger: a deviation of almost 0
    assert np.isfinite(of_one("tvd++", P, np.asarray(jax.nn.softmax(far))[0] + 1e-20)[1]).all()


def test_the_baseline_of_a_policy_changes_no_mean_and_less_noise():
    """T2: the exact form is what samples of q, rewarded where p is larger, give on average."""
    r = (P > Q).astype(float)
    mean, deviation = float(Q @ r), float(np.sqrt(Q @ r - (Q @ r) ** 2))
    tokens = np.random.default_rng(0).choice(3, 100_000, p=Q.astype(float) / Q.astype(float).sum())
    score = np.eye(3)[tokens] - Q  # d log q(x) / dz
    with_baseline = -score * ((r[tokens] - mean) / deviation)[:, None]
    without = -score * (r[tokens] / deviation)[:, None]
    _, exact = of_one("tvd++")
    for sampled in (with_baseline, without):
        assert (abs(sampled.mean(0) - exact) < 3 * sampled.std(0) / np.sqrt(len(tokens))).all()
    assert with_baseline.var(0).sum() < without.var(0).sum()


def test_hybrid_is_divergence_where_little_is_accepted():
    def share(accepted):
        """Return the share of KL in the gradient of a place where so much is accepted."""
        p, q = np.array([[accepted, 1 - accepted, 0], [1 - 2e-6, 1e-6, 1e-6]], np.float32)
        gradient, kl, tv = (of_one(name, p, q)[1][0] for name in ("lk_hybrid", "kl", "tv"))
        return (gradient - tv) / (kl - tv)

    assert share(0.1) == pytest.approx(np.exp(-0.3), abs=1e-3) and share(0.9) == pytest.approx(np.exp(-2.7), abs=1e-3)


def test_label_outside_of_the_drafters_tokens_is_a_number():
    outside = jnp.array([7, -1])
    assert np.isfinite(LOSSES["ce"](DRAFT[:2], None, outside, jnp.zeros(2))).all()


def test_weights_of_depths_worked_by_hand():
    """T6/D-PACE: q of .8, .5, .4 and a smoothing of .5 are kept at .9, .75, .7."""
    weights = losses.d_pace(jnp.log(jnp.array([[0.8], [0.5], [0.4]])))[:, 0]
    first, second, third = 0.9, 0.9 * 0.75, 0.9 * 0.75 * 0.7
    np.testing.assert_allclose(weights, [first + second + third, second + third, third], atol=1e-6)
    np.testing.assert_allclose(losses.d_pace(jnp.full((3, 1), -50.0), smooth=1.0)[:, 0], [3, 2, 1], atol=1e-6)
    np.testing.assert_allclose(losses.depth_decay(3, 0.8), [1, 0.8, 0.64], atol=1e-6)
    ended = losses.d_pace(jnp.log(jnp.array([[0.8], [0.5], [0.4]])), jnp.array([[1.0], [1.0], [0.0]]))[:, 0]
    np.testing.assert_allclose(ended, [first + second, second, 0], atol=1e-6)
    assert not np.asarray(jax.grad(lambda x: losses.d_pace(x).sum())(jnp.full((3, 1), -1.0))).any()


def test_features_are_squared_near_and_absolute_far():
    value = losses.smooth_l1(jnp.array([[0.5, 3.0]]), jnp.array([[0.0, 0.0]]))
    assert float(value[0]) == pytest.approx((0.125 + 2.5) / 2)
    gradient = jax.grad(lambda x: losses.smooth_l1(x, jnp.zeros((1, 2))).sum())(jnp.array([[0.5, 3.0]]))
    np.testing.assert_allclose(gradient, [[0.25, 0.5]], atol=1e-6)


def test_binary_cross_entropy_is_least_at_how_often_it_happens():
    slope = jax.grad(lambda x: losses.binary_cross_entropy(x, 0.3))
    assert float(slope(0.3)) == pytest.approx(0, abs=1e-5) and slope(0.2) < 0 < slope(0.4)
    assert np.isfinite(losses.binary_cross_entropy(jnp.array([0.0, 1.0]), jnp.array([1.0, 0.0]))).all()


def test_what_is_surest_and_wrong_has_most_to_learn():
    """A draft 20 nats from the target, whose acceptance float32 has as 0, learns as fast as by the divergence."""
    teacher, draft = jnp.array([[30.0, 0.0]]), jnp.array([[0.0, 20.0]])
    slope = jax.grad(lambda z: losses.negative_log_acceptance(z, teacher, jnp.array([0]), ONE)[0])(draft)
    np.testing.assert_allclose(slope, [[-1.0, 1.0]], atol=1e-4)
    chance = lambda odds: losses.binary_cross_entropy(jax.nn.sigmoid(odds), 1.0)
    weighted = lambda odds: losses.acceptance_weighted(jax.nn.sigmoid(odds), 1.0)[0]
    for odds in (-13.0, -20.0, -60.0):
        for loss in (chance, weighted):
            assert jax.grad(loss)(odds) == pytest.approx(-1, abs=1e-4)


def test_parts_add_up():
    both = losses.combined((("ce", 0.1), ("tv", 0.9)))
    apart = 0.1 * LOSSES["ce"](DRAFT, None, LABEL, WEIGHT) + 0.9 * LOSSES["tv"](DRAFT, TEACHER, LABEL, WEIGHT)
    np.testing.assert_allclose(both(DRAFT, TEACHER, LABEL, WEIGHT), apart, atol=1e-6)
    assert losses.combined((("ce", 0.1), ("tv", 0.9))) is both


@pytest.mark.parametrize("name", those(["tv", "tvd++"], sorted(set(LOSSES) - {"ce", "soft_ce"})))
def test_a_table_comes_to_the_rows_of_the_target(name):
    """T11.1: V = 8, rows of Dirichlet(.7), Adam; the rate falls to 0, as losses with corners need."""
    import optax

    rows = np.random.default_rng(0).dirichlet(np.full(8, 0.7), 8) + 1e-4
    teacher, label, weight = jnp.log(rows / rows.sum(1, keepdims=True)), jnp.zeros(8, jnp.int32), jnp.ones(8)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.05, 500))

    def step(carry, _):
        table, state = carry
        gradient = jax.grad(lambda z: jnp.sum(LOSSES[name](z, teacher, label, weight)))(table)
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(table, updates), state), None

    start = jnp.zeros((8, 8))
    table = jax.jit(lambda: jax.lax.scan(step, (start, optimizer.init(start)), None, 500)[0][0])()
    assert float(LOSSES["tv"](table, teacher, label, weight).mean()) < 0.01
