"""The card's example of the Monte Carlo search (A5) by hand; best-first search against enumeration."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.trees.table_search import _most_visited, _Search, best_first, grow_search

V = 9


def table_of(shares):
    """Successors of pairs in a dense table float32[V, V, V]."""

    def successors(pairs):
        scores = shares[pairs[..., 0], pairs[..., 1]]
        return jnp.broadcast_to(jnp.arange(V), scores.shape), scores

    return successors


def paths_of(tree):
    """The valid nodes as tuples of tokens from below the root."""
    tokens, parents, valid = (np.asarray(x)[0] for x in tree[:3])
    path = {0: ()}
    for i in range(1, len(tokens)):
        if valid[i]:
            path[i] = (*path[int(parents[i])], int(tokens[i]))
    return list(path.values())[1:]


@pytest.mark.parametrize(("iterations", "visits"), [(1, (0, 1)), (2, (1, 1)), (5, (4, 1)), (6, (4, 2))])
def test_the_search_goes_where_the_card_goes(iterations, visits):
    """3, 2, 2, 2, 2, 3: two tokens deep (the card counts the root too), the reward the sum of P."""
    shares = np.zeros((V, V, V), np.float32)
    shares[8, 1, 2], shares[8, 1, 3], shares[1, 2, 4], shares[1, 3, 5] = 0.7, 0.3, 1, 1
    search = jax.jit(
        lambda key: grow_search(table_of(jnp.asarray(shares)), jnp.array([8, 1]), key, iterations, 2, "sum")
    )
    s = search(jax.random.key(0))
    assert s.visits[jnp.array([1 + 2, 1 + 3])].tolist() == list(visits)
    assert float(s.visits[0]) == iterations
    assert float(s.rewards[0]) == pytest.approx(visits[0] * 2.7 + visits[1] * 2.3, abs=1e-4)  # 1 + .7 + 1, 1 + .3 + 1


@pytest.mark.parametrize(("reward", "of"), [("mean", (1 + 0.7 + 1) / 3), ("constant", 1.0), ("sum", 1 + 0.7 + 1.5)])
def test_what_a_path_is_worth(reward, of):
    """The path 2 and 4 has shares of .7 and 1.5, of which the mean counts no more than 1."""
    shares = np.zeros((V, V, V), np.float32)
    shares[8, 1, 2], shares[1, 2, 4] = 0.7, 1.5
    search = jax.jit(lambda key: grow_search(table_of(jnp.asarray(shares)), jnp.array([8, 1]), key, 3, 2, reward))
    s = search(jax.random.key(0))
    assert float(s.rewards[0]) == pytest.approx(3 * of, abs=1e-5)


# A search after 8, 1, each node with its parent, its visits and what may follow it.
SEARCHED = {
    (): (None, 6, {2: 0.6, 3: 0.4}),
    (2,): (0, 4, {4: 0.7, 5: 0.3}),
    (3,): (0, 2, {6: 1.0}),
    (2, 4): (1, 2, {7: 1.0}),
    (2, 5): (1, 1, {}),
    (3, 6): (2, 1, {}),
    (3, 0): (2, 0, {}),  # not visited
}


@pytest.mark.parametrize(
    ("paths", "more"),
    [
        (1, [(2, 4)]),
        (2, [(2, 4), (3, 6)]),  # of equal visits the earlier
        (3, [(3, 6), (2, 4, 7)]),  # what follows 2 is there already
        (9, [(2, 4, 7)]),
    ],
)
def test_the_most_visited_nodes_and_the_likeliest_after_each(paths, more):
    shares, nodes = np.zeros((V, V, V), np.float32), list(SEARCHED)
    pairs = np.array([(8, 1, *node)[-2:] for node in nodes])
    for pair, (_, _, following) in zip(pairs, SEARCHED.values(), strict=True):
        shares[*pair, list(following)] = list(following.values())
    visits = np.array([visited for _, visited, _ in SEARCHED.values()], np.float32)
    parents = np.array([-1 if above is None else above for above, _, _ in SEARCHED.values()])
    depths, none = np.array([len(node) for node in nodes]), np.zeros(len(nodes))
    search = _Search(*map(jnp.asarray, (pairs, parents, depths, none + 0.5, none, none, visits, none)))
    run = jax.jit(functools.partial(_most_visited, table_of(jnp.asarray(shares)), paths=paths))
    tokens, above, depth, valid = run(search)
    wanted = [node for node in nodes[1:] if SEARCHED[node][1]][:paths]
    assert paths_of((tokens[None], above[None], valid[None])) == wanted + more
    assert depth[valid].tolist() == [0, *map(len, wanted + more)]


def test_best_first_is_the_best_of_all_paths():
    rng = np.random.default_rng(0)
    shares = rng.random((V, V, V)) * (rng.random((V, V, V)) < 0.8)
    shares[:, :, 4:] = 0
    normal = shares / np.maximum(shares.sum(-1, keepdims=True), 1e-9)

    def value(path):
        text = (0, 1, *path)
        return np.prod([normal[text[i : i + 3]] for i in range(len(path))])

    search = jax.jit(
        lambda limit: best_first(table_of(jnp.asarray(shares, jnp.float32)), jnp.array([[0, 1]]), limit, 20, 4)
    )
    for limit in (4, 2, 0):
        every = [path for d in range(1, limit + 1) for path in itertools.product(range(4), repeat=d)]
        best = [v for v in sorted(map(value, every), reverse=True)[:20] if v > 0]
        ours = paths_of(search(jnp.array([limit])))
        assert len(set(ours)) == len(ours) == len(best)
        assert sorted(map(value, ours), reverse=True) == pytest.approx(best)
        assert limit < 4 or len(best) == 20
