"""Stop conditions, which judge the drafter's distributions while a tree grows, and end drafting early to save passes.

`confidence`, `entropy`: Kangaroo (Liu et al. 2024, arXiv 2404.18911) stops at a largest probability below 0.6, assisted
generation (DISCO; Mamou et al. 2024, arXiv 2405.04304) below 0.4. `fallback`: BiLD (Kim et al. 2023, arXiv 2302.07863).
`drafter_confidence`: DSpark (DeepSeek 2026), with the drafter's trained confidence.
`budget`: DSpark's scheduler, which stops all rows of a batch at the level that gives most tokens per second.
`acceptance`, `acceptance_head`: SpecDec++ (Huang, Guo, Wang 2024, arXiv 2405.19715). It shows that the best rule is a
threshold on the probability that a candidate is rejected. The largest q or the paper's head predicts it.

Guarantee: the guarantee of any verifier is preserved, because a condition decides to draft a token before it is drawn.
Deviations: q is the distribution that is sampled (warped; in greedy decoding the drafter's own distribution). Drafters
have no eos token, so no condition stops there. In the paper of `budget`, each row of a packed batch has its own length.
Rows of this engine are padded to one width, so `budget` chooses one length for all of them, level by level.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.numerics import sampling
from specjax.trees.contracts import Fed, Stop
from specjax.types import Array

FORMS = {
    "confidence:P": "stop after the first token drawn where the largest q is below P (0.4: assisted generation)",
    "entropy:H": "stop after the first token drawn where the entropy of q is above H nats",
    "fallback:P": "stop before drawing a token where the largest q is below P (0.6: BiLD)",
    "own:P": "stop before drawing a token where the drafter's trained confidence is below P (DSpark)",
    "budget": "stop all rows before a level that adds too few tokens for its cost, by the trained confidence (DSpark)",
    "acceptance:T": "stop once the probability of a rejection is above T, with the largest q as acceptance rate",
    "trained:T": "stop once the rejection probability by SpecDec++'s trained head (--set acceptance=FOLDER) is above T "
    "(0.3: its authors)",
}


def parse(spec: str) -> Stop:
    """Return a stop condition for one of `FORMS`. Raises: UsageError for any other text."""
    if spec == "budget":
        return budget()
    name, _, number = spec.partition(":")
    rules = {
        "confidence": confidence, "entropy": entropy, "fallback": fallback, "own": drafter_confidence,
        "acceptance": acceptance, "trained": acceptance_head,
    }  # fmt: skip
    try:
        threshold = float(number)
    except ValueError:
        threshold = float("nan")
    if name not in rules or threshold != threshold:
        raise UsageError(f'"{spec}" is not a stop condition; the forms are {", ".join(FORMS)}')
    return rules[name](threshold)


@functools.cache
def confidence(threshold: float = 0.4) -> Stop:
    """Stop after a token drawn where the largest probability is below `threshold`; the token stays.

    A threshold of 0 never stops. Above 1 exactly one token is drafted.

    Raises: UsageError if the threshold is negative.
    """
    _check(threshold)
    return Stop(lambda value, fed: (value, top_probability(fed) >= threshold))


def kangaroo(threshold: float = 0.6) -> Stop:
    """Return `confidence` with the threshold of Kangaroo, which drafts at most 6 tokens."""
    return confidence(threshold)


@functools.cache
def entropy(threshold: float) -> Stop:
    """Stop after a token drawn where the entropy is above `threshold` nats; the token stays.

    Raises: UsageError if the threshold is negative.
    """
    _check(threshold)
    return Stop(lambda value, fed: (value, sampling.entropy(fed.log_q) <= threshold))


@functools.cache
def fallback(threshold: float = 0.6) -> Stop:
    """Stop before drawing a token where the largest probability is below `threshold`: the target decodes it (BiLD).

    Above 1 the target decodes every token.

    Raises: UsageError if the threshold is negative.
    """
    _check(threshold)
    return confidence(threshold)._replace(keeps=False)


@functools.cache
def drafter_confidence(threshold: float = 0.5) -> Stop:
    """Stop before drawing a token where the drafter's trained confidence in its next draw is below `threshold`.

    Raises: UsageError if it is negative; when drafting begins, also for a drafter without a confidence head.
    """
    _check(threshold)
    return Stop(lambda value, fed: (value, read_confidence(fed) >= threshold), keeps=False)


@functools.cache
def budget(predict: Callable[[Fed], Array] | None = None) -> Stop:
    """Stop all rows of a batch at the level with the most expected tokens per cost of the target pass.

    Let a_{r,i} be the product of the confidences of the first i tokens of row r. Let c_r be the confidence of its next
    token, and t[j] the cost of a pass over chains of j tokens. Level j + 1 is drafted if, for some m >= 1,
      (sum over rows of 1 + a_{r,1} + ... + a_{r,j} + a_{r,j} (c_r + ... + c_r^m)) / t[j + m]
    is larger than the same without the last term, over t[j]. So levels that are free in a compiled width are drafted,
    and a wider pass is paid for by all levels that it adds.
    Guarantee: whether a level exists depends on tokens of earlier levels only, so the joint distribution of all rows is
    unchanged. A search over all levels afterwards would bias it, since a later confidence depends on an earlier token.

    Args:
      predict: as in `acceptance`; default: the drafter's trained confidence.

    Raises: when drafting begins, UsageError for a drafter without a confidence or costs, or a tree that is no chain.
    """

    def judge(value, fed: Fed):
        survival, total = value  # float32[B, 1] each: a_{r,j}, and 1 + a_{r,1} + ... + a_{r,j}
        chance = jnp.clip((predict or read_confidence)(fed), 0.0, 1.0)
        if fed.pass_costs is None or fed.expands is None:
            raise UsageError(
                "the stop condition budget needs the costs of passes, which this drafter lacks; choose own:P"
            )
        if chance.shape[1] > 1:
            raise UsageError("the stop condition budget needs a chain; leave the tree out, or choose own:P")
        costs = jnp.asarray(fed.pass_costs, jnp.float32)
        last, level = len(fed.pass_costs) - 1, jnp.max(fed.depth)
        is_live = fed.expands & (survival > 0)
        ahead = jnp.arange(1, last + 1)
        gain = jnp.where(is_live, survival * jnp.cumsum(chance**ahead, 1), 0.0)  # [B, D], by m levels more
        # Rows that do not draft at all have ended, or end with the next token.
        is_running = jnp.where(fed.depth == 0, fed.expands, total > 0)
        total = jnp.where(is_running, total, 0.0)
        expected = jnp.sum(total)
        later = (expected + jnp.sum(gain, 0)) / costs[jnp.minimum(level + ahead, last)]
        go_on = jnp.max(jnp.where(level + ahead <= last, later, 0.0)) > expected / costs[jnp.minimum(level, last)]
        survival = jnp.where(is_live, survival * chance, 0.0)
        return (survival, total + survival), jnp.broadcast_to(go_on, chance.shape)

    return Stop(judge, keeps=False, start=(1.0, 1.0), reads_costs=True)


def read_confidence(fed: Fed) -> Array:
    """Return float32[B, F]: the acceptance of these nodes' children as predicted by the drafter's confidence head."""
    if fed.confidence is None:
        raise UsageError(
            "own:P and budget need a drafter with a confidence head; use a drafter that has one, such as dspark, or "
            "choose another stop condition"
        )
    return fed.confidence


def top_probability(fed: Fed) -> Array:
    """Return float32[B, F]: the largest q of the children. It is their acceptance rate if the drafter is calibrated."""
    return jnp.exp(jnp.max(fed.log_q, -1))


def top_unwarped(fed: Fed) -> Array:
    """Return float32[B, F]: the largest q of the children at temperature 1, without any warping."""
    return jnp.exp(jnp.max(jax.nn.log_softmax(fed.logits.astype(jnp.float32), -1), -1))


@functools.cache
def acceptance(
    threshold: float = 0.3, *, min_tokens: int = 2, lag: bool = True, predict: Callable[[Fed], Array] = top_probability
) -> Stop:
    """Apply SpecDec++'s policy: stop when 1 - prod_i s_i > threshold, for predicted acceptances s_i of candidates i.

    Args:
      threshold: at 1 or above it never stops, below 0 it drafts `min_tokens` tokens. The tree's depth limits the draft.
      min_tokens: minimum number of drafted tokens.
      lag: do not judge the newest token, as in the paper, whose head reads the state after it. False also judges the
        newest token, which saves a pass. It is possible because the predictions come from q.
      predict: (Fed) -> s float32[B, F] of the children of these nodes. It must be a module-level function, since
        settings are compared by identity. The paper's head is `acceptance_head`.

    Raises: UsageError if min_tokens < 1.
    """
    if min_tokens < 1:
        raise UsageError(f"min_tokens must be at least 1, not {min_tokens}")

    def judge(value, fed: Fed):
        children = value * predict(fed)
        judged = value if lag else children
        return children, (1 - judged <= threshold) | (fed.depth + 1 < min_tokens)

    return Stop(judge, start=1.0)


@functools.cache
def acceptance_head(threshold: float = 0.3, *, min_tokens: int = 2, lag: bool = True) -> Stop:
    """Apply SpecDec++ with its trained head: stop when 1 - prod_i s_i > threshold over the tokens read.

    Args:
      threshold, min_tokens: as in `acceptance`.
      lag: keep the token that is drawn while the last one is judged, as in the paper. False: it is not drawn.

    Raises: UsageError if min_tokens < 1; when drafting begins, also for a drafter without an acceptance head.
    """
    if min_tokens < 1:
        raise UsageError(f"min_tokens must be at least 1, not {min_tokens}")

    def judge(value, fed: Fed):
        if fed.accepted is None:
            raise UsageError(
                "trained:T needs a drafter with an acceptance head; pass one to two_model (--set acceptance=FOLDER) "
                "or choose another stop condition"
            )
        judged = value * jnp.where(fed.depth > 0, fed.accepted, 1.0)  # the root is already committed
        return judged, (1 - judged <= threshold) | (fed.depth + lag < min_tokens)

    return Stop(judge, keeps=lag, start=1.0)


def _check(threshold: float) -> None:
    if not threshold >= 0:
        raise UsageError(f"the threshold of a stop condition must be at least 0, not {threshold}")
