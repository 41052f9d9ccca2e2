"""Targets and draft models with other caches than keys and values: a recurrent one that cannot rewind, and one with an
encoder's input.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import chi_square, tiny_llama
from toy_models import (
    INPUTS,
    VOCAB,
    alike,
    encoding,
    fold_in_order,
    inputs_of,
    law_of_triples,
    recurrent,
    recurrent_model,
)

import specjax
from specjax import UsageError, trees
from specjax.arrays import batch_axes
from specjax.drafters import auto, hierarchical, prompt_lookup, suffix, token_recycling, two_model
from specjax.engine.prepare import prepare
from specjax.persistence.resume import fingerprint_of
from specjax.types import Target

PROMPTS = [[1, 2, 3, 1, 2, 3, 4], [5], [7, 8]]
OPTIONS = {"key": jax.random.key(3), "max_new_tokens": 20}
SMALL = 3


def inputs_for(target: Target, **which):
    return {"inputs": inputs_of(len(PROMPTS), **which)} if target.model.capabilities.inputs else {}


def plain(target, **options):
    return specjax.decode(target, "autoregressive", PROMPTS, **OPTIONS, **options).to_lists()


PAIRS = {
    "recurrent by itself": (recurrent, lambda: alike(recurrent())),
    "recurrent by a transformer": (recurrent, lambda: tiny_llama(seed=1, layers=1, vocab=VOCAB)),
    "transformer by recurrent": (lambda: tiny_llama(vocab=VOCAB), recurrent),
    "encoding by itself": (encoding, lambda: alike(encoding())),
    "encoding by recurrent": (encoding, recurrent),
}


@pytest.mark.parametrize("tree", [None, "4x2"], ids=["chain", "tree"])
@pytest.mark.parametrize("pair", PAIRS)
def test_greedy_text_is_that_of_plain_decoding(pair, tree):
    target, draft = (make() for make in PAIRS[pair])
    drafter = two_model(draft, 3, tree=tree and trees.parse(tree))
    actual = specjax.decode(target, drafter, PROMPTS, **OPTIONS, **inputs_for(target))
    assert actual.to_lists() == plain(target, **inputs_for(target))
    if pair.endswith("itself"):  # so that paths of several nodes were committed, and rejected ones were not
        assert float(actual.mean_accepted.min()) > 0.5 and int(actual.stats.drafted.sum() - actual.stats.accepted.sum())


@pytest.mark.parametrize("tree", [None, "4x2"], ids=["chain", "tree"])
@pytest.mark.parametrize("make", [recurrent, encoding], ids=["recurrent", "encoding"])
def test_coupled_text_is_that_of_plain_decoding(make, tree):
    target = make()
    drafter = two_model(alike(target), 3, tree=tree and trees.parse(tree))
    options = {"temperature": 0.9, "sampling": "coupled"} | inputs_for(target)
    actual = specjax.decode(target, drafter, PROMPTS, **OPTIONS, **options)
    assert actual.to_lists() == plain(target, **options)
    assert float(actual.block_efficiency.mean()) > 1.2


@pytest.mark.parametrize("make", [recurrent, encoding], ids=["recurrent", "encoding"])
def test_sampled_text_has_the_law_of_the_target(make):
    target, rows, prompt = make(SMALL), 8000, [1, 0, 2, 1]
    inputs = inputs_of(1, SMALL) if target.model.capabilities.inputs else None
    distribution = law_of_triples(target, prompt, inputs)
    assert abs(distribution.sum() - 1) < 1e-4
    prompts = jnp.tile(jnp.array([prompt]), (rows, 1)), jnp.full((rows,), len(prompt))
    other_values = {} if inputs is None else {"inputs": jnp.repeat(inputs, rows, 0)}
    drafter = two_model(alike(target, 0.5), tree=trees.parse("2x1"))
    options = {"key": jax.random.key(7), "max_new_tokens": 3, "temperature": 1.0}
    result = specjax.decode(target, drafter, prompts, **options, **other_values)
    index = np.asarray(result.tokens) @ np.array([SMALL**2, SMALL, 1])
    counts = np.bincount(index, minlength=SMALL**3).reshape((SMALL,) * 3)
    assert chi_square(counts, distribution) > 1e-3
    of_draft = law_of_triples(alike(target, 0.5), prompt, inputs)
    assert chi_square(counts, of_draft) < 1e-6  # the draft's own distribution would be caught


def test_a_draft_model_that_ignores_the_tree_drafts_worse_but_writes_the_same():
    """Guarantees never depend on the draft model: a wrong one costs acceptance."""
    target, right = recurrent(), two_model(recurrent(), tree=trees.parse("4x2"))
    wrong = two_model(Target(recurrent_model(VOCAB, fold_in_order), target.params), tree=trees.parse("4x2"))
    good, bad = (specjax.decode(target, drafter, PROMPTS, **OPTIONS) for drafter in (right, wrong))
    assert good.to_lists() == bad.to_lists() == plain(target)
    assert float(good.block_efficiency.min()) > 2.8  # 3 tokens a pass, but for the last one
    assert float(bad.block_efficiency.mean()) < 2.7


def test_a_target_that_ignores_the_tree_writes_another_text():
    wrong = Target(recurrent_model(VOCAB, fold_in_order), recurrent().params)
    drafter = two_model(alike(recurrent()), tree=trees.parse("4x2"))
    assert specjax.decode(wrong, drafter, PROMPTS, **OPTIONS).to_lists() != plain(wrong)


def test_texts_depend_on_the_inputs():
    target = encoding()
    ours, other_values = (plain(target, **inputs_for(target, seed=seed)) for seed in (0, 1))
    assert all(a != b for a, b in zip(ours, other_values, strict=True))


REQUESTS = [[1, 2, 3, 1, 2, 3, 4], [5], [7, 8], [3, 3, 3], [9, 1]]


def served(target: Target, drafter) -> list[list[int]]:
    keys = jax.random.split(jax.random.key(5), len(REQUESTS))
    has = target.model.capabilities.inputs
    inputs = inputs_of(len(REQUESTS)) if has else [None] * len(REQUESTS)
    requests = [
        specjax.Request(prompt, key, count, one)
        for prompt, key, count, one in zip(REQUESTS, keys, (9, 4, 12, 7, 5), inputs, strict=True)
    ]
    texts: list[list[int]] = [[] for _ in REQUESTS]
    example = {"inputs": np.zeros(INPUTS, np.int32)} if has else {}
    options = {"slots": 2, "longest_prompt": 8, "max_new_tokens": 12, "temperature": 0.9, "sampling": "coupled"}
    for piece in specjax.serve(target, drafter, requests, **options, **example):
        texts[piece.request] += piece.tokens
    return texts


def alone(target: Target) -> list[list[int]]:
    keys = jax.random.split(jax.random.key(5), len(REQUESTS))
    inputs = {"inputs": inputs_of(len(REQUESTS))} if target.model.capabilities.inputs else {}
    options = {"key": keys, "max_new_tokens": 12, "temperature": 0.9, "sampling": "coupled"}
    rows = specjax.decode(target, "autoregressive", REQUESTS, **options, **inputs).to_lists()
    return [row[:count] for row, count in zip(rows, (9, 4, 12, 7, 5), strict=True)]


@pytest.mark.parametrize("make", [recurrent, encoding], ids=["recurrent", "encoding"])
def test_served_texts_are_those_of_requests_alone(make):
    """The loop of requests serves caches whose rows are their second axis."""
    target = make()
    assert served(target, two_model(alike(target), 2)) == alone(target)


def test_a_model_that_says_the_wrong_axis_is_caught():
    target = encoding()
    wrong = Target(target.model._replace(axes=batch_axes.rows_first), target.params)
    assert served(wrong, prompt_lookup(2)) != alone(target)


@pytest.mark.parametrize("make", [recurrent, encoding], ids=["recurrent", "encoding"])
def test_a_stream_gives_the_text_of_decode(make):
    target = make()
    texts: list[list[int]] = [[] for _ in PROMPTS]
    options = OPTIONS | {"temperature": 0.9} | inputs_for(target)
    for step in specjax.stream(target, two_model(alike(target), 3), PROMPTS, **options):
        for text, new in zip(texts, step.tokens, strict=True):
            text += new
    assert texts == specjax.decode(target, two_model(alike(target), 3), PROMPTS, **options).to_lists()


def chains_only() -> Target:
    """Return the recurrent model for which a tree is a chain of its nodes, and which declares it."""
    model = recurrent_model(VOCAB, fold_in_order)
    return Target(model._replace(capabilities=model.capabilities._replace(trees=False)), recurrent().params)


def test_a_model_that_takes_chains_only_is_given_no_trees():
    target = chains_only()
    expected = plain(target)
    assert specjax.decode(target, None, PROMPTS, **OPTIONS).to_lists() == expected  # by default prompt lookup
    assert specjax.decode(target, suffix(5), PROMPTS, **OPTIONS).to_lists() == expected
    for drafter in (auto(VOCAB, costs=(1.0,) * 4), suffix(15, fallback=token_recycling(VOCAB, num_nodes=7))):
        with pytest.raises(UsageError, match="accepts only chains"):
            specjax.decode(target, drafter, PROMPTS, **OPTIONS)
    with pytest.raises(UsageError, match="accepts only chains"):
        hierarchical(chains_only(), token_recycling(VOCAB, num_nodes=7))


def test_what_hierarchical_cannot_take_back_is_refused():
    with pytest.raises(UsageError, match="cannot rewind its cache, which the middle model of hierarchical needs"):
        hierarchical(recurrent(), prompt_lookup(2))
    with pytest.raises(UsageError, match="inner drafter's model cannot rewind"):
        hierarchical(tiny_llama(vocab=VOCAB), two_model(recurrent(), lag=4))


def test_a_middle_model_without_inputs_drafts_for_a_target_with_some():
    drafter = hierarchical(tiny_llama(vocab=VOCAB), prompt_lookup(2))
    actual = specjax.decode(encoding(), drafter, PROMPTS, **OPTIONS, **inputs_for(encoding()))
    assert actual.to_lists() == plain(encoding(), **inputs_for(encoding()))


def test_inputs_are_one_per_prompt_and_neither_missing_nor_too_many():
    with pytest.raises(UsageError, match="needs inputs in addition to tokens"):
        specjax.decode(encoding(), None, PROMPTS, **OPTIONS)
    with pytest.raises(UsageError, match="one entry per prompt, 3"):
        specjax.decode(encoding(), None, PROMPTS, **OPTIONS, inputs=inputs_of(1))


def test_serve_refuses_a_request_with_wrong_inputs_and_goes_on():
    inputs = inputs_of(2)
    row = lambda i: jax.tree.map(lambda x: x[i], inputs)
    key = jax.random.key(0)
    requests = [specjax.Request([1, 2], key, inputs=row(0)), specjax.Request([1, 2], key)]
    news = list(
        specjax.serve(
            encoding(), prompt_lookup(2), requests, slots=2, longest_prompt=4, max_new_tokens=5, inputs=row(0)
        )
    )
    assert [(n.request, n.error) for n in news if n.error] == [
        (1, "its inputs do not have the structure, shapes and dtypes of the inputs of serve")
    ]
    assert sum(len(n.tokens) for n in news if n.request == 0) == 5


def test_runs_with_other_inputs_are_other_runs():
    ours = inputs_of(len(PROMPTS))
    theirs = jax.tree.map(lambda x: x.at[1].add(1), ours)
    job = lambda inputs: prepare(
        encoding(), prompt_lookup(2), PROMPTS, specjax.Settings(), key=OPTIONS["key"], max_new_tokens=4, inputs=inputs
    )
    first, second = fingerprint_of(job(ours)), fingerprint_of(job(theirs))
    assert {name for name in first if first[name] != second[name]} == {"inputs"}
