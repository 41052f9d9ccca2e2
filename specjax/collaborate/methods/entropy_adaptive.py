"""Entropy adaptive decoding: the large model writes while the text is uncertain, the small one while it is not.

Simonds: Entropy Adaptive Decoding: Dynamic Model Switching for Efficient Inference (2025), arXiv 2502.06833.

Rule: H_t is the entropy, in bits, of the active model's distribution before temperature, and M_t the mean of the last
`window` of them. If at least `least` tokens have come since the last switch, the next token is the large model's where
M_t > tau and the small one's where not; else the model stays. A model that comes in reads what it missed.
Guarantee: lossy. With tau infinite it is decoding with the small model, with tau < 0 and start="large" with the large
one, byte for byte.
Deviations: `least` is 10 where the paper gives no number. The first token is the small model's unless `start` says so.
Rows share the passes: with several of them both models run, and only rows that agree save anything.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.x64 import without_x64
from specjax.catalog import Method, Option
from specjax.collaborate import multi_writer as texts
from specjax.collaborate.multi_writer import TextState
from specjax.collaborate.prepare import TextJob, number, prepare_texts, whole
from specjax.collaborate.results import TextResult, result
from specjax.collaborate.routing import token_by_token
from specjax.engine.packing import Prompts
from specjax.engine.prepare import Settings
from specjax.errors import UsageError
from specjax.numerics.sampling import entropy
from specjax.types import Array, Target

METHOD = Method(
    name="entropy_adaptive",
    kind="collaboration",
    guarantee="lossy",
    summary="switches between a small and a large model by the mean entropy of the last tokens",
    paper="Simonds 2025, arXiv 2502.06833",
    needs=frozenset({"draft"}),
    options=(
        Option("tau", "float", 1.0, "mean entropy in bits above which the large model writes"),
        Option("window", "int", 5, "tokens in the mean of the entropy"),
        Option("least", "int", 10, "minimum number of tokens between two switches"),
        Option("start", ("small", "large"), "small", "model that writes first"),
    ),
)


SMALL, LARGE = 0, 1


class Router(NamedTuple):
    """The last entropies, and who writes."""

    recent: Array  # float32[B, window], a ring
    number: Array  # int32[B], entropies so far
    since: Array  # int32[B], tokens since the last switch
    large: Array  # bool[B], whether the next token is the large model's
    switches: Array  # int32[B]


def entropy_adaptive(
    draft: Target,
    target: Target,
    prompts: Prompts,
    *,
    key: Array | int,
    max_new_tokens: int,
    tau: float = 1.0,
    window: int = 5,
    least: int = 10,
    start: str = "small",
    **settings: Any,
) -> TextResult:
    """Decoding that switches between a small and a large model by the entropy of what they say.

    Args:
      tau: bits, to be swept. window: entropies that are averaged. least: tokens between two switches.
      start: "small" or "large", who writes first. settings: of `decode`, for both models.

    Returns: TextResult of the writers draft, target, whose log is int32[B], the number of switches.
    Raises: UsageError for a setting outside its range, or models of different vocabularies.
    """
    number("tau", tau, True, "a number of bits")
    whole("window", window, 1)
    whole("least", least, 1)
    if start not in ("small", "large"):
        raise UsageError(f'start must be "small" or "large", not "{start}"')
    job = prepare_texts((draft, target), prompts, key=key, max_new_tokens=max_new_tokens, settings=Settings(**settings))
    done = _run(job, jnp.float32(tau), jnp.int32(least), jnp.bool_(start == "large"), window=window)
    return done.cut(max_new_tokens)


def begin(batch: int, window: int, large: Array) -> Router:
    """Before the first token."""
    zero = jnp.zeros((batch,), jnp.int32)
    return Router(jnp.zeros((batch, window)), zero, zero, jnp.broadcast_to(large, (batch,)), zero)


def route(router: Router, bits: Array, going: Array, tau: Array, least: Array) -> Router:
    """Who writes the next token, after one whose distribution had `bits` float32[B] of entropy."""
    window = router.recent.shape[1]
    recent = jnp.where((jnp.arange(window) == (router.number % window)[:, None]), bits[:, None], router.recent)
    number = router.number + 1
    filled = jnp.minimum(number, window)
    mean = jnp.sum(jnp.where(jnp.arange(window) < filled[:, None], recent, 0.0), 1) / filled
    large = jnp.where(router.since >= least, mean > tau, router.large)
    switch = large != router.large
    new = Router(recent, number, jnp.where(switch, 0, router.since + 1), large, router.switches + switch)
    return jax.tree.map(lambda x, old: jnp.where(going.reshape(-1, *[1] * (x.ndim - 1)), x, old), new, router)


@functools.partial(jax.jit, static_argnames=("window",))
@without_x64
def _run(job: TextJob, tau: Array, least: Array, large: Array, *, window: int) -> TextResult:
    def choose(text: TextState, router: Router, going: Array):
        text, small_says, _ = texts.look(job.writers, text, SMALL, going & ~router.large)
        text, large_says, _ = texts.look(job.writers, text, LARGE, going & router.large)
        logits = jnp.where(router.large[:, None], large_says, small_says)
        bits = entropy(jax.nn.log_softmax(logits, -1)) / jnp.log(2.0)
        author = jnp.where(router.large, LARGE, SMALL)
        return text, logits, author, route(router, bits, going, tau, least)

    text = job.begin()
    text, router = token_by_token(job.writers, text, choose, begin(len(text.length), window, large))
    return result(text, router.switches)
