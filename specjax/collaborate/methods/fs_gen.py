"""FS-GEN: a small and a large model write one text, by fused logits or by a router for each token.

Zhang, Wang, Ding, Qi, Hua, Lv, Zhou: Fast and Slow Generating: An Empirical Study on Large and Small
Language Models Collaborative Decoding (2024), arXiv 2406.12295.

Rule: l and s are the models' logits, s_ft those of a small model that was tuned, with a maximum p1 and a second p2.
  contrastive: s + beta (l - s) over the tokens with log p_l >= log alpha + max log p_l; no others.
  proxy: l + beta (s_ft - s).
  threshold, margin, oracle: a token is the small model's unless p1 < t, (p1 - p2) / 2 < t, or the models' likeliest
  tokens differ; then it is the large model's.
Guarantee: lossy. Where beta or t says so it is one of the models, byte for byte: proxy with beta = 0 the large one,
threshold 0 the small one, above 1 the large one, and the oracle's greedy text is the large model's.
Deviations: the speculative member of the frame is `decode` with `two_model`. No support vector machine.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import first_largest
from specjax.arrays.x64 import without_x64
from specjax.catalog import Method, Option
from specjax.collaborate import multi_writer as texts
from specjax.collaborate.multi_writer import TextState
from specjax.collaborate.prepare import TextJob, number, prepare_texts
from specjax.collaborate.results import TextResult, result
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
"""`strength` of each: the authors' beta and a, our choice of t."""


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
    """Text by a small model, `draft`, and a large one.

    Args:
      form: how they are combined. strength: beta of contrastive, 0.5, and of proxy, 1.0; t of the routers.
      alpha: of contrastive, how likely a token must be beside the likeliest. tuned: of proxy, the small model tuned.
      settings: of `decode`; temperature, top-k and top-p apply to what was fused.

    Returns: TextResult of the writers draft, target and, if given, tuned. A fused token counts as the target's.
    Raises: UsageError for a setting outside its range, models of different vocabularies, or proxy without `tuned`.
    """
    if form not in get_args(Form):
        raise UsageError(f'form must be one of {", ".join(get_args(Form))}, not "{form}"')
    if (form == "proxy") != (tuned is not None):
        raise UsageError('tuned is the tuned small model of form="proxy", and of no other; give both or neither')
    strength = DEFAULTS[form] if strength is None else strength
    number("strength", strength, True, "a number")
    number("alpha", alpha, 0 <= alpha <= 1, "from 0 to 1")
    models = (draft, target) if tuned is None else (draft, target, tuned)
    job = prepare_texts(models, prompts, key=key, max_new_tokens=max_new_tokens, settings=Settings(**settings))
    return _run(job, jnp.float32(strength), jnp.float32(alpha), form=form).cut(max_new_tokens)


def contrastive(small: Array, large: Array, beta: Array, alpha: Array) -> Array:
    """Scores float32[B, V] of logits [B, V]; -inf where the large model holds a token for implausible."""
    s, l = jax.nn.log_softmax(small, -1), jax.nn.log_softmax(large, -1)
    plausible = (l >= jnp.log(alpha) + jnp.max(l, -1, keepdims=True)) & (l > -jnp.inf)
    times = lambda weight, x: jnp.where(weight == 0, 0.0, weight * x)  # nothing of what has no mass is nothing
    return jnp.where(plausible, times(1 - beta, s) + times(beta, l), -jnp.inf)


def proxy(small: Array, large: Array, tuned: Array, strength: Array) -> Array:
    """Scores float32[B, V]; -inf where the large model has no mass, or one of those that shift it."""
    shift = jax.nn.log_softmax(tuned, -1) - jax.nn.log_softmax(small, -1)
    shift = jnp.where((tuned > -jnp.inf) & (small > -jnp.inf), strength * shift, -jnp.inf)
    return jnp.where(large > -jnp.inf, large + jnp.where(strength == 0, 0.0, shift), -jnp.inf)


def is_unsure(small: Array, form: str, threshold: Array) -> Array:
    """bool[B]: whether the routers `threshold` and `margin` ask the large model, by the small one's logits."""
    two = jax.lax.top_k(jax.nn.softmax(small, -1), 2)[0]
    return two[:, 0] < threshold if form == "threshold" else (two[:, 0] - two[:, 1]) / 2 < threshold


@functools.partial(jax.jit, static_argnames=("form",))
@without_x64
def _run(job: TextJob, strength: Array, alpha: Array, *, form: str) -> TextResult:
    writers = job.writers

    def fused(text: TextState, state: tuple, going: Array):
        text, small, _ = texts.look(writers, text, 0, going)
        text, large, _ = texts.look(writers, text, 1, going)
        if form == "contrastive":
            return text, contrastive(small, large, strength, alpha), 1, state
        text, tuned, _ = texts.look(writers, text, 2, going)
        return text, proxy(small, large, tuned, strength), 1, state

    def routed(text: TextState, state: tuple, going: Array):
        text, small, _ = texts.look(writers, text, 0, going)
        asks = going if form == "oracle" else going & is_unsure(small, form, strength)
        text, large, _ = texts.look(writers, text, 1, asks)
        if form == "oracle":
            asks &= first_largest(small) != first_largest(large)
        return text, jnp.where(asks[:, None], large, small), asks.astype(jnp.int32), state

    choose = fused if form in ("contrastive", "proxy") else routed
    text, _ = token_by_token(writers, job.begin(), choose, ())
    return result(text)
