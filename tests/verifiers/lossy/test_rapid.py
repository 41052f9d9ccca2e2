"""RAPID's knowledge transfer: the card's numbers, the distribution emitted, and how far it is from the target's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import block_distribution, without_replacement
from lossy import one_step, output_tv, random_chains, rapid_core
from toy import DRAFT_ROWS, TARGET_ROWS, markov, template

from specjax import UsageError, decode
from specjax.drafters import two_model
from specjax.trees import operations
from specjax.verifiers.lossy.rapid import adjusted_logits, rapid

pytestmark = pytest.mark.usefixtures("quick_compilation")

Z, Q = np.array([2.0, 1.0, 0.0]), np.array([0.2, 0.75, 0.05])
ETA, P_HAT = 2.0, [0.2560, 0.6561, 0.0879]


def softmax(z):
    return np.exp(z) / np.exp(z).sum(-1, keepdims=True)


def adjusted(p, q, eta, alpha=0.1):
    """p^ float64[V] by the card."""
    mask = q >= alpha * q.max()
    return softmax(np.log(p) - eta * mask * (p - q))


def card_tree():
    return operations.chain(jnp.array([[0, 1]]), jnp.ones((1, 2), bool), jnp.log(jnp.array([[Q, Q]])))


def test_the_cards_adjusted_logits():
    logits = jnp.array([[Z, Z]])
    z_hat = jax.jit(adjusted_logits)(card_tree(), logits, ETA, 0.1)
    np.testing.assert_allclose(z_hat[0, 0], [1.0695, 2.0105, 0.0], atol=5e-5)  # mask 1, 1, 0
    np.testing.assert_array_equal(z_hat[0, 1], Z)  # nothing was drafted below: the target's own
    np.testing.assert_allclose(softmax(np.asarray(z_hat[0, 0])), P_HAT, atol=5e-5)
    shifted = np.asarray(jax.jit(adjusted_logits)(card_tree(), logits, ETA, 1.0) - logits)[0, 0]
    assert (shifted != 0).tolist() == [False, True, False]  # alpha = 1: the draft's argmax alone
    np.testing.assert_array_equal(jax.jit(adjusted_logits)(card_tree(), logits, 0.0, 0.1), logits)


@pytest.mark.parametrize(("residual", "distribution"), [("phat", P_HAT), ("paper", [0.2865, 0.6561, 0.0574])])
def test_the_cards_acceptance_and_emitted_distribution(residual, distribution):
    acceptance, emitted = one_step(functools.partial(rapid_core, eta=ETA, residual=residual), softmax(Z), Q)
    np.testing.assert_allclose(acceptance, [1.0, 0.8748, 1.0], atol=5e-5)
    np.testing.assert_allclose(acceptance @ Q, 0.9061, atol=5e-5)
    np.testing.assert_allclose(emitted, distribution, atol=6e-5)


def test_the_papers_residual():
    reject = functools.partial(rapid_core, u=jnp.ones((1, 2)), tree=card_tree(), target_logits=jnp.array([[Z, Z]]))
    np.testing.assert_allclose(
        reject(eta=ETA, residual="paper").residual[0], np.array([0.4652, 0, 0.0400]) / 0.5052, atol=1e-4
    )


def test_with_the_exact_residual_drafted_positions_have_the_adjusted_distribution():
    """The joint distribution, which needs both: p^ where a token was drafted, p behind the block."""
    drafts, weights = without_replacement(DRAFT_ROWS, 0, template((1, 1)))
    core = functools.partial(rapid_core, eta=5.0)
    p, q = TARGET_ROWS.astype(np.float64), DRAFT_ROWS.astype(np.float64)
    p_hat = np.array([adjusted(*rows, 5.0) for rows in zip(p, q, strict=True)])
    distribution, accepted = block_distribution(core, drafts, weights, TARGET_ROWS, 2)
    # Behind a rejection nothing was drafted, so the target goes on by itself; the table extends by p.
    mass_accepted = np.minimum(q, p_hat)  # of a drafted token: the chance that it is drawn and accepted
    behind = lambda token: p_hat[token][:, None] * p
    joint = np.einsum("a,abc->abc", mass_accepted[0], [behind(a) for a in range(3)])
    joint += np.einsum("a,ab,bc->abc", p_hat[0] - mass_accepted[0], p, p)
    np.testing.assert_allclose(distribution, joint, atol=1e-6)
    np.testing.assert_allclose(distribution.sum((1, 2)), p_hat[0], atol=1e-6)
    np.testing.assert_allclose(accepted[0], 1 - mass_accepted[0].sum(), atol=1e-6)


def test_distance_from_the_target_grows_with_eta():
    etas = [0.0, 1.0, 5.0, 10.0]
    distance, tokens = output_tv(lambda eta, *x: rapid_core(*x, eta=eta), etas)
    np.testing.assert_allclose(distance, [0, 0.081987, 0.462728, 0.719179], atol=2e-6)
    np.testing.assert_allclose(tokens, [2.38, 2.534943, 2.587952, 1.948727], atol=2e-6)
    distance, same = output_tv(lambda eta, *x: rapid_core(*x, eta=eta, residual="paper"), etas)
    np.testing.assert_allclose(distance, [0, 0.076882, 0.293361, 0.244192], atol=2e-6)
    np.testing.assert_array_equal(tokens, same)


def test_greedy_accepts_the_argmax_of_the_adjusted_logits():
    u, tree, logits = random_chains()
    z_hat = np.asarray(jax.jit(adjusted_logits)(tree, logits, 3.0, 0.1))
    end = jax.device_get(rapid_core(u, tree, logits, eta=3.0, sample=False))
    best, tokens, valid = z_hat.argmax(-1), np.asarray(tree.tokens), np.asarray(tree.valid)
    for b in range(len(tokens)):
        count = 1
        while count < 5 and valid[b, count] and tokens[b, count] == best[b, count - 1]:
            count += 1
        assert end.num_nodes[b] == count and end.residual[b].argmax() == best[b, count - 1]
        assert end.residual[b].max() > 1 - 1e-6
    assert (best != np.asarray(logits).argmax(-1)).any() and len(np.unique(end.num_nodes)) == 5


def test_in_the_loop():
    """At temperature 0 the text is the greedy one; above, a draft equal to the target moves nothing."""
    run = functools.partial(decode, markov(), prompts=[[0, 2], [1]], key=jax.random.key(0), max_new_tokens=12)
    draft = two_model(markov(DRAFT_ROWS), 3)
    best = TARGET_ROWS.argmax(1)
    greedy = [functools.reduce(lambda text, _: [*text, int(best[text[-1]])], range(12), [end])[1:] for end in (2, 1)]
    assert run(drafter=draft, verifier=rapid()).to_lists() == greedy
    equal = run(drafter=two_model(markov(), 3), verifier=rapid(40.0), temperature=1.0)
    assert equal.stats.target_passes.tolist() == [3, 3]


def test_bad_settings():
    assert rapid() is rapid()
    with pytest.raises(UsageError, match="eta must be at least 0"):
        rapid(-1.0)
    with pytest.raises(UsageError, match="alpha must be from 0 to 1"):
        rapid(alpha=2.0)
    with pytest.raises(UsageError, match='residual must be "phat" or "paper"'):
        rapid(residual="none")
