"""SpecPC against float64 NumPy written from the card: scores, pooling and selection, and what its errors say."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_in_numpy import look_ahead, run, sharp_llama
from compiled import compiled_programs
from rules import takes_all
from toy import markov, tiny_llama

from specjax import UsageError, decode, drafters
from specjax.compression import specpc
from specjax.compression.specpc import SelectionRule, check_options, importance, most_important
from specjax.models import make_model
from specjax.types import Target

RNG = np.random.default_rng(0)
LONG = RNG.integers(1, 60, 150).tolist()
LENGTHS = np.array([90, 61])
RULE = SelectionRule(budget=40, window=8, kernel=6, neighbors=4, first=3, lookahead=1, first_layer=2)
SMALL = {"window": 8, "kernel": 6, "neighbors": 4, "first": 3}


draft = sharp_llama


def scores_of(prompt, rule, mutant=""):
    """Return the card's score of every token of a prompt."""
    text = look_ahead(draft().params, prompt, rule.lookahead - 1)
    weights, _ = run(draft().params, text)
    start = len(prompt) - rule.window
    ramp = np.ones(len(text) - start)
    ramp[: rule.window] = np.linspace(0, 1, rule.window)
    if mutant == "no ramp":
        ramp[:] = 1
    if mutant == "the prompt's queries alone":
        ramp[rule.window :] = 0
    layers = weights[0 if mutant == "all layers" else rule.first_layer :, :, start:, : len(prompt)]
    weighted = layers * ramp[:, None]
    return weighted.sum((0, 1, 2)) if mutant == "sum" else weighted.max((0, 1, 2))


def select(scores, rule, mutant=""):
    """Return the places that the card selects, with the reference's clipped neighbours."""
    size, left = len(scores), (rule.kernel - 1) // 2
    left = rule.kernel - 1 - left if mutant == "kernel to the left" else left
    pooled = [max(scores[max(i - left, 0) : i - left + rule.kernel]) for i in range(size)]
    pooled = scores if mutant == "no pooling" else pooled
    ranked = sorted(range(size), key=lambda i: (-pooled[i], i))
    reach = (max(rule.neighbors, 1) - 1) // 2
    around = range(-reach, max(rule.neighbors, 1) - reach)
    around = [0] if mutant == "no neighbours" else sorted(around, key=lambda offset: (abs(offset), offset))
    places = [*range(size - rule.window, size)] if mutant != "no window" else []
    places += range(rule.first) if mutant != "no first tokens" else []
    places += [min(max(place + offset, 0), size - 1) for place in ranked for offset in around]
    return sorted([*dict.fromkeys(places)][: rule.budget])


@functools.partial(jax.jit, static_argnames="rule")
def scores_in_jax(target, tokens, lengths, rule):
    return importance(target, tokens, lengths, rule)


def padded(rows, size=256):
    tokens = np.zeros((len(rows), size), np.int32)
    for place, row in zip(tokens, rows, strict=True):
        place[: len(row)] = row
    return tokens


@pytest.mark.parametrize("lookahead", [1, 3])
def test_scores_are_those_of_the_card(lookahead):
    rule = RULE._replace(lookahead=lookahead)
    prompts = [LONG[:length] for length in LENGTHS]
    ours = np.asarray(scores_in_jax(draft(), padded(prompts), LENGTHS, rule))
    for row, prompt in zip(ours, prompts, strict=True):
        np.testing.assert_allclose(row[: len(prompt)], scores_of(prompt, rule), rtol=1e-3, atol=1e-5)
        assert not row[len(prompt) :].any()
        mutants = ["no ramp", "all layers", "sum"] + (["the prompt's queries alone"] if lookahead > 1 else [])
        for mutant in mutants:
            assert np.abs(row[: len(prompt)] - scores_of(prompt, rule, mutant)).max() > 1e-3, mutant


def test_stacked_layers_have_the_same_scores():
    model = make_model(dataclasses.replace(draft().model.config, stacked=True))
    layers = jax.tree.map(lambda *parts: jnp.stack(parts), *(draft().params["layers"][i] for i in range(4)))
    stacked, prompt = Target(model, draft().params | {"layers": layers}), padded([LONG[:90]])
    scores = [scores_in_jax(target, prompt, LENGTHS[:1], RULE) for target in (stacked, draft())]
    np.testing.assert_allclose(*scores, rtol=1e-3, atol=1e-5)


RULES = [
    RULE,
    RULE._replace(kernel=1, neighbors=0),
    RULE._replace(kernel=5, neighbors=7, first=0),
    RULE._replace(window=1),
]


@pytest.mark.parametrize("rule", RULES)
def test_the_selection_is_that_of_the_card(rule):
    scores = np.zeros((2, 128), np.float32)
    for row, length in zip(scores, LENGTHS, strict=True):
        row[:length] = RNG.random(length) ** 8
    ours = np.asarray(jax.jit(most_important, static_argnums=2)(scores, LENGTHS, rule))
    assert ours.tolist() == [select(row[:length], rule) for row, length in zip(scores, LENGTHS, strict=True)]


@pytest.mark.parametrize(
    "mutant", ["no pooling", "kernel to the left", "no neighbours", "no window", "no first tokens"]
)
def test_each_step_of_the_selection_matters(mutant):
    scores = (np.random.default_rng(1).random((1, 90)) ** 8).astype(np.float32)
    scores[0, :12] = 0
    [ours] = np.asarray(most_important(jnp.asarray(scores), LENGTHS[:1], RULE)).tolist()
    assert ours == select(scores[0], RULE) != select(scores[0], RULE, mutant)


