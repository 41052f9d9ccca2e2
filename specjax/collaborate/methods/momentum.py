"""Momentum decoding: greedy decoding with a penalty that prevents loops.

Lan, Su, Liu, Huang, Mao: Momentum Decoding: Open-ended Text Generation As Graph Exploration (2022), arXiv 2212.02175.

Rule: among the k most likely tokens v, take the one with the largest p(v) - alpha f(depth(v)). For a token that the
text does not contain, depth is 0. Otherwise it is the length of the longest suffix of (text, v) that already occurs in
the text, at most 5. f is 0, 1, 2, 3, 4, 5. If the most likely token is new, it always wins.
Guarantee: lossy, without randomness. With alpha = 0 or k = 1 it is greedy decoding, byte for byte.
Deviations: f is the authors' table for GPT-2 XL; their tables for other models differ.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.arrays.modes import with_standard_modes
from specjax.catalog import Method, Option
from specjax.collaborate import multi_writer as texts
from specjax.collaborate.multi_writer import TextState
from specjax.collaborate.prepare import TextJob, number, prepare_texts, refuse, whole
from specjax.collaborate.results import TextResult, mark_failures, result
from specjax.collaborate.routing import token_by_token
from specjax.engine.packing import Prompts
from specjax.engine.prepare import Settings
from specjax.numerics.validation import check_range
from specjax.types import Array, Target

METHOD = Method(
    name="momentum",
    kind="collaboration",
    guarantee="lossy",
    summary="decodes greedily with a penalty for repeated phrases, which prevents loops",
    paper="Lan et al. 2022, arXiv 2212.02175",
    options=(
        Option("k", "int", 5, "most likely tokens to choose from"),
        Option("alpha", "float", 0.2, "weight of the repetition penalty"),
    ),
)


RESISTANCE = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
"""f of each depth."""
DEEPEST = len(RESISTANCE) - 1


def momentum(
    target: Target,
    prompts: Prompts,
    *,
    key: Array | int = 0,
    max_new_tokens: int,
    k: int = 5,
    alpha: float = 0.2,
    **settings: Any,
) -> TextResult:
    """Decode without randomness and without loops.

    Args:
      k: number of candidates. alpha: weight of the repetition penalty.
      settings: settings of `decode`: eos, capacity. key: not used.

    Raises: UsageError for a setting outside its range.
    """
    checked = check_options(k=k, alpha=alpha, **settings)
    number("k", k, k <= target.model.vocab_size, "from 1 to the vocabulary")
    job = prepare_texts(
        (target,), prompts, key=key, max_new_tokens=max_new_tokens, method=METHOD.name, settings=checked, rewinds=False
    )
    return mark_failures(_run(job, jnp.float32(alpha), k=k)).cut(max_new_tokens)


def check_options(*, k: int, alpha: float, **settings: Any) -> Settings:
    """Check the options, and return the settings, which are greedy. Raises: UsageError."""
    whole("k", k, 1, "from 1 to the vocabulary")
    number("alpha", alpha, alpha >= 0, "at least 0")
    number("alpha", alpha, alpha < float("inf"), "finite")
    check_range("temperature", settings.get("temperature"), lambda x: x == 0, "0, as this method draws no token")
    refuse(settings, ("top_k", "top_p", "min_p", "processors"), "would change the token that this method chooses")
    return Settings(**settings)


def depths(tokens: Array, length: Array, candidates: Array) -> Array:
    """Return int32[B, k], the depth of `candidates` int32[B, k] after a text.

    The text consists of the first `length` int32[B] of `tokens` int32[B, L].
    """
    place = jnp.arange(tokens.shape[1])
    matched, unbroken = jnp.zeros(tokens.shape, jnp.int32), jnp.ones(tokens.shape, bool)
    for back in range(DEEPEST - 1):  # the common suffix of the whole text and of the text up to each position
        last = take_along(tokens, jnp.maximum(length[:, None] - 1 - back, 0), 1)
        earlier = take_along(tokens, jnp.maximum(place - back, 0)[None], 1)
        unbroken &= (earlier == last) & (place >= back) & (length[:, None] > back)
        matched += unbroken
    # Matches of the text before each position; 0 at the first position.
    matched_before = jnp.pad(matched, ((0, 0), (1, 0)))[:, :-1]
    occurs = (tokens[:, :, None] == candidates[:, None]) & (place < length[:, None])[:, :, None]
    return jnp.minimum(jnp.max(jnp.where(occurs, 1 + matched_before[:, :, None], 0), 1), DEEPEST)


def choose_candidate(p: Array, depth: Array, alpha: Array) -> Array:
    """Return int32[B], the index of the best candidate, for p float32[B, k] in falling order and depth int32[B, k]."""
    score = p - alpha * jnp.asarray(RESISTANCE)[depth]
    return jnp.where(depth[:, 0] == 0, 0, jnp.argmax(score, 1)).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("k",))
@with_standard_modes
def _run(job: TextJob, alpha: Array, *, k: int) -> TextResult:
    def choose(text: TextState, state: tuple, unfinished: Array):
        text, logits, _ = texts.look(job.writers, text, 0, unfinished)
        p, candidates = jax.lax.top_k(jax.nn.softmax(logits, -1), k)
        best = choose_candidate(p, depths(text.tokens, text.length, candidates), alpha)
        token = take_along(candidates, best[:, None], 1)
        alone = jnp.where(jnp.arange(logits.shape[1]) == token, 0.0, -jnp.inf)
        return text, alone, 0, state

    text, _ = token_by_token(job.writers, job.begin(), choose, (), warped=True)
    return result(text)
