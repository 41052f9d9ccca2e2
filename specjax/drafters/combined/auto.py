"""Auto: several drafters share one tree, and only its most promising part is verified; a draft head is optional.

The method combines published parts. The tree fuses several sources, as in RASD (arXiv 2503.03434). They are a suffix
match (SAM-Decoding, arXiv 2411.10666) and Token Recycling (arXiv 2408.08696). A draft head adds the tree of its most
likely tokens (EAGLE, arXiv 2401.15077, or any other head). The size of the tree maximises goodput (SmartSpec,
arXiv 2406.14066), with the prefix rule for one affine batch.

Rule for a draft:
  1. Each node belongs to a class. The class of a copied node depends on the length of the match and the depth. The
     class of a recycled node depends on the stored probability of the token and the depth. The class of a head's node
     depends on the head's probability or confidence and the depth.
  2. The acceptance probability of a node is the measured rate of its class, given that the parent is correct. This
     calibrates the confidence of a head. If several drafters propose a token, it fails only if all of their classes
     fail. If recent nodes were correct less often than predicted, all probabilities of the row are lowered,
     separately for the head and the other drafters.
  3. The probability of a path is the product along it. The nodes are sorted by it, highest first.
  4. The target pass has the width w of `widths` with the most expected tokens per cost; w = 1 is plain decoding:
       sum over rows of (1 + the w - 1 largest probabilities) / costs[w].
     A batch finishes with its slowest row, so a row counts less the further it is ahead of that row. In `serve` no row
     waits for another, and all rows count equally.
  5. The head runs after the other drafters, and only while it saves more than it costs on average
     (`specjax.drafters.combined.head_schedule`). Otherwise its unread pairs wait in a window.
  6. What drafts really gained is added up in an account (`specjax.drafters.combined.account`). While it is overdrawn,
     decoding is plain. So drafts whose expectations are wrong cost a bounded share of the time.
The rates are learned in hindsight: every draft is stored, verified or not, until the text has passed it. No decision
therefore depends on the randomness of its own step.
With `sampling="coupled"` the noise of the target's draws is known. Stored tokens, votes for copies and the head's
tokens are then ranked by log q + noise (`specjax.drafters.combined.noisy_ranks`), and their classes depend on the
chance to be drawn.
Guarantee: distribution (a point-mass tree; a head's nodes are its most likely tokens, never sampled, and q is 1 at
each; in coupled sampling the text is that of plain sampling with the same key). All rows of a batch have the same
width, so the number of passes of a row depends on its batch; its text does not.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import costs as costs_of
from specjax.arrays import batch_axes, scopes
from specjax.catalog import Method, Option
from specjax.costs.sharing import ExpertSharing, init_sharing, observe_sharing, update_sharing
from specjax.drafters.combined import account, head_schedule, node_classes, settings
from specjax.drafters.combined.head_schedule import HeadSchedule
from specjax.drafters.combined.settings import Config
from specjax.drafters.heads import head_drafter, pending_pairs
from specjax.drafters.tables.token_recycling import Recycled, RecyclingUpdate, SuccessorLookup
from specjax.drafters.widths import RECENT, PassWidths, best_width, weight_of
from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.retrieval import rollouts
from specjax.retrieval.rollouts import Rollouts, RolloutSources
from specjax.retrieval.suffixes import copyable_tokens
from specjax.trees import node_statistics, operations
from specjax.trees.node_statistics import Counts, Drafted, NodeStatistics
from specjax.types import Array, Context, Drafter, Hooks, PyTree, Target, TokenTree, Traits, TreeSize

METHOD = Method(
    name="auto",
    kind="drafter",
    guarantee="distribution",
    summary="merges copies of earlier text, token recycling and an optional draft head into one tree, pruned by cost",
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
        Option("draft_cost", "float", None, "cost of drafting without the head in plain target passes"),
    ),
    factory="make_auto",
    arguments=("target", "draft"),
)


DRAFTING = 0.03
"""Default cost of drafting without a head, in passes of width 1.

It is 0.016 for SmolLM2 on two cores (0.5 of 31 ms), and 0.04 for Llama 3 8B on 8 v5e chips (from the compiler's
schedule). For a tiny model it is more than a pass, see `costs.of_drafting`.
"""
REST = 7
"""Plain steps between two drafts while drafting is not profitable."""
LEARN = 4
"""Token Recycling observes every LEARN-th of these plain steps.

