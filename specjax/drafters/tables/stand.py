"""STAND: sample a tree from a table of the target's distributions after the last 4, 3 or 2 tokens.

Song, Kim, Kim, Lee, Choi: Accelerated Test-Time Scaling with Model-Free Speculative Sampling (2025), arXiv 2506.04708.

Rule: for contexts of 4, 3 and 2 tokens, a table stores the 10 most likely next tokens, their probabilities P and a
count m. After each pass every token that was added to the text, with distribution p, updates its entries:
P <- (m P + p) / (m + 1), m <- m + 1, and the 10 largest stay. The children of a node of a static tree are drawn without
replacement (Gumbel-top-k) from the entry of the longest stored context. A node without an entry has no children.
Guarantee: distribution, with either acceptance rule.
  sample_and_match: the sampled tree does not depend on the noise of the target's draws, so it is a point mass for it.
  recursive_rejection: the children are tested against the distribution that they were drawn from. The distributions of
    all nodes take B N V floats.
Deviations: probabilities are stored as the target computes them, and warped (temperature, top-k, top-p) before each
draw. One table stores the contexts of all three lengths; the authors have three tables. On a TPU this halves the
operations of a look-up. Each row has its own table, next to the table of earlier calls; an entry of both is the mean
weighted by their counts. If a context occurs twice in one step, or within 32 tokens of the prompt, the later one
counts. The table learns from the prompt too. The paper's acceptance rule could not be confirmed. Its tree of 80 nodes
is not published, so the default tree is measured: see ACCEPTED.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.catalog import Method, Option, shared
from specjax.errors import UsageError
from specjax.numerics import sampling
from specjax.retrieval import contexts, ngrams
from specjax.retrieval.contexts import LONGEST, NextTokens
from specjax.trees.operations import compact
from specjax.trees.templates import Template
from specjax.types import Array, Context, Drafter, Hooks, Output, TokenTree, Traits, TreeSize, Verdict

METHOD = Method(
    name="stand",
    kind="drafter",
    guarantee="distribution",
    summary="samples a tree from a table of the target's distributions after the last 4, 3 or 2 tokens",
    paper="Song et al. 2025, arXiv 2506.04708",
    options=(
        shared.num_nodes(32),
        shared.PATHS,
        Option("draw", ("sampled", "likeliest"), "sampled", "how tokens of a table entry are drafted"),
        Option(
            "verify", ("sample_and_match", "recursive_rejection"), "sample_and_match", "acceptance rule for the draft"
        ),
        Option("read_prompt", "yes_or_no", True, "learn from the target's outputs for the prompt too"),
        shared.buckets(8192),
    ),
    cpu_options={"num_nodes": 7},
    arguments=("vocab_size",),
)


_PATHS = """
0 00 000 0000 00000 000000 0000000 00000000 1 01 2 001 0001 02 3 00001 10 000001 4 100 002 010 5 0000001
0002 0100 03 1000 10000 00000001 04 05 100000 01000 010000 003 0010 0100000 1000000 10000000 00002 00100
000002 01000000 6 7 11 8 9 20 004 001000 0010000 005 00010 000100 0001000 00010000 00100000 011 0003 0004
0000002 00000002 30 0005 0011 00003 00004 00005 00011 000010 0000100 00001000 06 07 08 09 020 200
"""

ACCEPTED = tuple(tuple(map(int, path)) for path in _PATHS.split())
"""Rank paths in the order of their acceptance counts.

