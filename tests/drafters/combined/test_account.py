"""The account of `auto`: drafts with wrong expectations lose a bounded number of passes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import markov

from specjax import stream
from specjax.drafters import auto
from specjax.drafters.combined import account
from specjax.drafters.combined.auto import DRAFTING
from specjax.drafters.widths import PassWidths
from specjax.trees import node_statistics

WIDTHS, COSTS = (1, 4, 8), (1.0, 2.0, 3.0)


def test_gains_are_the_tokens_beyond_the_cost_of_the_pass():
    passes = PassWidths(WIDTHS, np.array(COSTS, np.float32))
    gain = lambda width, *num_tokens, remaining=None: float(
        account.gain_of_pass(passes, width, jnp.array(num_tokens), remaining)
    )
    assert gain(1, 1) == pytest.approx(account.ALLOWANCE)
    assert gain(4, 3) == pytest.approx(1 + 3 * account.ALLOWANCE)
    assert gain(8, 5, 1) == pytest.approx(0 + 3 * account.ALLOWANCE)  # the mean of two rows
    assert gain(8, 5, 0) == pytest.approx(2 + 5 * account.ALLOWANCE)  # the second row has ended
    assert gain(8, 0, 0) == 0
    ahead = jnp.array([1, 100])  # the first row is far ahead of the second
    assert gain(8, 8, 1, remaining=ahead) == pytest.approx(-2 + account.ALLOWANCE)


def test_an_overdrawn_account_is_paid_back_by_the_allowance():
    assert float(account.pay(jnp.float32(account.LARGEST), jnp.float32(1))) == account.LARGEST
    assert int(account.plain_steps(jnp.float32(0.5))) == 0
    assert int(account.plain_steps(jnp.float32(-1.5))) == pytest.approx(1.5 / account.ALLOWANCE, abs=1)


def lost(new: int) -> float:
    """Return the plain passes lost in an unpredictable text."""
    drafter = auto(40, widths=WIDTHS, costs=COSTS)
    target = markov(np.full((40, 40), 1 / 40, np.float32))
    steps = stream(target, drafter, [[0]], key=jax.random.key(0), max_new_tokens=new, temperature=1.0)
    total = 0.0
    for step in steps:
        drafted = int(step.info.drafted[0])
        total += min(cost for width, cost in zip(WIDTHS, COSTS, strict=True) if width > drafted)
    return total - new


def test_wrong_expectations_lose_a_bounded_number_of_passes(monkeypatch):
    """Let every node be expected to be right, although none is."""
    new, rank = 300, node_statistics.rank

    def hopeful(*arguments):
        tree, chance = rank(*arguments)
        return tree._replace(valid=jnp.ones_like(tree.valid)), jnp.full_like(chance, 0.9)

    monkeypatch.setattr(node_statistics, "rank", hopeful)
    bound = account.OPENING + account.ALLOWANCE * new + max(COSTS) - 1 + DRAFTING
    jax.clear_caches()
    assert 1 < lost(new) <= bound
    # A mutant: an account that is never overdrawn.
    monkeypatch.setattr(account, "OPENING", 1e6)
    monkeypatch.setattr(account, "LARGEST", 1e6)
    jax.clear_caches()
    assert lost(new) > 3 * bound
    jax.clear_caches()
