"""STAND: draw a tree from a table of what the target thought after the last 4, 3 or 2 tokens.

Song, Kim, Kim, Lee, Choi: Accelerated Test-Time Scaling with Model-Free Speculative Sampling (2025), arXiv 2506.04708.

Rule: a table holds, for contexts of 4, 3 and 2 tokens, the 10 likeliest next tokens with their probabilities P, and a
count m. After each pass, at every token added to the text with law p: P <- (m P + p) / (m + 1), m <- m + 1; the 10
largest stay. The children of a node of a static tree are drawn without replacement (Gumbel-top-k) from the entry of the
longest context found; a node without one has no children.
Guarantee: distribution, by either verification.
  sample_and_match: the drawn tree does not depend on the noise of the target's draws, so it is a point mass to it.
  recursive_rejection: the drawn children are tested against the law they came from. It takes B N V floats for the laws.
Deviations: laws are stored as the target gives them and warped (temperature, top-k, top-p) when drawn from. One table
holds the contexts of all three lengths, where the authors have three: on a TPU a look takes half the operations. It is
per row, with what is remembered from earlier calls beside it: an entry of both is the mean by their counts. Where a
context occurs twice in one round, or within 32 tokens of the prompt, the later law counts. The laws of the prompt are
learned too. The paper's rule of verification could not be confirmed; its tree of 80 nodes is not published, so the
default is measured: see ACCEPTED.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from specjax import sampling
from specjax.errors import UsageError
from specjax.indexing import at, take_along
from specjax.pallas_kernels.gumbel_topk import likeliest
from specjax.retrieval import ngrams
from specjax.trees.operations import compact
from specjax.trees.templates import Template
from specjax.types import Array, Context, Drafter, Output, PyTree, TokenTree, Verdict

ORDERS = 4, 3, 2  # lengths of contexts, the first that is found counts
KEPT = 10  # tokens of an entry
WAYS = 4  # places of a bucket
UNUSED = np.arange(max(ORDERS)) < max(ORDERS) - np.array(ORDERS)[:, None]
"""bool[3, 4]: the tokens of a context that each of ORDERS leaves out."""
LEFT_OUT = np.iinfo(np.int32).max  # stands for them: no token


_PATHS = """
0 00 000 0000 00000 000000 0000000 00000000 1 01 2 001 0001 02 3 00001 10 000001 4 100 002 010 5 0000001
0002 0100 03 1000 10000 00000001 04 05 100000 01000 010000 003 0010 0100000 1000000 10000000 00002 00100
000002 01000000 6 7 11 8 9 20 004 001000 0010000 005 00010 000100 0001000 00010000 00100000 011 0003 0004
0000002 00000002 30 0005 0011 00003 00004 00005 00011 000010 0000100 00001000 06 07 08 09 020 200
"""

ACCEPTED = tuple(tuple(map(int, path)) for path in _PATHS.split())
"""Rank paths, the one accepted most often first: 48 greedy texts of SmolLM2-135M-Instruct after Spec-Bench prompts,
each with a table of its own and a draft from every position, the prompt not read (benchmarks/stand_tree.py replays the
rounds of a decoder instead, which favours siblings a little earlier)."""


class Entry(NamedTuple):
    """What followed a context, the likeliest first."""

    tokens: Array  # int32[..., k]; -1: none
    probs: Array  # float32[..., k]
    seen: Array  # int32[...], laws it is the mean of; 0: none


class StandState(NamedTuple):
    """The table of this call."""

    table: ngrams.Table  # of contexts of all ORDERS; values Entry
    tail: Array  # int32[B, 4], the end of the text that was read or drafted after last; -1 before its beginning


@functools.cache
def stand(
    vocab_size: int,
    *,
    num_nodes: int = 32,
    tree: tuple[tuple[int, ...], ...] | None = None,
    draw: Literal["sampled", "likeliest"] = "sampled",
    verify: Literal["sample_and_match", "recursive_rejection"] = "sample_and_match",
    read_prompt: bool = True,
    buckets: int = 8192,
) -> Drafter:
    """A static tree of `num_nodes` drafted tokens, or of the rank paths `tree`, filled from a table of n-grams.

    Args:
      num_nodes: the first of ACCEPTED. tree: see `best_paths`.
      draw: "likeliest" takes the most probable tokens at any temperature, as temperature 0 always does.
      verify: which rule is to judge the draft.
      read_prompt: learn the target's laws in the prompt too, for which its head works on the whole prompt, B x 128 x V
        floats at a time. Replayed on 48 greedy texts of SmolLM2, 32 nodes: 1.50 tokens per pass with it, 1.40 without.
      buckets: of the table, per row; four contexts each, of any length.

    Params: () or what an earlier call remembered (`DecodeResult.drafter`): the rows' entries, averaged by their counts.
    State: StandState; the table takes 416 x buckets bytes per row (3.4 MB by default).
    Raises: UsageError for a setting outside its range.
    """
    if verify not in ("sample_and_match", "recursive_rejection"):
        raise UsageError(f'verify must be "sample_and_match" or "recursive_rejection", not "{verify}"')
    if draw not in ("sampled", "likeliest"):
        raise UsageError(f'draw must be "sampled" or "likeliest", not "{draw}"')
    if (verify, draw) == ("recursive_rejection", "likeliest"):
        raise UsageError('verify="recursive_rejection" is for drawn trees; leave draw at "sampled"')
    ngrams.check_buckets(buckets)
    kept = min(KEPT, vocab_size)
    template = _template(num_nodes, tree, kept)
    longest, rounds = max(ORDERS), template.max_depth + 1
    exact = verify == "recursive_rejection"

    def empty(batch: int) -> ngrams.Table:
        none = Entry(jnp.full((kept,), -1, jnp.int32), jnp.zeros((kept,)), jnp.int32(0))
        return ngrams.empty(batch, buckets, WAYS, longest, none)

    def init(params, context: Context) -> StandState:
        batch = context.tokens.shape[0]
        if params and params.ages.shape[1] != buckets:
            raise UsageError(f"buckets must be that of the table remembered, {params.ages.shape[1]}, not {buckets}")
        return StandState(empty(batch), jnp.full((batch, longest), -1, jnp.int32))

    def read(params, state: StandState, context: Context, tokens: Array, count: Array, output: Output) -> StandState:
        text = jnp.concatenate([state.tail, tokens], 1)
        t = tokens.shape[1]
        contexts = text[:, 1 + np.arange(t)[:, None] + np.arange(longest)]
        laws = _laws(output.logits, jnp.arange(t) < count[:, None], kept)
        tail = take_along(text, count[:, None] + jnp.arange(longest), 1)
        return state._replace(table=ngrams.by_chunks(_learn, state.table, contexts, laws), tail=tail)

    def propose(params, keys: Array, state: StandState, context: Context, limit: Array):
        place = context.length[:, None] - longest + jnp.arange(longest)
        tail = take_along(context.tokens, jnp.maximum(place, 0), 1)
        tail = jnp.where(place >= 0, tail, -1)
        find = functools.partial(_find, params, state.table)
        drawn = _draw(template, find, tail, keys, context, limit, vocab_size, sampled=draw == "sampled", exact=exact)
        return compact(drawn), StandState(state.table, tail)

    def observe(
        params, state: StandState, context: Context, tree: TokenTree, verdict: Verdict, output: Output
    ) -> tuple[Array, Entry]:
        """The contexts int32[B, D + 1, 4] of the tokens added to the text, and their laws [B, D + 1]."""
        path = verdict.path[:, :rounds]
        node = jnp.maximum(path, 0)
        text = jnp.concatenate([state.tail, take_along(tree.tokens, node, 1)[:, 1:]], 1)
        contexts = text[:, np.arange(path.shape[1])[:, None] + np.arange(longest)]
        laws = _laws(take_along(output.logits, node[:, :, None], 1), path >= 0, kept)
        missing = rounds - path.shape[1]
        fill = lambda x: jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)))
        return jax.tree.map(fill, (contexts, laws))

    def update(params, state: StandState, seen: tuple[Array, Entry], verdict: Verdict) -> StandState:
        return state._replace(table=_learn(state.table, *seen))

    def remember(params, state: StandState) -> ngrams.Table:
        return ngrams.merge(params or empty(1), state.table, mix)

    return Drafter(
        init=init,
        propose=propose,
        observe=observe,
        update=update,
        num_nodes=template.num_nodes,
        max_depth=template.max_depth,
        draws="without_replacement" if exact else "point_mass",
        widths=tuple(w for w in (1, 8, 16, 32) if w < template.num_nodes),
        read=read if read_prompt else None,
        remember=remember,
    )


def _template(num_nodes: int, paths: tuple[tuple[int, ...], ...] | None, kept: int) -> Template:
    """Of the first of ACCEPTED, or of `paths`. Raises: UsageError for one that cannot be filled from entries."""
    if paths is None and not 1 <= num_nodes <= len(ACCEPTED):
        raise UsageError(f"num_nodes must be from 1 to {len(ACCEPTED)}, not {num_nodes}; for more nodes give a tree")
    chosen = ACCEPTED[:num_nodes] if paths is None else paths
    template = Template(chosen)
    for path in chosen:
        if path[-1] and (*path[:-1], path[-1] - 1) not in chosen:
            raise UsageError(f"the tree has {path} without its earlier sibling; add {(*path[:-1], path[-1] - 1)}")
    if template.ranks.max() >= kept:
        raise UsageError(f"the tree asks for rank {template.ranks.max()}, but entries keep ranks 0 to {kept - 1}")
    return template


def _draw(
    template: Template, find: Callable[[Array], Entry], tail: Array, keys: Array, context: Context, limit: Array,
    vocab_size: int, *, sampled: bool, exact: bool,
) -> TokenTree:  # fmt: skip
    """The tree below the end of the text int32[B, 4], level by level; `exact`: with the laws it was drawn from."""
    contexts, nodes, rows = tail[:, None], [tail[:, -1:]], []  # of the level above; -1: no node
    for depth, (place, ranks) in enumerate(template.below_root(), 1):
        entry = find(contexts)  # [B, F]
        tokens = entry.tokens  # the likeliest first
        if context.sampling.temperature is not None:
            law = jnp.where(tokens >= 0, jnp.log(jnp.maximum(entry.probs, 1e-37)), -jnp.inf)
            law = jnp.where(tokens >= 0, sampling.warp(law, context.sampling), -jnp.inf)
            rows.append((tokens, law))
            if sampled:
                noise = _noise(tokens, depth, keys, context, vocab_size)
                law, order = jax.lax.top_k(law + noise, int(ranks.max()) + 1)
                tokens = take_along(tokens, order, 2)
            tokens = jnp.where(law > -jnp.inf, tokens, -1)
        drawn = tokens[:, place, ranks]
        contexts = jnp.concatenate([contexts[:, place, 1:], drawn[:, :, None]], 2)
        nodes.append(drawn)
    tree = template.filled(nodes, limit)
    if not exact or context.sampling.temperature is None or context.noise is not None:
        return tree
    tokens, laws = (jnp.concatenate(parts, 1) for parts in zip(*rows, strict=True))
    whole = _whole(tokens, laws, vocab_size)
    leaves = template.num_nodes - tokens.shape[1]  # nothing was drawn below the last level
    return tree._replace(logits=jnp.pad(whole, ((0, 0), (0, leaves), (0, 0))))


def best_paths(accepted: Iterable[Sequence[int]], num_nodes: int) -> tuple[tuple[int, ...], ...]:
    """The `num_nodes` nodes that lay on accepted paths most often, best first: a `tree` made of calibration results.

    accepted: one rank path per round, as `accepted_path` gives it; may be empty. Fewer nodes if fewer were accepted.
    A node counts at least as much as its later siblings, which are drawn after it; of equal counts the shorter path
    comes first. So every node stands behind its parent and its earlier siblings.
    """
    counts = Counter(tuple(path[:depth]) for path in accepted for depth in range(1, len(path) + 1))
    weights: dict[tuple[int, ...], int] = {}
    for path, count in counts.items():
        for rank in range(path[-1] + 1):
            earlier = (*path[:-1], rank)
            weights[earlier] = max(weights.get(earlier, 0), count)
    return tuple(sorted(weights, key=lambda path: (-weights[path], len(path), path))[:num_nodes])


def accepted_path(tree: TokenTree, row: int, tokens: Sequence[int]) -> tuple[int, ...]:
    """The rank path along which a draft holds the first of `tokens`, those that its round added to a row."""
    drafted, parents, valid = (np.asarray(x)[row] for x in tree[:3])
    node, path = 0, []
    for token in tokens:
        children = np.flatnonzero(valid & (parents == node))
        rank = np.flatnonzero(drafted[children] == token)
        if not len(rank):
            break
        path.append(int(rank[0]))
        node = children[rank[0]]
    return tuple(path)


def mix(a: Entry, b: Entry) -> Entry:
    """The mean of two entries by their counts, over the tokens of both; the k largest, of equal ones the lower ids.
    Tokens of no probability are none."""
    total = a.seen + b.seen
    share = lambda x: (x.seen / jnp.maximum(total, 1))[..., None] * x.probs
    ours, theirs = share(a), share(b)
    same = (a.tokens[..., :, None] == b.tokens[..., None, :]) & (a.tokens >= 0)[..., :, None]
    ours += jnp.sum(jnp.where(same, theirs[..., None, :], 0.0), -1)
    rest = jnp.where(jnp.any(same, -2), -1, b.tokens)
    tokens = jnp.concatenate([a.tokens, rest], -1)
    probs = jnp.where(tokens >= 0, jnp.concatenate([ours, theirs], -1), -1.0)
    order = -probs, jnp.where(tokens >= 0, tokens, np.iinfo(np.int32).max)
    negative, tokens = (x[..., : a.tokens.shape[-1]] for x in jax.lax.sort(order, num_keys=2))
    known = negative < 0
    return Entry(jnp.where(known, tokens, -1), jnp.where(known, -negative, 0.0), total)


def _laws(logits: Array, wanted: Array, kept: int) -> Entry:
    """The likeliest tokens of logits float32[B, M, V] with their probabilities, as entries seen once."""
    tokens, log_p = likeliest(logits, kept)
    return Entry(tokens, jnp.exp(log_p), wanted.astype(jnp.int32))


def _by_order(contexts: Array) -> Array:
    """int32[B, 3 M, 4]: of each context int32[B, M, 4] its n-grams, one for each of ORDERS."""
    grams = jnp.where(UNUSED, LEFT_OUT, contexts[:, :, None])
    return grams.reshape(len(contexts), -1, contexts.shape[-1])


def _learn(table: ngrams.Table, contexts: Array, laws: Entry) -> ngrams.Table:
    """Mix laws [B, M], seen once or not at all, into the entries of their contexts int32[B, M, 4], of every order."""
    grams = _by_order(jnp.where(laws.seen[:, :, None] > 0, contexts, -1))
    wanted = jnp.all(grams >= 0, -1)
    tokens, probs = (jnp.repeat(x, len(ORDERS), 1) for x in laws[:2])
    once = Entry(tokens, probs, jnp.int32(1))
    found = ngrams.find(table, grams)
    place = np.arange(len(grams))[:, None], found.bucket, jnp.argmax(found.hit, 2)
    known = _read(table.values, place, jnp.any(found.hit, 2))
    return ngrams.write(table, grams, mix(known, once), wanted, prefix=grams.shape[-1])


def _find(params: PyTree, table: ngrams.Table, contexts: Array) -> Entry:
    """The entries [B, M] of the longest contexts known; seen 0 where none is."""
    grams, several = _by_order(contexts), [params, table] if params else [table]
    each = WAYS * table.ages.shape[1]  # places
    # One number for each hit, the larger the longer its context, that names its place: on a TPU operations count.
    number = each * np.arange(len(ORDERS), 0, -1)[:, None] + np.arange(WAYS)
    number = np.tile(number, (contexts.shape[1], 1))  # [3 M, A]

    def longest(table: ngrams.Table) -> Array:
        found = ngrams.find(table, grams)
        hits = jnp.where(found.hit, number + WAYS * found.bucket[:, :, None], 0)
        return jnp.max(hits.reshape(*contexts.shape[:2], -1), 2)

    best = [longest(table) for table in several]  # [B, M]; 0: none
    overall = functools.reduce(jnp.maximum, best) // each  # 1 to 3, of the longest context that any table knows

    def entry(table: ngrams.Table, best: Array) -> Entry:
        place = best % each
        row = np.arange(len(table.ages))[:, None]
        return _read(table.values, (row, place // WAYS, place % WAYS), (best > 0) & (best // each == overall))

    return functools.reduce(mix, map(entry, several, best))


def _read(values: Entry, place: tuple[ArrayLike, ...], known: Array) -> Entry:
    """What stands at places, int32[B, M] each; nothing where not `known` bool[B, M]."""
    entry = jax.tree.map(lambda x: at(x, *place), values)
    return Entry(jnp.where(known[..., None], entry.tokens, -1), entry.probs, jnp.where(known, entry.seen, 0))


def _noise(tokens: Array, depth: int, keys: Array, context: Context, vocab_size: int) -> Array:
    """Gumbel noise of tokens [B, M, k] that are to stand at `depth`: that of the target's own draw if it is shared."""
    batch, m, k = tokens.shape
    if context.noise is None:
        level = sampling.fold_in(keys, jnp.full((batch,), depth))
        return sampling.noise(level, m * k).reshape(batch, m, k)
    key = sampling.node_keys(context.noise, context.length, jnp.full((batch, 1), depth - 1))  # one per position
    return take_along(sampling.noise(key, vocab_size), jnp.maximum(tokens, 0), 2)


def _whole(tokens: Array, laws: Array, vocab_size: int) -> Array:
    """Laws over the vocabulary float32[B, M, V] from laws float32[B, M, k] of some tokens; uniform where none is."""
    batch, m, _ = tokens.shape
    none = jnp.all(laws == -jnp.inf, -1)[..., None]
    place = jnp.where(tokens >= 0, tokens, vocab_size)
    row, node = jnp.arange(batch)[:, None, None], jnp.arange(m)[:, None]
    whole = jnp.full((batch, m, vocab_size), -jnp.inf).at[row, node, place].set(laws, mode="drop")
    return jnp.where(none, 0.0, whole)