def test_the_example_of_the_card():
    """The maximum of two queries is (.3, .5, .1, .2, .4), and that of three neighbours (.5, .5, .5, .4, .4)."""
    queries = jnp.array([[0.1, 0.5, 0.1, 0.2, 0.1], [0.3, 0.1, 0.1, 0.1, 0.4]])
    rule = SelectionRule(budget=2, window=0, kernel=3, neighbors=1, first=0, lookahead=1, first_layer=0)
    assert most_important(jnp.max(queries, 0)[None], jnp.array([5]), rule).tolist() == [[0, 1]]
    assert most_important(jnp.max(queries, 0)[None], jnp.array([5]), rule._replace(budget=4)).tolist() == [[0, 1, 2, 3]]


def test_a_planted_token_stays_with_its_neighbours():
    scores = np.full((1, 90), 0.01, np.float32)
    scores[0, 57] = 0.9
    [ours] = most_important(jnp.asarray(scores), LENGTHS[:1], RULE._replace(budget=22)).tolist()
    assert {*range(54, 61)} <= {*ours} and ours == sorted(ours)


def test_compressed_prompts_are_those_of_the_card():
    """Several lengths, and a prompt that fits the budget already."""
    prompts = [LONG, LONG[:30], LONG[:40], LONG[:77]]
    result = specpc(draft(), prompts, 40, **SMALL)
    rule = RULE
    for prompt, short in zip(prompts, result, strict=True):
        if len(prompt) <= 40:
            assert short == prompt
            continue
        assert short == [prompt[i] for i in select(scores_of(prompt, rule).astype(np.float32), rule)]
        assert len(short) == 40 and short[:3] == prompt[:3] and short[-8:] == prompt[-8:]


@pytest.mark.parametrize("drafter", ["prompt_lookup", "two_model"])
def test_speculation_over_a_compressed_prompt_is_exact(drafter):
    target = tiny_llama()
    [prompt] = specpc(draft(), [LONG], 40, **SMALL)
    make = {
        "prompt_lookup": drafters.prompt_lookup,
        "two_model": lambda: drafters.two_model(draft(), 3, keep_logits=True),
    }[drafter]
    options = {"key": jax.random.key(0), "max_new_tokens": 24}
    plain = decode(target, "autoregressive", [prompt], **options).to_lists()
    assert decode(target, make(), [prompt], **options).to_lists() == plain
    assert plain != decode(target, "autoregressive", [LONG], **options).to_lists(), "the compression is lossy"
    if drafter == "two_model":
        assert decode(target, make(), [prompt], verifier=takes_all, **options).to_lists() != plain


def test_a_second_call_compiles_nothing():
    specpc(draft(), [LONG[:90]], 40, **SMALL)
    with compiled_programs() as compiled:
        specpc(draft(), [LONG[:100], LONG[:5]], 40, **SMALL)
    assert compiled == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": 0}, "budget must be a whole number of at least 1, not 0"),
        ({"budget": 1.5}, "budget must be a whole number of at least 1, not 1.5"),
        ({"budget": 68}, "budget must be above 68, the first 4 and the last 64 tokens that always stay, not 68; raise"),
        ({"window": 0}, "window must be a whole number of at least 1, not 0"),
        ({"kernel": -1}, "kernel must be a whole number of at least 1, not -1"),
        ({"neighbors": 2000}, "neighbors must be a whole number from 0 to 1024, not 2000"),
        ({"first": -1}, "first must be a whole number of at least 0, not -1"),
        ({"lookahead": 0}, "lookahead must be a whole number of at least 1, not 0"),
        ({"first_layer": 4}, "first_layer must be below the 4 layers of the draft model llama, not 4; lower it"),
    ],
)
def test_settings_out_of_range(options, words):
    with pytest.raises(UsageError, match=words):
        specpc(draft(), [LONG], **options)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([], "prompts is empty; give at least one prompt"),
        ([[1, 2], []], "prompt 1 is empty"),
        ("text", "prompts are lists of token ids, not text"),
        ([1, 2], "put a single prompt into a list"),
        (["text"], "prompts are lists of token ids, not text"),
        ([[1], [2, 64]], "prompt 1 has the token 64 at place 1, outside of the model's vocabulary of 64"),
        ([[1], [2] * 512], "prompt 1 has 512 tokens, and the draft model llama reads 512, lookahead of 1 included"),
    ],
)
def test_prompts_that_do_not_fit(prompts, words):
    with pytest.raises(UsageError, match=words):
        specpc(draft(), prompts)


def test_drafts_that_do_not_fit():
    with pytest.raises(UsageError, match=r"the model markov has no cache of keys and values .* specpc needs; choose"):
        specpc(markov(), [[0]])
    windowed = dataclasses.replace(draft().model.config, window=8)
    with pytest.raises(UsageError, match="attends within windows, which a selection would shift, which specpc needs"):
        specpc(Target(make_model(windowed), draft().params), [LONG])


def test_defaults():
    assert check_options().offsets[:5] == [0, -1, 1, -2, 2] and check_options().offsets[-1] == 32
    assert check_options(kernel=2000).neighbors == 1024 and check_options(neighbors=0).offsets == [0]
