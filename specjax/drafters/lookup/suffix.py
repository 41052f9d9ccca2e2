"""Suffix matching: draft the tokens that followed the longest match of the text's end, in the text or in a corpus.

Another drafter, the fallback, drafts if there is no match.

Hu et al., SAM Decoding: Speculative Decoding via Suffix Automaton (2024), arXiv 2411.10666.

Rule: m is the length of the longest suffix of the text (at most max_match) that occurs earlier. If m >= min_match,
draft the num_tokens tokens after an occurrence; a shorter match with a full continuation beats a longer one without.
Otherwise draft the tree of `fallback`. With a corpus, m' is the length of the longest suffix that occurs in it, minus
`bias`. If m' > m, draft the tokens after an occurrence in the corpus instead.
Guarantee: distribution (a point-mass chain, or the fallback's tree).
Deviations: the authors store automata on the host. Here a comparison with the whole text finds the same match on the
device, up to `max_match`. The corpus has a suffix array, and its first occurrence is copied. The authors copy from the
earliest occurrence in the text (`occurrence="earliest"`); the latest follows the recent topic. They require
min_match = 5 and use another drafter below it; without a fallback, short matches are better than an empty draft.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from specjax.catalog import Method, Option, TypicalAcceptance, shared
from specjax.drafters.composed import longest_of_each, read_each, remember_each, widths_of_each
from specjax.drafters.making import make_inner_drafter
from specjax.errors import UsageError
from specjax.retrieval.datastore import Datastore
from specjax.retrieval.datastore.index import Index, continuations, search
from specjax.retrieval.suffixes import copied_chain, copyable_text, last_tokens, match_length
from specjax.trees.autoregressive import autoregressive
from specjax.trees.operations import chain, pad_nodes
from specjax.types import Array, Context, Drafter, PyTree, Target, TokenTree, TreeSize

METHOD = Method(
    name="suffix",
    kind="drafter",
    guarantee="distribution",
    summary="drafts the tokens that followed the longest match of the text's end, in the text or in a datastore",
    paper="Hu et al. 2024, arXiv 2411.10666",
    takes=frozenset({"datastore"}),
    acceptance=TypicalAcceptance((0.35,), f"{shared.SMOLLM2}: 1.54 tokens per pass of chains of 7"),
    options=(
        shared.num_tokens(15),
        Option("max_match", "int", 16, "maximum length of the match"),
        Option("min_match", "int", None, "minimum length of the match; default: 2, or 5 with a fallback"),
        Option("occurrence", ("latest", "earliest"), "latest", "occurrence in the text to copy from"),
        Option("fallback", "drafter", None, "drafter for steps without a match, such as token_recycling"),
        Option("bias", "int", 5, "extra tokens that a match in the datastore needs to win over one in the text"),
    ),
    cpu_options={"num_tokens": 7},
    factory="make_suffix",
    arguments=("target",),
)


def suffix(
    num_tokens: int = 15,
    *,
    max_match: int = 16,
    min_match: int | None = None,
    occurrence: Literal["latest", "earliest"] = "latest",
    fallback: Drafter | None = None,
    corpus: Index | None = None,
    bias: int = 5,
) -> Drafter:
    """Draft a chain of up to `num_tokens` copied tokens, or the fallback's point-mass tree without a match.

    Args:
      min_match: minimum length of the match; default: 2, or 5 with a fallback.
      corpus: `Datastore.to_device()`, a second text to copy from; its token ids must be those of the target.
      bias: number of extra tokens that a match in the corpus needs to count as much as one in the text.

    Raises: UsageError for a number out of range (1 <= num_tokens, 0 <= bias, 1 <= min_match <= max_match). It is also
      raised for a fallback that is random or does not follow any tree.
    """
    if min_match is None:
        min_match = 2 if fallback is None else 5
    if num_tokens < 1:
        raise UsageError(f"num_tokens must be at least 1, not {num_tokens}")
    if not 1 <= min_match <= max_match:
        raise UsageError(f"min_match must be from 1 to max_match ({max_match}), not {min_match}")
    if bias < 0:
        raise UsageError(f"bias must be at least 0, not {bias}")
    fallback = fallback or autoregressive()
    if fallback.traits.draws != "point_mass" or not fallback.traits.follows_any_tree:
        raise UsageError("fallback must be a drafter without randomness that follows any tree, such as token_recycling")
    drafter = _functions(fallback.replace(params=()), num_tokens, max_match, min_match, occurrence, bias)
    return drafter.replace(params=Params(fallback.params, corpus))


def make_suffix(
    target: Target, *, fallback: str | Drafter | None = None, datastore: Datastore | None = None, **options
) -> Drafter:
    """Return `suffix` with a fallback by name and a datastore as corpus."""
    inner = None if fallback is None else make_inner_drafter(fallback, target, datastore)
    corpus = None if datastore is None else datastore.to_device(target.model.mesh)
    return suffix(fallback=inner, corpus=corpus, **options)


class Params(NamedTuple):
    """Parameters of the fallback, and the corpus if there is one."""

    fallback: PyTree
    corpus: Index | None


def find(tokens: Array, length: Array, num_tokens: int, max_match: int, occurrence: str) -> tuple[Array, Array]:
    """Return the start int32[B] of the best match's continuation (-1: no match), and the match's length int32[B]."""
    matched = match_length(tokens, length - 1, last_tokens(tokens, length, max_match))
    position = jnp.arange(tokens.shape[1])
    full = jnp.where(position + 1 + num_tokens <= length[:, None], matched, 0)
    # A shorter match that can be copied from in full beats a longer one at the end of the text.
    usable = jnp.where(jnp.any(full > 0, 1, keepdims=True), full, matched)
    best = jnp.max(usable, 1)
    candidate = (usable == best[:, None]) & (best[:, None] > 0)
    earliest = jnp.argmax(candidate, 1)
    latest = tokens.shape[1] - 1 - jnp.argmax(candidate[:, ::-1], 1)
    # If no continuation is full, the earliest match copies most tokens.
    choose_latest = jnp.any(full > 0, 1) & (occurrence == "latest")
    return jnp.where(best > 0, jnp.where(choose_latest, latest, earliest) + 1, -1), best


@functools.cache
def _functions(
    fallback: Drafter, num_tokens: int, max_match: int, min_match: int, occurrence: str, bias: int
) -> Drafter:
    nodes, deepest = max(num_tokens + 1, fallback.num_nodes), max(num_tokens, fallback.max_depth)

    def propose(params: Params, keys, state, context: Context, limit: Array):
        text, root = copyable_text(context), context.root
        start, matched = find(*text, num_tokens, max_match, occurrence)
        copied = copied_chain(root, *text, start, num_tokens, limit)
        if params.corpus is not None:
            retrieved, corpus_length = in_corpus(params.corpus, context, root, limit)
            copied = _pick(corpus_length - bias > matched, retrieved, copied)
            matched = jnp.maximum(matched, corpus_length - bias)
        drafted, state = fallback.propose(params.fallback, keys, state, context, limit)
        return _pick(matched >= min_match, pad_nodes(copied, nodes), pad_nodes(drafted, nodes)), state

    def in_corpus(corpus: Index, context: Context, root: Array, limit: Array) -> tuple[TokenTree, Array]:
        """Return a chain of the tokens after the longest match in the corpus, and the match's length int32[B]."""
        longest = min(max_match + bias, context.tokens.shape[1])
        matches = search(
            corpus, last_tokens(context.tokens, context.length, longest)[:, ::-1], context.length, bias + 1
        )
        follows = continuations(corpus, matches, 1, num_tokens)[:, 0]
        valid = (follows >= 0) & (jnp.arange(num_tokens) < limit[:, None])
        tokens = jnp.concatenate([root, jnp.maximum(follows, 0)], 1)
        return chain(tokens, jnp.concatenate([jnp.ones_like(root, bool), valid], 1)), matches.span

    def read(params: Params, state, *chunk):
        return read_each((fallback,), (params.fallback,), (state,), *chunk)[0]

    def remember(params: Params, state) -> Params:
        return params._replace(fallback=remember_each((fallback,), (params.fallback,), (state,))[0])

    return fallback.replace(
        init=lambda params, context: fallback.init(params.fallback, context),
        propose=propose,
        observe=lambda params, *round: fallback.observe(params.fallback, *round),
        update=lambda params, *round: fallback.update(params.fallback, *round),
        size=TreeSize(nodes, deepest),
        traits=fallback.traits._replace(
            max_accepted=longest_of_each((fallback,), deepest),
            chains=fallback.drafts_chains,
            widths=tuple(sorted({w for w in (1, 4, 8, *fallback.traits.widths, fallback.num_nodes) if w < nodes})),
        ),
        hooks=fallback.hooks._replace(
            prefill=read if fallback.hooks.prefill else None,
            export=remember if fallback.hooks.export else None,
            widths=widths_of_each((fallback,), 1, 4, 8, num_tokens + 1),
        ),
    )


def _pick(use_first: Array, first: TokenTree, second: TokenTree) -> TokenTree:
    """Return for each row the first tree where `use_first` bool[B] is true, else the second."""
    return jax.tree.map(lambda x, y: jnp.where(use_first[:, None], x, y), first, second)
