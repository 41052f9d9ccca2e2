"""ReDrafter against its equations in NumPy, and its beam search against the authors' packed beams."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_runs import LENGTH, PATH, TEXT, features_of, random_params, said_of
from toy import tiny_llama

from specjax import trees
from specjax.drafters.heads.head_drafter import to_drafted_nodes
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.redrafter import ReDrafterConfig, redrafter_head
from specjax.types import Context

CONFIG = ReDrafterConfig(32, 48, 64)


def silu(x):
    return x / (1 + np.exp(-x))


def taken_in(params, state, token):
    embedded = np.asarray(tiny_llama().params["embed"]["weight"])[token]
    u = params["rnn_u"]
    return silu(params["rnn_w"]["weight"] @ embedded + u["weight"] @ state + u["bias"])


def logits_of(params, feature, state):
    apply = lambda part, x: part["weight"] @ x + part["bias"]
    z = apply(params["input_proj"], np.concatenate([feature, state]))
    for block in params["blocks"].values():
        z = z + silu(apply(block["linear"], z))
    return params["head"]["weight"] @ z


@pytest.fixture(scope="module")
def params():
    return random_params("redrafter", CONFIG)


@pytest.fixture(scope="module")
def features():
    return features_of(tiny_llama())


def test_it_says_what_the_equations_say(params, features):
    ours = said_of(DraftHead(redrafter_head(CONFIG), params), tiny_llama(), features)
    for b, n in enumerate(LENGTH):
        state = np.zeros(CONFIG.width)
        for depth, token in enumerate([TEXT[b, n - 1], *PATH[b]]):
            state = taken_in(params, state, token)
            np.testing.assert_allclose(ours[b, depth], logits_of(params, features[b, n - 2], state), atol=1e-4)


def test_a_head_that_does_not_read_the_state_says_the_same_everywhere(params, features):
    blind = jax.tree.map(np.copy, params)
    blind["input_proj"]["weight"][:, CONFIG.width :] = 0
    ours = said_of(DraftHead(redrafter_head(CONFIG), blind), tiny_llama(), features)
    np.testing.assert_allclose(ours, np.broadcast_to(ours[:, :1], ours.shape), atol=1e-6)


def best_beams(params, feature, root, width, depth):
    """Return the `width` best continuations by beam search."""
    log_softmax = lambda x: x - np.log(np.exp(x - x.max()).sum()) - x.max()
    beams = [(0.0, (), taken_in(params, np.zeros(CONFIG.width), root))]
    for _ in range(depth):
        following = []
        for score, path, state in beams:
            log_q = log_softmax(logits_of(params, feature, state))
            best = np.argsort(-log_q)[:width]
            following += [(score + log_q[x], (*path, int(x)), taken_in(params, state, x)) for x in best]
        beams = sorted(following, key=lambda beam: -beam[0])[:width]
    return [path for _, path, _ in beams]


def paths_of(tree, row=0):
    """Return the paths of the valid nodes of a tree, without the root."""
    tokens, parents = np.asarray(tree.tokens[row]), np.asarray(tree.parents[row])
    path = lambda i: () if i == 0 else (*path(parents[i]), int(tokens[i]))
    return [path(i) for i in range(1, len(tokens)) if tree.valid[row, i]]


@pytest.mark.parametrize("width", [1, 3])
def test_a_beam_search_finds_the_authors_beams(params, features, width):
    head, target, depth = redrafter_head(CONFIG), tiny_llama(), 3
    context = Context(jnp.asarray(TEXT), jnp.asarray(LENGTH), target=target)
    builder = trees.beam(width, depth)

    @jax.jit
    def drafted(params, last):
        scratch, logits = head.start(params, last, context, builder.places)
        feed = lambda scratch, frontier: head.follow(params, scratch, to_drafted_nodes(frontier), context)
        limit = jnp.full_like(context.length, depth)
        return trees.grow(builder, feed, scratch, context.root[:, 0], logits, None, context, limit)[0].tree

    last = features[np.arange(len(TEXT)), LENGTH - 2]
    tree = drafted(params, last)
    for b, n in enumerate(LENGTH):
        beams = best_beams(params, last[b], TEXT[b, n - 1], width, depth)
        ours = paths_of(tree, b)
        assert sorted(path for path in ours if len(path) == depth) == sorted(beams)
        packed = trees.from_paths(
            tree.tokens[b : b + 1, 0], jnp.array([beams]), jnp.ones((1, width)), 1 + width * depth
        )
        assert set(paths_of(packed)) <= set(ours)


def test_beams_that_share_a_prefix_share_its_nodes():
    beams = jnp.array([[[5, 1, 2], [5, 1, 3], [5, 4, 2]]])
    tree = trees.from_paths(jnp.array([9]), beams, jnp.ones((1, 3)), 10)
    ours = paths_of(tree)
    assert sorted(ours) == [(5,), (5, 1), (5, 1, 2), (5, 1, 3), (5, 4), (5, 4, 2)] and len(ours) == 6
