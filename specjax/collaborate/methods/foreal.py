"""FoReaL decoding: a leading model begins sentences, and a small one finishes them.

Li et al.: What Makes Reasoning Models Different? Follow the Reasoning Leader for Efficient Decoding (2025),
arXiv 2506.06998.

Rule: each sentence begins with a coin toss g ~ Bernoulli(p). If g = 1, the leader writes the first n tokens, or all of
a shorter sentence, and the draft model writes the remaining ones. If g = 0, the draft model writes the sentence. Each
model reads the other's tokens.
Guarantee: lossy. With p = 0 the text is the draft model's. With p = 1 and n above the length of the longest sentence
it is the leader's, with its own key of `multi_writer.writer_keys`.
Deviations: n = 15 and p = 0.6 are our choice. The caller's segmenter detects the end of a sentence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.modes import with_standard_modes
from specjax.catalog import Method, Option, shared
from specjax.collaborate import multi_writer as texts
from specjax.collaborate.multi_writer import TextState
from specjax.collaborate.prepare import TextJob, number, prepare_texts, whole
from specjax.collaborate.results import TextResult, mark_failures, result, scalar
from specjax.collaborate.segments import Segmenter
from specjax.engine.packing import Prompts
from specjax.engine.prepare import Settings
from specjax.numerics.sampling import fold_in, uniform
from specjax.types import Array, Drafter, Target

METHOD = Method(
    name="foreal",
    kind="collaboration",
    guarantee="lossy",
    summary="begins sentences with a leading model and finishes them with a small one",
    paper="Li et al. 2025, arXiv 2506.06998",
    needs=frozenset({"draft", "segmenter"}),
    options=(
        Option("lead", "int", 15, "tokens of a sentence that the leading model writes"),
        Option("p", "float", 0.6, "probability that the leading model begins a sentence"),
        shared.WRITING_DRAFTER,
    ),
    words=(shared.steps("the ends of sentences"),),
)


DRAFT, LEADER = 0, 1
COIN = 105
"""Purpose of the keys of the coin tosses."""


class Sentences(NamedTuple):
    """Counts of sentences."""

    all: Array  # int32[B]
    led: Array  # int32[B], those that the leader began

    def summary(self, row: int) -> dict[str, Any]:
        """Return the counts of a row."""
        return {"sentences": scalar(self.all[row]), "led_sentences": scalar(self.led[row])}


def foreal(
    draft: Target,
    target: Target,
    prompts: Prompts,
    *,
    key: Array | int,
    max_new_tokens: int,
    segmenter: Segmenter,
    lead: int = 15,
    p: float = 0.6,
    drafter: Drafter | None = None,
    **settings: Any,
) -> TextResult:
    """Decode sentences that the leader, `target`, begins and the draft model finishes.

    Args:
      segmenter: detects the ends of sentences, such as `after_sentences(tokenizer, vocab_size)`.
      lead: n. p: probability of g = 1. drafter: drafts within the leader's parts.
      settings: settings of `decode`, for both models.

    Returns: TextResult of the writers draft, target; its log is a `Sentences`.
    Raises: UsageError for a setting outside its range, or models of different vocabularies.
    """
    job = prepare_texts(
        (draft, target), prompts, key=key, max_new_tokens=max_new_tokens, method=METHOD.name, drafters=(None, drafter),
        settings=check_options(lead=lead, p=p, **settings),
    )  # fmt: skip
    return mark_failures(_run(job, segmenter, jnp.int32(lead), jnp.float32(p))).cut(max_new_tokens)


def check_options(*, lead: int, p: float, **settings: Any) -> Settings:
    """Check the options, and return the settings of both models. Raises: UsageError."""
    whole("lead", lead, 1)
    number("p", p, 0 <= p <= 1, "from 0 to 1")
    return Settings(**settings)


@jax.jit
@with_standard_modes
def _run(job: TextJob, segmenter: Segmenter, lead: Array, p: Array) -> TextResult:
    writers = job.writers

    def body(carry: tuple[TextState, Sentences]) -> tuple[TextState, Sentences]:
        text, log = carry
        unfinished = text.unfinished
        coins = fold_in(fold_in(text.keys[:, 0], text.length), COIN)
        led = unfinished & (uniform(coins, 1)[:, 0] < p)
        text, beginning = texts.extend(writers, text, LEADER, segmenter=segmenter, limit=lead, active=led)
        remains = unfinished & ~(led & beginning.complete)
        text, _ = texts.extend(writers, text, DRAFT, segmenter=segmenter, run=beginning.run, active=remains)
        return text, Sentences(log.all + unfinished, log.led + led)

    text = job.begin()
    zero = jnp.zeros_like(text.length)
    text, log = jax.lax.while_loop(lambda carry: jnp.any(carry[0].unfinished), body, (text, Sentences(zero, zero)))
    return result(text, log)
