"""Retrieval against plain Python, positions of the short prompt, and a full cache (RAPID, A9)."""

import functools
import math

import attention_in_numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_in_numpy import sharp_llama
from rules import takes_valid
from toy import compiled, markov, tiny_llama, tiny_llama_alike

from specjax import UsageError, decode
from specjax.drafters import rapid
from specjax.drafters.model.rapid import attention_scores, retrieve
from specjax.engine.prefill import prefill
from specjax.types import Context, Target, Verdict

SMALL = {"budget": 12, "chunk": 4, "query": 3}


def reference(text, budget, chunk, query):
    """Return the shortened prompt, by the docstring of the module."""
    if len(text) <= budget:
        return text
    body, question = text[: len(text) - query], text[len(text) - query :]
    chunks = [body[i : i + chunk] for i in range(0, len(body), chunk)]
    held_by = {t: sum(t in c for c in chunks) for t in question}
    rarity = {t: round(1024 * math.log(len(chunks) / n)) for t, n in held_by.items() if n}
    score = lambda i: (i != 0, -sum(rarity.get(t, 0) for t in set(chunks[i])), i)
    best = sorted(sorted(range(len(chunks)), key=score)[: (budget - query) // chunk])
    return [t for i in best for t in chunks[i]] + question


def shortened(texts, size=64, **options):
    tokens = np.full((len(texts), size), 99, np.int32)  # what is behind a text has nothing to say
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    context = Context(jnp.asarray(tokens), jnp.array([len(text) for text in texts]))
    short = jax.jit(functools.partial(retrieve, slots=40, **(SMALL | options)))(context)
    assert short.tokens.shape == (len(texts), 40)
    return [row[:n].tolist() for row, n in zip(np.asarray(short.tokens), short.length, strict=True)]


def test_the_chunk_that_shares_rare_tokens_with_the_query_is_kept():
    #       first chunk |             |             | holds 8, rare |            | the query
    text = [50, 51, 52, 53, 1, 2, 3, 4, 1, 7, 1, 7, 1, 8, 2, 3, 5, 7, 6, 1, 8, 1, 7]
    assert shortened([text])[0] == [50, 51, 52, 53, 1, 8, 2, 3, 8, 1, 7]
    assert shortened([text], budget=16)[0] == [50, 51, 52, 53, 1, 7, 1, 7, 1, 8, 2, 3, 8, 1, 7]  # in document order
    assert shortened([text], budget=30)[0] == text


def test_equals_plain_python():
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 12, n).tolist() for n in (1, 2, 4, 11, 12, 13, 15, *rng.integers(13, 60, 50))]
    assert shortened(texts) == [reference(text, **SMALL) for text in texts]
    assert shortened(texts, budget=20) == [reference(text, 20, 4, 3) for text in texts]


def last_logits(target, texts, length):
    """Return logits after the first `length[b]` tokens of texts [B, 32]."""
    tokens = jnp.asarray(texts)
    batch, t = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(t), (batch, t))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)), (batch, t, t))
    output, _ = target.model.forward(
        target.params, tokens, target.model.init_cache(target.params, None, batch, t), positions=positions, mask=mask
    )
    return jnp.take_along_axis(output.logits, length[:, None, None] - 1, 1)[:, 0]


def test_drafts_are_what_a_fresh_pass_over_the_short_text_predicts():
    """Check a long prompt and one of a single token, after steps that accepted all, none and one."""
    target, prompts = tiny_llama(seed=3), [np.arange(100) * 7 % 64, [5]]
    drafter = compiled(rapid(target, 3, max_new_tokens=40, **SMALL))
    texts, short = [list(p) for p in prompts], [reference(list(p), **SMALL) for p in prompts]
    assert [len(s) for s in short] == [11, 1]
    rng = np.random.default_rng(0)
    fresh = jax.jit(functools.partial(last_logits, target))

    def buffer(rows, size):
        return jnp.asarray([[*map(int, row), *[0] * (size - len(row))] for row in rows], jnp.int32)

    context = lambda: Context(buffer(texts, 300), jnp.array([len(row) for row in texts]))
    state = drafter.init(drafter.params, context())
    assert state.cache.k[0].shape[-2] == 256  # 12 + 40 tokens and a chunk of the prefill; the text's buffer has 300
    for accepted in (3, 0, 1, 3):
        tree, state = drafter.propose(drafter.params, None, state, context(), jnp.full(2, 3))
        drafted = np.asarray(tree.tokens)
        for depth in range(1, 4):
            grown = [row + d[1:depth].tolist() for row, d in zip(short, drafted, strict=True)]
            logits = fresh(buffer(grown, 32), jnp.array([len(row) for row in grown]))
            np.testing.assert_array_equal(drafted[:, depth], logits.argmax(-1))
        path = np.where(np.arange(4) <= accepted, np.arange(4), -1)
        verdict = Verdict(np.stack([path, path]), np.full(2, accepted + 1), np.zeros(2, np.int32))
        state = drafter.update(drafter.params, state, (), verdict)
        for text, row, d in zip(texts, short, drafted, strict=True):
            new = [*d[1 : accepted + 1].tolist(), int(rng.integers(64))]
            text += new
            row += new