The counts come from 48 greedy texts of SmolLM2-135M-Instruct after Spec-Bench prompts. Each text had its own table, a
draft from every position, and no entries from the prompt. (benchmarks/stand_tree.py replays the steps of a decoder
instead, which favours siblings slightly earlier.)
"""


class StandState(NamedTuple):
    """The table of the current call."""

    table: ngrams.Table  # see `specjax.retrieval.contexts`
    tail: Array  # int32[B, 4], the end of the text at the last read or draft; -1 before the beginning of the text


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
    """Fill a static tree of `num_nodes` drafted tokens, or of the rank paths `tree`, from a table of n-grams.

    Args:
      num_nodes: the tree has the first `num_nodes` paths of ACCEPTED. tree: see `best_paths`.
      draw: "likeliest" drafts the most probable tokens at any temperature; temperature 0 always does.
      verify: the acceptance rule for the draft.
      read_prompt: learn from the prompt too. The target's head then runs on the whole prompt, B x 128 x V floats at a
        time. In a replay of 48 greedy texts of SmolLM2 with 32 nodes: 1.50 tokens per pass with it, 1.40 without.
      buckets: number of buckets of the table, per row; each has four contexts of any length.

    Params: () or the table of an earlier call (`DecodeResult.drafter`): the entries of all rows, averaged by counts.
    State: StandState; the table takes 416 x buckets bytes per row (3.4 MB by default).
    Raises: UsageError for a setting out of range.
    """
    if verify not in ("sample_and_match", "recursive_rejection"):
        raise UsageError(f'verify must be "sample_and_match" or "recursive_rejection", not "{verify}"')
    if draw not in ("sampled", "likeliest"):
        raise UsageError(f'draw must be "sampled" or "likeliest", not "{draw}"')
    if (verify, draw) == ("recursive_rejection", "likeliest"):
        raise UsageError('verify="recursive_rejection" needs sampled trees; leave draw at "sampled"')
    ngrams.check_buckets(buckets)
    if tree is None and not 1 <= num_nodes <= len(ACCEPTED):
        raise UsageError(f"num_nodes must be from 1 to {len(ACCEPTED)}, not {num_nodes}; for more nodes give a tree")
    paths = ACCEPTED[:num_nodes] if tree is None else tree
    config = Config(vocab_size, paths, draw == "sampled", verify == "recursive_rejection", buckets)
    template = config.template
    _check_ranks(paths, config.entry_size)
    return Drafter(
        propose=functools.partial(_propose, config),
        size=TreeSize(template.num_nodes, template.max_depth),
        init=functools.partial(_init, config),
        observe=functools.partial(_observe, config),
        update=_update,
        traits=Traits(
            draws="without_replacement" if config.exact else "point_mass",
            widths=tuple(w for w in (1, 8, 16, 32) if w < template.num_nodes),
        ),
        hooks=Hooks(
            prefill=functools.partial(_read, config) if read_prompt else None,
            export=functools.partial(_export, config),
        ),
    )


class Config(NamedTuple):
    vocab_size: int
    paths: tuple[tuple[int, ...], ...]
    sampled: bool  # sample from entries; else draft their most likely tokens
    exact: bool  # return the distributions that the tokens were drawn from
    buckets: int

    @property
    def template(self) -> Template:
        return Template(self.paths)

    @property
    def entry_size(self) -> int:
        """Return the number of tokens of an entry."""
        return min(contexts.MAX_TOKENS, self.vocab_size)


def _check_ranks(paths: tuple[tuple[int, ...], ...], entry_size: int) -> None:
    """Check that entries of `entry_size` tokens can fill a tree.

    Raises: UsageError if they cannot.
    """
    for path in paths:
        if path[-1] and (*path[:-1], path[-1] - 1) not in paths:
            raise UsageError(f"the tree has {path} without its earlier sibling; add {(*path[:-1], path[-1] - 1)}")
    deepest = max(path[-1] for path in paths)
    if deepest >= entry_size:
        raise UsageError(f"the tree has rank {deepest}, but entries have ranks 0 to {entry_size - 1}")


def _init(config: Config, params, context: Context) -> StandState:
    batch = context.tokens.shape[0]
    if params and params.ages.shape[1] != config.buckets:
        earlier_buckets = params.ages.shape[1]
        raise UsageError(f"buckets must be that of the earlier call's table, {earlier_buckets}, not {config.buckets}")
    return StandState(
        contexts.empty(batch, config.buckets, config.entry_size), jnp.full((batch, LONGEST), -1, jnp.int32)
    )


def _read(
    config: Config, params, state: StandState, context: Context, tokens: Array, count: Array, output: Output
) -> StandState:
    """Update the table with a chunk of the prompt."""
    t = tokens.shape[1]
    text = jnp.concatenate([state.tail, tokens], 1)
    ends = text[:, 1 + np.arange(t)[:, None] + np.arange(LONGEST)]
    new = contexts.make_entries(output.logits, jnp.arange(t) < count[:, None], config.entry_size)
    tail = take_along(text, count[:, None] + jnp.arange(LONGEST), 1)
    return state._replace(table=ngrams.scan_chunks(contexts.add_entries, state.table, ends, new), tail=tail)


def _propose(config: Config, params, keys: Array, state: StandState, context: Context, limit: Array):
    positions = context.length[:, None] - LONGEST + jnp.arange(LONGEST)
    tail = take_along(context.tokens, jnp.maximum(positions, 0), 1)
    tail = jnp.where(positions >= 0, tail, -1)
    find = functools.partial(contexts.find, params, state.table)
    return compact(_draw(config, find, tail, keys, context, limit)), StandState(state.table, tail)


def _draw(
    config: Config, find: Callable[[Array], NextTokens], tail: Array, keys: Array, context: Context, limit: Array
) -> TokenTree:
    """Sample the tree after the text's end int32[B, 4], level by level; if `exact`, include its distributions."""
    template = config.template
    ends, nodes, rows = tail[:, None], [tail[:, -1:]], []  # ends: of each path's text int32[B, F, 4]; -1: no node
    for depth, (parent_index, ranks) in enumerate(template.below_root(), 1):
        entry = find(ends)  # [B, F]
        tokens = entry.tokens  # most likely first
        if context.sampling.temperature is not None:
            log_q = jnp.where(tokens >= 0, jnp.log(jnp.maximum(entry.probs, 1e-37)), -jnp.inf)
            # Warping would leave greedy rows one token.
            is_greedy = sampling.is_greedy(context.sampling, len(tokens))[:, None, None]
            log_q = jnp.where((tokens < 0) | is_greedy, log_q, sampling.warp(log_q, context.sampling))
            rows.append((tokens, log_q))
            if config.sampled:
                noise = _noise(tokens, depth, keys, context, config.vocab_size)
                noise = jnp.where(is_greedy, 0.0, noise)
                log_q, order = jax.lax.top_k(log_q + noise, int(ranks.max()) + 1)
                tokens = take_along(tokens, order, 2)
            tokens = jnp.where(log_q > -jnp.inf, tokens, -1)
        drawn = tokens[:, parent_index, ranks]
        ends = jnp.concatenate([ends[:, parent_index, 1:], drawn[:, :, None]], 2)
        nodes.append(drawn)
    tree = template.filled(nodes, limit)
    if not config.exact or context.sampling.temperature is None or context.noise is not None:
        return tree
    tokens, log_q = (jnp.concatenate(parts, 1) for parts in zip(*rows, strict=True))
    log_q_rows = _scatter_log_q(tokens, log_q, config.vocab_size)
    leaves = template.num_nodes - tokens.shape[1]  # the last level has no children
    return tree._replace(logits=jnp.pad(log_q_rows, ((0, 0), (0, leaves), (0, 0))))


