"""FS-GEN: a small and a large model write one text, by fused logits, by a gate for each token, or by both.

Zhang, Wang, Ding, Qi, Hua, Lv, Zhou: Fast and Slow Generating: An Empirical Study on Large and Small
Language Models Collaborative Decoding (2024), arXiv 2406.12295.

Rule: l and s are the models' logits, and s_ft those of a tuned small model. A gate decides for each token whether the
large model is called. The form decides the logits of a token with a call:
  contrastive: s + beta (l - s) over the tokens with log p_l >= log alpha + max log p_l; no others.
  proxy: l + beta (s_ft - s).
  large: l.
A token without a call has the logits s, or s_ft with proxy. The gate reads the same model, whose highest
probabilities are p1 and p2:
  always: every token has a call.
  threshold: a call if p1 < t.
  margin: a call if (p1 - p2) / 2 < t.
  oracle: a call counts if the most likely tokens of this model and the large one differ. The large model always runs.
Guarantee: lossy. For some settings it is one of the models, byte for byte: proxy with beta = 0 and a call for every
token is the large model, and so is `large` with a threshold above 1. Threshold 0 is the small model. The greedy text of
`large` with the oracle is the large model's.
Deviations: the speculative form of the paper is `decode` with `two_model`. There is no support vector machine. The
authors have no oracle for fused logits; here it gates them like the other forms.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import first_largest
from specjax.arrays.modes import with_standard_modes
from specjax.catalog import Method, Option
from specjax.collaborate import multi_writer as texts
from specjax.collaborate.multi_writer import TextState
from specjax.collaborate.prepare import TextJob, number, prepare_texts
from specjax.collaborate.results import TextResult, mark_failures, result
from specjax.collaborate.routing import token_by_token
from specjax.engine.packing import Prompts
from specjax.engine.prepare import Settings
from specjax.errors import UsageError
from specjax.types import Array, Target

METHOD = Method(
    name="fs_gen",
    kind="collaboration",
    guarantee="lossy",
    summary="combines a small and a large model by fusing their logits or by routing each token",
    paper="Zhang et al. 2024, arXiv 2406.12295",
    needs=frozenset({"draft"}),
    takes=frozenset({"tuned"}),
    options=(
        Option(
            "form", ("contrastive", "proxy", "large"), "contrastive", "logits of a token that calls the large model"
        ),
        Option("gate", ("always", "threshold", "margin", "oracle"), "always", "choice of the tokens with a call"),
        Option("strength", "float", None, "beta of contrastive (0.5) and proxy (1.0)"),
        Option("threshold", "float", None, "t of the gates threshold (0.5) and margin (0.25)"),
        Option(
            "alpha",
            "float",
            None,
            "for contrastive (0.1): minimum probability of a token relative to the most likely one",
        ),
    ),
    words=(Option("tuned", "model", None, "for proxy: the tuned small model"),),
)


Form = Literal["contrastive", "proxy", "large"]
Gate = Literal["always", "threshold", "margin", "oracle"]
STRENGTHS = {"contrastive": 0.5, "proxy": 1.0}
"""Default `strength` of each form that has one: the authors' beta and a."""
ALPHAS = {"contrastive": 0.1}
"""Default `alpha` of the form that has one."""
THRESHOLDS = {"threshold": 0.5, "margin": 0.25}
"""Default `threshold` of each gate that has one, our choice of t."""
SMALL, LARGE, TUNED = range(3)


def fs_gen(
    draft: Target,
    target: Target,
    prompts: Prompts,
    *,
    key: Array | int,
    max_new_tokens: int,
    form: Form = "contrastive",
    gate: Gate = "always",
    strength: float | None = None,
    threshold: float | None = None,
    alpha: float | None = None,
    tuned: Target | None = None,
    **settings: Any,
) -> TextResult:
    """Decode with a small model, `draft`, and a large one.

    Args:
      form: logits of a token with a call of the large model. strength: beta of contrastive (0.5) and of proxy (1.0).
      gate: choice of the tokens with a call. threshold: t of `threshold` (0.5) and of `margin` (0.25).
      alpha: for contrastive (0.1), the minimum probability of a token relative to the most likely one.
      tuned: for proxy, the tuned small model. It writes the tokens without a call.
      settings: settings of `decode`; temperature, top-k and top-p apply to the fused logits.

    Returns: TextResult of the writers draft, target and, if present, tuned. The target is the author of a token with a
      call.
    Raises: UsageError for a setting outside its range, or one that the form or the gate does not read. The same is
      raised for models of different vocabularies, and for proxy without `tuned`.
    """
    checked = check_options(
        form=form, gate=gate, strength=strength, threshold=threshold, alpha=alpha, tuned=tuned, **settings
    )
    strength = STRENGTHS.get(form, 0.0) if strength is None else strength
    threshold = THRESHOLDS.get(gate, 0.0) if threshold is None else threshold
    alpha = ALPHAS.get(form, 0.0) if alpha is None else alpha
    models = (draft, target) if tuned is None else (draft, target, tuned)
    job = prepare_texts(models, prompts, key=key, max_new_tokens=max_new_tokens, method=METHOD.name, settings=checked)
    numbers = Numbers(*(jnp.float32(number) for number in (strength, threshold, alpha)))
    return mark_failures(_run(job, numbers, form=form, gate=gate)).cut(max_new_tokens)