Its observation takes 1.9 of 100 ms per step for 16 rows of SmolLM2 on two cores. At batch 1 every fourth step gives as
good drafts as every step (1.308 instead of 1.309 tokens per cost).
"""
OBSERVING = 0.1
"""Cost of this observation at batch 1, as a share of the cost of drafting."""
HOPE = 0.25
"""Prior of the expected savings; it leads to at least a dozen drafts."""


class AutoHistory(NamedTuple):
    """Results of earlier calls; these are the parameters of a drafter without a head."""

    recycled: Recycled | tuple[()]
    counts: Counts  # [CLASSES]
    rollouts: Rollouts | tuple[()] = ()  # texts to copy from, see `with_rollouts`


class Params(NamedTuple):
    """Parameters with a head: results of earlier calls, and the head's own parameters."""

    history: AutoHistory | tuple[()]
    head: PyTree


class DraftRecord(NamedTuple):
    """Quality of earlier drafts, and the pause until the next draft."""

    past: NodeStatistics
    promise: Array  # float32[], moving average of the expected savings of drafts, in passes of width 1
    rest: Array  # int32[], plain steps until the next draft
    balance: Array  # float32[], plain passes that drafts may still lose, see `account`
    has_proposed: Array  # bool[], the next pass is for a tree of `auto`, not for one of another drafter


class HeadState(NamedTuple):
    read: pending_pairs.State
    schedule: HeadSchedule


class State(NamedTuple):
    matrix: Recycled
    record: DraftRecord
    head: HeadState | tuple[()] = ()
    sources: RolloutSources | tuple[()] = ()  # the rollouts that each row copies from
    sharing: ExpertSharing | tuple[()] = ()  # of a mixture of experts whose passes have estimated costs


class Observation(NamedTuple):
    """The part of a target pass that the state learns from."""

    recycled: RecyclingUpdate
    pairs: PyTree  # of the head; (): there is none
    ratio: Array | tuple[()]  # float32[2], see `observe_sharing`
    gain: Array  # float32[], tokens beyond the cost of the pass, in plain passes


class RankedDraft(NamedTuple):
    """The draft of a step."""

    tree: TokenTree  # the nodes to verify
    drafted: Drafted  # all drafted nodes
    saved: Array  # float32[], expected savings of the tree, in passes of width 1


def auto(
    vocab_size: int,
    *,
    head: DraftHead | None = None,
    head_tree: tuple[tuple[int, ...], ...] | None = None,
    widths: tuple[int, ...] | None = None,
    costs: costs_of.Costs = None,
    head_cost: float | None = None,
    draft_cost: float | None = None,
    num_recycled: int | None = None,
    dtype: costs_of.WeightDtype = "float32",
    platform: str | None = None,
) -> Drafter:
    """Draft as many tokens as save time on this device; decode plainly if no draft saves time.

    Args:
      head: a draft head of the target.
      head_tree: rank paths of the head's most likely tokens, no deeper than the head drafts. Default: a chain with
        second-best tokens, or 40 nodes, by the platform.
      head_cost: cost of the head's draft in passes of width 1; default: from its number of weights (`costs.of_head`).
      draft_cost: cost of drafting without the head in passes of width 1; default: DRAFTING. Drafts pause while they
        save less. `make_auto` knows the target, and estimates the cost, which is high if the target is tiny.
      widths: widths of the target pass to choose from, rising from 1; each of them is compiled. Default: CPU_WIDTHS or
        WIDTHS, by the platform, without those that do not pay for the batch (`specjax.drafters.widths`).
      costs: costs of a pass of each width, in passes of width 1, as numbers or from `specjax.costs`. Default:
        `costs.estimated` for the batch and `dtype` of the parameters.
      num_recycled: number of nodes from Token Recycling, at most 80; default: 40 on CPU, else 80.
      platform: the platform of the program, "cpu", "gpu" or "tpu", or a chip such as "h200"; default: this device.

    State: the state of `token_recycling` with chances, at most 2.2 MB per row. With a head, its memory of the text and
      the hidden states of unread tokens are added: WAITING tokens and the longest draft.
    Raises: UsageError for widths that do not rise from 1, or costs that do not fit them. It is also raised for a
      head_tree without a head, or one deeper than the head drafts.
    """
    draft_head = None if head is None else head.head
    config = settings.make_config(
        vocab_size, num_recycled, widths, costs, dtype, platform, draft_head, head_tree, head_cost,
        DRAFTING if draft_cost is None else draft_cost,
    )  # fmt: skip
    drafter = _functions(config)
    return drafter if head is None else drafter.replace(params=Params((), head.params))