def test_a_prompt_within_the_budget_is_read_whole():
    """Use a prompt within the budget: the drafter equals `two_model`; the target as its own draft is always right."""
    run = lambda drafter, prompt: decode(tiny_llama(), drafter, [prompt], key=jax.random.key(0), max_new_tokens=12)
    options = SMALL | {"budget": 16, "max_new_tokens": 12}
    assert run(rapid(tiny_llama(), 3, **options), list(range(16))).stats.target_passes.tolist() == [3]
    short = run(rapid(tiny_llama(), 3, **options), list(range(60)))
    assert short.stats.target_passes.tolist() > [3]


def forgetful(target):
    """Return the same model without rewinding."""
    return Target(target.model._replace(rewind=None), target.params)


def test_a_row_that_outgrows_the_cache_is_read_again():
    """Use a text of one repeated sentence, for which all chunks are equal: the target as draft is always right."""
    rows = np.full((9, 9), 1e-6, np.float32)
    rows[np.arange(9), (np.arange(9) + 1) % 9] = 1.0
    run = lambda draft: decode(
        markov(rows), rapid(draft, 3, max_new_tokens=20, **SMALL), [[*range(9)] * 3, [1]], key=jax.random.key(0),
        max_new_tokens=280,
    )  # fmt: skip
    result = run(markov(rows))
    assert result.lengths.tolist() == [280, 280] and result.stats.target_passes.tolist() == [70, 70]
    drafted = run(forgetful(markov(rows))).stats.drafted.tolist()
    assert 15 <= drafted[0] <= 30 and 24 <= drafted[1] <= 40  # while it fits


def test_what_is_read_again_is_the_short_text():
    """Compare drafts after the limit with a new pass over the retrieved text; the other row keeps its cache."""
    target, prompts = tiny_llama(seed=3), [np.arange(70) * 7 % 64, np.arange(50) * 5 % 64]
    drafter = compiled(rapid(target, 3, max_new_tokens=20, **SMALL))
    texts, short = [list(map(int, p)) for p in prompts], [reference(list(map(int, p)), **SMALL) for p in prompts]
    buffer = lambda rows, size: jnp.asarray([[*row, *[0] * (size - len(row))] for row in rows], jnp.int32)
    context = lambda: Context(buffer(texts, 300), jnp.array([len(row) for row in texts]))
    state = drafter.init(drafter.params, context())
    new = (np.random.default_rng(0).integers(64, size=24).tolist(), [9])  # decoded without a draft
    for text, row, tokens in zip(texts, short, new, strict=True):
        text += tokens
        row += tokens
    assert len(short[0]) > 12 + 20
    short[0] = reference(texts[0], **SMALL)
    tree, state = drafter.propose(drafter.params, None, state, context(), jnp.full(2, 3))
    assert state.state.dropped.tolist() == [len(t) - len(s) for t, s in zip(texts, short, strict=True)]
    drafted = np.asarray(tree.tokens)
    for depth in range(1, 4):
        grown = [row + d[1:depth].tolist() for row, d in zip(short, drafted, strict=True)]
        logits = last_logits(target, buffer(grown, 32), jnp.array([len(row) for row in grown]))
        np.testing.assert_array_equal(drafted[:, depth], logits.argmax(-1))


def test_chunks_are_selected_again_by_the_same_program():
    """Every 8 new tokens the draft model reads the chunks that are relevant to the new end of the text."""
    target, text = tiny_llama(seed=3), list(map(int, np.arange(70) * 7 % 64))
    drafter = compiled(rapid(target, 3, max_new_tokens=200, refresh=8, **SMALL))
    context = lambda: Context(jnp.asarray([[*text, *[0] * (300 - len(text))]]), jnp.array([len(text)]))
    state = drafter.init(drafter.params, context())
    shift, short, refreshed = int(state.dropped[0]), reference(text, **SMALL), []
    assert state.cache.k[0].shape[2] == 256  # 12 + 8 tokens, and a chunk of the prefill
    for new in np.random.default_rng(0).integers(0, 64, 40).tolist():
        tree, state = drafter.propose(drafter.params, None, state, context(), jnp.full(1, 3))
        if int(state.state.dropped[0]) != shift:
            shift, short = int(state.state.dropped[0]), reference(text, **SMALL)
            refreshed.append(len(text))
            assert shift == len(text) - len(short)
        logits = last_logits(target, jnp.asarray([[*short, *[0] * (32 - len(short))]]), jnp.array([len(short)]))
        assert int(tree.tokens[0, 1]) == int(logits[0].argmax())
        verdict = Verdict(np.array([[0, -1, -1, -1]]), np.ones(1, np.int32), np.array([new]))
        state = drafter.update(drafter.params, state, (), verdict)
        text.append(new)
        short = [*short, new]
    assert len(refreshed) >= 3 and drafter.propose._cache_size() == 1


