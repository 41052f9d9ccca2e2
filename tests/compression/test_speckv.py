"""SpecKV against float64 NumPy written from the card: its selection, its texts, and what its errors say."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_in_numpy import LAYERS, look_ahead, run, sharp_llama
from compiled import compiled_programs
from rules import takes_all
from toy import chi_square, markov, tiny_llama

from specjax import UsageError, costs, decode, drafters, serve
from specjax.bench.near_ties import next_logits
from specjax.compression import speckv
from specjax.compression.compact_model import CacheRule, select_slots
from specjax.decoders.pearl import pearl
from specjax.engine.prefill import prefill
from specjax.models import make_model
from specjax.persistence.fingerprint import digest_model
from specjax.retrieval import cached_tokens
from specjax.retrieval.cached_tokens import most_observed
from specjax.rollouts.scoring import score
from specjax.types import Target

RNG = np.random.default_rng(0)
LONG = RNG.integers(1, 60, 90).tolist()
SHORT = LONG[20:50]
RULE = CacheRule(capacity=16, window=4, kernel=5, lookahead=3, max_new_tokens=12)
SMALL = {"capacity": 16, "window": 4, "kernel": 5, "lookahead": 3}
HEADS = 2
target = sharp_llama


@functools.cache
def another() -> Target:
    """Another model, which looks ahead or drafts."""
    return tiny_llama(seed=1)


@functools.cache
def compressed(has_draft: bool = False, **changes) -> Target:
    return speckv(target(), another() if has_draft else None, RULE.max_new_tokens, **SMALL | changes)


def card(params, text, length, rule=RULE, mutant=""):
    """Return the cached places that stay, by layer and key/value head, of a text with the lookahead at its end."""
    weights = run(params, text)[0]  # [layers, H, T, T]
    cached = length - 1
    start = max(cached - rule.window, 0)
    end = cached + 1 if mutant == "no lookahead" else len(text)
    observed = weights[:, :, start + (mutant == "one query less") : end, :start]
    pair = observed.reshape(LAYERS, HEADS, -1, *observed.shape[2:])
    scores = pair.mean((2, 3)) if mutant == "mean" else pair.max(2).mean(2) if mutant == "mean of queries" else None
    scores = pair.max((2, 3)) if scores is None else scores
    if mutant == "one set for all heads":
        scores = np.broadcast_to(scores.max(1, keepdims=True), scores.shape)
    reach = 0 if mutant == "no pooling" else rule.kernel // 2
    pooled = [scores[..., max(i - reach, 0) : i + reach + 1].max(-1) for i in range(start)]
    count = min(rule.capacity - (0 if mutant == "window on top" else cached - start), start)
    window = [*range(start, cached)]
    places = lambda layer, head: sorted(range(start), key=lambda i: (-pooled[i][layer, head], i))[: max(count, 0)]
    return [[sorted(places(layer, head)) + window for head in range(HEADS)] for layer in range(LAYERS)]


@functools.partial(jax.jit, static_argnames="rule")
def selected(target, text, lengths, rule=RULE):
    cache = target.model.start_cache(target.params, None, lengths, 256)
    cache = prefill(target.model, target.params, cache, text, lengths - 1)
    return select_slots(target, text, cache, lengths - 1, rule)


def padded(rows, size=256):
    tokens = np.zeros((len(rows), size), np.int32)
    for place, row in zip(tokens, rows, strict=True):
        place[: len(row)] = row
    return jnp.asarray(tokens)


MUTANTS = ["no lookahead", "one query less", "mean", "mean of queries", "one set for all heads", "no pooling",
    "window on top"]  # fmt: skip


def test_the_selection_is_that_of_the_card():
    """Use two prompts of different lengths, and one that fits the capacity."""
    prompts = [LONG, SHORT, LONG[:9]]
    texts = [look_ahead(target().params, prompt, 3) for prompt in prompts]
    slots = np.asarray(selected(target(), padded(texts), jnp.array([len(prompt) for prompt in prompts])))
    assert slots.shape == (LAYERS, 3, HEADS, RULE.capacity)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        stay = [[[int(i) for i in head if i < len(prompt) - 1] for head in layer] for layer in slots[:, row]]
        assert stay == card(target().params, text, len(prompt))
        if len(prompt) > RULE.capacity + 1:
            assert [
                mutant for mutant in MUTANTS if card(target().params, text, len(prompt), RULE, mutant) == stay
            ] == []
        else:
            assert stay[0][0] == [*range(len(prompt) - 1)]


def test_stacked_and_rounded_caches_have_a_selection():
    model = make_model(dataclasses.replace(target().model.config, stacked=True))
    layers = jax.tree.map(lambda *parts: jnp.stack(parts), *(target().params["layers"][i] for i in range(LAYERS)))
    text, lengths = padded([look_ahead(target().params, LONG, 3)]), jnp.array([len(LONG)])
    expected = np.asarray(selected(target(), text, lengths))
    stacked = Target(model, target().params | {"layers": layers})
    np.testing.assert_array_equal(selected(stacked, text, lengths), expected)
    for name, params in ((True, stacked.params), (False, target().params)):
        rounded = make_model(dataclasses.replace(target().model.config, stacked=name, cache_dtype="int8"))
        assert (np.asarray(selected(Target(rounded, params), text, lengths)) == expected).mean() > 0.7


def test_the_example_of_the_card():
    """The maximum of two queries is (.3, .5, .1, .2, .4), and that of three neighbours (.5, .5, .5, .4, .4)."""
    weights = np.array([[0.1, 0.5, 0.1, 0.2, 0.1], [0.3, 0.1, 0.1, 0.1, 0.4]])
    query = jnp.asarray(np.log(weights))[None, :, None]  # the keys are unit vectors, and the new tokens' keys are far
    key, far = jnp.eye(5)[None, None], jnp.full((1, 1, 2, 5), 50.0)
    select = lambda budget: most_observed(query, key, far, jnp.array([5]), jnp.array([5]), budget, 3).tolist()
    assert select(2) == [[[0, 1]]] and select(4) == [[[0, 1, 2, 3]]]


def test_a_capacity_of_all_tokens_but_one_drops_the_least_observed_token():
    """A kernel of 1 compares single tokens. All queries of a group count, and so does the lookahead."""
    text, cached = look_ahead(target().params, LONG, 3), len(LONG) - 1
    rule = RULE._replace(capacity=cached - 1, kernel=1)
    slots = np.asarray(selected(target(), padded([text]), jnp.array([len(LONG)]), rule))[:, 0]
    dropped = [[[*{*range(cached)} - {*head.tolist()}] for head in layer] for layer in slots]
    start = cached - rule.window
    weights = run(target().params, text)[0][:, :, start:, :start]  # [layers, H, window + 1 + lookahead, start]
    groups = weights.reshape(LAYERS, HEADS, -1, *weights.shape[2:])
    argmin = lambda observed: observed.max((2, 3)).argmin(-1)[..., None]
    np.testing.assert_array_equal(dropped, argmin(groups))
    for mutant in (groups[:, :, :1], groups[..., : -rule.lookahead, :]):  # one head of a group, or no lookahead
        assert (argmin(mutant) != dropped).any()


def hidden_keys(places, length, size):
    """Return the keys that do not stay, for the queries from the last token of the prompt on, bool[layers, K, T, T]."""
    hidden = np.zeros((LAYERS, HEADS, size, size), bool)
    for layer in range(LAYERS):
        for head in range(HEADS):
            dropped = [*{*range(length - 1)} - {*places[layer][head]}]
            hidden[layer, head, length - 1 :, dropped] = True
    return hidden


def greedy(params, prompt, places, count, shift=0):
    """Return the greedy text of a model that sees `places` of the prompt only, from its last token on."""
    text = list(prompt)
    for _ in range(count):
        hidden = hidden_keys(places, len(prompt), len(text))
        text.append(int(np.argmax(run(params, text, hidden)[1][-1])))
    return text[len(prompt) :]


def texts(model, drafter="autoregressive", prompts=(LONG, SHORT, LONG[:9]), **options):
    options = {"key": jax.random.key(0), "max_new_tokens": 12} | options
    return decode(model, drafter, list(prompts), **options).to_lists()


@pytest.mark.parametrize("has_draft", [False, True])
def test_texts_are_those_of_the_keys_that_stay(has_draft):
    """The keys that stay have their places in the complete text, and so have the new tokens."""
    result = texts(compressed(has_draft))
    writer = another() if has_draft else target()
    for prompt, new in zip((LONG, SHORT, LONG[:9]), result, strict=True):
        count = RULE.lookahead
        if has_draft:
            [written] = decode(writer, "autoregressive", [prompt], key=0, max_new_tokens=count).to_lists()
            text = [*prompt, *written]
        else:
            text = look_ahead(target().params, prompt, count)
        places = card(target().params, text, len(prompt))
        assert new == greedy(target().params, prompt, places, 12)
    complete = texts(target())
    assert result[:2] != complete[:2] and result[2] == complete[2], "the compression is lossy"


def make(name):
    return {
        "prompt_lookup": drafters.prompt_lookup,
        "two_model": lambda: drafters.two_model(another(), 3, keep_logits=True),
        "token_recycling": lambda: drafters.token_recycling(64),
        "early_exit": lambda: drafters.early_exit(compressed(), exit_layer=2, num_tokens=3),
    }[name]()


@pytest.mark.parametrize("name", ["prompt_lookup", "two_model", "token_recycling", "early_exit"])
def test_speculation_over_a_compact_cache_is_exact(name):
    plain = texts(compressed())
    assert texts(compressed(), make(name)) == plain
    if name == "two_model":
        assert texts(compressed(), make(name), verifier=takes_all) != plain


def test_a_large_capacity_leaves_the_text():
    for capacity in (len(LONG) - 1, 400):
        assert texts(compressed(capacity=capacity)) == texts(target())


def test_a_sampled_text_has_the_law_of_the_compact_cache():
    """Compare two sampled tokens of a vocabulary of 3 with their distribution in NumPy, and with that of a mutant."""
    model = sharp_llama(vocab=3)
    prompt = (RNG.integers(0, 3, 24)).tolist()
    text = look_ahead(model.params, prompt, 3)
    places = card(model.params, text, len(prompt), RULE._replace(capacity=8))
    law, complete = np.zeros((3, 3)), np.zeros((3, 3))
    for table, stay in ((law, places), (complete, [[[*range(len(prompt) - 1)]] * HEADS] * LAYERS)):
        for first in range(3):
            chain = [*prompt, first]
            logits = run(model.params, chain, hidden_keys(stay, len(prompt), len(chain)))[1][-2:] / 2.0
            p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
            table[first] = p[0, first] * p[1]
    small = speckv(model, None, 4, **SMALL | {"capacity": 8})
    options = {"key": jax.random.key(3), "max_new_tokens": 2, "samples_per_prompt": 2000, "temperature": 2.0}
    draft = drafters.two_model(tiny_llama(seed=1, vocab=3), 2, keep_logits=True)

    def counts(**more):
        first, second = np.asarray(decode(small, draft, [prompt], **options, **more).to_lists()).T
        return np.bincount(first * 3 + second, minlength=9).reshape(3, 3)

    sampled = counts()
    assert chi_square(sampled, law) > 1e-3
    assert chi_square(sampled, complete) < 1e-6, "the complete cache has another law"
    assert chi_square(counts(verifier=takes_all), law) < 1e-6


def test_the_cache_is_small_and_has_room():
    """A cache after the prompt has slots for the capacity, the new tokens and a tree, whatever the prompt's length."""
    model, tokens = compressed().model, padded([LONG], 512)
    cache = model.init_cache(compressed().params, None, 1, 512)
    cache = prefill(model, compressed().params, cache, tokens, jnp.array([len(LONG) - 1]))
    small = model.finish_prompt(compressed().params, cache, tokens, jnp.array([len(LONG)]), 4)
    assert small.base.k[0].shape[2] == 128 < cache.base.k[0].shape[2] == 512
    assert small.base.length.tolist() == [16] and small.dropped.tolist() == [len(LONG) - 1 - 16]
    assert model.rewind(small, jnp.array([len(LONG) - 2])).base.length.tolist() == [15]
    with pytest.raises(UsageError, match=r"max_new_tokens must be at most 12, for which the caches of llama by speckv"):
        texts(compressed(), max_new_tokens=13)