def make_auto(target: Target, draft: Target | DraftHead | None, **options) -> Drafter:
    """Return `auto` for a target, with its draft head if there is one. A draft model is not used.

    The default cost of drafting is `costs.of_drafting`, at least DRAFTING. It is DRAFTING beside numbers as costs.
    """
    head = draft if isinstance(draft, DraftHead) else None
    costs = options.get("costs")
    if options.get("draft_cost") is None and (not costs or isinstance(costs, costs_of.Curve)):
        estimate = costs_of.of_drafting(target, options.get("platform"))
        options["draft_cost"] = max(DRAFTING, min(estimate, settings.MOST_COST - 1))
    return auto(target.model.vocab_size, head=head, dtype=costs_of.dtype_of(target), **options)


def copies_rollouts(drafter: Drafter) -> bool:
    """Return True if `with_rollouts` accepts a drafter."""
    return getattr(drafter.propose, "func", None) in (_propose, _propose_with_head)


def replace_head(drafter: Drafter, params: PyTree) -> Drafter:
    """Replace the parameters of the head of an `auto`, or all parameters of another drafter."""
    is_auto = copies_rollouts(drafter) and isinstance(drafter.params, Params)
    return drafter.replace(params=drafter.params._replace(head=params) if is_auto else params)


def with_rollouts(drafter: Drafter, texts: Rollouts) -> Drafter:
    """Return an `auto` whose rows also copy from samples of their prompts: earlier ones and those of the batch.

    The draft of a row then depends on the committed texts of its siblings, never on a token that is still to be drawn.
    So the guarantee is the same. The arrays are parameters: other texts of the same shape run the same program.

    Raises: UsageError for another drafter.
    """
    if not copies_rollouts(drafter):
        raise UsageError("only the drafter auto copies from rollouts; choose auto, or leave rollouts out")
    params = drafter.params
    history = params.history if isinstance(params, Params) else params
    counts = jnp.zeros(len(node_classes.prior(isinstance(params, Params))))
    history = (history or AutoHistory((), Counts(counts, counts)))._replace(rollouts=texts)
    return drafter.replace(params=params._replace(history=history) if isinstance(params, Params) else history)


@functools.cache
def _functions(config: Config) -> Drafter:
    """Return the drafter without its parameters."""
    draft_head = config.head
    return Drafter(
        propose=functools.partial(_propose if draft_head is None else _propose_with_head, config),
        size=TreeSize(max(config.widths), config.longest - 1),
        init=functools.partial(_init, config),
        observe=functools.partial(_observe, config),
        update=functools.partial(_update, config),
        traits=Traits(
            widths=config.widths[:-1],
            follows_any_tree=True,
            taps=() if draft_head is None else draft_head.taps,
            rewinds=draft_head is None,
            reads_best=config.recycling.reads_best,
        ),
        hooks=Hooks(
            prefill=None if draft_head is None else functools.partial(_prefill, config),
            axes=functools.partial(_axes, config),
            widths=lambda batch, target: config.passes(batch, target).widths,
            export=functools.partial(_export, config),
            explain=_explain,
        ),
    )


def _init(config: Config, params, context: Context) -> State:
    matrix = config.recycling.init((), context)
    past = node_statistics.init(len(config.prior), context.tokens.shape[0], config.shape)
    record = DraftRecord(past, jnp.float32(HOPE), jnp.int32(0), jnp.float32(account.OPENING), jnp.bool_(False))
    texts = _history(config, params).rollouts
    sources = rollouts.find_sources(texts, context) if isinstance(texts, Rollouts) else ()
    sharing = init_sharing() if config.counted_experts(context.target) else ()
    if config.head is None:
        return State(matrix, record, sources=sources, sharing=sharing)
    read = pending_pairs.init_state(config.head, params.head, context, config.window)
    return State(matrix, record, HeadState(read, head_schedule.init_schedule()), sources, sharing)


