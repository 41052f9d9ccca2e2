"""The exact law of a verifier, by enumerating drafts and integrating its uniforms.

A rule accepts node i when u_i is below a threshold that depends on the decisions before it. The threshold is found on
the rule itself, as a black box, by bisection; so every pattern of decisions gets its exact probability, and the law of
the emitted block, extended by the target, can be compared with the target's own joint law.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import TokenTree

BISECTIONS = 32


def patterns(core, tree: TokenTree, target_logits):
    """Every accept/reject pattern of the nodes behind the root, and its probability.

    Args:
      core: (u[B, N], tree, target_logits) -> Descent-like with `path`, `count`, `residual`, `node`.
      tree, target_logits: batched over E drafts.

    Returns: probability float64[E, P], and the core's results at each pattern, leaves [E, P, ...].
    """
    drafts, n = tree.tokens.shape
    table = np.array(list(itertools.product((0, 1), repeat=n - 1)), np.int32).reshape(-1, n - 1)  # 1: accept
    count = len(table)
    tiled = jax.tree.map(lambda x: jnp.repeat(x, count, 0), tree)
    logits = jnp.repeat(target_logits, count, 0)
    run = jax.jit(lambda u: core(u, tiled, logits))
    forced = np.concatenate([np.zeros((count, 1)), np.where(table == 1, 0.0, 1.0)], 1).astype(np.float32)
    forced = np.tile(forced, (drafts, 1))
    probability = np.ones(drafts * count)
    for i in range(1, n):
        low, high = np.zeros(drafts * count), np.ones(drafts * count)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            u = forced.copy()
            u[:, i] = middle
            u[:, i + 1 :] = 1.0
            accepted = np.asarray((run(jnp.asarray(u)).path == i).any(1))
            low, high = np.where(accepted, middle, low), np.where(accepted, high, middle)
        threshold = np.where(high < 1e-6, 0.0, np.where(low > 1 - 1e-6, 1.0, (low + high) / 2))
        chosen = np.tile(table[:, i - 1], drafts) == 1
        probability *= np.where(chosen, threshold, 1 - threshold)
    end = run(jnp.asarray(forced))
    shape = lambda x: np.asarray(x).reshape(drafts, count, *x.shape[1:])
    return probability.reshape(drafts, count), jax.tree.map(shape, end)


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
            law = rows[tokens[parent]].astype(np.float64)
            left = 1 - sum(law[t] for t in taken)
            grown += [((*tokens, t), weight * law[t] / left) for t in range(vocab) if t not in taken]
        outcomes = grown
    tokens = np.array([t for t, _ in outcomes], np.int32)
    parents = np.broadcast_to(template.parents, tokens.shape)
    logits = np.log(rows)[tokens].astype(np.float32)
    tree = TokenTree(jnp.asarray(tokens), jnp.asarray(parents), jnp.ones(tokens.shape, bool), jnp.asarray(logits))
    return tree, np.array([w for _, w in outcomes])


def block_law(core, tree: TokenTree, weights, target_rows: np.ndarray, depth: int):
    """The law of the emitted block extended by the target to depth + 1 tokens, and of the number of accepted drafts.

    Returns: float64[V] * (depth + 1), float64[depth + 1].
    """
    vocab = len(target_rows)
    tokens = np.asarray(tree.tokens)
    logits = jnp.log(jnp.asarray(target_rows))[tree.tokens]
    probability, end = patterns(core, tree, logits)
    law = np.zeros((vocab,) * (depth + 1))
    accepted_law = np.zeros(depth + 1)
    rows = target_rows.astype(np.float64)
    for e, p in np.argwhere(probability > 0):
        accepted = int(end.num_nodes[e, p]) - 1
        block = tuple(tokens[e, end.path[e, p, 1 : accepted + 1]])
        weight = weights[e] * probability[e, p]
        accepted_law[accepted] += weight
        residual = end.residual[e, p].astype(np.float64)
        extension = weight * residual / residual.sum()
        for _ in range(depth - accepted):
            extension = extension[..., None] * rows
        law[block] += extension
    return law, accepted_law
