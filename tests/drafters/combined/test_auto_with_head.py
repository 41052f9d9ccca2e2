"""Tests of `auto` with a draft head: a useful head runs, a useless one rarely does, and its memory is complete."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_memory import PROMPTS, differs, knowing, permutation, run_rounds
from heads import tiny_head
from tiers import exhaustive
from toy import markov, tiny_llama

from specjax import Request, Target, UsageError, api, costs, decode, make_drafter, serve, stream
from specjax.drafters import auto
from specjax.drafters.combined import account, head_schedule, node_classes
from specjax.drafters.combined.auto import make_auto
from specjax.drafters.heads import pending_pairs
from specjax.engine.prepare import Settings
from specjax.trees.growing import GrownTree
from specjax.trees.node_statistics import Drafted, make_shape
from specjax.trees.operations import chain
from specjax.trees.templates import Template
from specjax.types import Context

CHAIN = ((0,), (0, 0), (0, 0, 0))
SMALL = {"widths": (1, 3, 6), "costs": (1.0, 1.01, 1.02), "num_recycled": 7, "head_tree": ((0,), (1,), (0, 0))}


@functools.cache
def drafter_of(kind="eagle3", **options):
    return auto(64, head=tiny_head(kind, tiny_llama()), **SMALL | options)


def plain(**options):
    return decode(tiny_llama(), "autoregressive", PROMPTS, key=0, **options).to_lists()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("eagle3", {"temperature": 0.8, "sampling": "coupled", "eos": (27, 12)}),
        *(
            exhaustive(kind, {"eos": (27, 12)})
            for kind in ("eagle3", "dspark", "medusa", "kangaroo", "hydra", "dflash2")
        ),
        exhaustive("dspark", {"temperature": 0.8, "sampling": "coupled"}),
        exhaustive("eagle3", {"temperature": 1.0}),
    ],
)
def test_the_text_is_that_of_plain_decoding(kind, options):
    """Compare texts on ragged batches, greedy and sampled; a point mass is accepted if the target draws its token."""
    result = decode(tiny_llama(), drafter_of(kind), PROMPTS, key=0, max_new_tokens=24, **options)
    assert result.to_lists() == plain(max_new_tokens=24, **options)
    assert int(result.stats.drafted.sum()) > 0


def counted(head):
    """Return the head, and a list that gets an entry for each of its drafts."""
    calls = []

    def start(*arguments):
        jax.debug.callback(lambda: calls.append(1))
        return head.head.start(*arguments)

    return head.replace(head=head.head._replace(start=start)), calls


def passes(target, drafter, new, prompt=(0,), **options):
    result = decode(target, drafter, [list(prompt)], key=0, max_new_tokens=new, **options)
    jax.effects_barrier()
    return int(result.stats.target_passes[0]), result


def test_a_head_that_knows_the_target_is_as_good_as_alone():
    """Decode a text without repetitions, which only the head can predict."""
    target, move = permutation(61)
    head, calls = counted(knowing(target, 30 * move, np.zeros_like(move)))
    drafter = auto(61, head=head, head_tree=CHAIN, widths=(1, 4), costs=(1.0, 1.1), head_cost=0.2, num_recycled=7)
    fused, result = passes(target, drafter, 48, [0, 3])
    assert result.to_lists()[0] == [3 * (i + 2) % 61 for i in range(48)]
    assert fused == 48 / (1 + len(CHAIN)) and fused - 1 <= len(calls) <= fused  # of the last token nothing is drafted


@pytest.mark.parametrize("is_learnable", [True, exhaustive(False)])
def test_a_head_that_is_always_wrong_is_hardly_ever_asked(is_learnable):
    """Use a head that is confident and wrong: the passes equal those of auto without a head."""
    vocab, new = 40, 320
    target, move = permutation(vocab, 3)
    if not is_learnable:
        target = markov(np.full((vocab, vocab), 1 / vocab, np.float32))
    head, calls = counted(knowing(target, 30 * np.roll(move, 1, 0), np.zeros_like(move)))
    settings = {"widths": (1, 4, 8), "costs": (1.0, 1.2, 1.5), "num_recycled": 7}
    with_head = auto(vocab, head=head, head_tree=CHAIN, head_cost=0.3, **settings)
    options = {} if is_learnable else {"temperature": 1.0}
    ours, result = passes(target, with_head, new, **options)
    theirs, other = passes(target, auto(vocab, **settings), new, **options)
    assert result.to_lists() == other.to_lists()
    probes = ours * head_schedule.PROBES / 0.3
    assert 0 < len(calls) <= 12 + probes
    assert ours - theirs <= 2  # fewer there may be: what is verified teaches which tokens follow, right or wrong


def test_what_was_decoded_while_it_rested_is_read_before_it_drafts(monkeypatch):
    """Pause the head for longer than the window, with occasional drafts of the other drafters."""
    for name in ("OPENING", "LARGEST"):  # the head's cost is paid from the account, which must not be overdrawn
        monkeypatch.setattr(account, name, 1e6)
    jax.clear_caches()
    drafter = drafter_of(head_cost=50.0)
    head = tiny_head("eagle3", tiny_llama())
    job, state = run_rounds(drafter, Settings(), rounds=40, new=90)
    waiting = state.draft.head.read
    assert int(waiting.num_read.min()) > waiting.pending.tokens.shape[1] and int(waiting.pending.count.max()) > 3
    context = Context(state.tokens, state.length, target=job.parts.target)
    chunk = waiting.pending.tokens.shape[1] // 2
    read_all = jax.jit(lambda read: pending_pairs.read_pending(head.head, head.params, read, context, chunk))
    assert differs(head, job, state, lambda draft: read_all(draft.head.read)) < 1e-4
    # A mutant: what waits is counted, but its features are lost.
    lost = waiting._replace(pending=waiting.pending._replace(features=jnp.zeros_like(waiting.pending.features)))
    assert differs(head, job, state, lambda draft: read_all(lost)) > 1e-2


def asked(gains, cost, rounds=60):
    """Return how often the head runs, and the schedule, for gains that repeat in turn."""
    state, nothing, count = head_schedule.init_schedule(), jnp.float32(0), 0
    for i in range(rounds):
        due = head_schedule.is_due(state, nothing)
        count += int(due)
        state = head_schedule.update_schedule(state, cost, nothing, jnp.float32(gains[i % len(gains)]), due)
    return count, state


def test_when_it_is_asked():
    nothing, cost = jnp.float32(0), 0.3
    failed, waits = head_schedule.init_schedule(), []
    assert bool(head_schedule.is_due(failed, nothing))
    for _ in range(8):
        failed = head_schedule.update_schedule(failed, cost, nothing, nothing, jnp.bool_(True))
        waits.append(int(failed.wait))
    assert waits == [0, 1, 3, 7, 15, 30, 30, 30] and not bool(head_schedule.is_due(failed, nothing))
    assert int(head_schedule.update_schedule(failed, cost, nothing, nothing, jnp.bool_(False)).wait) == 29
    assert (
        int(head_schedule.update_schedule(failed, cost, nothing, jnp.float32(1), jnp.bool_(True)).wait) == 15
    )  # a gain
    assert not bool(head_schedule.is_profitable(failed, nothing)) and bool(
        head_schedule.is_profitable(failed, jnp.float32(0.1))
    )  # of each by itself
    _, good = asked([1.0], cost, 5)
    assert (
        int(good.wait) == 0
        and bool(head_schedule.is_profitable(good, nothing))
        and not bool(head_schedule.is_profitable(good, jnp.float32(2)))
    )
    once = head_schedule.update_schedule(good, cost, nothing, nothing, jnp.bool_(True))
    assert int(once.wait) == 0 and bool(head_schedule.is_due(once, nothing))  # one bad draft is no reason to rest


@pytest.mark.parametrize(
    ("gains", "cost", "share"),
    [([0.0, 0.6], 0.15, 1), ([1.6, 2.6], 1.5, 1), ([2.0, 0.0, 0.0], 0.15, 0.8), ([4.0, 4.0, 0.0], 1.5, 1)],
)
def test_it_is_asked_as_long_as_it_pays_in_the_mean(gains, cost, share):
    """Keep running a head that is useless in every other step, or in two of three, at any cost that it saves."""
    assert asked(gains, cost, 240)[0] >= 240 * share


@pytest.mark.parametrize(("gains", "cost"), [([0.0], 0.15), ([0.3, 0.0, 0.3], 0.3), ([2.2, 0.0], 1.5)])
def test_it_is_asked_seldom_where_it_does_not_pay_in_the_mean(gains, cost):
    count, _ = asked(gains, cost, 1200)
    lost = cost - sum(gains) / len(gains)
    assert count > 5 and count * lost / 1200 < 0.02


def test_nodes_of_a_head_are_classed_by_what_it_says_and_their_depth():
    shape = make_shape(2, Template([(0,)]), Template([(0,), (0, 0)]))
    none = jnp.zeros((1, 6), jnp.int32)
    tree = chain(jnp.array([[1, 5, 6]]), jnp.array([[True, True, False]]))
    grown = GrownTree(tree, none, jnp.array([[1.0, 0.55, 0.99]]))
    drafted = node_classes.with_head(shape, Drafted(none, none > 0, none, none[:, 0]), grown)
    assert drafted.tokens.tolist() == [[0, 0, 0, 0, 5, 6]] and drafted.valid.tolist() == [[False] * 4 + [True, False]]
    assert (drafted.kind[0, 4:] - node_classes.CLASSES).tolist() == [6 * 4 + 0, 10 * 4 + 1]
    assert (
        len(node_classes.prior(True)) == node_classes.CLASSES + node_classes.HEAD_CLASSES
        and len(node_classes.prior()) == node_classes.CLASSES
    )
    assert shape.source.tolist() == [0, 0, 0, 0, 1, 1] and shape.parents.tolist() == [-1, 0, 1, 0, 0, 4]


def small(target, vocab=8):
    """Return `auto` with a head that knows a permutation, and runs whenever it can help."""
    _, move = permutation(vocab)
    head = knowing(target, 30 * move, np.zeros_like(move))
    return auto(vocab, head=head, head_tree=CHAIN, widths=(1, 4), costs=(1.0, 1.1), head_cost=0.0, num_recycled=3)


@pytest.mark.exhaustive
def test_what_it_taught_is_kept_beside_the_head():
    target, _ = permutation(8)
    first = decode(target, small(target), [[0], [3, 6]], key=0, max_new_tokens=30)
    assert first.drafter.params.head is not None
    assert float(first.drafter.params.history.counts.trials[node_classes.CLASSES :].sum()) > 10
    again = decode(target, first.drafter, [[0], [3, 6]], key=0, max_new_tokens=30)
    assert again.to_lists() == first.to_lists()
    assert (again.stats.target_passes <= first.stats.target_passes).all()


@pytest.mark.exhaustive
def test_stream_and_serve():
    target, _ = permutation(8)
    drafter, prompts = small(target), [[0], [3, 6], [1, 4, 7, 2]]
    rows = [[], [], []]
    for step in stream(target, drafter, prompts, key=0, max_new_tokens=16):
        for row, new in zip(rows, step.tokens, strict=True):
            row += new
    assert rows == decode(target, drafter, prompts, key=0, max_new_tokens=16).to_lists()
    texts = [[], [], []]
    requests = (Request(prompt, jax.random.key(i), 16) for i, prompt in enumerate(prompts))
    for news in serve(target, drafter, requests, slots=2, longest_prompt=6, max_new_tokens=16):
        texts[news.request] += news.tokens
    assert texts == rows


@pytest.mark.exhaustive
def test_eight_devices_equal_one():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), "data")
    place = lambda x, *spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))
    tokens, lengths = (
        jnp.array([[i + 1, 2, 3, i + 1, 2, 3, i + 1] for i in range(8)]),
        jnp.array([5, 1, 7, 2, 3, 6, 4, 5]),
    )
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(8))
    target, drafter = tiny_llama(), drafter_of(head_cost=0.0)
    options = {"max_new_tokens": 16, "temperature": 0.8, "eos": (3,), "sampling": "coupled"}
    alone = decode(target, drafter, (tokens, lengths), key=keys, **options)
    spread = decode(
        Target(target.model, place(target.params)),
        drafter.replace(params=place(drafter.params)),
        (place(tokens, "data"), place(lengths, "data")),
        key=place(keys, "data"),
        **options,
    )
    np.testing.assert_array_equal(alone.tokens, spread.tokens)
    for ours, theirs in zip(*map(jax.tree.leaves, (alone.stats, spread.stats)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.exhaustive
def test_a_row_alone_equals_the_row_in_a_batch():
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(4))
    options = {"max_new_tokens": 24, "temperature": 0.8}
    batch = decode(tiny_llama(), drafter_of(), PROMPTS, key=keys, **options).to_lists()
    for b in (1, 2):
        alone = decode(tiny_llama(), drafter_of(), [PROMPTS[b]], key=keys[b : b + 1], **options)
        assert alone.to_lists()[0] == batch[b]


def test_a_head_is_a_drafter_of_its_own():
    """Pass a head to `decode`; the drafter is `auto` with this head."""
    head = tiny_head("eagle3", tiny_llama())
    drafter, _ = api._with_defaults(tiny_llama(), head, Settings())
    assert drafter.propose is make_auto(tiny_llama(), head).propose is make_drafter("auto", tiny_llama(), head).propose
    assert drafter.params.head is head.params and drafter.traits.draws == "point_mass"


def test_what_drafting_costs():
    """Compare costs with a hand computation: EAGLE-1 multiplies with its layer, fc and the target's output head."""
    target, move = permutation(8)
    head = knowing(target, move, move)
    layer, width = head.params["stack"][0], 8
    weights = sum(x.size for x in jax.tree.leaves((layer["attention"], layer["mlp"])) if x.ndim == 2)
    total = sum(x.size for x in jax.tree.leaves(target.params))
    levels = costs.of_head(target, head, 3) - costs.of_head(target, head, 2)
    assert levels * total >= weights + 2 * width * width
    assert costs.of_head(target, head, 3) == pytest.approx(costs.of_head(target, head, 1) + 2 * levels)


def test_bad_settings():
    head = tiny_head("medusa", tiny_llama())
    with pytest.raises(UsageError, match="head_tree is 4 tokens deep, but the head drafts 3"):
        auto(64, head=head, head_tree=((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)))
    with pytest.raises(UsageError, match="head_tree and head_cost need a draft head"):
        auto(64, head_tree=((0,),))
    with pytest.raises(UsageError, match="head_cost must be at least 0, not -1"):
        auto(64, head=head, head_cost=-1)
    with pytest.raises(UsageError, match="head_cost must be below 10,000 passes, not inf"):
        auto(64, head=head, head_cost=float("inf"))
    assert auto(64, head=head).num_nodes == 16 and auto(64, head=head).traits.taps == head.head.taps
