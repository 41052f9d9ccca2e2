"""Arbitrage: the target rewrites a step of the draft model if the rewrite is predicted to be better.

Arbitrage: Efficient Reasoning via Advantage-Aware Speculation (2025), arXiv 2512.05033.

Rule: the draft model writes a step z. The decision depends on the form:
  router: y = sigmoid(w . h + b) of a router model's hidden state h at the end of z; the target rewrites where y >= tau.
  reward: a process reward s(z) ignores the target's step; the target rewrites where s < tau.
  oracle: both models write, with rewards s_d and s_t; the target's step is used where s_t - s_d > tau.
Guarantee: lossy. A router with tau = 0 leaves all steps to the target, with its own key of `multi_writer.writer_keys`.
With tau above 1 it leaves all to the draft model. The oracle is the upper bound for routers.
Deviations: the caller provides the router. Its training, on which of the two steps the reward prefers, is not included.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from specjax.arrays.modes import with_standard_modes
from specjax.catalog import Method, Option, shared
from specjax.collaborate import multi_writer as texts
from specjax.collaborate.methods.reward_smc import Reward
from specjax.collaborate.multi_writer import TextState, Writers
from specjax.collaborate.prepare import TextJob, number, prepare_texts, whole
from specjax.collaborate.results import TextResult, mark_failures, result
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
)


ROUTER = 2
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
    router: Target | None = None,
    head: tuple[Array, Array] | None = None,
    reward: Reward | None = None,
    drafter: Drafter | None = None,
    **settings: Any,
) -> TextResult:
    """Decode steps with the draft model, and rewrite some of them with the target.

    Args:
      segmenter: detects the ends of steps, such as `after_strings(["\\n\\n"], ...)`.
      max_step_tokens: maximum number of tokens per step.
      form: source of the decision. tau: its threshold; defaults are 0.5 for router, 0.7 for reward and 0 for oracle.
      router, head: a model of the same vocabulary and (w float32[D], b float32[]). reward: as in `reward_smc`.
      drafter: drafts within the target's own steps. settings: settings of `decode`, for both models.

    Returns: TextResult of the writers draft, target and, if present, router. Its log is a `StepLog` with y, s or
      s_t - s_d as scores.
    Raises: UsageError for a form without its model or reward, a setting outside its range, models of different
      vocabularies, or a NaN score.
    """
    checked = check_options(form=form, tau=tau, max_step_tokens=max_step_tokens, **settings)
    if form == "router" and (router is None or head is None):
        raise UsageError('form="router" needs router=, a model, and head=, its (w, b)')
    if form != "router" and reward is None:
        raise UsageError(f'form="{form}" needs reward=, a function of steps')
    tau = DEFAULTS[form] if tau is None else tau
    models = (draft, target) if router is None else (draft, target, router)
    job = prepare_texts(
        models, prompts, key=key, max_new_tokens=max_new_tokens, drafters=(None, drafter), settings=checked
    )
    done = _run(job, segmenter, jnp.float32(tau), head, form=form, reward=reward, max_step_tokens=max_step_tokens)
    reason = f"the score of the {form} is NaN; look at its parameters"
    return mark_failures(done, {reason: ~done.log.valid}).cut(max_new_tokens)


def check_options(*, form: Form, tau: float | None, max_step_tokens: int, **settings: Any) -> Settings:
    """Check the options, and return the settings of both models. Raises: UsageError."""
    if form not in get_args(Form):
        raise UsageError(f'form must be one of {", ".join(get_args(Form))}, not "{form}"')
    if tau is not None:
        number("tau", tau, True, "a number")
    whole("max_step_tokens", max_step_tokens, 1)
    return Settings(**settings)


@functools.partial(jax.jit, static_argnames=("form", "reward", "max_step_tokens"))
@with_standard_modes
def _run(
    job: TextJob, segmenter: Segmenter, tau: Array, head: tuple[Array, Array] | None, *, form: str,
    reward: Reward | None, max_step_tokens: int,
) -> TextResult:  # fmt: skip
    def routed(writers: Writers, text: TextState, step: Step):
        assert head is not None
        text, _, hidden = texts.look(writers, text, ROUTER, step.active)
        return text, jax.nn.sigmoid(hidden.astype(jnp.float32) @ head[0] + head[1])

    def rewarded(text: TextState, step: Step) -> Array:
        assert reward is not None
        return reward(text.tokens, step.start, text.length, ~text.unfinished)

    def compared(writers: Writers, text: TextState, step: Step):
        """Return the advantage of the target's step.

        The target writes it in a copy of the text, and again if it is accepted: draws depend on the position alone.
        """
        start = jnp.where(step.active, step.start, text.length)
        other, _ = texts.extend(
            writers,
            texts.rewind(writers, text, start),
            TARGET,
            segmenter=segmenter,
            limit=max_step_tokens,
            active=step.active,
        )
        advantage = rewarded(other, step) - rewarded(text, step)
        return text._replace(passes=other.passes, read=other.read), advantage

    judges = {"router": routed, "reward": lambda writers, text, step: (text, rewarded(text, step)), "oracle": compared}
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
    return result(text, log)