def test_a_text_with_new_chunks_is_exact():
    draft = tiny_llama_alike()
    drafter = rapid(draft, 3, max_new_tokens=200, refresh=8, **SMALL)
    options = {"key": jax.random.key(0), "max_new_tokens": 60}
    prompts = [[*range(50)], [5, 6]]
    plain = decode(tiny_llama(), "autoregressive", prompts, **options).to_lists()
    result = decode(tiny_llama(), drafter, prompts, **options)
    assert result.to_lists() == plain and result.stats.accepted.sum() > 0
    assert decode(tiny_llama(), drafter, prompts, verifier=takes_valid, **options).to_lists() != plain


def test_bad_settings():
    for options, sentence in [
        ({"num_tokens": 0}, "num_tokens must be at least 1"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"query": 1}, "query must be at least 2"),
        ({"budget": 0}, "budget must be at least 192, a chunk and the query, not 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"refresh": 0}, "refresh must be a whole number of at least 1, not 0"),
    ]:
        with pytest.raises(UsageError, match=sentence):
            rapid(tiny_llama(), **options)


def by_attention(**changes):
    return rapid(tiny_llama_alike(), 3, **SMALL | {"score": "attention", "max_new_tokens": 20} | changes)


def test_chunks_by_attention_are_those_of_plain_numpy():
    """Two texts of different lengths, whose attention is computed in float64."""
    texts = [np.random.default_rng(n).integers(1, 60, size).tolist() for n, size in ((0, 50), (1, 37))]
    tokens = np.zeros((2, 128), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    target, lengths = sharp_llama(), jnp.array(list(map(len, texts)))
    cache = target.model.init_cache(target.params, None, 2, 256)
    cache = prefill(target.model, target.params, cache, jnp.asarray(tokens), lengths - 1)
    context = Context(jnp.asarray(tokens), lengths, cache=cache, target=target)
    scores = attention_scores(context, SMALL["chunk"], SMALL["query"])
    short = retrieve(context, **SMALL, slots=40, scores=scores)
    for row, text in enumerate(texts):
        weights = attention_in_numpy.run(target.params, text[:-1])[0][-1, :, -1].mean(0)
        body = len(text) - SMALL["query"]
        chunks = [range(i, min(i + SMALL["chunk"], body)) for i in range(0, body, SMALL["chunk"])]
        means = [weights[list(chunk)].mean() for chunk in chunks]
        np.testing.assert_allclose(scores[row, 1 : len(chunks)], means[1:], rtol=1e-4)
        best = sorted([0, *sorted(range(1, len(chunks)), key=lambda i: -means[i])[:1]])
        expected = [text[i] for chunk in best for i in chunks[chunk]] + text[body:]
        assert short.tokens[row, : short.length[row]].tolist() == expected


def test_text_with_chunks_by_attention_is_that_of_plain_decoding():
    prompts = [list(range(1, 41)), [3, 1, 4, 1, 5] * 3, [7], [7, 7]]
    run = lambda drafter, **options: decode(
        tiny_llama(), drafter, prompts, key=jax.random.key(0), max_new_tokens=20, **options
    )
    plain = run("autoregressive").to_lists()
    for refresh in (None, 4):
        result = run(by_attention(refresh=refresh))
        assert result.to_lists() == plain and result.stats.accepted.sum() > 0
    assert run(by_attention(), verifier=takes_valid).to_lists() != plain


def test_a_budget_for_the_whole_text_reads_all_of_it():
    """Then drafts with chunks by attention are those of the target itself, in each step."""
    drafter = rapid(tiny_llama(), 3, score="attention", budget=90, chunk=4, query=3, max_new_tokens=40)
    result = decode(tiny_llama(), drafter, [list(range(1, 41)), [7, 7]], key=jax.random.key(0), max_new_tokens=20)
    assert result.stats.target_passes.tolist() == [5, 5]


def test_what_chunks_by_attention_refuse():
    with pytest.raises(UsageError, match='score must be tokens or attention, not "h2o"'):
        by_attention(score="h2o")
    with pytest.raises(UsageError, match="no cache of keys and values on one device, which rapid with score=attention"):
        decode(markov(), by_attention(), [[1, 2]], key=0, max_new_tokens=2)