def _observe(
    config: Config, params, state: StandState, context: Context, tree: TokenTree, verdict: Verdict, output: Output
) -> tuple[Array, NextTokens]:
    """Return the contexts int32[B, D + 1, 4] of the new tokens, and the target's entries for them [B, D + 1]."""
    rounds = config.template.max_depth + 1
    path = verdict.path[:, :rounds]
    node = jnp.maximum(path, 0)
    text = jnp.concatenate([state.tail, take_along(tree.tokens, node, 1)[:, 1:]], 1)
    ends = text[:, np.arange(path.shape[1])[:, None] + np.arange(LONGEST)]
    new = contexts.make_entries(take_along(output.logits, node[:, :, None], 1), path >= 0, config.entry_size)
    missing = rounds - path.shape[1]
    fill = lambda x: jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)))
    return jax.tree.map(fill, (ends, new))


def _update(params, state: StandState, observation: tuple[Array, NextTokens], verdict: Verdict) -> StandState:
    return state._replace(table=contexts.add_entries(state.table, *observation))


def _export(config: Config, params, state: StandState) -> ngrams.Table:
    return contexts.merge(params or contexts.empty(1, config.buckets, config.entry_size), state.table)


def _noise(tokens: Array, depth: int, keys: Array, context: Context, vocab_size: int) -> Array:
    """Return Gumbel noise for tokens [B, M, k] at `depth`; in coupled decoding it is that of the target's draw."""
    batch, m, k = tokens.shape
    if context.noise is None:
        level = sampling.fold_in(keys, jnp.full((batch,), depth))
        return sampling.noise(level, m * k).reshape(batch, m, k)
    key = sampling.node_keys(context.noise, context.length, jnp.full((batch, 1), depth - 1))  # one key per position
    return take_along(sampling.noise(key, vocab_size), jnp.maximum(tokens, 0), 2)


def _scatter_log_q(tokens: Array, log_q: Array, vocab_size: int) -> Array:
    """Scatter log q of some tokens float32[B, M, k] to the vocabulary float32[B, M, V]; uniform without a token."""
    batch, m, _ = tokens.shape
    is_empty = jnp.all(log_q == -jnp.inf, -1)[..., None]
    index = jnp.where(tokens >= 0, tokens, vocab_size)
    row, node = jnp.arange(batch)[:, None, None], jnp.arange(m)[:, None]
    full = jnp.full((batch, m, vocab_size), -jnp.inf).at[row, node, index].set(log_q, mode="drop")
    return jnp.where(is_empty, 0.0, full)


def best_paths(accepted: Iterable[Sequence[int]], num_nodes: int) -> tuple[tuple[int, ...], ...]:
    """Return the `num_nodes` nodes that were most often on accepted paths, best first, as a `tree`.

    The result has fewer nodes if fewer were accepted. A node counts at least as much as its later siblings, which are
    drawn after it. For equal counts the shorter path comes first. Every node thus follows its parent and its earlier
    siblings.

    Args:
      accepted: one rank path per step, from `accepted_path`; it may be empty.
    """
    counts = Counter(tuple(path[:depth]) for path in accepted for depth in range(1, len(path) + 1))
    weights: dict[tuple[int, ...], int] = {}
    for path, count in counts.items():
        for rank in range(path[-1] + 1):
            earlier = (*path[:-1], rank)
            weights[earlier] = max(weights.get(earlier, 0), count)
    return tuple(sorted(weights, key=lambda path: (-weights[path], len(path), path))[:num_nodes])


def accepted_path(tree: TokenTree, row: int, tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the rank path of the longest prefix of `tokens`, the new tokens of a row, in the draft of their step."""
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
