"""DDTree against a NumPy heap, the text of a head with it, and heads that refuse it."""

import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heads import tiny_head
from toy import tiny_llama

from specjax import UsageError, make_drafter, trees
from specjax.trees.growing import grow
from specjax.types import Context, Sampling

VOCAB, LEVELS = 7, 4
PROMPT = 1, 2, 3, 4


def heap_paths(log_q, total):
    """Return the token paths of the `total` best prefixes, by the heap of the authors."""
    order = np.argsort(-log_q, 1, kind="stable")
    ranks = -np.sort(-log_q, 1)
    heap, paths = [(-ranks[0, 0], (0,))], set()
    while heap and len(paths) < total:
        cost, path = heapq.heappop(heap)
        depth, rank = len(path) - 1, path[-1]
        paths.add(tuple(int(order[d, r]) for d, r in enumerate(path)))
        if rank + 1 < log_q.shape[1]:
            heapq.heappush(heap, (cost + ranks[depth, rank] - ranks[depth, rank + 1], (*path[:-1], rank + 1)))
        if depth + 1 < len(log_q):
            heapq.heappush(heap, (cost - ranks[depth + 1, 0], (*path, 0)))
    return paths


@pytest.mark.parametrize("total", [1, 4, 16, 40])
def test_the_nodes_are_those_of_a_heap(total):
    logits = np.random.default_rng(total).normal(size=(20, LEVELS, VOCAB)).astype(np.float32) * 2
    builder = trees.ddtree(total, LEVELS)

    @jax.jit
    def tree_of(logits):
        batch = len(logits)
        feed = lambda memory, frontier: (memory, logits[jnp.arange(batch)[:, None], frontier.depth])
        context = Context(*[None] * len(Context._fields))._replace(sampling=Sampling())
        root, limit = jnp.zeros(batch, jnp.int32), jnp.full(batch, LEVELS)
        return grow(builder, feed, (), root, logits[:, 0], None, context, limit, is_path_free=True)[0].tree

    tree = jax.tree.map(np.asarray, tree_of(jnp.asarray(logits)))
    for row, log_q in enumerate(np.asarray(jax.nn.log_softmax(logits, -1), np.float64)):
        paths = {0: ()}
        for node in np.flatnonzero(tree.valid[row])[1:]:
            paths[node] = (*paths[tree.parents[row, node]], int(tree.tokens[row, node]))
        assert set(paths.values()) - {()} == heap_paths(log_q, total)


def test_a_head_whose_slots_see_tokens_refuses_it():
    with pytest.raises(UsageError, match="ddtree needs one of dflash, medusa, p_eagle"):
        make_drafter("eagle3", tiny_llama(), tiny_head("eagle3", tiny_llama()), tree=trees.parse("ddtree:8"))