def test_a_pass_reads_the_weights_of_the_target_only():
    assert costs.active_bytes(compressed(True)) == costs.active_bytes(compressed()) == costs.active_bytes(target())
    assert costs.of_draft(compressed(True), another()) == costs.of_draft(target(), another())


def test_the_scores_of_few_queries_exist_at_a_time(monkeypatch):
    """Queries are taken in parts, whose maximum is that of all; the memory is that of a part."""
    rng = np.random.default_rng(2)
    rand = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    query, key, new_key = rand(2, 45, 4, 8), rand(2, 2, 700, 8), rand(2, 2, 45, 8)
    start, cached = jnp.array([600, 300]), jnp.array([620, 310])
    select = lambda: jax.jit(lambda *arrays: most_observed(*arrays, start, cached, 90, 7)).lower(query, key, new_key)
    parts, memory = select().compile(), []
    for size in (cached_tokens.QUERIES, 45):
        monkeypatch.setattr(cached_tokens, "QUERIES", size)
        program = select().compile()
        np.testing.assert_array_equal(program(query, key, new_key), parts(query, key, new_key))
        memory.append(program.memory_analysis().temp_size_in_bytes)
    assert memory[0] < 0.6 * memory[1]


def test_a_checkpoint_is_of_one_capacity():
    again = speckv(target(), None, RULE.max_new_tokens, **SMALL)
    assert digest_model(compressed()) == digest_model(again) != digest_model(compressed(capacity=17))


