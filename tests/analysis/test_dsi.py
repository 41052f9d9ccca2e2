"""DSI's times: events worked by hand, a clock that ticks, closed forms, and what it is never slower than."""

import itertools

import numpy as np
import pytest

from specjax import UsageError
from specjax.analysis import dsi, servers, smallest_lookahead


def outcomes(num_tokens):
    """bool[2^S, S]: all there are."""
    return np.array(list(itertools.product([False, True], repeat=num_tokens)))


def test_events_worked_by_hand():
    """Six tokens, the fourth draft is wrong; a pass takes 4, a draft 1, a task goes out every 2 drafts.

    Two servers: passes 0-4 (token 1), 2-6 (2 and 3), 4-8 on the first server (4 and 5): the fourth draft is wrong. From
    8 on: passes 8-12 (token 5) and, on the one draft that is left to be made, 9-13 (token 6).
    One server: 0-4, 4-8, 8-12, then 12-16 and 16-20. Speculation: 3 tokens by 6, 1 by 12, 2 with one draft by 17.
    """
    accepted = [True, True, True, False, True, True]
    times = dsi(accepted, 4, 1, lookahead=2, servers=2)
    assert (times.dsi, times.speculation, times.plain) == (13, 17, 24)
    assert dsi(accepted, 4, 1, lookahead=2).dsi == 13
    assert dsi(accepted, 4, 1, lookahead=2, servers=1).dsi == 20


def by_the_clock(accepted, target_time, draft_time, lookahead, servers):
    """The same for whole times, tick by tick: a drafter, a queue of tasks, and servers."""
    clock, base = 0, 0
    while base < len(accepted):
        began, left, drafted, waiting, running, added = clock, len(accepted) - base, 0, [0], [], 0
        while not added:
            while waiting and len(running) < servers:
                running.append((clock + target_time, waiting.pop(0)))
            clock += 1
            if (clock - began) % draft_time == 0 and drafted < left - 1:
                drafted += 1
                if drafted % lookahead == 0 or drafted == left - 1:
                    waiting.append(drafted)
            while running and running[0][0] == clock and not added:
                judged = accepted[base : base + running.pop(0)[1] + 1]
                if not all(judged):
                    added = judged.index(False) + 1
                elif len(judged) == left:
                    added = left
        base += added
    return clock


@pytest.mark.parametrize("copies", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("target_time", "draft_time", "lookahead"), [(5, 1, 1), (5, 1, 2), (7, 2, 1), (6, 2, 3), (2, 2, 1)]
)
def test_the_clock_agrees(target_time, draft_time, lookahead, copies):
    rows = outcomes(7)
    times = dsi(rows, target_time, draft_time, lookahead=lookahead, servers=copies).dsi
    assert times.tolist() == [by_the_clock(row, target_time, draft_time, lookahead, copies) for row in rows.tolist()]


@pytest.mark.parametrize("lookahead", [1, 2, 5, 40])
@pytest.mark.parametrize("num_tokens", [1, 2, 11, 24])
def test_closed_forms(num_tokens, lookahead):
    """Binary fractions, so equality is exact. With as many servers as `servers` says only a short last block waits."""
    every, none = np.ones(num_tokens, bool), np.zeros(num_tokens, bool)
    assert dsi(every, 1, 0.125, lookahead=lookahead).dsi == (num_tokens - 1) * 0.125 + 1
    enough = servers(1, 0.125, lookahead)
    waits = 0 if (num_tokens - 1) % lookahead == 0 else (lookahead - 1) * 0.125
    times = dsi(every, 1, 0.125, lookahead=lookahead, servers=enough).dsi
    assert 0 <= times - ((num_tokens - 1) * 0.125 + 1) <= waits
    for copies in (1, 2, None):
        assert dsi(none, 1, 0.125, lookahead=lookahead, servers=copies).dsi == num_tokens
    rounds, remainder = divmod(num_tokens, lookahead + 1)
    wanted = rounds * (lookahead * 0.125 + 1) + (remainder > 0) * ((remainder - 1) * 0.125 + 1)
    assert dsi(every, 1, 0.125, lookahead=lookahead).speculation == wanted
    assert dsi(none, 1, 0.125, lookahead=1).speculation == (num_tokens - 1) * 1.125 + 1


