"""Draft models with larger or smaller vocabularies than the target: exact texts of shared ids."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import exhaustive
from toy import TARGET_ROWS, chi_square, joint_distribution, markov, sampled_triples, tiny_llama

import specjax
from specjax import decode, trees
from specjax.decoders import pearl_in_one_program
from specjax.drafters import autoregressive, easyspec, hierarchical, prompt_lookup, rapid, two_model
from specjax.models.vocabulary import resize_vocabulary
from specjax.types import Context, Sampling

VOCAB = len(TARGET_ROWS)
METHODS = {
    "chain": lambda draft: two_model(draft, 3),
    "tree": lambda draft: two_model(draft, tree=trees.branching("2x2")),
    "easyspec": lambda draft: easyspec(draft, 3),
    "rapid": lambda draft: rapid(draft, 3, budget=16, chunk=4, query=4),
    "hierarchical": lambda draft: hierarchical(draft, prompt_lookup(2), min_tokens=2),
    "hierarchical_of_two": lambda draft: hierarchical(draft, two_model(wide(VOCAB + 1), 2, lag=4), min_tokens=2),
}


def wide(vocab, seed=5):
    """Return a random Markov model over `vocab` tokens."""
    return markov(np.random.default_rng(seed).dirichlet(np.ones(vocab), vocab).astype(np.float32))


@pytest.mark.parametrize(
    ("method", "vocab"),
    [
        ("chain", VOCAB - 1), ("tree", VOCAB + 2), exhaustive("chain", VOCAB + 2), exhaustive("tree", VOCAB - 1),
        *(exhaustive(method, VOCAB + more) for method in list(METHODS)[2:] for more in (-1, 2)),
    ],
)  # fmt: skip
def test_sampled_text_has_the_distribution_of_the_target(method, vocab):
    counts = sampled_triples(METHODS[method](wide(vocab)), TARGET_ROWS)
    assert chi_square(counts, joint_distribution(TARGET_ROWS, 0, 3)) > 1e-3


@pytest.mark.parametrize(
    ("method", "vocab"),
    [
        ("tree", 60), ("hierarchical", 66), exhaustive("hierarchical", 60), exhaustive("tree", 66),
        *(exhaustive(*x) for x in itertools.product(sorted(METHODS.keys() - {"tree", "hierarchical"}), (60, 66))),
    ],
)  # fmt: skip
def test_greedy_and_coupled_text_is_that_of_plain_decoding(method, vocab):
    target, draft = tiny_llama(), tiny_llama(seed=3, vocab=vocab)
    options = {"key": jax.random.key(2), "max_new_tokens": 10}
    prompts = [[63, 62, 61, 63, 62], [5]]  # ids that a draft of 60 lacks
    for more in ({}, {"temperature": 1.0, "top_k": 62, "sampling": "coupled"}):
        drafter = METHODS[method](draft)
        wanted = decode(target, autoregressive(), prompts, **options, **more).to_lists()
        assert decode(target, drafter, prompts, **options, **more).to_lists() == wanted


def test_pearl_takes_them():
    target, prompts = tiny_llama(), [[63, 62, 61], [5]]
    options = {"key": jax.random.key(2), "max_new_tokens": 10, "temperature": 1.0}
    wanted = decode(target, autoregressive(), prompts, sampling="coupled", **options).to_lists()
    for vocab in (60, 66):
        draft = tiny_llama(seed=3, vocab=vocab)
        assert pearl_in_one_program(target, draft, prompts, num_tokens=2, **options).to_lists() == wanted


@pytest.mark.parametrize("more", [-1, 2])
def test_the_draft_is_drawn_from_the_ids_that_both_have(more):
    target, draft = markov(), wide(VOCAB + more)
    drafter = two_model(draft, 2)
    batch = 3
    tokens = jnp.zeros((batch, 160), jnp.int32).at[:, 0].set(VOCAB - 1)
    context = Context(tokens, jnp.ones(batch, jnp.int32), Sampling(jnp.float32(1.0)), target=target)
    state = drafter.init(drafter.params, context)
    keys = jax.random.split(jax.random.key(0), batch)
    tree, _ = drafter.propose(drafter.params, keys, state, context, jnp.full(batch, 2))
    rows = np.asarray(draft.params)[min(VOCAB, VOCAB + more) - 1][:VOCAB]  # of its last id, where it lacks the token
    wanted = np.pad(rows / rows.sum(), (0, VOCAB - len(rows)))
    np.testing.assert_allclose(jax.nn.softmax(tree.logits[:, 0]), np.broadcast_to(wanted, (batch, VOCAB)), atol=1e-6)


def test_by_name_and_the_same_object():
    target, draft = markov(), wide(VOCAB + 2)
    prompts, options = [[1, 2, 1], [0]], {"key": jax.random.key(0), "max_new_tokens": 6}
    texts = [
        decode(target, specjax.make_drafter(name, target, draft), prompts, **options).to_lists()
        for name in ("two_model", "easyspec")
    ]
    assert texts == [decode(target, autoregressive(), prompts, **options).to_lists()] * 2
    assert resize_vocabulary(draft.model, VOCAB) is resize_vocabulary(draft.model, VOCAB)
    for a, b in itertools.pairwise([resize_vocabulary(draft.model, VOCAB + 2), draft.model]):
        assert a is b
