"""Simulated time of speculation with several copies of the target, in which drafting never waits for verification.

Timor, Mamou, Korat, Berchansky, Pereg, Wasserblat, Galanti, Gordon, Harel: Distributed Speculative Inference (DSI):
Speculation Parallelism for Provably Faster Lossless Language Model Inference (2024), arXiv 2405.14105.

Rule: each server has a copy of the target. A task goes to a server when drafting begins, and after every k drafted
tokens (the lookahead). The task reads the tokens that were drafted since the previous task. After t_t it returns the
target's token after each of them. The first token of a block is therefore verified by the previous task. The first
draft that differs from the target's token is replaced by it, all later work is cancelled, and drafting restarts there.
A task waits if no server is free. The drafter continues meanwhile, and blocks keep their k tokens. The last of S tokens
is a bonus token: at most S - 1 are drafted, and the last block may be short.

With t_d <= t_t and no waiting task, S tokens take (S - 1) t_d + t_t for every k if all drafts are accepted. They take
S t_t for any number of servers if no draft is accepted.
Guarantee: distribution, for the method; this module only simulates its time. For the same outcomes and k t_d <= t_t it
is never slower than plain decoding, for any number of servers. With `servers(...)` + 1 servers (the last, short block
may come early) it is never slower than plain speculation with the same k. With k = 1 it is then never slower than with
any k.
Deviations: in the authors' simulation a block verifies its own first token, and each stretch between two rejections
takes the time of plain decoding if that is less. Here nothing is chosen in hindsight. Their tasks wait last in, first
out. Messages and cancellation take no time here, and t_t does not depend on k.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from specjax.errors import UsageError


class DsiTimes(NamedTuple):
    """The simulated time of the last token, in the unit of the arguments."""

    dsi: np.ndarray  # float64[...]
    speculation: np.ndarray  # float64[...], alternating `lookahead` drafts and one target pass
    plain: np.ndarray  # float64[...], one target pass per token


def dsi(
    accepted: ArrayLike, target_time: float, draft_time: float, *, lookahead: int = 1, servers: int | None = None
) -> DsiTimes:
    """Simulate the time of one text with DSI, plain speculation and plain decoding, by discrete events.

    Args:
      accepted: bool[..., S], True where the draft of a token equals the target's token. All three methods use the same
        outcomes. The last outcome has no effect, nor, for speculation, those of its bonus tokens.
      target_time, draft_time: t_t of a target pass and t_d of a drafted token, in any unit. If the drafter is slower
        than the target, DSI takes the time of plain decoding.
      lookahead: k.
      servers: copies of the target. None: enough that no task waits.

    Returns: DsiTimes, float64 of the shape before S.
    Raises: UsageError for times that are not positive, no tokens, no servers, or a lookahead below 1.
    """
    accepted = np.asarray(accepted, bool)
    _check(target_time, draft_time, lookahead=lookahead, servers=1 if servers is None else servers)
    if accepted.ndim == 0 or accepted.shape[-1] == 0:
        raise UsageError(
            f"accepted must contain the outcomes of at least one token, but has the shape {accepted.shape}"
        )
    shape, num_tokens = accepted.shape[:-1], accepted.shape[-1]
    rows = accepted.reshape(-1, num_tokens)
    if servers is None:  # one more than for full blocks, since the last block is short
        servers = _ceil(target_time / (lookahead * draft_time)) + 1
    in_time = rows & (draft_time <= target_time)
    return DsiTimes(
        _dsi(_next_rejection(in_time), target_time, draft_time, lookahead, servers).reshape(shape),
        _speculation(_next_rejection(rows), target_time, draft_time, lookahead).reshape(shape),
        np.full(shape, num_tokens * target_time, np.float64),
    )


def servers(target_time: float, draft_time: float, lookahead: int) -> int:
    """Return the servers that verify blocks of `lookahead` tokens as fast as they are drafted: ceil(t_t / (k t_d)).

    Raises: UsageError for times that are not positive, or a lookahead below 1.
    """
    _check(target_time, draft_time, lookahead=lookahead)
    return _ceil(target_time / (lookahead * draft_time))


def smallest_lookahead(target_time: float, draft_time: float, servers: int) -> int:
    """Return the smallest lookahead for which no task waits with this number of servers.

    Raises: UsageError for times that are not positive, or no servers.
    """
    _check(target_time, draft_time, servers=servers)
    return _ceil(target_time / (servers * draft_time))


def _dsi(rejected: np.ndarray, target_time: float, draft_time: float, lookahead: int, servers: int) -> np.ndarray:
    """Return float64[R], the time of each row. One iteration ends one task in every active row.

    All tasks take equally long, so they end in order, and task i uses the server of task i - `servers`.
    """
    rows, num_tokens = np.arange(len(rejected)), rejected.shape[1] - 1
    servers = min(servers, num_tokens)
    time, free = (
        np.zeros(len(rows)),
        np.zeros((len(rows), servers)),
    )  # end of the last task; time at which each server is free
    begin, base, task = (
        np.zeros(len(rows)),
        np.zeros(len(rows), int),
        np.zeros(len(rows), int),
    )  # of the current drafting
    active = np.ones(len(rows), bool)
    while active.any():
        fed = np.minimum(task * lookahead, num_tokens - 1 - base)  # drafted tokens after `base` that the task has read
        end = np.maximum(begin + fed * draft_time, free[rows, task % servers]) + target_time
        free[rows, task % servers] = end
        time = np.where(active, end, time)
        wrong = rejected[rows, base] <= base + fed
        committed = np.where(wrong, rejected[rows, base], base + fed) + 1
        begin, base, task = np.where(wrong, end, begin), np.where(wrong, committed, base), np.where(wrong, 0, task + 1)
        free[wrong] = end[wrong, None]
        active &= committed < num_tokens
    return time


def _speculation(rejected: np.ndarray, target_time: float, draft_time: float, lookahead: int) -> np.ndarray:
    """Return float64[R], the time of each row. The last step drafts only tokens that can be used."""
    rows, num_tokens = np.arange(len(rejected)), rejected.shape[1] - 1
    time, base = np.zeros(len(rows)), np.zeros(len(rows), int)
    while (active := base < num_tokens).any():
        drafted = np.minimum(lookahead, num_tokens - 1 - base)
        time += np.where(active, drafted * draft_time + target_time, 0.0)
        base = np.where(active, np.minimum(rejected[rows, base], base + drafted) + 1, base)
    return time


def _next_rejection(accepted: np.ndarray) -> np.ndarray:
    """Return int64[R, S + 1], the first rejected token at or after each token, or S."""
    num_tokens = accepted.shape[1]
    place = np.where(accepted, num_tokens, np.arange(num_tokens))
    place = np.pad(place, ((0, 0), (0, 1)), constant_values=num_tokens)
    return np.minimum.accumulate(place[:, ::-1], 1)[:, ::-1]


def _ceil(x: float) -> int:
    """Round up, with a tolerance for decimal times: 3.0000000000000004 gives 3."""
    return math.ceil(x * (1 - 1e-9))


def _check(target_time: float, draft_time: float, **counts: int) -> None:
    if not (0 < target_time < math.inf and 0 < draft_time < math.inf):
        raise UsageError(f"target_time and draft_time must be positive, not {target_time} and {draft_time}")
    for name, count in counts.items():
        if count < 1:
            raise UsageError(f"{name} must be at least 1, not {count}")