@pytest.mark.parametrize(
    ("target_time", "draft_time", "lookahead"), [(5, 1, 1), (5, 1, 5), (7, 2, 3), (4, 1, 3), (3, 3, 1)]
)
def test_never_slower_than_plain_decoding_or_speculation(target_time, draft_time, lookahead):
    """DSI is never slower for any outcome, if a block takes no longer to draft than to verify."""
    rows = outcomes(10)
    by_copies = [dsi(rows, target_time, draft_time, lookahead=lookahead, servers=n) for n in (1, 2, 3, 4, None)]
    assert all((times.dsi <= times.plain).all() for times in by_copies)
    assert all((more.dsi <= fewer.dsi).all() for fewer, more in itertools.pairwise(by_copies))
    enough = servers(target_time, draft_time, lookahead) + 1
    times = dsi(rows, target_time, draft_time, lookahead=lookahead, servers=enough)
    np.testing.assert_array_equal(times.dsi, by_copies[-1].dsi)
    assert (times.dsi <= times.speculation).all()
    closest = dsi(rows, target_time, draft_time).dsi
    assert (closest <= times.speculation).all() and (closest <= times.dsi).all()


def test_where_it_is_slower():
    """A single server cannot keep up, and falls behind speculation; blocks that outlast a pass leave the target
    idle."""
    every = np.ones(60, bool)
    few, enough = dsi(every, 1, 0.1, lookahead=2, servers=1), dsi(every, 1, 0.1, lookahead=2, servers=5)
    assert enough.dsi < few.speculation < few.dsi < few.plain
    short, long = (dsi([True, False] * 5, 1, 0.9, lookahead=k) for k in (1, 4))
    assert short.dsi <= short.plain < long.dsi


@pytest.mark.parametrize(
    ("draft_time", "lookahead", "copies"),
    [(0.05, 5, 4), (0.1, 5, 2), (0.1, 1, 10), (0.5, 2, 1), (1.0, 1, 1), (1.5, 2, 1)],
)
def test_expected_time(draft_time, lookahead, copies):
    """10,000 texts of 50 tokens at each acceptance rate; at least as fast as both, and faster where drafts are good."""
    assert servers(1, draft_time, lookahead) == copies
    drawn = np.random.default_rng(0).random((10_000, 50))
    for rate in (0, 0.1, 0.3, 0.5, 0.7, 0.9, 1):
        means = [x.mean() for x in dsi(drawn < rate, 1, draft_time, lookahead=lookahead, servers=copies)]
        assert means[0] <= min(means[1:]) + 1e-9, rate
        if rate >= 0.5 and draft_time < 0.5:
            assert means[0] < 0.95 * min(means[1:]), rate


def test_rejections_cost_a_pass_each():
    """A text of S tokens costs S t_d with lookahead 1. The first token and each rejection but one at the end add t_t -
    t_d."""
    accepted = np.random.default_rng(1).random((50, 4, 30)) < 0.8
    times = dsi(accepted, 1, 0.25)
    stretches = 1 + (~accepted[..., :-1]).sum(-1)
    assert times.dsi.shape == times.speculation.shape == times.plain.shape == (50, 4)
    np.testing.assert_allclose(times.dsi, 30 * 0.25 + stretches * 0.75, rtol=1e-12)


def test_servers_and_lookahead():
    assert [servers(1, 0.05, 5), servers(1, 0.1, 5), servers(1, 0.3, 1), servers(0.3, 0.1, 1)] == [4, 2, 4, 3]
    assert [smallest_lookahead(1, 0.05, 4), smallest_lookahead(1, 0.1, 2), smallest_lookahead(1, 0.3, 2)] == [5, 5, 2]
    assert smallest_lookahead(1, 0.4, 100) == servers(1, 2, 1) == 1
    for tenths, copies in itertools.product(range(1, 40), range(1, 12)):
        lookahead = smallest_lookahead(1, tenths / 10, copies)
        assert servers(1, tenths / 10, lookahead) <= copies
        assert lookahead == 1 or servers(1, tenths / 10, lookahead - 1) > copies


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dsi([True], 0, 1), "target_time and draft_time must be positive, not 0 and 1"),
        (lambda: dsi([True], 1, float("nan")), "must be positive, not 1 and nan"),
        (lambda: servers(1, -1, 1), "must be positive, not 1 and -1"),
        (lambda: servers(1, 1, 0), "lookahead must be at least 1, not 0"),
        (lambda: smallest_lookahead(1, 1, 0), "servers must be at least 1, not 0"),
        (lambda: dsi([True], 1, 1, lookahead=0), "lookahead must be at least 1, not 0"),
        (lambda: dsi([True], 1, 1, servers=0), "servers must be at least 1, not 0"),
        (lambda: dsi([], 1, 1), r"outcomes of at least one token, but has the shape \(0,\)"),
        (lambda: dsi(True, 1, 1), r"outcomes of at least one token, but has the shape \(\)"),
    ],
)
def test_bad_settings(call, words):
    with pytest.raises(UsageError, match=words):
        call()
