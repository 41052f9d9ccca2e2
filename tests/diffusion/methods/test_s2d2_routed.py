"""S2D2 with routers: hand-counted scores, what never verifying and always verifying are, and the law of a span."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
import toy_denoisers as toys
from tiers import exhaustive

import specjax
from specjax import UsageError
from specjax.diffusion import Denoiser, forward, methods, routers
from specjax.diffusion.routers import RoundForecast

ROWS = 2000
PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8], [9] * 11, [3] * 8]


def asked(run, expected, sure, width=4) -> RoundForecast:
    return RoundForecast(jnp.array(run), jnp.array(expected, jnp.float32), jnp.array(sure), width)


def test_the_expected_run_and_the_scores_of_the_paper():
    chance = jnp.array([[0.3, 0.9, 0.8, 0.5, 0.7]])
    run = jnp.array([[False, True, True, True, False]])
    assert float(routers.expected_run(chance, run)[0]) == pytest.approx(0.9 + 0.72 + 0.36)
    round_ = asked([3, 3, 3], [1.98, 1.98, 0.5], [0, 2, 1])
    decides = lambda router: router.route(router.init(3), round_)[0].tolist()
    assert decides(routers.score(0.0, 1.0)) == [True, True, False]
    assert decides(routers.score(0.0, 1.0, True)) == [True, False, False]
    assert decides(routers.span(4)) == [False] * 3 and decides(routers.span(3)) == [True] * 3
    assert decides(routers.always()) == [True] * 3


def test_chances_are_those_of_entropy_or_of_a_margin():
    logits = jnp.log(jnp.array([[[0.25, 0.25, 0.25, 0.25], [0.97, 0.01, 0.01, 0.01]]]))
    alone = jnp.where(jnp.arange(4) == 0, 0.0, -jnp.inf) * jnp.ones_like(logits)
    proposal = specjax.diffusion.Proposal(jnp.zeros((1, 2), jnp.int32), logits, alone, logits, jnp.ones(1, bool))
    entropy = -sum(p * np.log(p) for p in (0.97, 0.01, 0.01, 0.01)) / np.log(4)
    np.testing.assert_allclose(routers.acceptance(proposal)[0], [np.exp(-1), np.exp(-entropy)], rtol=1e-6)
    np.testing.assert_allclose(routers.acceptance(proposal, beta=2.0)[0, 0], np.exp(-2), rtol=1e-6)
    assert routers.acceptance(proposal, "margin")[0].tolist() == [0, 1]


def test_hysteresis_stays_on_until_the_score_is_low():
    router = routers.hysteresis(on=1.0, off=-1.0, cost=1.0)
    state, decisions = router.init(1), []
    for expected in (1.5, 2.5, 1.5, 0.5, -0.5, 1.5):  # with one sure column the score is one less
        verifies, state = router.route(state, asked([4], [expected], [1]))
        decisions.append(bool(verifies[0]))
    assert decisions == [False, True, True, True, False, False]
    with pytest.raises(UsageError, match="off 2"):
        routers.hysteresis(on=1.0, off=2.0)


def test_a_bandit_learns_where_verifying_pays():
    """Rounds of one kind give three tokens if they verify and one if not, of another one and one."""
    router = routers.bandit(explore=0.3)
    state, decisions = router.init(2), []
    for _ in range(40):
        verifies, state = router.route(state, asked([4, 1], [3.0, 0.1], [0, 0]))
        tokens = jnp.where(verifies, jnp.array([3, 1]), 1)
        state = router.learn(state, verifies, tokens)
        decisions.append(verifies)
    late = np.mean(np.array(decisions[20:]), 0)
    assert late[0] > 0.8 and late[1] < 0.2
    assert np.asarray(state.rounds).sum((1, 2)).tolist() == [40, 40]


@pytest.mark.parametrize("temperature", [exhaustive(0.0), exhaustive(0.8)])
def test_a_router_that_never_verifies_is_sdar(temperature):
    denoiser = toys.causal()
    settings = {"key": 3, "max_new_tokens": 18, "temperature": temperature, "logprobs": True}
    never = methods.s2d2_routed(denoiser, router="span", min_run=5, tau=0.02)  # a block has four columns
    ours, theirs = (
        specjax.denoise(denoiser, way, PROMPTS, **settings) for way in (never, methods.sdar(denoiser, tau=0.02))
    )
    assert ours.to_lists() == theirs.to_lists()
    assert jnp.array_equal(ours.stats.target_passes, theirs.stats.target_passes)
    np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)


def test_whole_runs_stand_where_a_mask_says_the_same_whatever_stands_around_it():
    rows = jnp.array([[0.6, 0.1, 0.3, 1e-9]] * 4, jnp.float32)
    denoiser = Denoiser(toy.markov_model(4), rows, 3, "block_causal", 3)
    way = methods.s2d2_routed(denoiser, router="always")
    result = specjax.denoise(denoiser, way, [[0, 0, 0]] * 400, key=5, max_new_tokens=9, temperature=1.0)
    assert np.all(np.asarray(result.stats.target_passes) == 6)  # three blocks, of two passes each
    share = np.bincount(np.asarray(result.tokens).ravel(), minlength=3) / result.tokens.size
    np.testing.assert_allclose(share, [0.6, 0.1, 0.3], atol=0.03)


@functools.cache
def ternary() -> Denoiser:
    target = toy.tiny_llama(vocab=4)
    return Denoiser(target.model, target.params, 3, "block_causal", 4)


@jax.jit
def alone(denoiser: Denoiser, texts: jax.Array) -> jax.Array:
    """float32[N, 3]: what follows texts [N, T] by the model with blocks of one: a mask behind them, which sees them."""
    tokens = jnp.pad(texts, ((0, 0), (0, 1)), constant_values=denoiser.mask_token)
    count, size = tokens.shape
    columns = jnp.broadcast_to(jnp.arange(size), tokens.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (count, size, size))
    hidden, _ = forward.forward(
        denoiser, denoiser.model.init_cache(denoiser.params, None, count, 8), tokens, columns, mask
    )
    return jax.nn.softmax(forward.compute_logits(denoiser, hidden[:, -1]))[:, :3]


@pytest.mark.parametrize(("router", "is_the_law"), [("always", True), exhaustive("span", False)])
def test_a_verified_span_has_the_law_of_blocks_of_one(router, is_the_law):
    """Three columns behind one token of their block; `span`, which never verifies runs so short, is the mutant."""
    denoiser = ternary()
    law = np.ones(1)
    for size in range(3):
        texts = jnp.array([[1, *text] for text in itertools.product(range(3), repeat=size)])
        law = (law[:, None] * np.asarray(alone(denoiser, texts))).ravel()
    assert law.sum() == pytest.approx(1, abs=1e-5)
    span = {"min_run": 4} if router == "span" else {}
    way = methods.s2d2_routed(denoiser, router=router, tau=0.0, **span)
    result = specjax.denoise(denoiser, way, [[1]] * ROWS, key=11, max_new_tokens=3, temperature=1.0)
    text = np.asarray(result.tokens) @ np.array([9, 3, 1])
    p_value = toy.chi_square(np.bincount(text, minlength=27), law / law.sum())
    assert (p_value > 1e-3) == is_the_law, p_value


@pytest.mark.exhaustive  # the law of a span says it for any temperature
def test_greedy_text_of_a_block_is_that_of_blocks_of_one():
    denoiser = toys.causal(8)
    settings = {"key": 3, "max_new_tokens": 7}
    prompts = [[5], [9], [33]]
    ours = specjax.denoise(denoiser, methods.s2d2_routed(denoiser, router="always"), prompts, **settings)
    assert ours.to_lists() == specjax.denoise(denoiser, "s2d2", prompts, **settings).to_lists()


@pytest.mark.parametrize("router", [exhaustive("score"), exhaustive("hysteresis"), exhaustive("bandit")])
def test_routers_decode_with_rows_independent_of_each_other(router):
    denoiser = toys.causal()
    way = methods.s2d2_routed(denoiser, router=router, above=-0.5, below=-2.0)
    settings = {"max_new_tokens": 14, "temperature": 0.8}
    batch = specjax.denoise(denoiser, way, PROMPTS[:2], key=5, **settings)
    for row, key in enumerate(toys.keys_of(5, 2)):
        one = specjax.denoise(denoiser, way, [PROMPTS[row]], key=key[None], **settings)
        assert one.to_lists()[0] == batch.to_lists()[row]
        assert int(one.stats.target_passes[0]) == int(batch.stats.target_passes[row])


def test_models_that_do_not_fit_are_refused():
    for denoiser, words in ((toys.full(), "full attention"), (toys.causal(4, "seed_and_mask"), "choose linear_spec")):
        with pytest.raises(UsageError, match=words):
            methods.s2d2_routed(denoiser)