def check_options(
    *, form: Form, gate: Gate = "always", strength: float | None = None, threshold: float | None = None,
    alpha: float | None = None, tuned: Target | None = None, **settings: Any,
) -> Settings:  # fmt: skip
    """Check the options, and return the settings of the fused logits. Raises: UsageError."""
    for name, value, words in (("form", form, get_args(Form)), ("gate", gate, get_args(Gate))):
        if value not in words:
            raise UsageError(f'{name} must be one of {", ".join(words)}, not "{value}"')
    if form == "proxy" and tuned is None:
        raise UsageError('tuned is needed for form="proxy": the small model of `draft` after tuning')
    if form != "proxy" and tuned is not None:
        raise UsageError(f'tuned is the tuned small model of form="proxy", not of "{form}"; leave it out')
    if strength is not None:
        _check_used("strength", f'form="{form}"', form, STRENGTHS)
        number("strength", strength, True, "a number")
    if threshold is not None:
        _check_used("threshold", f'gate="{gate}"', gate, THRESHOLDS)
        number("threshold", threshold, True, "a number")
    if alpha is not None:
        _check_used("alpha", f'form="{form}"', form, ALPHAS)
        number("alpha", alpha, 0 <= alpha <= 1, "from 0 to 1")
    return Settings(**settings)


def _check_used(name: str, choice: str, word: str, readers: Mapping[str, float]) -> None:
    """Raise a UsageError for a number that the chosen form or gate does not read."""
    if word not in readers:
        raise UsageError(f"{name} is for {' and '.join(readers)}, and {choice} does not read it; leave it out")


class Numbers(NamedTuple):
    """The traced settings, float32[] each."""

    strength: Array
    threshold: Array
    alpha: Array


def contrastive(small: Array, large: Array, beta: Array, alpha: Array) -> Array:
    """Return scores float32[B, V] of logits [B, V]; -inf for tokens that are implausible under the large model."""
    s, l = jax.nn.log_softmax(small, -1), jax.nn.log_softmax(large, -1)
    plausible = (l >= jnp.log(alpha) + jnp.max(l, -1, keepdims=True)) & (l > -jnp.inf)
    times = lambda weight, x: jnp.where(weight == 0, 0.0, weight * x)  # 0 * -inf would be NaN
    return jnp.where(plausible, times(1 - beta, s) + times(beta, l), -jnp.inf)


def proxy(small: Array, large: Array, tuned: Array, strength: Array) -> Array:
    """Return scores float32[B, V]; -inf where the large model or one of the two small models has no mass."""
    shift = jax.nn.log_softmax(tuned, -1) - jax.nn.log_softmax(small, -1)
    shift = jnp.where((tuned > -jnp.inf) & (small > -jnp.inf), strength * shift, -jnp.inf)
    return jnp.where(large > -jnp.inf, large + jnp.where(strength == 0, 0.0, shift), -jnp.inf)


def is_unsure(logits: Array, gate: Gate, threshold: Array) -> Array:
    """Return bool[B], True where `threshold` or `margin` calls the large model, from logits [B, V] of a small one."""
    two = jax.lax.top_k(jax.nn.softmax(logits, -1), 2)[0]
    return two[:, 0] < threshold if gate == "threshold" else (two[:, 0] - two[:, 1]) / 2 < threshold


@functools.partial(jax.jit, static_argnames=("form", "gate"))
@with_standard_modes
def _run(job: TextJob, numbers: Numbers, *, form: Form, gate: Gate) -> TextResult:
    writers = job.writers
    base = TUNED if form == "proxy" else SMALL  # the model that the gate reads and that writes without a call

    def choose(text: TextState, state: tuple, unfinished: Array):
        text, base_logits, _ = texts.look(writers, text, base, unfinished)
        calls = unfinished
        if gate in THRESHOLDS:
            calls &= is_unsure(base_logits, gate, numbers.threshold)
        text, large, _ = texts.look(writers, text, LARGE, calls)
        if gate == "oracle":
            calls &= first_largest(base_logits) != first_largest(large)
        logits = large
        if form == "contrastive":
            logits = contrastive(base_logits, large, numbers.strength, numbers.alpha)
        elif form == "proxy":
            text, small, _ = texts.look(writers, text, SMALL, calls)
            logits = proxy(small, large, base_logits, numbers.strength)
        return text, jnp.where(calls[:, None], logits, base_logits), jnp.where(calls, LARGE, base), state

    text, _ = token_by_token(writers, job.begin(), choose, ())
    return result(text)