def test_near_ties_are_measured_on_the_compact_cache():
    [text] = texts(compressed(), prompts=[LONG])
    for count in (0, 5):
        logits = next_logits(compressed(), [*LONG, *text[:count]], len(LONG))
        assert int(np.argmax(logits)) == text[count]


def test_a_second_call_compiles_nothing():
    texts(compressed())
    with compiled_programs() as compiled:
        again = speckv(target(), None, RULE.max_new_tokens, **SMALL)
        texts(again, prompts=[LONG[:77], SHORT, LONG[:20]], key=jax.random.key(1))
    assert compiled == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capacity": 0}, "capacity must be a whole number of at least 1, not 0"),
        ({"capacity": 32}, "capacity must be above 32, the last tokens that always stay, not 32; raise capacity"),
        ({"window": 0}, "window must be a whole number of at least 1, not 0"),
        ({"kernel": 4}, "kernel must be an odd number, such as 5, not 4"),
        ({"lookahead": 129}, "lookahead must be a whole number from 1 to 128, not 129"),
        ({"max_new_tokens": None}, "max_new_tokens must be a whole number of at least 1, not None"),
        ({"capacity": None}, "capacity must be a whole number of at least 1, not None"),
        ({"target": None}, "target must be a specjax.Target, not NoneType; load one with specjax.load"),
        ({"draft": "small"}, "draft must be a specjax.Target, not str"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, not 0"),
    ],
)
def test_settings_out_of_range(options, words):
    with pytest.raises(UsageError, match=words):
        speckv(**{"target": target(), "draft": None, "max_new_tokens": 8} | options)


