"""Input-guided aggressive decoding (IAD): copy the text to edit until the target departs from it.

Ge, Xia, Sun, Chen, Wei: Lossless Acceleration for Seq2seq Generation with Aggressive Decoding (2022), arXiv 2205.10350;
first in Sun, Ge, Wei, Wang: Instantaneous Grammatical Error Correction with Shallow Aggressive Decoding (ACL 2021),
arXiv 2106.04970.

Rule: the source s is a text that the output is expected to resemble. The position c in s is the one that the output
has reached.
  copy: draft s[c], s[c+1], ...; search once the target departs from them.
  search: for n = 1, 2, ..., max_ngram, let m be the number of occurrences of the last n output tokens in s. If m = 0,
    draft no token. If m = 1, set c to the end of that occurrence and copy. If m > 1, try the next n.
Guarantee: distribution (a point-mass chain).
Deviations: a draft has at most `num_tokens` tokens; the authors copy all remaining tokens. Copying continues while the
target's own token after a draft is the next token of the source. The draft has no eos at the end of the source, because
the target adds that token itself in the same pass. The search starts with the token at which the target departed, as
in the paper; the released code decodes one more token before it. Any text can be the source, such as a predicted
output. The default source is what the target's encoder has read, with its eos. Without an encoder it is the row's own
prompt. The output rarely starts like the prompt, so decoding then starts with a search.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.catalog import Method, Option, shared
from specjax.errors import UsageError
from specjax.retrieval.suffixes import copied_chain, copyable_tokens, last_tokens, match_length
from specjax.types import Array, Context, Drafter, Traits, TreeSize

METHOD = Method(
    name="input_guided",
    kind="drafter",
    guarantee="distribution",
    summary="drafts from the text to edit (or the source, or the prompt) at the position that the output has reached",
    paper="Ge et al. 2022, arXiv 2205.10350",
    takes=frozenset({"source"}),
    options=(
        shared.num_tokens(32),
        Option("max_ngram", "int", 3, "maximum length of the output's end to search for"),
    ),
)


BUCKET = 128
"""Sources are padded to a multiple of this length, so that sources of similar length share one program."""

Source = Sequence[Sequence[int]] | tuple[Array | np.ndarray, Array | np.ndarray]


class State(NamedTuple):
    position: Array  # int32[B], of the next source token to copy; -1: search
    prompt: Array  # int32[B], length of the prompt
    length: Array  # int32[B], of the text when `position` was computed


def input_guided(source: Source | None = None, num_tokens: int = 32, *, max_ngram: int = 3) -> Drafter:
    """Draft a chain of up to `num_tokens` tokens of the source; the draft is empty while the position is unknown.

    Args:
      source: one text per row, without an eos at its end: a list of token lists, or (tokens int32[B, Ns], lengths
        int32[B]) padded on the right. Default: the sources of the target's encoder, or the prompts. Another source of
        the same shape compiles no new program.
      max_ngram: maximum length of the output's end that is searched for in the source.

    Raises: UsageError for a setting below 1, an empty source, or a length beyond the array. Decoding raises one if the
      number of sources differs from the number of prompts.
    """
    if num_tokens < 1:
        raise UsageError(f"num_tokens must be at least 1, not {num_tokens}")
    if max_ngram < 1:
        raise UsageError(f"max_ngram must be at least 1, not {max_ngram}")
    drafter = _functions(num_tokens, max_ngram)
    return drafter if source is None else drafter.replace(params=_pack(source))


@functools.cache
def _functions(num_tokens: int, max_ngram: int) -> Drafter:
    def init(params, context: Context) -> State:
        rows = context.tokens.shape[0]
        if params and params[0].shape[0] != rows:
            raise UsageError(f"source has {params[0].shape[0]} rows for {rows} prompts; give one source per prompt")
        has_encoder = context.target is not None and context.target.model.source is not None
        start = jnp.full((rows,), 0 if params or has_encoder else -1, jnp.int32)
        return State(start, context.length, context.length)

    def propose(params, keys, state: State, context: Context, limit):
        tokens, length = copyable_tokens(context), context.length
        source, size = params or context.source or (tokens, state.prompt)
        root = context.root
        position = _follow(state, source, size, root, length)
        ending = last_tokens(tokens, length, max_ngram)
        ending = jnp.where(jnp.arange(max_ngram) < (length - state.prompt)[:, None], ending, -1)  # of the output only
        position = jnp.where(position >= 0, position, _search(source, size, ending))
        tree = copied_chain(root, source, size, position, num_tokens, limit)
        return tree, State(position, state.prompt, length)

    return Drafter(
        propose=propose,
        size=TreeSize(num_tokens + 1, num_tokens),
        init=init,
        traits=Traits(chains=True, follows_any_tree=True),
    )


def _follow(state: State, source: Array, size: Array, root: Array, length: Array) -> Array:
    """Return int32[B], the source position after the copied tokens; -1 if `root` [B, 1] departs from the source.

    All tokens that were added since the last draft, except the root, are copies.
    """
    position = state.position + length - state.length - 1  # the root's position, if it is a copy
    same = take_along(source, jnp.clip(position, 0, source.shape[1] - 1)[:, None], 1) == root
    copied = (state.position >= 0) & (position < size) & same[:, 0]
    fresh = length == state.length  # the first round
    return jnp.where(fresh, state.position, jnp.where(copied, position + 1, -1))


def _search(source: Array, size: Array, ending: Array) -> Array:
    """Return int32[B], the end of the single occurrence of the shortest unique `ending`; -1 without one."""
    matched = match_length(source, size, ending)[:, :, None] > jnp.arange(ending.shape[1])  # bool[B, Ns, n]
    once = jnp.sum(matched, 1) == 1  # if an ending does not occur, no longer ending does
    shortest = jnp.argmax(once, 1)
    end = jnp.argmax(take_along(matched, shortest[:, None, None], 2)[:, :, 0], 1) + 1
    return jnp.where(jnp.any(once, 1), end, -1).astype(jnp.int32)


def _pack(source: Source) -> tuple[Array, Array]:
    """Return (tokens int32[B, Ns], lengths int32[B]) from either form of a source."""
    if isinstance(source, tuple) and len(source) == 2 and hasattr(source[0], "ndim"):
        tokens, lengths = jnp.asarray(source[0], jnp.int32), jnp.asarray(source[1], jnp.int32)
        if tokens.ndim != 2 or lengths.shape != tokens.shape[:1]:
            raise UsageError(f"source must be (tokens[B, Ns], lengths[B]), not {tokens.shape} and {lengths.shape}")
    else:
        longest = max((len(row) for row in source), default=0)
        padded = np.zeros((len(source), -(-max(longest, 1) // BUCKET) * BUCKET), np.int32)
        for target, row in zip(padded, source, strict=True):
            target[: len(row)] = row
        tokens, lengths = jnp.asarray(padded), jnp.asarray([len(row) for row in source], jnp.int32)
    if not isinstance(lengths, jax.core.Tracer):
        for row, length in enumerate(np.asarray(lengths)):
            if length < 1:
                raise UsageError(f"source {row} is empty; give a text to copy from, or leave source out")
            if length > tokens.shape[1]:
                raise UsageError(f"source {row} has length {length}, but the array holds {tokens.shape[1]} tokens")
    return tokens, lengths
