"""Auto: several model-free drafters in one tree, of which only as much is verified as pays; often nothing.

Our own combination of published parts. The tree is the union of a suffix match (SAM-Decoding, arXiv 2411.10666) and of
recycled runners-up (Token Recycling, arXiv 2408.08696), fused as in RASD (arXiv 2503.03434); its size is that of the
best goodput (SmartSpec, arXiv 2406.14066), with the prefix rule for one affine batch.

Rule, of a draft:
  1. Each node belongs to a class: a copied one by the length of the match and its own depth, a recycled one by how
     likely the target once found the token and its depth.
  2. The chance of a node is how often nodes of its class turned out to be the text where their parents were. A token
     that both drafters propose fails only if both classes fail. Where fewer nodes were right of late than their classes
     said, all chances of the row are lowered at once.
  3. The chance of a path is the product along it. The nodes stand in falling order of it.
  4. The pass takes the w of `widths` with the most expected tokens per cost,
       sum over rows of (1 + the w - 1 largest chances) / costs[w];
     w = 1 is plain decoding. Where a batch is ready when its slowest row is, a row counts the less the further it is
     ahead of that; in `serve`, where no row waits for another, all count alike.
Chances are learnt in hindsight: a whole draft is kept, verified or not, until the text has passed it by. So no decision
reads the randomness of its own round.
Guarantee: distribution (a point-mass tree). All rows of a batch take the same width, so the number of passes of a row
depends on its batch; its text does not.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from specjax import buffers, turns
from specjax import costs as costs_of
from specjax.drafters.lookup.suffix import find
from specjax.drafters.tables.token_recycling import RANKS, Recycled, Seen, best_paths, recycled_tree, token_recycling
from specjax.errors import UsageError
from specjax.indexing import take_along
from specjax.retrieval.suffixes import copied_chain
from specjax.trees import hindsight, operations
from specjax.trees.hindsight import Counts, Drafted, Hindsight, Shape, shape_of
from specjax.trees.templates import Template
from specjax.types import Array, Context, Drafter, TokenTree

CPU_WIDTHS = (1, 4, 8, 16)
WIDTHS = (1, 16, 32, 64)
"""Where the weights are read once for dozens of tokens, so that narrow passes are hardly cheaper."""
MATCHES = (1, 2, 3, 4, 6, 9, 16)  # lower bounds of the classes of match lengths
DEPTHS = (1, 2, 3, 5, 9)  # of depths of copied tokens
CHANCES = (0.0, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # of recycled probabilities
LEVELS = (1, 2, 3)  # of depths of recycled tokens
COPIED = len(MATCHES) * len(DEPTHS)
CLASSES = COPIED + len(CHANCES) * len(LEVELS)

MARGIN = 1.1
"""By how much a wider pass must promise more than plain decoding: estimates are noisy, and a loss weighs more."""
DRAFTING = 0.03
"""What drafting costs, in passes of width 1: 0.016 for SmolLM2 on two cores (0.5 of 31 ms), 0.04 for Llama 3 8B on 8
v5e chips (by the compiler's schedule)."""
REST = 7
"""Plain steps between two drafts where drafting does not pay."""
LEARN = 4
"""Every how many of these resting steps runners-up are recycled. Of 16 rows of SmolLM2 that took 1.9 of 100 ms on two
cores at each step; at batch 1 it makes drafts as good as recycling all of them (1.308 tokens per cost, not 1.309)."""
HOPE = 0.25
"""The promise before anything was seen: at least a dozen drafts."""
LEAD = 4.0
"""How many tokens ahead of the slowest row divide what a row counts by e."""
RECENT = 0.125
"""Weight of a draft in the average of what drafts promised."""


class Memory(NamedTuple):
    """What a call may start from: the parameters."""

    recycled: Recycled
    counts: Counts  # [CLASSES]


class _Record(NamedTuple):
    """How good the drafts were, and whether to draft."""

    past: Hindsight
    promise: Array  # float32[], average over the last drafts: passes of width 1 that the chosen width promised to save
    rest: Array  # int32[], plain steps until the next draft


class _State(NamedTuple):
    matrix: Recycled
    record: _Record


@functools.cache
def auto(
    vocab_size: int,
    *,
    widths: tuple[int, ...] | None = None,
    costs: costs_of.Costs = None,
    num_recycled: int | None = None,
    dtype: str = "float32",
    platform: str | None = None,
) -> Drafter:
    """Draft as much as pays on this device, and nothing where nothing does.

    Args:
      widths: verify widths to choose from, rising from 1; each is compiled. Default: CPU_WIDTHS or WIDTHS, by the
        platform. costs: from `specjax.costs`, or numbers, of a pass of each width in passes of width 1; None:
        `costs.estimated` for the batch and `dtype` of the parameters.
      num_recycled: nodes that Token Recycling proposes, 80 at most; default: 40 on CPU, else 80.
      platform: what the program is for, "cpu", "gpu" or "tpu"; None: what JAX runs on.

    State: that of `token_recycling` with chances, 2.2 MB per row at most.
    Raises: UsageError for widths that do not rise from 1, or costs that do not fit them.
    """
    on_cpu = (platform or jax.default_backend()) == "cpu"
    if widths is None:
        widths = CPU_WIDTHS if on_cpu else WIDTHS
    if num_recycled is None:
        num_recycled = 40 if on_cpu else 80
    if len(widths) < 2 or widths[0] != 1 or list(widths) != sorted(set(widths)):
        raise UsageError(f"widths must rise from 1, such as 1, 4, 8, not {list(widths)}")
    costs_of.check(costs, len(widths), "width")
    recycling = token_recycling(vocab_size, num_nodes=num_recycled, keep_chances=True)
    config = _Config(recycling, widths, costs, dtype, platform)
    return Drafter(
        init=functools.partial(_init, config),
        propose=functools.partial(_propose, config),
        observe=functools.partial(_observe, config),
        update=functools.partial(_update, config),
        axes=_axes,
        num_nodes=max(widths),
        max_depth=int(config.shape.depth.max()),
        widths=widths[:-1],
        follows_any_tree=True,
        remember=functools.partial(_remember, config),
    )


class _Config(NamedTuple):
    recycling: Drafter
    widths: tuple[int, ...]
    costs: costs_of.Costs
    dtype: str
    platform: str | None

    @property
    def template(self) -> Template:
        """Of the recycled nodes."""
        return Template(best_paths(self.recycling.num_nodes - 1))

    @property
    def shape(self) -> Shape:
        return shape_of(max(self.widths) - 1, self.template)


def _init(config: _Config, params, context: Context) -> _State:
    batch = context.tokens.shape[0]
    matrix = config.recycling.init(params.recycled if params else (), context)
    counts = params.counts if params else Counts(jnp.zeros(CLASSES), jnp.zeros(CLASSES))
    past = hindsight.begin(counts, batch, config.shape)
    return _State(matrix, _Record(past, jnp.float32(HOPE), jnp.int32(0)))


def _axes(state: _State) -> _State:
    rows = buffers.rows_first(state)
    return rows._replace(record=rows.record._replace(promise=buffers.SHARED, rest=buffers.SHARED))


def _propose(config: _Config, params, keys, state: _State, context: Context, limit: Array) -> tuple[TokenTree, _State]:
    context = context._replace(cache=None, target=None)  # a branch would be given them
    rest, draft = functools.partial(_rest, config), functools.partial(_draft, config)
    tree, record = jax.lax.cond(state.record.rest > 0, rest, draft, state.matrix, state.record, context, limit)
    return tree, state._replace(record=record)


def _rest(config: _Config, matrix: Recycled, record: _Record, context: Context, limit: Array):
    root = context.root
    tree = operations.pad_nodes(operations.chain(root, root >= 0), max(config.widths))
    return tree, record._replace(rest=record.rest - 1)


def _draft(config: _Config, matrix: Recycled, record: _Record, context: Context, limit: Array):
    shape = config.shape
    past = hindsight.learn(_prior(), shape, record.past, context)
    drafted = _join(shape, recycled_tree(config.template, matrix, context, limit), matrix, context, limit)
    tree, chance = hindsight.rank(_prior(), shape, drafted, past)
    width, saved = _best_width(config, chance, _weight(context.left, limit > 0))
    tree = tree._replace(valid=tree.valid & (jnp.arange(len(shape.parents)) < width))
    promise = record.promise + RECENT * (saved - record.promise)
    rest = jnp.where((promise < DRAFTING) & (width == 1), REST, jnp.zeros_like(record.rest))
    record = record._replace(past=hindsight.wait_for(past, drafted), promise=promise, rest=rest)
    return operations.cut(tree, max(config.widths)), record


def _observe(config: _Config, params, state: _State, context: Context, tree, verdict, output) -> Seen:
    """What Token Recycling sees; in narrow passes while it rests, only of every fourth."""
    learn = lambda: config.recycling.observe((), state.matrix, context, tree, verdict, output)
    if tree.tokens.shape[1] > config.widths[0]:
        return learn()
    nothing = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(learn))
    return jax.lax.cond(state.record.rest % LEARN == 0, learn, nothing)


