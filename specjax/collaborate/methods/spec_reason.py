"""SpecReason: a small model writes the steps of a chain of thought, and a large one rewrites steps with low ratings.

Pan, Dai, Zhang, Oliaro, Jia, Netravali: SpecReason: Fast and Accurate Inference-Time Compute via Speculative Reasoning
(2025), arXiv 2504.07891.

Rule: the draft model writes a step s. The target reads it and, after a fixed judging prompt, rates it with one digit:
u = the most likely token, 0 if it is no digit, or sum_k k p(k) with p normalised over the ten digits. The prompt is a
new turn of the user and the beginning of the answer (`judging.judge_prompt`). The step is accepted if u >= threshold.
Otherwise the target writes a step in its place. The target writes the first `first` steps. The text ends with a step
that contains an answer or repeats the previous step.
Guarantee: lossy. With a threshold of 0 the text is the draft model's. With a threshold above 9 it is the target's,
with its own key of `multi_writer.writer_keys`. A drafter inside the target's steps keeps its own guarantee: greedy
text is the same.
Deviations: judging is one pass over the prompt without a commit to the cache, so no rewind is needed. The words of the
judging prompt are ours. The authors normalise over the digits among the ten most likely tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax.arrays.modes import with_standard_modes
from specjax.catalog import Method, Option, shared
from specjax.collaborate import multi_writer as texts
from specjax.collaborate import phrases
from specjax.collaborate.multi_writer import TextState, Writers
from specjax.collaborate.phrases import PhraseCounter, Phrases
from specjax.collaborate.prepare import TextJob, check_ids, number, prepare_texts, whole
from specjax.collaborate.results import TextResult, mark_failures, result
from specjax.collaborate.routing import TARGET, Step, judged_steps
from specjax.collaborate.segments import Segmenter
from specjax.engine.packing import Prompts
from specjax.engine.prepare import Settings
from specjax.errors import UsageError
from specjax.types import Array, Drafter, Target

METHOD = Method(
    name="spec_reason",
    kind="collaboration",
    guarantee="lossy",
    summary="writes reasoning steps with a small model; the target rates each and rewrites those with a low rating",
    paper="Pan et al. 2025, arXiv 2504.07891",
    needs=frozenset({"draft", "segmenter", "judging"}),
    options=(
        Option("threshold", "float", 7.0, "minimum rating of an accepted step, from 0 to 9"),
        Option("average", "yes_or_no", False, "use the mean rating instead of the most likely one"),
        Option("first", "int", 0, "first steps that the target writes itself"),
        Option("max_step_tokens", "int", 512, "maximum number of tokens per step"),
        shared.WRITING_DRAFTER,
    ),
    words=(
        Option("judging", "text_file", None, "the judge's question and, after a line ---, its answer up to the digit"),
        shared.steps("an empty line"),
        Option("answer", "texts", None, "texts that mark an answer, joined by |: the text ends after their step"),
    ),
)


NO_RATING = "the target's rating is NaN; look at its parameters"


def spec_reason(
    draft: Target,
    target: Target,
    prompts: Prompts,
    *,
    key: Array | int,
    max_new_tokens: int,
    segmenter: Segmenter,
    judging: Sequence[int],
    digits: Sequence[int],
    threshold: float = 7.0,
    average: bool = False,
    first: int = 0,
    max_step_tokens: int = 512,
    answer: Phrases = (),
    drafter: Drafter | None = None,
    **settings: Any,
) -> TextResult:
    """Decode steps with the draft model, rated by the target. The authors sample at temperature 0.6 with top_p 0.95.

    Args:
      segmenter: detects the ends of steps, such as `after_strings(["\\n\\n"], ...)`.
      max_step_tokens: maximum number of tokens per step.
      judging, digits: ids of the judging prompt and of 0 ... 9, such as `judge_prompt(tokenizer)._asdict()`.
      threshold: minimum rating of an accepted step. average: whether to use the mean rating, not the most likely one.
      first: steps that the target writes without a proposal.
      answer: counter of texts that mark an answer, such as `count_strings(["boxed"], ...)`, or sequences of ids.
      drafter: drafts within the target's own steps. settings: settings of `decode`, for both models.

    Returns: TextResult of the writers draft, target; its log is a `StepLog`.
    Raises: UsageError for a setting outside its range, models of different vocabularies, or a judge without a rating.
    """
    checked = check_options(threshold=threshold, first=first, max_step_tokens=max_step_tokens, **settings)
    if len(digits) != 10 or not len(judging):
        raise UsageError("digits must be the ten ids of 0 to 9, and judging must have at least one token")
    job = prepare_texts(
        (draft, target), prompts, key=key, max_new_tokens=max_new_tokens, method=METHOD.name, drafters=(None, drafter),
        settings=checked, spare=len(judging),
    )  # fmt: skip
    vocab = target.model.vocab_size
    for name, ids in (("judging", judging), ("digits", digits)):
        check_ids(name, ids, vocab)
    counter = phrases.to_counter(answer, vocab) if len(answer) else None
    done = _run(
        job, segmenter, jnp.asarray(judging, jnp.int32), jnp.asarray(digits, jnp.int32), jnp.float32(threshold),
        jnp.int32(first), counter, average=average, max_step_tokens=max_step_tokens,
    )  # fmt: skip
    return mark_failures(done, {NO_RATING: ~done.log.valid}).cut(max_new_tokens)


def check_options(*, threshold: float, first: int, max_step_tokens: int, **settings: Any) -> Settings:
    """Check the options, and return the settings of both models. Raises: UsageError."""
    number("threshold", threshold, True, "a number")
    whole("first", first, 0)
    whole("max_step_tokens", max_step_tokens, 1)
    return Settings(**settings)


def rating(logits: Array, digits: Array, average: bool) -> Array:
    """Return the rating float32[B] from logits float32[B, V] and the ids int32[10] of the digits.

    It is 0 where the most likely token is no digit (for the average, where no digit has any mass), and NaN where the
    logits are no numbers.
    """
    of_digits = logits[:, digits]
    if average:
        p = jax.nn.softmax(of_digits, -1)
        score = jnp.where(jnp.any(of_digits > -jnp.inf, -1), jnp.sum(jnp.arange(10) * p, -1), 0.0)
    else:
        best = jnp.argmax(of_digits, -1)
        is_digit = jnp.max(of_digits, -1) == jnp.max(logits, -1)
        score = jnp.where(is_digit, best, 0).astype(jnp.float32)
    return jnp.where(jnp.any(jnp.isnan(logits), -1), jnp.nan, score)


def judge_by_digit(writers: Writers, text: TextState, step: Step, *, judging: Array, digits: Array, average: bool):
    """Return (text, float32[B]), the target's rating of a step after the judging prompt."""
    suffix = jnp.broadcast_to(judging, (len(text.length), len(judging)))
    count = jnp.full(text.length.shape, len(judging))
    text, scores = texts.score(writers, text, TARGET, suffix, count, step.active)
    return text, rating(scores.logits, digits, average)


@functools.partial(jax.jit, static_argnames=("average", "max_step_tokens"))
@with_standard_modes
def _run(
    job: TextJob, segmenter: Segmenter, judging: Array, digits: Array, threshold: Array, first: Array,
    answer: PhraseCounter | None, *, average: bool, max_step_tokens: int,
) -> TextResult:  # fmt: skip
    text, log = judged_steps(
        job.writers,
        job.begin(),
        segmenter=segmenter,
        judge=functools.partial(judge_by_digit, judging=judging, digits=digits, average=average),
        route=lambda score, step: score < threshold,
        max_step_tokens=max_step_tokens,
        first=first,
        answer=answer,
    )
    return result(text, log)