def _history(config: Config, params: AutoHistory | Params | tuple[()]) -> AutoHistory:
    """Return the results of earlier calls, or empty ones."""
    history = params.history if isinstance(params, Params) else params
    zeros = jnp.zeros(len(config.prior))
    return history or AutoHistory((), Counts(zeros, zeros))


def _axes(config: Config, state: State) -> State:
    rows = batch_axes.rows_first(state)
    shared = dict.fromkeys(("promise", "rest", "balance", "has_proposed"), batch_axes.SHARED)
    record = rows.record._replace(**shared)
    rows = rows._replace(record=record, sharing=batch_axes.shared(state.sharing))
    if config.head is None or not isinstance(state.head, HeadState):
        return rows
    return rows._replace(
        head=HeadState(pending_pairs.state_axes(config.head, state.head.read), batch_axes.shared(state.head.schedule))
    )


def _propose(config: Config, params, keys, state: State, context: Context, limit: Array) -> tuple[TokenTree, State]:
    passes = config.passes(len(limit), context.target).with_sharing(state.sharing)
    context = _for_branches(context)
    history = _history(config, params)

    def draft_tree(
        successors: SuccessorLookup, history: AutoHistory, record: DraftRecord, *position
    ) -> tuple[TokenTree, DraftRecord]:
        draft, past = _draft_without_head(config, passes, successors, history, state.sources, record, *position)
        return draft.tree, _record_draft(config, record, draft, past, config.draft_cost)

    def skip(
        successors: SuccessorLookup, history: AutoHistory, record: DraftRecord, *position
    ) -> tuple[TokenTree, DraftRecord]:
        return _empty_draft(config, *position).tree, _record_pause(record)

    successors = SuccessorLookup(state.matrix, history.recycled)
    is_resting = state.record.rest > 0
    if passes.is_plain:
        return _empty_draft(config, context, limit).tree, state
    tree, record = jax.lax.cond(is_resting, skip, draft_tree, successors, history, state.record, context, limit)
    return tree, state._replace(record=record)


def _propose_with_head(
    config: Config, params: Params, keys, state: State, context: Context, limit: Array
) -> tuple[TokenTree, State]:
    """Draft without the head, then with it if it is likely to save time.

    The head's memory is written between the branches, because a branch would copy it.
    """
    head, history = config.head, _history(config, params)
    assert head is not None and isinstance(state.head, HeadState)
    bare_context, record = _for_branches(context), state.record
    passes = config.passes(len(limit), context.target).with_sharing(state.sharing)
    if passes.is_plain:
        return _empty_draft(config, bare_context, limit).tree, state
    is_resting, schedule = record.rest > 0, state.head.schedule
    draft_others = functools.partial(_draft_without_head, config, passes)
    skip = lambda successors, history, sources, record, *position: (_empty_draft(config, *position), record.past)
    successors = SuccessorLookup(state.matrix, history.recycled)
    without_head, past = jax.lax.cond(
        is_resting, skip, draft_others, successors, history, state.sources, record, bare_context, limit
    )
    cost = _cost(config, context, params)
    runs_head = head_schedule.is_due(schedule, without_head.saved) & ~is_resting & jnp.any(limit > 0)
    is_full = jnp.max(state.head.read.pending.count) + config.longest > state.head.read.pending.tokens.shape[1]
    read = pending_pairs.read_pending(head, params.head, state.head.read, context, config.chunk, runs_head | is_full)

    def draft_with_head() -> RankedDraft:
        builder = config.builder if context.noise is None else config.noisy_builder
        grown = head_drafter.grow_tree(head, builder, params.head, read.memory, keys, context, limit)
        return _rank(
            config,
            passes,
            past,
            history.counts,
            node_classes.with_head(config.shape, without_head.drafted, grown),
            bare_context,
            limit,
        )

    draft = jax.lax.cond(runs_head, draft_with_head, lambda: without_head)
    schedule = head_schedule.update_schedule(schedule, cost, without_head.saved, draft.saved, runs_head)
    net = draft._replace(saved=jnp.maximum(draft.saved - jnp.where(runs_head, cost, 0.0), without_head.saved))
    pick = lambda old, new: jnp.where(is_resting, old, new)
    paid = config.draft_cost + jnp.where(runs_head, cost, 0.0)
    record = jax.tree.map(pick, _record_pause(record), _record_draft(config, record, net, past, paid))
    return draft.tree, state._replace(record=record, head=HeadState(read, schedule))


