"""Several completions from one pass per token, compared with the card, plain decoding and a beam in NumPy (A12)."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_llama

from specjax import UsageError, decode
from specjax.decoders import superposed
from specjax.decoders.superposed import UNKNOWN, WEIGHTS, mix_ngrams, ngram_probability
from specjax.drafters import autoregressive
from specjax.retrieval.datastore import from_documents
from specjax.trees.superposition import extend
from specjax.types import Mixture

PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [5]]


def greedy(target, **options):
    return decode(target, autoregressive(), PROMPTS, key=jax.random.key(0), max_new_tokens=12, **options).to_lists()


def test_the_cards_scores():
    p, f = jnp.array([[0.5, 0.3, 0.2]]), jnp.array([[[0.1, 0.8, 0.1], [0.7, 0.1, 0.2]]])
    scores = jnp.log(jnp.array([[0.6, 0.4]]))
    log_r = mix_ngrams(jnp.log(p), f, 0.5)
    total = jnp.exp(scores[:, :, None] + log_r)
    np.testing.assert_allclose(total[0], [[0.1342, 0.2939, 0.0849], [0.2366, 0.0693, 0.0800]], atol=6e-5)
    draft, token, best = extend(scores, log_r)
    assert (draft.tolist(), token.tolist()) == ([[0, 1]], [[1, 0]])
    np.testing.assert_allclose(jax.nn.softmax(best, -1)[0], [0.554, 0.446], atol=6e-4)


def test_a_draft_that_the_corpus_does_not_know_falls_behind():
    log_p = jnp.log(jnp.array([[0.5, 0.5]]))
    log_r = mix_ngrams(log_p, jnp.array([[[0.0, 0.0], [0.25, 0.0]]]), 0.5)
    np.testing.assert_allclose(log_r[0, 0], 0.5 * log_p[0] + UNKNOWN)
    np.testing.assert_allclose(log_r[0, 1], [0.5 * np.log(0.5) + 0.5 * np.log(0.25), -np.inf], rtol=1e-6)


def test_ngrams_are_counted_as_written_out():
    """Check P_n(v | context): the count of context and v divided by the count of the context."""
    documents = np.random.default_rng(0).integers(0, 3, (6, 20)).tolist()
    corpus = from_documents(documents, 3).to_device()
    times = lambda gram: sum(row[i : i + len(gram)] == gram for row in documents for i in range(len(row)))
    texts = [[0, 1, 2, 0, 1], [2, 2, 2, 2, 2], [9, 9, 9, 1, 0], [1, 1, 0, 0, 2]]
    lengths = [5, 9, 2, 5]
    wanted = np.zeros((4, 3))
    for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        for n, weight in enumerate(WEIGHTS, 2):
            context = text[6 - n :]
            if n - 1 <= length and times(context):
                wanted[row] += [weight * times([*context, v]) / times(context) for v in range(3)]
    tokens = jnp.broadcast_to(jnp.arange(3), (4, 3))
    probability = jax.jit(ngram_probability)(corpus, jnp.array(texts), jnp.array(lengths), tokens)
    assert (wanted > 0).any() and (wanted[2] > 0).any()
    np.testing.assert_allclose(probability, wanted, rtol=1e-6)


def test_one_draft_is_greedy_decoding():
    target = tiny_llama()
    result = superposed(target, PROMPTS, max_new_tokens=12, drafts=1)
    assert result.to_lists() == greedy(target)
    assert result.finish_reasons == ["length"] * 2 and result.block_efficiency.tolist() == [1.0, 1.0]


@jax.jit
def logits_behind(target, mixture):
    """Return logits float32[1, V] of a pass over the whole text."""
    count = mixture.ids.shape[1]
    output, _ = target.model.forward(
        target.params, mixture, target.model.init_cache(target.params, None, 1, 128), positions=jnp.arange(count)[None],
        mask=jnp.tril(jnp.ones((1, count, count), bool)),
    )  # fmt: skip
    return output.logits[:, -1]


def beam(target, prompt, steps, k, candidates, temperature, f=None, alpha=0.54):
    """Compute the rule in plain NumPy, with passes over the whole text."""

    def distribution(history):
        ids = [[[t] * k for t in prompt]] + [[drafts] for drafts, _ in history]
        weights = [[[1.0] + [0.0] * (k - 1)] * len(prompt)] + [[w] for _, w in history]
        mixture = Mixture(*(jnp.array([[*itertools.chain(*x)]]) for x in (ids, weights)))
        logits = np.asarray(logits_behind(target, mixture)[0], np.float64) / temperature
        named = np.argsort(-logits, kind="stable")[:candidates]
        return named, logits[named] - np.logaddexp.reduce(logits[named])

    named, log_p = distribution([])
    drafts, scores, history = [[t] for t in named[:k].tolist()], log_p[:k], []
    for _ in range(steps - 1):
        weights = np.exp(scores - np.logaddexp.reduce(scores))
        history.append(([d[-1] for d in drafts], weights.tolist()))
        named, log_p = distribution(history)
        log_r = np.tile(log_p, (k, 1))
        if f is not None:
            of = np.array([[f([*prompt, *d], v) for v in named.tolist()] for d in drafts])
            with np.errstate(divide="ignore"):
                log_mix = (1 - alpha) * log_p + alpha * np.log(of)
            log_r = np.where((of > 0).any(1, keepdims=True), log_mix, (1 - alpha) * log_p + UNKNOWN)
        total = (scores[:, None] + log_r).ravel()
        best = np.argsort(-total, kind="stable")[:k]
        drafts = [[*drafts[i // candidates], int(named[i % candidates])] for i in best]
        scores = total[best]
    return drafts, scores


@pytest.mark.parametrize("counted", [False, True])
def test_the_rule_written_out(counted):
    target, corpus, f = tiny_llama(), None, None
    if counted:
        documents = np.random.default_rng(1).integers(0, 64, (30, 200)).tolist()
        corpus = from_documents(documents, 64).to_device()

        @functools.cache
        def times(*gram):
            return sum(tuple(row[i : i + len(gram)]) == gram for row in documents for i in range(len(row)))

        def f(text, v):
            contexts = [(w, text[1 - n :]) for n, w in enumerate(WEIGHTS, 2) if n - 1 <= len(text)]
            return sum(w * times(*c, v) / times(*c) for w, c in contexts if times(*c))

    settings = {"candidates": 9, "temperature": 2.0}
    ours = superposed(target, PROMPTS, max_new_tokens=4, drafts=3, corpus=corpus, **settings)
    for row, prompt in enumerate(PROMPTS):
        drafts, scores = beam(target, prompt, 4, 3, f=f, **settings)
        assert ours.drafts.to_lists()[row] == drafts
        np.testing.assert_allclose(ours.drafts.scores[row], scores, rtol=1e-4)
    assert len({tuple(draft) for draft in ours.drafts.to_lists()[0]}) == 3


def test_drafts_that_end_are_set_aside_and_the_search_stops():
    target = tiny_llama()
    plain = greedy(target)[0]
    eos = next(token for token in plain[2:] if token not in plain[:2])
    result = superposed(target, PROMPTS, max_new_tokens=12, drafts=2, eos=[eos])
    for row in result.drafts.to_lists():
        assert all(eos not in draft[:-1] for draft in row)
    assert result.to_lists()[0] == result.drafts.to_lists()[0][0] == plain[: plain.index(eos) + 1]
    assert result.finish_reasons[0] == "eos"
    assert int(result.stats.target_passes[0]) >= int(result.lengths[0])
    assert (np.diff(result.drafts.scores, axis=1) <= 0).all()
    assert (result.tokens[0, result.lengths[0] :] == -1).all()


def test_a_second_call_compiles_nothing():
    from specjax.decoders.superposed import _run

    target = tiny_llama()
    run = lambda prompts, **options: superposed(target, prompts, max_new_tokens=12, drafts=2, eos=[3], **options)
    run(PROMPTS)
    size = _run._cache_size()
    run([[7, 7], [8, 9, 10]], temperature=0.5)
    assert _run._cache_size() == size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafts": 0}, "drafts must be a whole number of at least 1"),
        ({"drafts": 4, "candidates": 3}, "drafts must be at most candidates, 3, not 4"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"alpha": 1.0}, "alpha must be at least 0 and below 1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(UsageError, match=message):
        superposed(tiny_llama(), PROMPTS, **{"max_new_tokens": 4} | options)
