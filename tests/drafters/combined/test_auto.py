"""What auto decides, and what it learns: by hand, and against plain decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import markov, tiny_llama

from specjax import UsageError, costs, decode, stream
from specjax.drafters import auto, autoregressive
from specjax.drafters.combined.auto import (
    CLASSES,
    COPIED,
    DOUBT,
    DRAFTING,
    HOPE,
    LEAD,
    LEARN,
    MEMORY,
    RECENT,
    REST,
    Counts,
    Joined,
    _learn,
    _prior,
    _rank,
    _Record,
    _shape,
    _weight,
)
from specjax.trees import operations
from specjax.trees.templates import Template
from specjax.types import Context, Output, Verdict

rank = lambda shape, *arrays: jax.jit(functools.partial(_rank, shape))(*arrays)
learn = lambda shape, *arrays: jax.jit(functools.partial(_learn, shape))(*arrays)
NOTHING = Counts(jnp.zeros((1, CLASSES)), jnp.zeros((1, CLASSES)))


def record(shadow=None, found=(0.0, 0.0)):
    return _Record(NOTHING, shadow, jnp.array([found]), jnp.float32(0), jnp.int32(0), jnp.array([1]))


def joined(copied, paths, tokens, kinds, start=0):
    """A chain of `copied` tokens and recycled nodes at `paths`, all valid."""
    shape = _shape(copied, Template(paths))
    return shape, Joined(jnp.array([tokens]), jnp.ones((1, len(tokens)), bool), jnp.array([kinds]), jnp.array([start]))


def run(target, drafter, prompts=((0,),), new=120, **options):
    return decode(target, drafter, [list(p) for p in prompts], key=jax.random.key(0), max_new_tokens=new, **options)


def cycle(n):
    """A target that goes round n tokens."""
    rows = np.full((n, n), 1e-6, np.float32)
    rows[np.arange(n), (np.arange(n) + 1) % n] = 1.0
    return markov(rows)


def mostly_a_cycle(chance):
    """A target that goes round nine tokens, each time with this chance."""
    rows = np.full((9, 9), (1 - chance) / 8, np.float32)
    rows[np.arange(9), (np.arange(9) + 1) % 9] = chance
    return markov(rows)


def test_nodes_stand_in_order_of_their_chance_and_twins_add_up():
    # A copied chain 5 6 and recycled nodes 5, 7, and 6 below the recycled 5.
    kinds = [0, 0, 1, COPIED, COPIED + 1, COPIED + 2]
    shape, draft = joined(2, [(0,), (1,), (0, 0)], [1, 5, 6, 5, 7, 6], kinds)
    assert shape.parents.tolist() == [-1, 0, 1, 0, 0, 3]
    tree, chance = rank(shape, draft, record())
    p = _prior()
    of_5 = 1 - (1 - p[0]) * (1 - p[COPIED])
    of_6 = of_5 * (1 - (1 - p[1]) * (1 - p[COPIED + 2]))
    wanted = sorted([(of_5, 5), (of_6, 6), (p[COPIED + 1], 7)], reverse=True)
    assert tree.valid.sum() == 4
    assert tree.tokens[0, 1:4].tolist() == [token for _, token in wanted]
    np.testing.assert_allclose(chance[0, :4], [0, *[value for value, _ in wanted]], rtol=1e-5)
    six = tree.tokens[0].tolist().index(6)
    assert tree.tokens[0, tree.parents[0, six]] == 5


def test_hindsight_counts_what_would_have_been_accepted():
    """Drafted when the text had 2 tokens: 5 is right, 6 after it is not; 7 is wrong; what follows it was not tried."""
    shape, shadow = joined(2, [(0,), (0, 0)], [1, 5, 6, 7, 8], [0, 3, 4, 3, 9], start=2)
    state = record(shadow)
    text = jnp.array([[4, 1, 5, 9, 9, 9]])
    waiting = learn(shape, state, Context(text, jnp.array([3])))  # 5 is there; what follows it is not
    assert int(waiting.shadow.start[0]) == 2 and float(waiting.counts.trials.sum()) == 0
    learnt = learn(shape, waiting, Context(text, jnp.array([4])))
    assert int(learnt.shadow.start[0]) == 0
    assert learnt.counts.trials[0, [3, 4, 9]].tolist() == [2, 1, 0]
    assert learnt.counts.hits[0, [3, 4, 9]].tolist() == [1, 0, 0]
    p = _prior()
    np.testing.assert_allclose(learnt.found[0], [1, 2 * p[3] + p[4]], rtol=1e-6)
    again = learn(shape, learnt._replace(shadow=shadow), Context(text, jnp.array([4])))
    np.testing.assert_allclose(again.counts.trials[0, 4], MEMORY + 1, rtol=1e-6)


def test_a_text_that_disappoints_lowers_all_chances():
    shape, draft = joined(1, [(0,)], [1, 5, 7], [0, 3, COPIED + 1])
    believed = rank(shape, draft, record())[1]
    doubted = rank(shape, draft, record(found=(0.0, DOUBT)))[1]
    np.testing.assert_allclose(doubted, believed / 2, rtol=1e-5)
    np.testing.assert_allclose(rank(shape, draft, record(found=(9.0, 1.0)))[1], believed, rtol=1e-6)


@pytest.mark.parametrize("copied", [1, 2, 5])
def test_the_joined_tree_is_the_union_of_both_drafts(copied):
    """Against paths of tokens in plain Python; siblings among recycled nodes differ, as the matrix has them."""
    rng, paths = np.random.default_rng(0), [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)]
    shape = _shape(copied, Template(paths))
    ranked, shared = jax.jit(functools.partial(_rank, shape)), 0
    for _ in range(30):
        tokens, valid = np.zeros(len(shape.parents), int), np.ones(len(shape.parents), bool)
        for i, parent in enumerate(shape.parents.tolist()[1:], 1):
            before = [j for j in range(1 + copied, i) if shape.parents[j] == parent]
            tokens[i] = rng.choice([t for t in range(4) if t not in tokens[before]])
            valid[i] = valid[parent] and rng.random() < 0.8
        kinds = rng.integers(0, CLASSES, len(tokens))
        draft = Joined(*(jnp.asarray(x)[None] for x in (tokens, valid, kinds)), jnp.array([1]))
        tree, chance = ranked(draft, record())

        def spelt(i, tokens, parents):
            return () if i == 0 else (*spelt(int(parents[i]), tokens, parents), int(tokens[i]))

        miss = {}
        for i in np.flatnonzero(valid)[1:]:
            path = spelt(i, tokens, shape.parents)
            shared += path in miss
            miss[path] = miss.get(path, 1.0) * (1 - _prior()[kinds[i]])
        wanted = {path: np.prod([1 - miss[path[: n + 1]] for n in range(len(path))]) for path in miss}
        nodes = np.flatnonzero(tree.valid[0])[1:]
        found = {spelt(i, tree.tokens[0], tree.parents[0]): float(chance[0, i]) for i in nodes}
        assert len(found) == len(nodes) and found == pytest.approx(wanted, rel=1e-4)
        assert (tree.parents[0, 1:] < np.arange(1, len(tokens)))[: len(nodes)].all()
    assert shared > 10


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_that_of_plain_decoding(temperature):
    target, prompts = tiny_llama(), ((1, 2, 3, 1, 2, 3, 1), (5,))
    drafter = auto(64, widths=(1, 4, 8), costs=(1.0, 1.01, 1.02))
    ours = run(target, drafter, prompts, 40, temperature=temperature)
    assert ours.to_lists() == run(target, autoregressive(), prompts, 40, temperature=temperature).to_lists()
    assert ours.stats.drafted.sum() > 0


def test_it_drafts_where_that_pays_and_is_plain_decoding_where_not():
    cheap = run(cycle(9), auto(9, widths=(1, 4, 8), costs=(1.0, 1.1, 1.2)))
    assert cheap.to_lists()[0] == [(t + 1) % 9 for t in range(120)]
    assert int(cheap.stats.target_passes[0]) < 35
    dear = run(cycle(9), auto(9, widths=(1, 4, 8), costs=(1.0, 9.0, 9.0)))
    assert int(dear.stats.target_passes[0]) == 120
    assert int(dear.stats.drafted[0]) == 0


def test_hopeless_texts_are_left_alone():
    """A target that draws from 40 tokens alike: nothing can be foreseen, and after a while nothing is drafted."""
    target = markov(np.full((40, 40), 1 / 40, np.float32))
    result = run(target, auto(40, widths=(1, 4, 8), costs=(1.0, 1.3, 1.6)), new=400, temperature=1.0)
    assert int(result.stats.target_passes[0]) > 380
    assert int(result.stats.drafted[0]) < 100


def test_where_drafting_does_not_pay_it_is_seldom_tried():
    context = Context(jnp.array([[1, 2, 3, 1, 2, 3, 1, 2]]), jnp.array([8]))
    fresh = auto(64, widths=(1, 4)).init((), context)

    def propose(cost, **record):
        drafter = auto(64, widths=(1, 4), costs=(1.0, cost))
        state = fresh._replace(record=fresh.record._replace(**record))
        return drafter.propose((), jax.random.split(jax.random.key(0), 1), state, context, jnp.array([9]))

    tree, resting = propose(1.01, rest=jnp.int32(2))
    assert tree.valid[0].tolist() == [True, False, False, False] and tree.tokens[0, 0] == 2
    assert int(resting.record.rest) == 1 and int(resting.record.shadow.start[0]) == 0
    tree, woken = propose(1.01, promise=jnp.float32(0))
    assert tree.valid.sum() == 4 and int(woken.record.rest) == 0  # what is in sight pays
    assert float(woken.record.promise) > DRAFTING
    _, hopeful = propose(9.0)
    assert int(hopeful.record.rest) == 0 and float(hopeful.record.promise) == HOPE * (1 - RECENT)
    _, weary = propose(9.0, promise=jnp.float32(DRAFTING))
    assert int(weary.record.rest) == REST


def test_while_it_rests_it_learns_from_every_fourth_step():
    drafter = auto(9, widths=(1, 4))
    context = Context(jnp.array([[1, 2, 3, 0, 0]]), jnp.array([3]))
    state = drafter.init((), context)
    tree = operations.chain(jnp.array([[3]]), jnp.ones((1, 1), bool))
    verdict = Verdict(jnp.array([[0]]), jnp.array([1]), jnp.array([4]))
    output = Output(jnp.zeros((1, 1, 9)).at[0, 0, 4].set(5.0), None)
    learnt = []
    for rest in range(REST + 1):
        resting = state._replace(record=state.record._replace(rest=jnp.int32(rest)))
        seen = drafter.observe((), resting, context, tree, verdict, output)
        learnt.append(int(drafter.update((), resting, seen, verdict).matrix.tokens[0, 3, 0]))
    assert learnt == [-1 if rest % LEARN else 4 for rest in range(REST + 1)]


def test_plain_decoding_keeps_learning():
    """At a price at which only sure drafts pay, it begins plain and speculates once the text has proved regular."""
    drafter = auto(9, widths=(1, 8), costs=(1.0, 5.0))
    short, long = (run(cycle(9), drafter, new=new) for new in (12, 200))
    assert int(short.stats.drafted[0]) == 0
    assert int(long.stats.target_passes[0]) < 60
    warm = run(cycle(9), long.drafter, new=12)
    assert int(warm.stats.target_passes[0]) < 8


def test_a_batch_backs_off_as_its_passes_grow_dear():
    """By the rule of thumb of a CPU: of rows that mostly go round nine tokens one drafts and 32 do not."""
    known = costs.estimated((1, 8), 1, platform="cpu"), costs.estimated((1, 8), 32, platform="cpu")
    assert known[0][1] < 2 and known[1][1] > 5
    assert costs.estimated((1, 64), 1, platform="tpu")[1] < 1.15
    drafter = auto(9, widths=(1, 8), platform="cpu")
    drafted = [
        int(run(mostly_a_cycle(3 / 4), drafter, [(0,)] * batch, new=200, temperature=1.0).stats.drafted.max())
        for batch in (1, 32)
    ]
    assert drafted[0] > 10 * drafted[1]


def spent(drafter, chance, known):
    """Over 500 tokens, mean of three keys; `known`: what a pass of each width costs."""
    total = 0.0
    for seed in range(3):
        steps = stream(
            mostly_a_cycle(chance), drafter, [[0]], key=jax.random.key(seed), max_new_tokens=500, temperature=1.0
        )
        total += sum(min(cost for width, cost in known.items() if width > step.info.drafted[0]) for step in steps)
    return total / 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("chance", [0.3, 0.75, 0.9])
@pytest.mark.parametrize("known", [(1.0, 1.3, 2.0), (1.0, 2.0, 3.0), (1.0, 3.0, 5.0)])
def test_it_is_nearly_as_good_as_the_best_width(known, chance):
    """The text is the same at all widths, so what it cost tells. Where the widths are nearly as good, 0.92."""
    widths = 1, 4, 8
    price = dict(zip(widths, known, strict=True))
    always = [auto(9, widths=(1, width), costs=(1.0, 0.1)) for width in widths[1:]]
    best = min(500.0, *(spent(drafter, chance, price) for drafter in always))
    assert best / spent(auto(9, widths=widths, costs=known), chance, price) > 0.9


def test_a_batch_does_not_wait_for_drafts_of_rows_that_are_ahead():
    """One row goes round nine tokens, three draw from 40 others alike: helping the one would only make all wait."""
    rows = np.full((49, 49), 1e-9, np.float32)
    rows[np.arange(9), (np.arange(9) + 1) % 9] = 1.0
    rows[9:, 9:] = 1 / 40
    drafter = auto(49, widths=(1, 8), costs=(1.0, 2.0))
    alone = run(markov(rows), drafter, [(0,)], new=200, temperature=1.0)
    together = run(markov(rows), drafter, [(0,), (9,), (10,), (11,)], new=200, temperature=1.0)
    assert int(alone.stats.target_passes[0]) < 60
    assert int(together.stats.target_passes[0]) > 150 and int(together.stats.drafted.max()) < 60


def test_the_slowest_row_counts_most():
    weight = _weight(jnp.array([7, 3, 3 + int(LEAD), 1]), jnp.array([True, True, True, False]))
    np.testing.assert_allclose(weight, [np.exp(-1), 1, np.exp(-1), 0], rtol=1e-6)
    assert (_weight(jnp.array([5, 2]), jnp.zeros(2, bool)) == 0).all()


def test_a_decision_does_not_read_the_randomness_of_its_round():
    """Another key: another text, but the first round drafts the same."""
    drafter = auto(64, widths=(1, 4, 8), costs=(1.0, 1.01, 1.02))
    context = Context(jnp.array([[1, 2, 3, 1, 2, 3, 1, 2]]), jnp.array([8]))
    state = drafter.init((), context)
    first, second = (
        drafter.propose((), jax.random.split(jax.random.key(seed), 1), state, context, jnp.array([9]))[0]
        for seed in (0, 1)
    )
    for ours, theirs in zip(first[:3], second[:3], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert operations.depths(first.parents).max() > 1


def test_bad_settings():
    with pytest.raises(UsageError, match="widths must rise from 1"):
        auto(9, widths=(2, 4))
    with pytest.raises(UsageError, match="widths must rise from 1"):
        auto(9, widths=())
    with pytest.raises(UsageError, match="num_nodes must be from 1 to 80, not 0"):
        auto(9, num_recycled=0)
    with pytest.raises(UsageError, match="one positive number per width"):
        auto(9, costs=(1.0, 2.0))
    with pytest.raises(UsageError, match="over the model's"):
        costs.measured(tiny_llama(), (1, 4), context=1 << 20)
