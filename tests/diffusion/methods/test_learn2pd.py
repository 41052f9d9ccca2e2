"""The learned filter, and ends of texts."""

import hand_made
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_denoisers as toys

import specjax
from specjax import UsageError
from specjax.diffusion import methods
from specjax.diffusion.methods.learn2pd import Filter, above, filtered
from specjax.diffusion.rules import quota, threshold

EOS = 5
SETTINGS = {"key": 1, "max_new_tokens": 14}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8]]


def test_the_filter_sees_decided_columns_too():
    """It takes an open column only if the one before it is sure, whether that is open or decided."""
    shift = jnp.eye(4, k=1)
    filter = Filter(100 * shift, jnp.zeros(4), jnp.eye(4), jnp.full(4, -80.0))
    rule = filtered(0.9)
    for opened, expected in (([True] * 4, [0, 1]), ([False, True, True, True], [1])):
        proposal = hand_made.proposal([[0.95, 0.6, 0.5, 0.4]], [[1, 2, 3, 4]], narrow=True)
        take, _, _ = rule.select(filter, (), proposal, hand_made.window([opened]), jnp.ones(1, int))
        assert hand_made.places(take) == [expected]
    z = Filter(*(jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(4, 3), (3,), (3, 4), (4,)])))
    c = np.linspace(0, 1, 4, dtype=np.float32)[None]
    by_hand = np.maximum(c @ np.asarray(z.weight1) + np.asarray(z.bias1), 0) @ np.asarray(z.weight2) + z.bias2
    np.testing.assert_allclose(z(c), by_hand, rtol=1e-5)


def test_what_is_behind_the_canvas_says_nothing():
    """This filter takes a column if the last one of the block is sure of anything at all."""
    last = jnp.zeros((32, 32)).at[31].set(1e4)
    rule = filtered(0.9)
    for columns, expected in ((32, [*range(32)]), (5, [2])):
        proposal = hand_made.proposal([[0.5, 0.6, 0.7, 0.6, 0.5] + [0.2] * (columns - 5)])
        view = hand_made.view([[True] * columns])
        take, _, _ = rule.select(Filter(last, jnp.zeros(32), jnp.eye(32), jnp.full(32, -10.0)), (), proposal, view, 1)
        assert hand_made.places(take) == [expected]


def test_a_sharp_filter_is_the_threshold_rule_and_theta_of_one_is_one_a_pass():
    denoiser = toys.full()
    run = lambda method: specjax.denoise(denoiser, method, PROMPTS, **SETTINGS)
    method = methods.learn2pd(denoiser, filter=above(0.03, 8))
    ours, plain = run(method), run(method.replace(rule=threshold(0.03), control=None))
    assert ours.to_lists() == plain.to_lists() and ours.decided_at.tolist() == plain.decided_at.tolist()
    assert ours.stats.target_passes[0] < 14
    one, slow = (
        run(method.replace(rule=filtered(1.0).replace(params=above(0.03, 8)))),
        run(method.replace(rule=quota())),
    )
    assert one.decided_at.tolist() == slow.decided_at.tolist()
    at_once = run(method.replace(rule=filtered(-0.1).replace(params=above(0.03, 8))))
    assert at_once.stats.target_passes.tolist() == [2, 2]


def test_behind_the_end_nothing_is_decided_and_nothing_waited_for():
    best, sure = np.full(34, 3), np.full(34, 0.6)
    sure[2:7], best[7], sure[7] = 0.5 - np.arange(5) / 100, EOS, 0.97  # the end comes first, then what is surer behind
    denoiser = toys.frozen(sure, best)
    filter = above(0.9, 32)
    run = lambda eotp: specjax.denoise(
        denoiser, methods.learn2pd(denoiser, filter=filter, eotp=eotp), [[1, 1]], key=0, max_new_tokens=32, eos=EOS
    )
    with_, without = run(True), run(False)
    assert with_.to_lists() == without.to_lists() == [[3] * 5 + [EOS]] and with_.finish_reasons == ["eos"]
    assert with_.stats.target_passes.tolist() == [6] and without.stats.target_passes.tolist() == [32]
    assert with_.columns.tolist() == [34 + 5 * 8]


def test_what_it_refuses():
    with pytest.raises(UsageError, match="give filter="):
        methods.learn2pd(toys.full())
    with pytest.raises(UsageError, match="shapes"):
        methods.learn2pd(toys.full(), filter=above(0.5, 8)._replace(bias2=jnp.zeros(7)))
    with pytest.raises(UsageError, match="block size of 8, and the model one of 4"):
        methods.learn2pd(toys.causal(), filter=above(0.5, 8))