def test_models_that_do_not_fit():
    with pytest.raises(UsageError, match=r"the model markov has no cache of keys and values .* speckv needs; choose"):
        speckv(markov(), None, 8)
    windowed = dataclasses.replace(target().model.config, window=8)
    with pytest.raises(UsageError, match="attends within windows, which a selection would shift, which speckv needs"):
        speckv(Target(make_model(windowed), target().params), None, 8)
    with pytest.raises(UsageError, match="the draft model markov has 99 tokens and the target 64; choose"):
        speckv(target(), markov(np.full((99, 99), 1 / 99, np.float32)), 8)
    with pytest.raises(UsageError, match="the draft model llama cannot rewind, which speckv needs"):
        speckv(target(), Target(another().model._replace(rewind=None), another().params), 8)
    with pytest.raises(
        UsageError, match="serve does not compress caches, as llama by speckv:16,window=4,kernel=5,lookahead=3 does"
    ):
        serve(compressed(), drafters.autoregressive(), [], slots=1, longest_prompt=64, max_new_tokens=8)
    with pytest.raises(UsageError, match="has no cache of keys and values on one device, which sparse_cache needs"):
        drafters.sparse_cache(compressed())


def test_parts_with_caches_of_their_own_refuse_a_compressed_target():
    small = compressed()
    for part in (
        lambda: score(small, [[1, 2]], [[3]]),
        lambda: pearl(small, tiny_llama(seed=1), [[1, 2]], key=0, max_new_tokens=2),
    ):
        with pytest.raises(UsageError, match="does not compress caches"):
            part()
