"""The exact distribution of a verifier, by enumerating drafts and integrating its uniforms.

A rule accepts node i when u_i is below a threshold that depends on the decisions before it. The threshold is found on
the rule itself, as a black box, by bisection; so every pattern of decisions gets its exact probability, and the
distribution of the emitted block, extended by the target, can be compared with the target's own joint distribution.
"""

from __future__ import annotations

import itertools

import jax
import numpy as np

from specjax.trees import operations
from specjax.types import TokenTree

BISECTIONS = 26  # float32 has 24 bits


def patterns(core, tree: TokenTree, target_logits):
    """Every accept/reject pattern of the nodes behind the root, and its probability.

    Args:
      core: (u[B, N], tree, target_logits) -> Accepted.
      tree, target_logits: batched over E drafts.

    Returns: probability float64[E, P], and the core's results at each pattern, leaves [E, P, ...].
    """
    drafts, n = tree.tokens.shape
    table = np.array(list(itertools.product((0, 1), repeat=n - 1)), np.int32).reshape(-1, n - 1)  # 1: accept
    count = len(table)
    run = _compiled(core, tree, target_logits, count)
    forced = np.concatenate([np.zeros((count, 1)), np.where(table == 1, 0.0, 1.0)], 1).astype(np.float32)
    # A row for each node i and each pattern of the i - 1 before it, and one to spare: all thresholds in one bisection.
    node = np.concatenate([np.full(1 << i - 1, i) for i in range(1, n)] + [[n - 1]])
    prefixes = np.concatenate([np.arange(1 << i - 1) << n - i for i in range(1, n)] + [[0]])
    u, own_node = np.tile(forced[prefixes], (drafts, 1)), np.tile(node, drafts)[:, None]
    low, high = np.zeros(drafts * count), np.ones(drafts * count)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        np.put_along_axis(u, own_node, middle[:, None].astype(np.float32), 1)
        accepted = (np.asarray(run(u).path) == own_node).any(1)
        low, high = np.where(accepted, middle, low), np.where(accepted, high, middle)
    threshold = np.where(high < 1e-6, 0.0, np.where(low > 1 - 1e-6, 1.0, (low + high) / 2)).reshape(drafts, count)
    probability = np.ones((drafts, count))
    for i in range(1, n):
        its = threshold[:, (1 << i - 1) - 1 + (np.arange(count) >> n - i)]
        probability *= np.where(table[:, i - 1] == 1, its, 1 - its)
    forced = np.tile(forced, (drafts, 1))
    end = run(forced)
    shape = lambda x: np.asarray(x).reshape(drafts, count, *x.shape[1:])
    return probability, jax.tree.map(shape, end)


def _compiled(core, tree: TokenTree, target_logits, count: int):
    """`core` as a function of the uniforms alone, of each draft `count` times."""
    tiled, logits = jax.device_put(jax.tree.map(lambda x: np.repeat(np.asarray(x), count, 0), (tree, target_logits)))
    many = len(logits) > 1000  # rows, BISECTIONS times a node: they take longer to compute than to compile
    run = jax.jit(core, compiler_options={"xla_backend_optimization_level": 1} if many else None)
    return lambda u: run(u, tiled, logits)


def without_replacement(rows: np.ndarray, start: int, template):
    """Every outcome of drawing a template's children without replacement from Markov rows.

    Returns: TokenTree with logits, batched over the outcomes, and their probabilities float64[E].
    """
    vocab = len(rows)
    outcomes = [((start,), 1.0)]
    for node in range(1, template.num_nodes):
        parent = int(template.parents[node])
        siblings = [i for i in range(1, node) if template.parents[i] == parent]
        grown = []
        for tokens, weight in outcomes:
            taken = {tokens[i] for i in siblings}
            distribution = rows[tokens[parent]].astype(np.float64)
            left = 1 - sum(distribution[t] for t in taken)
            grown += [((*tokens, t), weight * distribution[t] / left) for t in range(vocab) if t not in taken]
        outcomes = grown
    tokens = np.array([t for t, _ in outcomes], np.int32)
    return draft(rows, tokens, template.parents), np.array([w for _, w in outcomes])


def leaf_first_patterns(core, tree: TokenTree, target_logits):
    """Enumerate as `patterns`, for a rule that tests nodes from the leaves up and stops at the first that it accepts.

    Pattern i ends at node i: it passes its own test and every node before it, in post-order, failed.
    """
    drafts, n = tree.tokens.shape
    merged = jax.jit(operations.merge_equal_siblings)(tree)
    parents, valid = np.asarray(merged.parents), np.asarray(merged.valid)
    run = _compiled(core, tree, target_logits, n)
    own_node = np.tile(np.eye(n, dtype=bool), (drafts, 1))
    ends = lambda end: np.asarray(end.path.max(1))  # nodes stand behind their parents
    low, high = np.zeros(drafts * n), np.ones(drafts * n)
    mine = np.tile(np.arange(n), drafts)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        accepted = ends(run(np.where(own_node, middle[:, None], 1.0).astype(np.float32))) == mine
        low, high = np.where(accepted, middle, low), np.where(accepted, high, middle)
    threshold = np.where(high < 1e-6, 0.0, np.where(low > 1 - 1e-6, 1.0, (low + high) / 2)).reshape(drafts, n)
    threshold[:, 0] = 1.0
    probability = np.zeros((drafts, n))

    def post_order(e, node):
        for child in range(1, n):
            if valid[e, child] and parents[e, child] == node:
                yield from post_order(e, child)
        yield node

    for e in range(drafts):
        left = 1.0
        for node in post_order(e, 0):
            probability[e, node] = left * threshold[e, node]
            left *= 1 - threshold[e, node]
    end = run(np.where(own_node, 0.0, 1.0).astype(np.float32))
    shape = lambda x: np.asarray(x).reshape(drafts, n, *x.shape[1:])
    return probability, jax.tree.map(shape, end)


