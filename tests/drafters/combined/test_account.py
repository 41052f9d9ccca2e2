"""The account of `auto`: drafts with wrong expectations lose a bounded number of passes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heads import tiny_head
from toy import markov, tiny_llama

from specjax import decode, stream
from specjax.drafters import auto, choice, prompt_lookup
from specjax.drafters.combined import account
from specjax.drafters.combined.auto import DRAFTING
from specjax.drafters.widths import PassWidths
from specjax.engine.prepare import Settings, prepare
from specjax.engine.run import start
from specjax.engine.step import step as run_step
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


def drafts_after(steps, target, drafter):
    """Return the drafter's state after some steps."""
    job = prepare(target, drafter, [[1, 2, 3, 1, 2, 3, 1, 2]], Settings(), key=jax.random.key(0), max_new_tokens=30)
    state, advance = start(job), jax.jit(run_step)
    for _ in range(steps):
        state, _ = advance(job.parts, state)
    return state.draft


def test_the_draft_of_a_head_is_paid_from_the_account():
    target = tiny_llama()
    options = {"head_tree": ((0,), (1,), (0, 0)), "widths": (1, 3, 6), "costs": (1.0, 2.5, 3.0)}
    balance = lambda cost: float(
        drafts_after(1, target, auto(64, head=tiny_head("eagle3", target), head_cost=cost, **options)).record.balance
    )
    assert balance(0.5) - balance(1.5) == pytest.approx(1)


def test_passes_of_other_drafters_are_not_in_the_account():
    """The first steps of `choice` are plain, and of its first drafter, whose passes are wider than those of `auto`."""
    ours = auto(64, widths=(1, 4), costs=(1.0, 2.0))
    drafter = choice(prompt_lookup(7, min_ngram=1), ours, depths=(7,), costs=(1.0, 2.0, 3.0))
    balances = [float(drafts_after(n, tiny_llama(), drafter).several[1].record.balance) for n in (1, 2, 3)]
    assert balances[:2] == [account.OPENING] * 2
    assert balances[2] != account.OPENING


def test_costs_are_relative_to_the_first():
    """An account of plain passes that cost 2.0 would always be overdrawn."""
    target = markov(np.roll(np.eye(7, dtype=np.float32), 1, 1))
    passes = lambda costs: int(
        decode(target, auto(7, widths=WIDTHS, costs=costs), [[0]], key=0, max_new_tokens=60).stats.target_passes[0]
    )
    assert passes((2.0, 2.2, 2.4)) == passes((1.0, 1.1, 1.2)) < 40
