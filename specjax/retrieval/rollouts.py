"""Earlier samples of the same prompts, as a text that precedes the text of each row.

A drafter that copies from the text copies from these samples too if it reads `extend(rollouts, sources, context)`. The
samples of a prompt resemble each other, in one call and in later epochs of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import gather_at, take_along
from specjax.retrieval.suffixes import copyable_tokens, last_tokens, match_length
from specjax.types import Array, Context

END = -3
"""Value after each sample. No token and no padding of a text equals it, so no match crosses it."""
MULTIPLIER = 1_000_003
PLACES = 16
"""Number of places of the text that vote on a continuation."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rollouts:
    """The latest samples of P prompts."""

    prompts: Array | np.ndarray  # uint32[P], `prompt_hash` of each prompt
    tokens: Array | np.ndarray  # int32[P, S], samples with END after each, the newest last; END before the first
    siblings: int = field(default=0, metadata={"static": True})  # rows with the same prompt that a row also reads


class RolloutSources(NamedTuple):
    """The texts that each row copies from, in addition to its own. An index of -1 stands for no text."""

    earlier: Array  # int32[B], a prompt of `Rollouts`
    siblings: Array  # int32[B, G], rows of the batch with the same prompt


def pack(
    prompts: Sequence[Sequence[int]], samples: Sequence[Iterable[Iterable[int]]], size: int, siblings: int = 0
) -> Rollouts:
    """Return `Rollouts` of at most `size` tokens per prompt, from the samples of each prompt, the newest last."""
    tokens = np.full((len(prompts), size), END, np.int32)
    for row, texts in zip(tokens, samples, strict=True):
        joined = np.concatenate([np.zeros(0, np.int32), *(np.append(text, END) for text in map(np.asarray, texts))])
        row[max(size - len(joined), 0) :] = joined[-size:]
    width = max(map(len, prompts))
    padded = np.array([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], np.int32)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    return Rollouts(prompt_hash(padded, lengths, np), tokens, siblings)


def prompt_hash(tokens: Array | np.ndarray, length: Array | np.ndarray, xp: Any = jnp) -> Array:
    """Return uint32[B], a polynomial of the first `length` int32[B] of `tokens` int32[B, L], for any padding.

    xp: jax.numpy, or numpy on the host, where a dispatch of each operation would take longer.
    """
    powers = np.cumprod(np.full(tokens.shape[1], MULTIPLIER, np.uint32), dtype=np.uint32)
    is_prompt = np.arange(tokens.shape[1]) < length[:, None]
    terms = xp.where(is_prompt, (xp.asarray(tokens).astype(np.uint32) + np.uint32(1)) * powers, np.uint32(0))
    return xp.sum(terms, 1, dtype=np.uint32)


def find_sources(rollouts: Rollouts, context: Context) -> RolloutSources:
    """Return the texts of each row's prompt. Equal hashes of different prompts cost acceptance, never exactness."""
    hashes = prompt_hash(context.tokens, context.length)
    index_of = lambda same: jnp.where(jnp.any(same, 1), jnp.argmax(same, 1), -1).astype(jnp.int32)
    earlier = index_of(hashes[:, None] == rollouts.prompts)
    batch = len(hashes)
    same = (hashes[:, None] == hashes) & ~jnp.eye(batch, dtype=bool)
    count = min(rollouts.siblings, batch)
    nearest = jnp.where(same, batch - jnp.abs(jnp.arange(batch)[:, None] - jnp.arange(batch)), 0)
    score, siblings = jax.lax.top_k(nearest, count)
    return RolloutSources(earlier, jnp.where(score > 0, siblings, -1))


def extend(rollouts: Rollouts, sources: RolloutSources, context: Context) -> Context:
    """Return the context with the earlier samples and the present texts of the siblings before each row's text.

    Tokens after the end of a sample are END, which a drafter must not draft.
    """
    context = context._replace(tokens=copyable_tokens(context))
    batch, size = context.tokens.shape
    earlier = jnp.where(sources.earlier[:, None] >= 0, rollouts.tokens[jnp.maximum(sources.earlier, 0)], END)
    siblings = jnp.maximum(sources.siblings, 0)
    is_text = jnp.arange(size) < context.length[siblings][..., None]
    texts = jnp.where(is_text & (sources.siblings >= 0)[..., None], context.tokens[siblings], END)  # [B, G, L]
    copies = jnp.concatenate([earlier, texts.reshape(batch, -1), jnp.full((batch, 1), END, jnp.int32)], 1)
    tokens = jnp.concatenate([copies, context.tokens], 1)
    return context._replace(tokens=tokens, length=context.length + copies.shape[1])