def independent_paths(rows: np.ndarray, start: int, paths: int, depth: int, sets: bool = False):
    """Every outcome of `paths` independent chains, level by level, and its probability, as `without_replacement`.

    sets: every *set* of chains, for rules whose result does not depend on the order of the paths.
    """
    vocab = len(rows)
    parents = np.array([-1, *([0] * paths), *range(1, paths * (depth - 1) + 1)], np.int32)
    chains = list(itertools.product(range(vocab), repeat=depth))
    path_sets = list(
        itertools.combinations_with_replacement(chains, paths) if sets else itertools.product(chains, repeat=paths)
    )
    orders = [len(set(itertools.permutations(c))) if sets else 1 for c in path_sets]
    tokens = np.array([(start, *np.array(c).T.ravel()) for c in path_sets], np.int32)  # level by level
    weights = np.prod([rows.astype(np.float64)[tokens[:, parents[i]], tokens[:, i]] for i in range(1, len(parents))], 0)
    return draft(rows, tokens, parents), weights * orders


def with_replacement(rows: np.ndarray, start: int, parents):
    """Every outcome of drawing each node of a fixed tree on its own, and its probability, as `without_replacement`.

    The logits of nodes without children are zeros, as builders leave them.
    """
    outcomes = np.array([(start, *t) for t in np.ndindex(*[len(rows)] * (len(parents) - 1))], np.int32)
    chances = [rows.astype(np.float64)[outcomes[:, above], outcomes[:, i]] for i, above in enumerate(parents) if i]
    tree = draft(rows, outcomes, parents)
    has_children = np.isin(np.arange(len(parents)), parents)[:, None]
    return tree._replace(logits=jax.device_put(np.where(has_children, tree.logits, 0))), np.prod(chances, 0)


def draft(rows, tokens, parents):
    """TokenTree of tokens [E, N] drawn from Markov rows."""
    with np.errstate(divide="ignore"):
        logits = np.log(rows)[tokens].astype(np.float32)
    everywhere = np.broadcast_to(parents, tokens.shape)
    return jax.tree.map(jax.device_put, TokenTree(tokens, everywhere, np.ones(tokens.shape, bool), logits))


def top_and_sampled(rows: np.ndarray, start: int, template):
    """Every outcome of drafts whose first child is sampled and whose others are the likeliest tokens of the row."""
    outcomes, tail = [((start,), 1.0)], np.zeros_like(rows)
    children = {int(p): int((template.parents == p).sum()) for p in template.parents}
    fixed = lambda token, count: np.argsort(-rows[token], kind="stable")[: count - 1]
    for token in range(len(rows)):
        tail[token] = rows[token]
        tail[token, fixed(token, max(children.values()))] = 0
    tail = tail / tail.sum(1, keepdims=True)
    for node in range(1, template.num_nodes):
        parent, rank = int(template.parents[node]), int(template.ranks[node])
        grown = []
        for tokens, weight in outcomes:
            last = tokens[parent]
            if rank:
                grown.append(((*tokens, int(fixed(last, children[parent])[rank - 1])), weight))
            else:
                grown += [((*tokens, t), weight * float(w)) for t, w in enumerate(tail[last]) if w > 0]
        outcomes = grown
    tokens = np.array([t for t, _ in outcomes], np.int32)
    return draft(tail, tokens, template.parents), np.array([w for _, w in outcomes])


def block_distribution(core, tree: TokenTree, weights, target_rows: np.ndarray, depth: int, patterns=patterns):
    """The distribution of the emitted block extended by the target to depth + 1 tokens, and of accepted drafts.

    Returns: float64[V] * (depth + 1), float64[depth + 1].
    """
    vocab = len(target_rows)
    tokens = np.asarray(tree.tokens)
    logits = np.log(target_rows)[tokens]
    probability, end = patterns(core, tree, logits)
    distribution = np.zeros((vocab,) * (depth + 1))
    accepted_distribution = np.zeros(depth + 1)
    rows = target_rows.astype(np.float64)
    for e, p in np.argwhere(probability > 0):
        accepted = int(end.num_nodes[e, p]) - 1
        block = tuple(tokens[e, end.path[e, p, 1 : accepted + 1]])
        weight = weights[e] * probability[e, p]
        accepted_distribution[accepted] += weight
        residual = end.residual[e, p].astype(np.float64)
        extension = weight * residual / residual.sum()
        for _ in range(depth - accepted):
            extension = extension[..., None] * rows
        distribution[block] += extension
    return distribution, accepted_distribution