def _for_branches(context: Context) -> Context:
    """Return the context without the target, which branches would get as arguments, and without its placeholders.

    The last token stays as it is, because it is the root of the tree.
    """
    is_last = jnp.arange(context.tokens.shape[1]) == context.length[:, None] - 1
    tokens = jnp.where(is_last, context.tokens, copyable_tokens(context))
    return context._replace(cache=None, target=None, tokens=tokens)


def _cost(config: Config, context: Context, params: Params) -> float:
    """Return the cost of the head's draft, in passes of width 1."""
    assert config.head is not None and context.target is not None
    drafting = config.head_cost
    if drafting is None:
        head = DraftHead(config.head, params.head)
        drafting = costs_of.of_head(context.target, head, config.builder.levels, config.platform, context)
    return min(config.draft_cost, DRAFTING) + drafting  # the nodes are merged and ranked again


def _draft_without_head(
    config: Config, passes: PassWidths, successors: SuccessorLookup, history: AutoHistory,
    sources: RolloutSources | tuple[()], record: DraftRecord, context: Context, limit: Array,
) -> tuple[RankedDraft, NodeStatistics]:  # fmt: skip
    """Draft without the head, and update the statistics of earlier drafts."""
    counts, texts = history.counts, history.rollouts
    past = node_statistics.count_pending(config.prior, config.shape, record.past, context, counts)
    copyable = None
    if isinstance(texts, Rollouts) and isinstance(sources, RolloutSources):
        copyable = rollouts.extend(texts, sources, context)
    drafted = node_classes.without_head(config.shape, config.template, successors, context, limit, copyable)
    return _rank(config, passes, past, counts, drafted, context, limit), past


def _rank(
    config: Config, passes: PassWidths, past: NodeStatistics, counts: Counts, drafted: Drafted, context: Context,
    limit: Array,
) -> RankedDraft:  # fmt: skip
    """Rank the drafted nodes, and cut the tree to the best width."""
    tree, chance = node_statistics.rank(config.prior, config.shape, drafted, past, counts)
    width, saved = best_width(passes.widths, passes.costs, chance, weight_of(context.remaining, limit > 0))
    tree = tree._replace(valid=tree.valid & (jnp.arange(chance.shape[1]) < width))
    return RankedDraft(operations.cut(tree, max(config.widths)), drafted, saved)


def _empty_draft(config: Config, context: Context, limit: Array) -> RankedDraft:
    """Return an empty draft."""
    root = context.root
    tree = operations.pad_nodes(operations.chain(root, root >= 0), max(config.widths))
    none = jnp.zeros((len(root), len(config.shape.parents)), jnp.int32)
    return RankedDraft(tree, Drafted(none, none > 0, none, none[:, 0]), jnp.float32(0))


def _record_draft(
    config: Config, record: DraftRecord, draft: RankedDraft, past: NodeStatistics, cost: Array | float
) -> DraftRecord:
    """Return the record after a draft that took `cost` plain passes. Drafts pause while they save less."""
    promise = record.promise + RECENT * (draft.saved - record.promise)
    saves_less = (promise < config.draft_cost) & (draft.saved < config.draft_cost)
    pause = jnp.where(saves_less, _pause(config), jnp.zeros_like(record.rest))
    balance = account.pay(record.balance, -cost)
    return DraftRecord(node_statistics.store_pending(past, draft.drafted), promise, pause, balance, jnp.bool_(True))


def _pause(config: Config) -> int:
    """Return the plain steps between two drafts while drafting is not profitable: many if a draft costs much."""
    return max(REST, math.ceil(config.draft_cost / head_schedule.PROBES))


def _learn_every(config: Config) -> int:
    """Return the number of plain steps of a pause in which Token Recycling observes one."""
    return max(LEARN, math.ceil(config.draft_cost * OBSERVING / head_schedule.PROBES))


