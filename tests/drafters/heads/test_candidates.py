"""Low-rank output layers that select candidates: their logits, the joint law of drafts, and texts."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import block_distribution
from head_runs import PATH, features_of, said_of
from heads import config_of, tiny_head
from rules import module
from tiers import exhaustive
from toy import joint_distribution, tiny_llama

from specjax import UsageError, decode, make_drafter, trees
from specjax.drafters import autoregressive
from specjax.models.heads.candidates import NAME, factorize, with_candidates
from specjax.models.heads.kinds import init_head
from specjax.numerics.quantized_array import QuantizedArray
from specjax.types import TokenTree

VOCAB = 16
OWN_LAYER = {
    "eagle3": {},
    "dflash": {"own_head": True, "softcap": 2.0},
    "hydra": {},
    "medusa": {"own_head": True},
    "mlp_speculator": {},
    "redrafter": {},
    "chimera": {},
}
TAPS = {"eagle3": 3, "dflash": 2}


@functools.cache
def target():
    return tiny_llama(vocab=VOCAB)


@functools.cache
def head_of(kind):
    """Return a random head with an output layer of its own."""
    config = dataclasses.replace(config_of(kind, target()), **OWN_LAYER[kind])
    head, rng = init_head(kind, config, jax.random.key(1)), np.random.default_rng(1)
    more = lambda x: x + 0.3 * rng.normal(size=x.shape).astype(x.dtype)
    return head.replace(params=jax.tree.map(lambda x: more(x) if x.dtype == jnp.float32 else x, head.params))


def logits_of(head, path=PATH):
    return said_of(head, target(), features_of(target(), TAPS.get(head.head.kind, 1)), path)


KINDS = [
    "eagle3",
    "dflash",
    "mlp_speculator",
    *(exhaustive(kind) for kind in ("hydra", "medusa", "redrafter", "chimera")),
]


@pytest.mark.parametrize("kind", KINDS)
def test_all_tokens_as_candidates_are_the_full_head(kind):
    head, full = head_of(kind), logits_of(head_of(kind))
    size = int(np.isfinite(full).sum(-1).max())
    np.testing.assert_allclose(logits_of(with_candidates(head, size, 2)), full, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_candidates_have_the_exact_logits_and_others_none(kind):
    head, full = head_of(kind), logits_of(head_of(kind))
    some = logits_of(with_candidates(head, 5))
    is_candidate = np.isfinite(some)
    assert (is_candidate.sum(-1) == 5).all()
    np.testing.assert_allclose(some[is_candidate], full[is_candidate], atol=2e-5)


def test_a_layer_of_full_rank_selects_the_likeliest_tokens():
    head, full = head_of("eagle3"), logits_of(head_of("eagle3"))
    some = logits_of(with_candidates(head, 4, rank=32))
    np.testing.assert_array_equal(np.isfinite(some), full >= np.sort(full, -1)[..., -4:-3])


def test_the_factors_are_the_truncated_svd():
    table = jax.random.normal(jax.random.key(0), (40, 12)) + 3.0
    up, down = factorize(table, 5)
    centred = np.asarray(table) - np.asarray(table).mean(0)
    u, s, vt = np.linalg.svd(centred, full_matrices=False)
    np.testing.assert_allclose(up @ down, (u[:, :5] * s[:5]) @ vt[:5], atol=1e-4)


def joint_error(reported):
    """Return the error of the joint law of three tokens if chains of two candidates are verified with q of `reported`.

    The head draws from 3 of 16 tokens, so 9 chains have a probability above 0.
    """
    few = with_candidates(head_of("eagle3"), 3, 4)
    q_of = lambda head, first: np.exp(jax.nn.log_softmax(logits_of(head, np.array([[first, 0, 0]] * 2)))[0, :2])
    root = q_of(few, 0)[0]
    tokens, weights, logits = [], [], []
    for first in np.flatnonzero(root):
        drawn, stated = q_of(few, int(first)), q_of(reported(few), int(first))
        for second in np.flatnonzero(drawn[1]):
            tokens.append((0, first, second))
            weights.append(root[first] * drawn[1, second])
            with np.errstate(divide="ignore"):
                logits.append(np.log(np.concatenate([stated, np.ones((1, VOCAB)) / VOCAB])))
    parents = np.broadcast_to(np.array([-1, 0, 1]), (len(tokens), 3))
    tree = TokenTree(np.array(tokens, np.int32), parents, np.ones_like(parents, bool), np.array(logits, np.float32))
    rows = np.random.default_rng(0).dirichlet(np.ones(VOCAB), VOCAB)
    core = module("standard").core
    joint, accepted = block_distribution(core, jax.tree.map(jax.device_put, tree), np.array(weights), rows, 2)
    assert len(tokens) == 9 and accepted[2] > 0
    return np.abs(joint - joint_distribution(rows, 0, 3)).max()


def test_the_joint_law_of_drafts_from_candidates_is_the_targets():
    assert joint_error(lambda head: head) < 1e-6


def test_reporting_the_distribution_of_the_full_head_is_caught():
    full = lambda head: head.replace(params={name: x for name, x in head.params.items() if name != NAME})
    assert joint_error(full) > 1e-3


@pytest.mark.parametrize(
    ("kind", "options"), [("eagle3", {"tree": trees.eagle2(top_k=4, depth=3, total=8)}), exhaustive("hydra", {})]
)
def test_greedy_texts_are_unchanged(kind, options):
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6]]
    plain = decode(target(), autoregressive(), prompts, key=0, max_new_tokens=12)
    drafter = make_drafter(kind, target(), head_of(kind), candidates=3, candidate_rank=8, **options)
    assert decode(target(), drafter, prompts, key=0, max_new_tokens=12).to_lists() == plain.to_lists()


def test_an_output_layer_in_few_bits_selects_candidates():
    head, table = head_of("eagle3"), head_of("eagle3").params["head"]["weight"]
    scales = jnp.max(jnp.abs(table), 1, keepdims=True) / 127
    int8 = QuantizedArray(jnp.round(table / scales).astype(jnp.int8), scales)
    quantized = head.replace(params=head.params | {"head": {"weight": int8}})
    some, full = logits_of(with_candidates(quantized, 4)), logits_of(quantized)
    np.testing.assert_allclose(some[np.isfinite(some)], full[np.isfinite(some)], atol=1e-3)


def test_a_plan_needs_no_arrays():
    head = head_of("eagle3")
    shapes = jax.eval_shape(lambda: head.params)
    planned = with_candidates(head.replace(params=shapes), 4).params
    assert jax.tree.structure(planned) == jax.tree.structure(with_candidates(head, 4).params)
    assert planned[NAME].up[0].shape == (VOCAB - 1, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": 16}, "candidates must be from 1 to 15, the tokens that the head drafts, not 16"),
        ({"candidates": 0}, "not 0"),
        ({"candidates": 4, "candidate_rank": 33}, "candidate_rank must be from 1 to 32, the width of the head, not 33"),
        ({"candidate_rank": 4}, "candidate_rank needs the number of candidates"),
    ],
)
def test_bad_numbers_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        make_drafter("eagle3", target(), head_of("eagle3"), **options)


def test_heads_with_the_targets_output_layer_are_refused():
    with pytest.raises(UsageError, match="output layer of its own"):
        make_drafter("eagle", target(), tiny_head("eagle", target()), candidates=4)
