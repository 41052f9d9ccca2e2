"""FS-GEN: a small and a large model write one text, by fused logits or by a router for each token.

Zhang, Wang, Ding, Qi, Hua, Lv, Zhou: Fast and Slow Generating: An Empirical Study on Large and Small
Language Models Collaborative Decoding (2024), arXiv 2406.12295.

Rule: l and s are the models' logits, and s_ft those of a tuned small model. The small model's highest probabilities
are p1 and p2.
  contrastive: s + beta (l - s) over the tokens with log p_l >= log alpha + max log p_l; no others.
  proxy: l + beta (s_ft - s).
  threshold: the large model writes the token if p1 < t, otherwise the small one.
  margin: the large model writes the token if (p1 - p2) / 2 < t.
  oracle: the large model writes the token if the models' most likely tokens differ.
Guarantee: lossy. For some settings it is one of the models, byte for byte: proxy with beta = 0 is the large model,
threshold 0 is the small one, and a threshold above 1 is the large one. The greedy text of the oracle is the large
model's.
Deviations: the speculative form of the paper is `decode` with `two_model`. There is no support vector machine.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, get_args

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
            "form", ("contrastive", "proxy", "threshold", "margin", "oracle"), "contrastive", "method of combination"
        ),
        Option(
            "strength", "float", None, "beta of contrastive (0.5) and proxy (1.0), or the threshold of the other forms"
        ),
        Option(
            "alpha", "float", 0.1, "for contrastive: minimum probability of a token relative to the most likely one"
        ),
    ),
)


Form = Literal["contrastive", "proxy", "threshold", "margin", "oracle"]
DEFAULTS = {"contrastive": 0.5, "proxy": 1.0, "threshold": 0.5, "margin": 0.25, "oracle": 0.0}
"""Default `strength` of each form: the authors' beta and a, and our choice of t."""


def fs_gen(
    draft: Target,
    target: Target,
    prompts: Prompts,
    *,
    key: Array | int,
    max_new_tokens: int,
    form: Form = "contrastive",
    strength: float | None = None,
    alpha: float = 0.1,
    tuned: Target | None = None,
    **settings: Any,
) -> TextResult:
    """Decode with a small model, `draft`, and a large one.

    Args:
      form: method of combination. strength: beta of contrastive (0.5) and of proxy (1.0), or t of the routers.
      alpha: for contrastive, the minimum probability of a token relative to the most likely one.
      tuned: for proxy, the tuned small model.
      settings: settings of `decode`; temperature, top-k and top-p apply to the fused logits.

    Returns: TextResult of the writers draft, target and, if present, tuned. The target is the author of fused tokens.
    Raises: UsageError for a setting outside its range, models of different vocabularies, or proxy without `tuned`.
    """
    checked = check_options(form=form, strength=strength, alpha=alpha, tuned=tuned, **settings)
    strength = DEFAULTS[form] if strength is None else strength
    models = (draft, target) if tuned is None else (draft, target, tuned)
    job = prepare_texts(models, prompts, key=key, max_new_tokens=max_new_tokens, settings=checked)
    done = _run(job, jnp.float32(strength), jnp.float32(alpha), form=form)
    return mark_failures(done).cut(max_new_tokens)


def check_options(
    *, form: Form, strength: float | None, alpha: float, tuned: Target | None = None, **settings: Any
) -> Settings:
    """Check the options, and return the settings of the fused logits. Raises: UsageError."""
    if form not in get_args(Form):
        raise UsageError(f'form must be one of {", ".join(get_args(Form))}, not "{form}"')
    if form == "proxy" and tuned is None:
        raise UsageError('form="proxy" needs tuned=, the tuned small model, which only Python can pass')
    if form != "proxy" and tuned is not None:
        raise UsageError(f'tuned is the tuned small model of form="proxy", not of "{form}"; leave it out')
    if strength is not None:
        number("strength", strength, True, "a number")
    number("alpha", alpha, 0 <= alpha <= 1, "from 0 to 1")
    return Settings(**settings)


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


def is_unsure(small: Array, form: str, threshold: Array) -> Array:
    """Return bool[B], True where `threshold` or `margin` route to the large model, from the small one's logits."""
    two = jax.lax.top_k(jax.nn.softmax(small, -1), 2)[0]
    return two[:, 0] < threshold if form == "threshold" else (two[:, 0] - two[:, 1]) / 2 < threshold


@functools.partial(jax.jit, static_argnames=("form",))
@with_standard_modes
def _run(job: TextJob, strength: Array, alpha: Array, *, form: str) -> TextResult:
    writers = job.writers

    def fuse(text: TextState, state: tuple, unfinished: Array):
        text, small, _ = texts.look(writers, text, 0, unfinished)
        text, large, _ = texts.look(writers, text, 1, unfinished)
        if form == "contrastive":
            return text, contrastive(small, large, strength, alpha), 1, state
        text, tuned, _ = texts.look(writers, text, 2, unfinished)
        return text, proxy(small, large, tuned, strength), 1, state

    def route(text: TextState, state: tuple, unfinished: Array):
        text, small, _ = texts.look(writers, text, 0, unfinished)
        uses_large = unfinished if form == "oracle" else unfinished & is_unsure(small, form, strength)
        text, large, _ = texts.look(writers, text, 1, uses_large)
        if form == "oracle":
            uses_large &= first_largest(small) != first_largest(large)
        return text, jnp.where(uses_large[:, None], large, small), uses_large.astype(jnp.int32), state

    choose = fuse if form in ("contrastive", "proxy") else route
    text, _ = token_by_token(writers, job.begin(), choose, ())
    return result(text)