def _record_pause(record: DraftRecord) -> DraftRecord:
    """Return the record after a step without a draft."""
    return record._replace(rest=record.rest - 1, has_proposed=jnp.bool_(True))


def _prefill(config: Config, params: Params, state: State, *chunk) -> State:
    """Read a chunk of the prompt with the head."""
    assert config.head is not None and isinstance(state.head, HeadState)
    return state._replace(
        head=state.head._replace(read=pending_pairs.read_prompt(config.head, params.head, state.head.read, *chunk))
    )


def _observe(config: Config, params, state: State, context: Context, tree, verdict, output):
    """Return the observations of Token Recycling and of the head, or () if no pass of this batch drafts.

    During pauses Token Recycling observes only every LEARN-th narrow pass.
    """
    passes = config.passes(len(context.length), context.target).with_sharing(state.sharing)
    if passes.is_plain:
        return ()
    learn = lambda: config.recycling.observe((), state.matrix, context, tree, verdict, output)
    nothing = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(learn))
    is_narrow = tree.tokens.shape[1] <= config.widths[0]
    observation: RecyclingUpdate = (
        jax.lax.cond(state.record.rest % _learn_every(config) == 0, learn, nothing) if is_narrow else learn()
    )
    pairs: PyTree = ()
    ratio: Array | tuple[()] = ()
    if config.head is not None:
        pairs = pending_pairs.accepted_pairs(config.head, config.longest, tree, verdict, output)
    sizes = config.counted_experts(context.target)
    if sizes is not None and output.experts is not None:
        ratio = observe_sharing(sizes, output.experts, *tree.tokens.shape)
    gain = account.gain_of_pass(passes, tree.tokens.shape[1], verdict.num_nodes, context.remaining)
    return Observation(observation, pairs, ratio, gain)


def _update(config: Config, params, state: State, observation, verdict) -> State:
    if observation == ():
        return state
    recycled, pairs, ratio, gain = observation
    record = state.record
    # Beside other drafters, as in `choice`, the pass may be for a tree of one of them.
    balance = account.pay(record.balance, jnp.where(record.has_proposed, gain, 0.0))
    pause = jnp.maximum(record.rest, account.plain_steps(balance))
    state = state._replace(record=record._replace(balance=balance, rest=pause, has_proposed=jnp.bool_(False)))
    if config.head is not None:
        assert isinstance(state.head, HeadState)
        state = state._replace(head=state.head._replace(read=pending_pairs.append(state.head.read, pairs)))
    if isinstance(state.sharing, ExpertSharing) and isinstance(ratio, jax.Array):
        state = state._replace(sharing=update_sharing(state.sharing, ratio))
    # A branch would copy the matrix; a loop of zero or one iterations writes in place.
    write = lambda _, matrix: config.recycling.update((), matrix, recycled, verdict)
    has_updates = jnp.any(recycled.valid).astype(jnp.int32)
    with jax.named_scope(scopes.ONCE):
        return state._replace(matrix=jax.lax.fori_loop(0, has_updates, write, state.matrix))


def _export(config: Config, params, state: State) -> AutoHistory | Params:
    export, history = config.recycling.hooks.export, _history(config, params)
    assert export is not None
    counts = node_statistics.merge_counts(history.counts, state.record.past.counts)
    new_history = AutoHistory(export(history.recycled, state.matrix), counts, history.rollouts)
    return Params(new_history, params.head) if isinstance(params, Params) else new_history


def _explain(previous: State, current: State) -> str:
    """Explain why a step did or did not draft."""
    old, new = previous.record, current.record
    if old.rest > 0 and old.balance < 0:
        excess = f"drafts cost {-float(old.balance):.2f} passes more than they may lose"
        return f"pauses: {excess}; drafts in {int(old.rest)} steps"
    if old.rest > 0:
        expected = f"recent drafts were expected to save {float(old.promise):.2f} passes"
        return f"pauses: {expected}; drafts in {int(old.rest)} steps"
    saved = float(old.promise + (new.promise - old.promise) / RECENT)
    if saved < 0.005:
        return "drafted, but no node was worth its cost" + (f"; pauses for {int(new.rest)} steps" if new.rest else "")
    return f"expects to save {saved:.2f} passes"
