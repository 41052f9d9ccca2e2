"""Chances of nodes by hand: how they order a draft, and what the text teaches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters.combined.node_classes import CLASSES, COPIED, prior
from specjax.trees import node_statistics
from specjax.trees.node_statistics import DOUBT, MEMORY, Counts, Drafted, NodeStatistics, make_shape
from specjax.trees.templates import Template
from specjax.types import Context

PRIOR = prior()
EARLIER = Counts(jnp.zeros(CLASSES), jnp.zeros(CLASSES))
rank = lambda shape, *arrays: jax.jit(functools.partial(node_statistics.rank, PRIOR, shape))(*arrays, EARLIER)
learn = lambda shape, *arrays: jax.jit(functools.partial(node_statistics.count_pending, PRIOR, shape))(*arrays, EARLIER)
NOTHING = jax.tree.map(lambda x: x[None], EARLIER)


def past(shadow=None, recent=(0.0, 0.0)):
    return NodeStatistics(NOTHING, shadow, jnp.array([recent])[:, :, None])


def joined(copied, paths, tokens, kinds, start=0):
    """A chain of `copied` tokens and recycled nodes at `paths`, all valid."""
    shape = make_shape(copied, Template(paths))
    return shape, Drafted(jnp.array([tokens]), jnp.ones((1, len(tokens)), bool), jnp.array([kinds]), jnp.array([start]))


def test_nodes_stand_in_order_of_their_chance_and_twins_add_up():
    # A copied chain 5 6 and recycled nodes 5, 7, and 6 below the recycled 5.
    kinds = [0, 0, 1, COPIED, COPIED + 1, COPIED + 2]
    shape, draft = joined(2, [(0,), (1,), (0, 0)], [1, 5, 6, 5, 7, 6], kinds)
    assert shape.parents.tolist() == [-1, 0, 1, 0, 0, 3]
    tree, chance = rank(shape, draft, past())
    of_5 = 1 - (1 - PRIOR[0]) * (1 - PRIOR[COPIED])
    of_6 = of_5 * (1 - (1 - PRIOR[1]) * (1 - PRIOR[COPIED + 2]))
    wanted = sorted([(of_5, 5), (of_6, 6), (PRIOR[COPIED + 1], 7)], reverse=True)
    assert tree.valid.sum() == 4
    assert tree.tokens[0, 1:4].tolist() == [token for _, token in wanted]
    np.testing.assert_allclose(chance[0, :4], [0, *[value for value, _ in wanted]], rtol=1e-5)
    six = tree.tokens[0].tolist().index(6)
    assert tree.tokens[0, tree.parents[0, six]] == 5


def test_hindsight_counts_what_would_have_been_accepted():
    """Drafted when the text had 2 tokens: 5 is right, 6 after it is not; 7 is wrong; what follows it was not tried."""
    shape, shadow = joined(2, [(0,), (0, 0)], [1, 5, 6, 7, 8], [0, 3, 4, 3, 9], start=2)
    initial = past(shadow)
    text = jnp.array([[4, 1, 5, 9, 9, 9]])
    waiting = learn(shape, initial, Context(text, jnp.array([3])))  # 5 is there; what follows it is not
    assert int(waiting.pending.start[0]) == 2 and float(waiting.counts.trials.sum()) == 0
    updated = learn(shape, waiting, Context(text, jnp.array([4])))
    assert int(updated.pending.start[0]) == 0
    assert updated.counts.trials[0, [3, 4, 9]].tolist() == [2, 1, 0]
    assert updated.counts.hits[0, [3, 4, 9]].tolist() == [1, 0, 0]
    np.testing.assert_allclose(updated.recent[0, :, 0], [1, 2 * PRIOR[3] + PRIOR[4]], rtol=1e-5)
    again = learn(shape, updated._replace(pending=shadow), Context(text, jnp.array([4])))
    np.testing.assert_allclose(again.counts.trials[0, 4], MEMORY + 1, rtol=1e-5)


def test_what_several_texts_taught_is_joined():
    """A row trusts itself the more the more it saw; a long text counts as much as all before it, however long it is."""
    counts = lambda hits, trials: Counts(jnp.array(hits, jnp.float32), jnp.array(trials, jnp.float32))
    earlier = counts([20.0], [40.0])
    total = node_statistics.add_earlier(counts([[0.0], [10.0], [45.0]], [[0.0], [25.0], [51.0]]), earlier)
    assert total.hits[:, 0].tolist() == [20, 20, 45] and total.trials[:, 0].tolist() == [40, 45, 51]
    of_all = node_statistics.merge_counts(counts([0.0], [0.0]), counts([[6.0], [4.0]], [[10.0], [20.0]]))
    assert (float(of_all.hits[0]), float(of_all.trials[0])) == (10, 30)
    late = node_statistics.merge_counts(of_all, counts([[50.0]], [[50.0]]))
    np.testing.assert_allclose((late.hits[0], late.trials[0]), (60 * 50 / 80, 50), rtol=1e-5)


def test_a_text_that_disappoints_lowers_all_chances():
    shape, draft = joined(1, [(0,)], [1, 5, 7], [0, 3, COPIED + 1])
    believed = rank(shape, draft, past())[1]
    doubted = rank(shape, draft, past(recent=(0.0, DOUBT)))[1]
    np.testing.assert_allclose(doubted, believed / 2, rtol=1e-5)
    np.testing.assert_allclose(rank(shape, draft, past(recent=(9.0, 1.0)))[1], believed, rtol=1e-5)


@pytest.mark.parametrize("copied", [1, 2, 5])
def test_the_joined_tree_is_the_union_of_both_drafts(copied):
    """Against paths of tokens in plain Python; siblings among recycled nodes differ, as the matrix has them."""
    rng, paths = np.random.default_rng(0), [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)]
    shape = make_shape(copied, Template(paths))
    ranked, shared = jax.jit(functools.partial(node_statistics.rank, PRIOR, shape)), 0
    for _ in range(30):
        tokens, valid = np.zeros(len(shape.parents), int), np.ones(len(shape.parents), bool)
        for i, parent in enumerate(shape.parents.tolist()[1:], 1):
            elder_siblings = [j for j in range(1 + copied, i) if shape.parents[j] == parent]
            tokens[i] = rng.choice([t for t in range(4) if t not in tokens[elder_siblings]])
            valid[i] = valid[parent] and rng.random() < 0.8
        kinds = rng.integers(0, CLASSES, len(tokens))
        draft = Drafted(*(jnp.asarray(x)[None] for x in (tokens, valid, kinds)), jnp.array([1]))
        tree, chance = ranked(draft, past(), EARLIER)

        def spelt(i, tokens, parents):
            return () if i == 0 else (*spelt(int(parents[i]), tokens, parents), int(tokens[i]))

        miss = {}
        for i in np.flatnonzero(valid)[1:]:
            path = spelt(i, tokens, shape.parents)
            shared += path in miss
            miss[path] = miss.get(path, 1.0) * (1 - PRIOR[kinds[i]])
        wanted = {path: np.prod([1 - miss[path[: n + 1]] for n in range(len(path))]) for path in miss}
        nodes = np.flatnonzero(tree.valid[0])[1:]
        chance_of = {spelt(i, tree.tokens[0], tree.parents[0]): float(chance[0, i]) for i in nodes}
        assert len(chance_of) == len(nodes) and chance_of == pytest.approx(wanted, rel=1e-4)
        assert (tree.parents[0, 1:] < np.arange(1, len(tokens)))[: len(nodes)].all()
    assert shared > 10