def _update(config: _Config, params, state: _State, seen: Seen, verdict) -> _State:
    # A branch would copy the matrix; a loop of one turn or none writes in place.
    write = lambda _, matrix: config.recycling.update((), matrix, seen, verdict)
    is_news = jnp.any(seen.valid).astype(jnp.int32)
    with jax.named_scope(turns.ONCE):
        return state._replace(matrix=jax.lax.fori_loop(0, is_news, write, state.matrix))


def _remember(config: _Config, params, state: _State) -> Memory:
    remember = config.recycling.remember
    assert remember is not None
    counts = jax.tree.map(lambda x: jnp.mean(x, 0), state.record.past.counts)
    return Memory(remember(params.recycled if params else (), state.matrix), counts)


def _join(shape: Shape, runners_up: TokenTree, recycled: Recycled, context: Context, limit: Array) -> Drafted:
    """The drafts for the present position: a copied chain, then the recycled tree."""
    count = shape.copied
    start, matched = find(context.tokens, context.length, count, MATCHES[-1], "latest")
    root = context.root
    copy = copied_chain(root, context.tokens, context.length, start, count, limit)
    of_copy = _class(matched[:, None], MATCHES) * len(DEPTHS) + _class(shape.depth[1 : 1 + count], DEPTHS)
    of_rest = _class(jnp.exp(_log_chance(recycled, runners_up)), CHANCES) * len(LEVELS)
    of_rest += _class(shape.depth[1 + count :], LEVELS)
    beside = lambda x, y: jnp.concatenate([x, y], 1)
    kind = beside(beside(jnp.zeros_like(root), of_copy), COPIED + of_rest)
    tokens, valid = beside(copy.tokens, runners_up.tokens[:, 1:]), beside(copy.valid, runners_up.valid[:, 1:])
    return Drafted(tokens, valid, kind, context.length)