class LikelyCopy(NamedTuple):
    """A continuation that many similar places of the text share."""

    tokens: Array  # int32[B, D]
    valid: Array  # bool[B, D]
    chance: Array  # float32[B, D], share of the votes for each token, given that the tokens before it are correct


def likeliest_copy(
    tokens: Array, length: Array, count: int, max_match: int = 16, noise: Callable[[Array], Array] | None = None
) -> LikelyCopy:
    """Return the continuation that the places with the longest matches share most, D = `count`.

    The PLACES best places vote. A match of m tokens has m votes, and m = 0 none. The winner has the largest expected
    number of correct tokens if the text continues as at a random place. Chances are shrunk by one vote per token.

    Args:
      tokens: int32[B, L], length: int32[B], a context of `extend`.
      noise: returns the noise float32[B, D, R] of the target's draws for tokens int32[B, D, R] at the next D places.
        The votes for a token are then the q of a race (`drafters.combined.noisy_ranks`), which the draft should win.
    """
    matched = match_length(tokens, length - 1, last_tokens(tokens, length, max_match))
    size = tokens.shape[1]
    score, place = jax.lax.top_k(matched * size + jnp.arange(size), min(PLACES, size))  # the latest of equal matches
    weight = (score // size).astype(jnp.float32)  # [B, R]
    index = place[..., None] + 1 + jnp.arange(count)
    paths = gather_at(tokens, jnp.arange(len(tokens))[:, None, None], jnp.minimum(index, size - 1))
    is_text = (index < length[:, None, None]) & (paths >= 0) & (weight > 0)[..., None]
    is_text = jnp.cumprod(is_text, 2).astype(bool)  # [B, R, D]
    agrees = jnp.cumprod((paths[:, :, None] == paths[:, None]) & is_text[:, :, None] & is_text[:, None], 3)
    votes = jnp.sum(agrees * weight[:, None, :, None], 2)  # [B, R, D]
    total = jnp.broadcast_to(jnp.sum(weight, 1)[:, None, None], (*votes.shape[:2], 1))
    votes_before = jnp.concatenate([total, votes[:, :, :-1]], 2)  # votes for the tokens before
    share = votes / (votes_before + 1)
    if noise is None:
        chance, expected = share, votes
    else:
        chance = _race(
            share, 1 / (votes_before + 1), agrees, is_text, jnp.swapaxes(noise(jnp.swapaxes(paths, 1, 2)), 1, 2)
        )
        expected = jnp.cumprod(jnp.where(is_text, chance, 0.0), 2)
    best = jnp.argmax(jnp.sum(expected, 2), 1)[:, None, None]
    take = lambda x: take_along(x, best, 1)[:, 0]
    return LikelyCopy(jnp.maximum(take(paths), 0), take(is_text), take(chance))


def _race(share: Array, other_share: Array, agrees: Array, is_text: Array, noise: Array) -> Array:
    """Return the chance float32[B, R, D] that the token of a place is drawn, given that the tokens before it are.

    Args:
      share: float32[B, R, D], share of the votes for the token. other_share: the share without votes.
      agrees: [B, R, R, D], 1 where two places share the tokens up to a depth. noise: float32[B, R, D] of the tokens.
    """
    score = jnp.exp(jnp.clip(jnp.log(jnp.maximum(share, 1e-6)) + noise, -60, 60))
    agrees_before = jnp.concatenate([jnp.ones_like(agrees[..., :1]), agrees[..., :-1]], 3)
    num_equal = jnp.maximum(jnp.sum(agrees, 2), 1)  # [B, R, D], places with the same token
    rivals = jnp.sum(agrees_before * jnp.where(is_text, score / num_equal, 0.0)[:, None], 2)
    return jnp.where(is_text, score / jnp.maximum(rivals, 1e-30) * jnp.exp(-other_share / score), 0.0)
