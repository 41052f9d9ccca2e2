"""Auto: several drafters in one tree, of which only as much is verified as pays; often nothing. With a head or without.

Our own combination of published parts. The tree is the union of a suffix match (SAM-Decoding, arXiv 2411.10666), of
recycled runners-up (Token Recycling, arXiv 2408.08696) and, if a learned head of the target is given, of its tree of
likeliest tokens (EAGLE, arXiv 2401.15077, or any other), fused as in RASD (arXiv 2503.03434); its size is that of the
best goodput (SmartSpec, arXiv 2406.14066), with the prefix rule for one affine batch.

Rule, of a draft:
  1. Each node belongs to a class: a copied one by the length of the match and its own depth, a recycled one by how
     likely the target once found the token and its depth, one of the head by how likely the head finds it (its own
     confidence, where it has one) and its depth.
  2. The chance of a node is how often nodes of its class turned out to be the text where their parents were: so what a
     head says is calibrated by what it was right in. A token that several drafters propose fails only if all of their
     classes fail. Where fewer nodes were right of late than their classes said, all chances of the row are lowered at
     once, those of the head apart from the others.
  3. The chance of a path is the product along it. The nodes stand in falling order of it.
  4. The pass takes the w of `widths` with the most expected tokens per cost,
       sum over rows of (1 + the w - 1 largest chances) / costs[w];
     w = 1 is plain decoding. Where a batch is ready when its slowest row is, a row counts the less the further it is
     ahead of that; in `serve`, where no row waits for another, all count alike.
  5. The head is asked once the others have drafted, and only where that saves more than it costs in the mean
     (`specjax.drafters.combined.head_schedule`). The pairs that it has not read meanwhile wait in a window.
Chances are learnt in hindsight: a whole draft is kept, verified or not, until the text has passed it by. So no decision
reads the randomness of its own round.
Guarantee: distribution (a point-mass tree, a head's nodes too: its likeliest tokens, never drawn; q is 1 at each). All
rows of a batch take the same width, so the number of passes of a row depends on its batch; its text does not.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import costs as costs_of
from specjax.arrays import batch_axes, scopes
from specjax.catalog import Method, Option
from specjax.drafters.combined import head_schedule, node_classes, settings
from specjax.drafters.combined.head_schedule import Asking
from specjax.drafters.combined.settings import Config
from specjax.drafters.combined.widths import RECENT, best_width, weight_of
from specjax.drafters.heads import learned, reading
from specjax.drafters.tables.token_recycling import Known, Recycled, Seen, recycled_tree
from specjax.models.heads.contract import DraftHead
from specjax.trees import node_statistics, operations
from specjax.trees.node_statistics import Counts, Drafted, Hindsight
from specjax.types import Array, Context, Drafter, Hooks, PyTree, Target, TokenTree, Traits, TreeSize

METHOD = Method(
    name="auto",
    kind="drafter",
    guarantee="distribution",
    summary="merges suffix matches, token recycling and a draft head into one tree, and prunes it by cost",
    paper="our combination of arXiv 2411.10666, 2408.08696, 2503.03434 and 2406.14066",
    takes=frozenset({"costs", "head"}),
    options=(
        Option("widths", "integers", None, "widths of the target pass, rising from 1"),
        Option("num_recycled", "int", None, "nodes from token recycling"),
        Option("head_tree", "tree_shape", None, "tree of the draft head's most likely tokens"),
        Option(
            "head_cost",
            "float",
            None,
            "cost of the head's draft in plain target passes; default: from its number of weights",
        ),
    ),
    factory="make_auto",
    arguments=("target", "draft"),
)


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


class Memory(NamedTuple):
    """What earlier calls taught: the parameters."""

    recycled: Recycled | tuple[()]
    counts: Counts  # [CLASSES]


class Params(NamedTuple):
    """With a head: what earlier calls taught, and its own."""

    learnt: Memory | tuple[()]
    head: PyTree


class _Record(NamedTuple):
    """How good the drafts were, and whether to draft."""

    past: Hindsight
    promise: Array  # float32[], average over the last drafts: passes of width 1 that the chosen width promised to save
    rest: Array  # int32[], plain steps until the next draft


class _OfHead(NamedTuple):
    read: reading.State
    asking: Asking


class _State(NamedTuple):
    matrix: Recycled
    record: _Record
    head: _OfHead | tuple[()] = ()


class _Draft(NamedTuple):
    """What may be verified in a round."""

    tree: TokenTree  # of as many nodes as pay
    drafted: Drafted  # all of them
    saved: Array  # float32[], passes of width 1 that the tree promises to save


def auto(
    vocab_size: int,
    *,
    head: DraftHead | None = None,
    head_tree: tuple[tuple[int, ...], ...] | None = None,
    widths: tuple[int, ...] | None = None,
    costs: costs_of.Costs = None,
    head_cost: float | None = None,
    num_recycled: int | None = None,
    dtype: str = "float32",
    platform: str | None = None,
) -> Drafter:
    """Draft as much as pays on this device, and nothing where nothing does.

    Args:
      head: a learned one of the target. head_tree: rank paths of its likeliest tokens; default: by the platform, a
        chain with runners-up or 40 nodes, no deeper than the head drafts. head_cost: of drafting these, in passes of
        width 1; None: by the weights that it reads (`costs.of_head`).
      widths: verify widths to choose from, rising from 1; each is compiled. Default: CPU_WIDTHS or WIDTHS, by the
        platform. costs: from `specjax.costs`, or numbers, of a pass of each width in passes of width 1; None:
        `costs.estimated` for the batch and `dtype` of the parameters.
      num_recycled: nodes that Token Recycling proposes, 80 at most; default: 40 on CPU, else 80.
      platform: what the program is for, "cpu", "gpu" or "tpu"; None: what JAX runs on.

    State: that of `token_recycling` with chances, 2.2 MB per row at most; with a head its memory of the text, and the
    features of the tokens that it has not read: of WAITING and of the longest draft.
    Raises: UsageError for widths that do not rise from 1, costs that do not fit them, or a tree without a head or
      deeper than it drafts.
    """
    of_head = None if head is None else head.head
    config = settings.checked(vocab_size, num_recycled, widths, costs, dtype, platform, of_head, head_tree, head_cost)
    made = _functions(config)
    return made if head is None else made.replace(params=Params((), head.params))


def make_auto(target: Target, draft: Target | DraftHead | None, **options) -> Drafter:
    """Return `auto` for a target, with its draft head if there is one. A draft model is not used."""
    head = draft if isinstance(draft, DraftHead) else None
    return auto(target.model.vocab_size, head=head, dtype=costs_of.dtype_of(target), **options)


@functools.cache
def _functions(config: Config) -> Drafter:
    """The drafter, without its parameters."""
    of_head = config.head
    return Drafter(
        propose=functools.partial(_propose if of_head is None else _propose_with_head, config),
        size=TreeSize(max(config.widths), config.longest - 1),
        init=functools.partial(_init, config),
        observe=functools.partial(_observe, config),
        update=functools.partial(_update, config),
        traits=Traits(
            widths=config.widths[:-1],
            follows_any_tree=True,
            taps=() if of_head is None else of_head.taps,
            rewinds=of_head is None,
        ),
        hooks=Hooks(
            prefill=None if of_head is None else functools.partial(_read, config),
            axes=functools.partial(_axes, config),
            export=functools.partial(_remember, config),
            explain=_explain,
        ),
    )


def _init(config: Config, params, context: Context) -> _State:
    matrix = config.recycling.init((), context)
    past = node_statistics.begin(len(config.prior), context.tokens.shape[0], config.shape)
    record = _Record(past, jnp.float32(HOPE), jnp.int32(0))
    if config.head is None:
        return _State(matrix, record)
    read = reading.begin(config.head, params.head, context, config.window)
    return _State(matrix, record, _OfHead(read, head_schedule.begin()))


def _earlier(config: Config, params: Memory | Params | tuple[()]) -> Memory:
    """What earlier calls taught, if any did."""
    learnt = params.learnt if isinstance(params, Params) else params
    none = jnp.zeros(len(config.prior))
    return learnt or Memory((), Counts(none, none))


def _axes(config: Config, state: _State) -> _State:
    rows = batch_axes.rows_first(state)
    rows = rows._replace(record=rows.record._replace(promise=batch_axes.SHARED, rest=batch_axes.SHARED))
    if config.head is None or not isinstance(state.head, _OfHead):
        return rows
    return rows._replace(head=_OfHead(reading.axes(config.head, state.head.read), batch_axes.shared(state.head.asking)))


def _propose(config: Config, params, keys, state: _State, context: Context, limit: Array) -> tuple[TokenTree, _State]:
    context = context._replace(cache=None, target=None)  # a branch would be given them
    earlier = _earlier(config, params)

    def look(known: Known, counts: Counts, record: _Record, *now) -> tuple[TokenTree, _Record]:
        draft, past = _look(config, known, counts, record, *now)
        return draft.tree, _drafted(record, draft, past)

    def rest(known: Known, counts: Counts, record: _Record, *now) -> tuple[TokenTree, _Record]:
        return _nothing(config, *now).tree, _rested(record)

    known = Known(state.matrix, earlier.recycled)
    is_resting = state.record.rest > 0
    tree, record = jax.lax.cond(is_resting, rest, look, known, earlier.counts, state.record, context, limit)
    return tree, state._replace(record=record)


def _propose_with_head(
    config: Config, params: Params, keys, state: _State, context: Context, limit: Array
) -> tuple[TokenTree, _State]:
    """The others draft, then the head if that is likely to pay. Its memory is written between the branches: these would
    copy it."""
    head, builder, earlier = config.head, config.builder, _earlier(config, params)
    assert head is not None and isinstance(state.head, _OfHead)
    others, record = context._replace(cache=None, target=None), state.record
    is_resting, asked_of = record.rest > 0, state.head.asking
    look = functools.partial(_look, config)
    rest = lambda known, counts, record, *now: (_nothing(config, *now), record.past)
    known = Known(state.matrix, earlier.recycled)
    alone, past = jax.lax.cond(is_resting, rest, look, known, earlier.counts, record, others, limit)
    cost = _cost(config, context, params)
    asks = head_schedule.is_due(asked_of, alone.saved) & ~is_resting & jnp.any(limit > 0)
    is_full = jnp.max(state.head.read.new.count) + config.longest > state.head.read.new.tokens.shape[1]
    read = reading.caught_up(head, params.head, state.head.read, context, config.chunk, asks | is_full)

    def ask() -> _Draft:
        grown = learned.grown(head, builder, params.head, read.memory, keys, context, limit)
        return _ranked(
            config, past, earlier.counts, node_classes.with_head(config.shape, alone.drafted, grown), others, limit
        )

    draft = jax.lax.cond(asks, ask, lambda: alone)
    asked_of = head_schedule.learnt(asked_of, cost, alone.saved, draft.saved, asks)
    net = draft._replace(saved=jnp.maximum(draft.saved - jnp.where(asks, cost, 0.0), alone.saved))
    pick = lambda old, new: jnp.where(is_resting, old, new)
    record = jax.tree.map(pick, _rested(record), _drafted(record, net, past))
    return draft.tree, state._replace(record=record, head=_OfHead(read, asked_of))


def _cost(config: Config, context: Context, params: Params) -> float:
    """Of asking the head, in passes of width 1."""
    assert config.head is not None and context.target is not None
    drafting = config.head_cost
    if drafting is None:
        drafting = costs_of.of_head(context.target, DraftHead(config.head, params.head), config.builder.levels)
    return DRAFTING + drafting  # the draft is joined and ranked anew


def _look(
    config: Config, known: Known, counts: Counts, record: _Record, context: Context, limit: Array
) -> tuple[_Draft, Hindsight]:
    """What the drafters beside the head have to offer, and what is known of their earlier drafts."""
    past = node_statistics.learn(config.prior, config.shape, record.past, context, counts)
    runners_up = recycled_tree(config.template, known, context, limit)
    drafted = node_classes.without_head(config.shape, runners_up, known, context, limit)
    return _ranked(config, past, counts, drafted, context, limit), past


def _ranked(
    config: Config, past: Hindsight, counts: Counts, drafted: Drafted, context: Context, limit: Array
) -> _Draft:
    """As much of what was drafted as pays."""
    tree, chance = node_statistics.rank(config.prior, config.shape, drafted, past, counts)
    known = costs_of.evaluate(config.costs, config.widths, chance.shape[0], config.dtype, config.platform)
    width, saved = best_width(config.widths, known, chance, weight_of(context.left, limit > 0))
    tree = tree._replace(valid=tree.valid & (jnp.arange(chance.shape[1]) < width))
    return _Draft(operations.cut(tree, max(config.widths)), drafted, saved)


def _nothing(config: Config, context: Context, limit: Array) -> _Draft:
    """An empty draft."""
    root = context.root
    tree = operations.pad_nodes(operations.chain(root, root >= 0), max(config.widths))
    none = jnp.zeros((len(root), len(config.shape.parents)), jnp.int32)
    return _Draft(tree, Drafted(none, none > 0, none, none[:, 0]), jnp.float32(0))


def _drafted(record: _Record, draft: _Draft, past: Hindsight) -> _Record:
    """After a draft."""
    promise = record.promise + RECENT * (draft.saved - record.promise)
    is_plain = ~jnp.any(draft.tree.valid[:, 1:])
    rest = jnp.where((promise < DRAFTING) & is_plain, REST, jnp.zeros_like(record.rest))
    return _Record(node_statistics.wait_for(past, draft.drafted), promise, rest)


def _rested(record: _Record) -> _Record:
    """After a round without one."""
    return record._replace(rest=record.rest - 1)


def _read(config: Config, params: Params, state: _State, *chunk) -> _State:
    """The head reads the prompt."""
    assert config.head is not None and isinstance(state.head, _OfHead)
    return state._replace(
        head=state.head._replace(read=reading.read_prompt(config.head, params.head, state.head.read, *chunk))
    )


def _observe(config: Config, params, state: _State, context: Context, tree, verdict, output):
    """What Token Recycling sees, in narrow passes while it rests only of every fourth; and what the head does."""
    learn = lambda: config.recycling.observe((), state.matrix, context, tree, verdict, output)
    nothing = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(learn))
    is_narrow = tree.tokens.shape[1] <= config.widths[0]
    seen: Seen = jax.lax.cond(state.record.rest % LEARN == 0, learn, nothing) if is_narrow else learn()
    if config.head is None:
        return seen
    return seen, reading.seen(config.head, config.longest, tree, verdict, output)


def _update(config: Config, params, state: _State, seen, verdict) -> _State:
    if config.head is not None:
        assert isinstance(state.head, _OfHead)
        seen, pairs = seen
        state = state._replace(head=state.head._replace(read=reading.added(state.head.read, pairs)))
    # A branch would copy the matrix; a loop of one turn or none writes in place.
    write = lambda _, matrix: config.recycling.update((), matrix, seen, verdict)
    is_news = jnp.any(seen.valid).astype(jnp.int32)
    with jax.named_scope(scopes.ONCE):
        return state._replace(matrix=jax.lax.fori_loop(0, is_news, write, state.matrix))


def _remember(config: Config, params, state: _State) -> Memory | Params:
    remember, earlier = config.recycling.hooks.export, _earlier(config, params)
    assert remember is not None
    counts = node_statistics.joined(earlier.counts, state.record.past.counts)
    learnt = Memory(remember(earlier.recycled, state.matrix), counts)
    return Params(learnt, params.head) if isinstance(params, Params) else learnt


def _explain(before: _State, after: _State) -> str:
    """Of one round: why it drafted, or did not."""
    old, new = before.record, after.record
    if old.rest > 0:
        return f"rests, since drafts lately promised to save {float(old.promise):.2f} passes; drafts in {int(old.rest)}"
    saved = float(old.promise + (new.promise - old.promise) / RECENT)
    if saved < 0.005:
        return "drafted, but nothing was likely enough to pay" + (f"; rests for {int(new.rest)}" if new.rest else "")
    return f"promises to save {saved:.2f} passes"