def _class(x: ArrayLike, bounds) -> Array:
    """int32 like x: the last class whose lower bound x reaches; 0 below all."""
    return jnp.maximum(jnp.sum(jnp.asarray(x)[..., None] >= jnp.asarray(bounds), -1) - 1, 0)


def _log_chance(recycled: Recycled, tree: TokenTree) -> Array:
    """float32[B, N - 1]: how likely the target once found the token of each node, the root apart, after its parent's.

    tree: as `recycled_tree` gives it."""
    parent = take_along(tree.tokens, tree.parents[:, 1:], 1)
    tokens, log_p = recycled.after(parent, np.arange(RANKS)[None])  # [B, N - 1, 8]
    assert log_p is not None
    return jnp.max(jnp.where(tokens == tree.tokens[:, 1:, None], log_p, -jnp.inf), 2)


def _prior() -> np.ndarray:
    """float32[CLASSES]: the chance of each class before anything was seen."""
    first = np.array([0.25, 0.45, 0.55, 0.65, 0.75, 0.85, 0.9])
    later = np.array([0.5, 0.6, 0.7, 0.75, 0.8, 0.88, 0.92])
    copied = np.stack([first] + [later] * (len(DEPTHS) - 1), 1).reshape(-1)
    edges = np.append(CHANCES, 1.0)
    recycled = np.repeat(0.6 * (edges[1:] + edges[:-1]) / 2, len(LEVELS))
    return np.concatenate([copied, recycled]).astype(np.float32)


def _weight(left: Array | None, running: Array) -> Array:
    """float32[B]: what a token counts in a row with `left` int32[B] to come: 1 in the slowest, 0 where none is running.

    Without it four rows of SmolLM2 took a twentieth longer than plain decoding on two of six tasks. With it in `serve`,
    where short requests come and go, thirty that could be foreseen took 480 steps beside a long one, not 138.
    """
    if left is None:
        return running.astype(jnp.float32)
    slowest = jnp.max(jnp.where(running, left, 0))
    return jnp.where(running, jnp.exp((left - slowest) / LEAD), 0.0)


def _best_width(config: _Config, chance: Array, weight: Array) -> tuple[Array, Array]:
    """int32[]: of the pass with the most expected tokens per cost, and how many plain passes it promises to save,
    float32[]. chance: float32[B, M], falling. weight: float32[B], what a token of a row counts."""
    widths = np.asarray(config.widths)
    total = jnp.cumsum(chance, 1)  # [B, M], of the nodes up to here; the root has none
    tokens = jnp.sum(weight[:, None] * (1 + total[:, widths - 1]), 0)  # [W]
    known = jnp.asarray(costs_of.at(config.costs, config.widths, chance.shape[0], config.dtype, config.platform))
    goodput = tokens / known
    best = jnp.argmax(goodput.at[0].multiply(MARGIN))
    saved = tokens[best] / jnp.maximum(tokens[0], 1e-6) - known[best]
    return jnp.asarray(widths)[best], jnp.where(best > 0, saved, 0.0)
