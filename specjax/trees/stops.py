"""When to stop drafting: rules that judge the drafter's distributions while a tree grows, so that passes are saved.

`confidence`, `entropy`: Kangaroo (Liu et al. 2024, arXiv 2404.18911) stops at a largest probability below 0.6, assisted
generation (DISCO; Mamou et al. 2024, arXiv 2405.04304) below 0.4. `fallback`: BiLD (Kim et al. 2023, arXiv 2302.07863).
`own`: DSpark (DeepSeek 2026), by the drafter's trained confidence.
`acceptance`, `trained`: SpecDec++ (Huang, Guo, Wang 2024, arXiv 2405.19715), which shows that the best rule is a
threshold on the chance that a candidate will be rejected; by the largest q, or by the paper's head.

Guarantee: that of the verifier, whichever it is: a rule decides whether a token is drafted before it sees the token.
Deviations: q is the distribution that is sampled (warped; the drafter's own in greedy decoding). A drafter does not
know eos, so none of them stops there.
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
    "confidence:P": "keep the token drawn where the largest q is below P, and stop (0.4: assisted generation)",
    "entropy:H": "the same where the entropy of q is above H nats",
    "fallback:P": "do not even draw there (0.6: BiLD)",
    "own:P": "draw nothing where the drafter's own, trained confidence is below P (DSpark)",
    "acceptance:T": "stop once the chance of a rejection is above T, if tokens are accepted as often as the largest q",
    "trained:T": "the same by SpecDec++'s trained head, which --set acceptance=FOLDER gives (0.3: its authors)",
}


def parse(spec: str) -> Stop:
    """A rule from one of `FORMS`. Raises: UsageError for any other text."""
    name, _, number = spec.partition(":")
    rules = {
        "confidence": confidence, "entropy": entropy, "fallback": fallback, "own": own, "acceptance": acceptance,
        "trained": trained,
    }  # fmt: skip
    try:
        threshold = float(number)
    except ValueError:
        threshold = float("nan")
    if name not in rules or threshold != threshold:
        raise UsageError(f'"{spec}" is not a stop rule; the forms are {", ".join(FORMS)}')
    return rules[name](threshold)


@functools.cache
def confidence(threshold: float = 0.4) -> Stop:
    """Stop after a token drawn where the largest probability is below `threshold`; the token stays.

    0 never stops, above 1 there is one token. Raises: UsageError if it is negative.
    """
    _check(threshold)
    return Stop(lambda value, fed: (value, top_probability(fed) >= threshold))


def kangaroo(threshold: float = 0.6) -> Stop:
    """`confidence` with the threshold of Kangaroo, which drafts at most 6 tokens."""
    return confidence(threshold)


@functools.cache
def entropy(threshold: float) -> Stop:
    """Stop after a token drawn where the entropy is above `threshold` nats; it stays. Raises: UsageError if < 0."""
    _check(threshold)
    return Stop(lambda value, fed: (value, sampling.entropy(fed.log_q) <= threshold))


@functools.cache
def fallback(threshold: float = 0.6) -> Stop:
    """BiLD's fallback: draw nothing where the largest probability is below `threshold`, and leave it to the target.

    Above 1 every token is the target's. Raises: UsageError if it is negative.
    """
    _check(threshold)
    return confidence(threshold)._replace(keeps=False)


@functools.cache
def own(threshold: float = 0.5) -> Stop:
    """Draw nothing where the drafter's own confidence, its word on what it will draw, is below `threshold`.

    Raises: UsageError if it is negative; once it drafts, for a drafter that has none.
    """
    _check(threshold)
    return Stop(lambda value, fed: (value, own_confidence(fed) >= threshold), keeps=False)


def own_confidence(fed: Fed) -> Array:
    """float32[B, F]: what the drafter was trained to say of the acceptance of these nodes' children."""
    if fed.confidence is None:
        raise UsageError(
            "this drafter does not say how sure it is; own:P is for heads with a confidence head, such as those of "
            "dspark; choose another stop rule"
        )
    return fed.confidence


def top_probability(fed: Fed) -> Array:
    """float32[B, F]: the largest q of the children; how often they are accepted if the drafter is as right as sure."""
    return jnp.exp(jnp.max(fed.log_q, -1))


def top_unwarped(fed: Fed) -> Array:
    """float32[B, F]: likewise by the drafter's logits as they are, whatever the temperature."""
    return jnp.exp(jnp.max(jax.nn.log_softmax(fed.logits.astype(jnp.float32), -1), -1))


@functools.cache
def acceptance(
    threshold: float = 0.3, *, least: int = 2, lag: bool = True, predict: Callable[[Fed], Array] = top_probability
) -> Stop:
    """SpecDec++'s policy: stop when 1 - prod_i s_i > threshold, s_i the predicted acceptance of candidate i.

    Args:
      threshold: at 1 or above it never stops, below 0 there are `least` tokens. The longest draft is the tree's depth.
      least: tokens drafted in any case.
      lag: the newest token is not judged yet, as in the paper, whose head reads the state behind it. False: it is,
        which saves a pass and which predictions from q allow.
      predict: (Fed) -> s float32[B, F] of the children of these nodes; a module-level function, since settings are
        compared by identity. That of the paper's head is `trained`.

    Raises: UsageError if least < 1.
    """
    if least < 1:
        raise UsageError(f"least must be at least 1, not {least}")

    def judge(value, fed: Fed):
        children = value * predict(fed)
        judged = value if lag else children
        return children, (1 - judged <= threshold) | (fed.depth + 1 < least)

    return Stop(judge, start=1.0)


@functools.cache
def trained(threshold: float = 0.3, *, least: int = 2, lag: bool = True) -> Stop:
    """SpecDec++ with its head, of a drafter that has one: stop when 1 - prod_i s_i > threshold over the tokens read.

    Args: threshold, least: as for `acceptance`. lag: as in the paper, the token that is drawn while the last is judged
      stays in the draft. False: it is not drawn.

    Raises: UsageError if least < 1; once it drafts, for a drafter without an acceptance head.
    """
    if least < 1:
        raise UsageError(f"least must be at least 1, not {least}")

    def judge(value, fed: Fed):
        if fed.accepted is None:
            raise UsageError(
                "this drafter has no acceptance head, which trained:T goes by; give one to two_model (--set "
                "acceptance=FOLDER), or choose another stop rule"
            )
        judged = value * jnp.where(fed.depth > 0, fed.accepted, 1.0)  # the root is the text's
        return judged, (1 - judged <= threshold) | (fed.depth + lag < least)

    return Stop(judge, keeps=lag, start=1.0)


def _check(threshold: float) -> None:
    if not threshold >= 0:
        raise UsageError(f"the threshold of a stop rule must be at least 0, not {threshold}")
