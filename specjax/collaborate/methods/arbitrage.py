"""Arbitrage: the target rewrites a step of the draft model if the rewrite is predicted to be better.

Arbitrage: Efficient Reasoning via Advantage-Aware Speculation (2025), arXiv 2512.05033.

Rule: the draft model writes a step z. The decision depends on the form:
  router: y = sigmoid(w . h + b) of a router model's hidden state h at the end of z; the target rewrites where y >= tau.
    A router is a reward model whose score is the probability that the target's step is better.
  reward: a process reward s(z) ignores the target's step; the target rewrites where s < tau.
  oracle: both models write, with rewards s_d and s_t; the target's step is used where s_t - s_d > tau.
Guarantee: lossy. A router with tau = 0 leaves all steps to the target, with its own key of `multi_writer.writer_keys`.
With tau above 1 it leaves all to the draft model. The oracle is the upper bound for routers.
Training: `specjax.training.train_router`, on which of the two steps a process reward prefers.
Deviations: the authors' router reads the problem and the steps without the chat template of the writers, and each step
up to its last line break. Ours reads the tokens of the text.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from specjax.arrays.modes import with_standard_modes
from specjax.catalog import Method, Option, shared
from specjax.collaborate import multi_writer as texts
from specjax.collaborate.multi_writer import TextState, Writers
from specjax.collaborate.prepare import TextJob, number, prepare_texts, whole
from specjax.collaborate.results import TextResult, mark_failures, result
from specjax.collaborate.rewards import Reward, as_argument, check_reward, readers_of, score_text
from specjax.collaborate.routing import TARGET, Step, judged_steps
from specjax.collaborate.segments import Segmenter
from specjax.engine.packing import Prompts
from specjax.engine.prepare import Settings
from specjax.errors import UsageError
from specjax.types import Array, Drafter, Target

METHOD = Method(
    name="arbitrage",
    kind="collaboration",
    guarantee="lossy",
    summary="writes steps with a small model; the target rewrites the steps that it is predicted to improve",
    paper="arXiv 2512.05033",
    needs=frozenset({"draft", "segmenter"}),
    takes=frozenset({"router", "reward"}),
    options=(
        Option("form", ("router", "reward", "oracle"), "router", "source of the decision"),
        Option(
            "tau", "float", None, "threshold of the decision; default: 0.5 for router, 0.7 for reward, 0 for oracle"
        ),
        Option("max_step_tokens", "int", 512, "maximum number of tokens per step"),
        shared.WRITING_DRAFTER,
    ),
    words=(
        *shared.reward_words("router", "router of form router"),
        *shared.reward_words(),
        shared.steps("an empty line"),
    ),
)


READER = 2  # the writer that is the model of the router or of the reward
Form = Literal["router", "reward", "oracle"]
DEFAULTS = {"router": 0.5, "reward": 0.7, "oracle": 0.0}


def arbitrage(
    draft: Target,
    target: Target,
    prompts: Prompts,
    *,
    key: Array | int,
    max_new_tokens: int,
    segmenter: Segmenter,
    form: Form = "router",
    tau: float | None = None,
    max_step_tokens: int = 512,
    router: Reward | None = None,
    reward: Reward | None = None,
    drafter: Drafter | None = None,
    **settings: Any,
) -> TextResult:
    """Decode steps with the draft model, and rewrite some of them with the target.

    Args:
      segmenter: detects the ends of steps, such as `after_strings(["\\n\\n"], ...)`.
      max_step_tokens: maximum number of tokens per step.
      form: source of the decision. tau: its threshold; defaults are 0.5 for router, 0.7 for reward and 0 for oracle.
      router, reward: functions of texts or models of `reward_of`; only that of the form is used. The score of a router
        is the probability that the target's step is better. The score of a reward is that of the step.
      drafter: drafts within the target's own steps. settings: settings of `decode`, for both models.

    Returns: TextResult of the writers draft, target and, if present, the model that scores. Its log is a `StepLog` with
      y, s or s_t - s_d as scores.
    Raises: UsageError for a form without its model or reward, a setting outside its range, models of different
      vocabularies, or a NaN score.
    """
    checked = check_options(
        form=form, tau=tau, max_step_tokens=max_step_tokens, router=router, reward=reward, **settings
    )
    tau = DEFAULTS[form] if tau is None else tau
    scorer = router if form == "router" else reward
    assert scorer is not None
    job = prepare_texts(
        (draft, target), prompts, key=key, max_new_tokens=max_new_tokens, method=METHOD.name, drafters=(None, drafter),
        settings=checked,
        readers=readers_of(scorer),
    )  # fmt: skip
    done = _run(job, segmenter, jnp.float32(tau), as_argument(scorer), form=form, max_step_tokens=max_step_tokens)
    reason = f"the score of the {form} is NaN; look at its parameters"
    return mark_failures(done, {reason: ~done.log.valid}).cut(max_new_tokens)


def check_options(
    *, form: Form, tau: float | None, max_step_tokens: int, router: Any = None, reward: Any = None, **settings: Any
) -> Settings:
    """Check the options, and return the settings of both models. Raises: UsageError."""
    if form not in get_args(Form):
        raise UsageError(f'form must be one of {", ".join(get_args(Form))}, not "{form}"')
    if tau is not None:
        number("tau", tau, True, "a number")
    whole("max_step_tokens", max_step_tokens, 1)
    used, other = ("router", reward) if form == "router" else ("reward", router)
    check_reward(used, router if form == "router" else reward)
    if other is not None:
        raise UsageError(f'form="{form}" reads the {used} alone; leave the other one out')
    return Settings(**settings)


@functools.partial(jax.jit, static_argnames=("form", "max_step_tokens"))
@with_standard_modes
def _run(
    job: TextJob, segmenter: Segmenter, tau: Array, scorer: Reward, *, form: str, max_step_tokens: int
) -> TextResult:
    def scored(writers: Writers, text: TextState, step: Step) -> tuple[TextState, Array]:
        return score_text(scorer, writers, text, step.start, step.active, READER)

    def compared(writers: Writers, text: TextState, step: Step) -> tuple[TextState, Array]:
        text, score = scored(writers, text, step)
        other, _ = write_anew(writers, text, step, segmenter, max_step_tokens)
        other, better = scored(writers, other, step)
        return text._replace(passes=other.passes, read=other.read), better - score

    judges = {"router": scored, "reward": scored, "oracle": compared}
    routes = {
        "router": lambda score, step: score >= tau,
        "reward": lambda score, step: score < tau,
        "oracle": lambda score, step: score > tau,
    }
    text, log = judged_steps(
        job.writers,
        job.begin(),
        segmenter=segmenter,
        judge=judges[form],
        route=routes[form],
        max_step_tokens=max_step_tokens,
    )
    return result(text, log, TARGET)


def write_anew(
    writers: Writers, text: TextState, step: Step, segmenter: Segmenter, max_step_tokens: int
) -> tuple[TextState, texts.Written]:
    """Return a copy of the text in which the target writes the step.

    It writes the same step again if that is accepted, because draws depend on the position alone.
    """
    start = jnp.where(step.active, step.start, text.length)
    other = texts.rewind(writers, text, start)
    return texts.extend(writers, other, TARGET, segmenter=segmenter, limit=max_step_tokens, active=step.active)
