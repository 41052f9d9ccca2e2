"""Entropy adaptive decoding: the large model writes while the entropy is high, and the small one while it is low.

Simonds: Entropy Adaptive Decoding: Dynamic Model Switching for Efficient Inference (2025), arXiv 2502.06833.

Rule: H_t is the entropy, in bits, of the active model's distribution before temperature. M_t is the mean of the last
`window` of them. After at least `min_tokens` tokens since the last switch, the large model writes the next token if
M_t > tau, and otherwise the small one. Before that the model does not change. A model that takes over first reads the
tokens it missed.
Guarantee: lossy. With tau infinite it is decoding with the small model, byte for byte. With tau < 0 and start="large"
it is decoding with the large one.
Deviations: `min_tokens` is 10, as the paper gives no number. The small model writes the first token unless `start` is
"large". Rows share the passes, so both models run in a mixed batch. Time is saved only when all rows agree.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.modes import with_standard_modes
from specjax.catalog import Method, Option
from specjax.collaborate import multi_writer as texts
from specjax.collaborate.multi_writer import TextState
from specjax.collaborate.prepare import TextJob, number, prepare_texts, whole
from specjax.collaborate.results import TextResult, mark_failures, result, scalars
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
        Option("min_tokens", "int", 10, "minimum number of tokens between two switches"),
        Option("start", ("small", "large"), "small", "model that writes first"),
    ),
)


SMALL, LARGE = 0, 1


class Switches(NamedTuple):
    """Counts of the changes of the writer."""

    switches: Array  # int32[B]

    def summary(self, row: int) -> dict[str, Any]:
        """Return the count of a row."""
        return scalars(self, row, self._fields)


class Router(NamedTuple):
    """The last entropies, and the model that writes next."""

    recent: Array  # float32[B, window], a ring
    number: Array  # int32[B], entropies so far
    since: Array  # int32[B], tokens since the last switch
    large: Array  # bool[B], True: the large model writes the next token
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
    min_tokens: int = 10,
    start: str = "small",
    **settings: Any,
) -> TextResult:
    """Decode with a small and a large model, switching by the entropy of their distributions.

    Args:
      tau: threshold in bits, to be tuned. window: number of entropies in the mean.
      min_tokens: minimum number of tokens between two switches. start: "small" or "large", the model that writes first.
      settings: settings of `decode`, for both models.

    Returns: TextResult of the writers draft, target; its log is a `Switches`.
    Raises: UsageError for a setting outside its range, or models of different vocabularies.
    """
    checked = check_options(tau=tau, window=window, min_tokens=min_tokens, start=start, **settings)
    job = prepare_texts(
        (draft, target), prompts, key=key, max_new_tokens=max_new_tokens, method=METHOD.name, settings=checked
    )
    done = _run(job, jnp.float32(tau), jnp.int32(min_tokens), jnp.bool_(start == "large"), window=window)
    return mark_failures(done).cut(max_new_tokens)


def check_options(*, tau: float, window: int, min_tokens: int, start: str, **settings: Any) -> Settings:
    """Check the options, and return the settings of both models. Raises: UsageError."""
    number("tau", tau, True, "a number of bits")
    whole("window", window, 1)
    whole("min_tokens", min_tokens, 1)
    if start not in ("small", "large"):
        raise UsageError(f'start must be "small" or "large", not "{start}"')
    return Settings(**settings)


def begin(batch: int, window: int, large: Array) -> Router:
    """Return the router's state before the first token."""
    zero = jnp.zeros((batch,), jnp.int32)
    return Router(jnp.zeros((batch, window)), zero, zero, jnp.broadcast_to(large, (batch,)), zero)


def route(router: Router, bits: Array, unfinished: Array, tau: Array, min_tokens: Array) -> Router:
    """Update the router after a token with the entropy `bits` float32[B], and select the writer of the next token."""
    window = router.recent.shape[1]
    recent = jnp.where((jnp.arange(window) == (router.number % window)[:, None]), bits[:, None], router.recent)
    number = router.number + 1
    filled = jnp.minimum(number, window)
    mean = jnp.sum(jnp.where(jnp.arange(window) < filled[:, None], recent, 0.0), 1) / filled
    large = jnp.where(router.since >= min_tokens, mean > tau, router.large)
    switch = large != router.large
    new = Router(recent, number, jnp.where(switch, 0, router.since + 1), large, router.switches + switch)
    return jax.tree.map(lambda x, old: jnp.where(unfinished.reshape(-1, *[1] * (x.ndim - 1)), x, old), new, router)


@functools.partial(jax.jit, static_argnames=("window",))
@with_standard_modes
def _run(job: TextJob, tau: Array, min_tokens: Array, large: Array, *, window: int) -> TextResult:
    def choose(text: TextState, router: Router, unfinished: Array):
        text, small_logits, _ = texts.look(job.writers, text, SMALL, unfinished & ~router.large)
        text, large_logits, _ = texts.look(job.writers, text, LARGE, unfinished & router.large)
        logits = jnp.where(router.large[:, None], large_logits, small_logits)
        bits = entropy(jax.nn.log_softmax(logits, -1)) / jnp.log(2.0)
        author = jnp.where(router.large, LARGE, SMALL)
        return text, logits, author, route(router, bits, unfinished, tau, min_tokens)

    text = job.begin()
    text, router = token_by_token(job.writers, text, choose, begin(len(text.length), window, large))
    return result(text, Switches(router.switches))
