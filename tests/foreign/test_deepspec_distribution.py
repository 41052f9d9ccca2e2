"""DeepSpec's distribution tests of speculative sampling, with their negative control, on the rules of specjax.

Source: DeepSpec pull request 48 at afdfa7c (MIT). The sizes and thresholds are facts of it; the code is ours.

Cases: chi-square of each position over 20,000 rounds against float64 references, a threshold that a correct rule
exceeds with probability 1e-9, and the negative control: drafts from another distribution than the declared
one must fail.

Cases without meaning here: their strict xfails of known bugs, and the comparison of two implementations of the warper
(`specjax.numerics.sampling.warp` is the only one).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rules import takes_all
from scipy.stats import chi2, ncx2

from specjax import verifiers
from specjax.types import TokenTree

ROUNDS, VOCAB, LENGTH, FALSE_FAILURE = 20_000, 6, 3, 1e-9


def laws(seed=0):
    """Return float64 distributions p [L + 1, V] of the target and q [L, V] of the draft, one per position."""
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(VOCAB, 2.0), LENGTH + 1), rng.dirichlet(np.full(VOCAB, 2.0), LENGTH)
    return 0.9 * p + 0.1 / VOCAB, 0.9 * q + 0.1 / VOCAB


def statistics(rule, drawn_from=None, seed=1):
    """Return the chi-square of the tokens at each position, and how many rounds reach it."""
    p, q = laws()
    draw_key, keys = jax.random.split(jax.random.key(seed))
    drawn = jnp.asarray(q if drawn_from is None else drawn_from)
    drafted = jax.random.categorical(draw_key, jnp.log(drawn), shape=(ROUNDS, LENGTH))
    shape = (ROUNDS, LENGTH + 1)
    logits = jnp.log(jnp.asarray(np.concatenate([q, q[-1:]]), jnp.float32))
    tree = TokenTree(
        jnp.pad(drafted, ((0, 0), (1, 0))), jnp.broadcast_to(jnp.arange(LENGTH + 1) - 1, shape), jnp.ones(shape, bool),
        jnp.broadcast_to(logits, (*shape, VOCAB)),
    )  # fmt: skip
    target = jnp.broadcast_to(jnp.log(jnp.asarray(p, jnp.float32)), (*shape, VOCAB))
    keys = jax.random.split(keys, ROUNDS if isinstance(rule, verifiers.Verifier) else shape)
    verdict = jax.jit(lambda *arguments: rule(*arguments))(keys, tree, target)
    count, last = np.asarray(verdict.num_nodes), np.asarray(verdict.next_token)
    out = []
    for position in range(LENGTH + 1):
        reached = count > position
        tokens = last if position == LENGTH else np.where(count > position + 1, drafted[:, position], last)
        expected = p[position] * reached.sum()
        observed = np.bincount(tokens[reached], minlength=VOCAB)
        out.append((((observed - expected) ** 2 / expected).sum(), reached.sum()))
    return out


THRESHOLD = chi2.isf(FALSE_FAILURE, VOCAB - 1)


@pytest.mark.parametrize("name", ["standard", "recursive_rejection"])
def test_each_position_has_the_law_of_the_target(name):
    """The law of a position is that of the target whenever the text of this round reaches it."""
    for statistic, rounds in statistics(getattr(verifiers, name)):
        assert rounds > 500 and statistic < THRESHOLD


def test_drafts_from_another_law_than_the_declared_one_fail():
    """The power of the control is computed: its expected statistic is far above the threshold."""
    p, q = laws()
    other = q[:, ::-1]
    accepted = np.minimum(1, p[0] / q[0]) * other[0]
    residual = np.maximum(p[0] - q[0], 0)
    emitted = accepted + (1 - accepted.sum()) * residual / residual.sum()
    shift = ROUNDS * ((emitted - p[0]) ** 2 / p[0]).sum()
    assert ncx2.cdf(THRESHOLD, VOCAB - 1, shift) < FALSE_FAILURE
    assert statistics(verifiers.standard, other)[0][0] > THRESHOLD
    assert statistics(takes_all)[0][0] > THRESHOLD
