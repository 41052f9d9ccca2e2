"""Log-probabilities of served tokens: those of the target's own logits, whatever the settings of the request."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_llama

from specjax import Cancel, Request, Target, UsageError, drafters, processors, serve
from specjax.serving.requests import check_request
from specjax.verifiers import token_logprobs

LIMITS = {"slots": 3, "longest_prompt": 80, "max_new_tokens": 14}
PROMPT = [1, 2, 3, 1, 2, 3, 1]


def served(requests, **options):
    """Return the tokens and log-probabilities of each request."""
    tokens, logprobs = {}, {}
    drafter = drafters.prompt_lookup(3, min_ngram=1)
    for update in serve(tiny_llama(), drafter, requests, **LIMITS, **options):
        assert update.error is None or update.finish_reason == "refused"
        tokens.setdefault(update.request, []).extend(update.tokens)
        logprobs.setdefault(update.request, []).append(update.logprobs)
    return tokens, logprobs


def raw_logprobs(prompt, text):
    """Return log_softmax of the target at each token of the text, float32[N, V]."""
    target, length = tiny_llama(), len(prompt) + len(text)
    tokens = jnp.array([prompt + text])
    cache = target.model.init_cache(target.params, None, 1, length)
    forward = jax.jit(
        lambda params, tokens: (
            target.model.forward(
                params,
                tokens,
                cache,
                positions=jnp.arange(length)[None],
                mask=jnp.tril(jnp.ones((1, length, length), bool)),
            )[0].logits
        )
    )
    logits = forward(target.params, tokens)[0, len(prompt) - 1 : -1]
    return np.asarray(jax.nn.log_softmax(logits.astype(jnp.float32), -1))


def test_they_are_those_of_the_model_before_processors_and_temperature():
    ours = [processors.repetition(1.3)]
    requests = [
        Request(PROMPT, 0, alternatives=3, processors=ours),
        Request(PROMPT, 1, temperature=0.7, top_k=5, alternatives=0),
        Request([5, 6], 2, temperature=0.7),
        Request([5, 6, 7], 2, alternatives=5),
    ]
    tokens, logprobs = served(requests, max_alternatives=5, processors=[processors.repetition(1.0)])
    assert set(logprobs[2]) == {None}
    for number, count in ((0, 3), (1, 0), (3, 5)):
        expected = raw_logprobs(requests[number].prompt, tokens[number])
        of_tokens, likeliest, alternatives = (np.concatenate(x) for x in zip(*logprobs[number], strict=True))
        assert likeliest.shape == alternatives.shape == (14, count)
        np.testing.assert_allclose(of_tokens, expected[np.arange(14), tokens[number]], atol=2e-5)
        np.testing.assert_array_equal(likeliest, np.argsort(-expected, 1, kind="stable")[:, :count])
        np.testing.assert_allclose(alternatives, -np.sort(-expected, 1)[:, :count], atol=2e-5)
    assert any(len(update.tokens) > 1 for updates in logprobs.values() for update in updates if update)


def test_those_of_a_prompt_are_those_of_the_model():
    """They are right beyond the first chunk, and for a prompt that the store has."""
    long = np.random.default_rng(0).integers(1, 16, 70).tolist()
    prompts = [long, long, long[:50], [5, 6], [5], long]
    requests = [
        Request(prompt, i, 3, alternatives=i % 4, scores_prompt=i != 5, temperature=0.5)
        for i, prompt in enumerate(prompts)
    ]
    options = {"max_alternatives": 5, "processors": [processors.repetition(1.0)]}
    results = {}
    for update in serve(tiny_llama(), drafters.prompt_lookup(3, min_ngram=1), requests, **LIMITS, **options):
        assert (update.prompt_logprobs is None) == (update.request in results or update.request == 5)
        assert update.cached == 0
        results.setdefault(update.request, update.prompt_logprobs)
    for i, prompt in enumerate(prompts[:5]):
        of_tokens, likeliest, alternatives = results[i]
        expected = raw_logprobs(prompt[:1], prompt[1:]) if len(prompt) > 1 else np.zeros((0, 16))
        assert likeliest.shape == alternatives.shape == (len(prompt) - 1, i % 4)
        np.testing.assert_allclose(of_tokens, expected[np.arange(len(prompt) - 1), prompt[1:]], atol=2e-5)
        np.testing.assert_allclose(alternatives, -np.sort(-expected, 1)[:, : i % 4], atol=2e-5)
        np.testing.assert_allclose(np.take_along_axis(expected, likeliest, 1), alternatives, atol=2e-5)


def test_blocks_need_not_divide_a_text():
    target = tiny_llama()
    hidden = jax.random.normal(jax.random.key(0), (2, 44, target.model.config.width))
    following = jnp.arange(88).reshape(2, 44) % 16
    zeros = token_logprobs.zero_logprobs((2, 44), 2)
    results = token_logprobs.text_logprobs(target, hidden, following, jnp.int32(41), zeros)
    logprobs = jax.nn.log_softmax(target.model.unembed(target.params, hidden), -1)
    wanted = jnp.take_along_axis(logprobs, following[..., None], 2)[..., 0]
    np.testing.assert_allclose(results.tokens[:, :41], wanted[:, :41], atol=1e-5)
    np.testing.assert_allclose(results.alternatives[:, :41], jax.lax.top_k(logprobs, 2)[0][:, :41], atol=1e-5)
    unread = token_logprobs.text_logprobs(target, hidden, following, jnp.int32(0), zeros)
    assert all(not np.any(x) for x in unread)


def test_requests_that_cannot_have_those_of_a_prompt_are_refused():
    request = Request([1, 2], 0, alternatives=0, scores_prompt=True)
    with_head = tiny_llama()
    without = Target(with_head.model._replace(unembed=None), with_head.params)
    for target, limit, changes, words in (
        (without, 1, {}, "a model with `unembed`"),
        (with_head, None, {}, "needs max_alternatives of serve"),
        (with_head, 1, {"alternatives": None}, "needs a number of alternatives"),
    ):
        limits = serve(target, "autoregressive", **LIMITS, max_alternatives=limit).setup.limits
        with pytest.raises(UsageError, match=words):
            check_request(request._replace(**changes), limits)


def test_requests_for_more_than_serve_reports_are_refused():
    for limit, words in ((None, "serve reports no logprobs"), (2, "serve reports at most 2")):
        updates = list(serve(
            tiny_llama(), "autoregressive", [Request([1], 0, 2, alternatives=3)], max_alternatives=limit, **LIMITS
        ))  # fmt: skip
        assert [update.finish_reason for update in updates] == ["refused"] and words in updates[0].error
    with pytest.raises(UsageError, match="max_alternatives must be from 0"):
        serve(tiny_llama(), "autoregressive", [], max_alternatives=-1, **LIMITS)


def test_a_cancelled_request_ends_and_the_others_go_on():
    requests = [Request(PROMPT, 0), Request([5], 1), Request([9, 1], 2), Request([7, 8], 3)]
    alone, _ = served(requests)
    updates = serve(tiny_llama(), drafters.prompt_lookup(3, min_ngram=1), requests, **LIMITS)
    tokens, reasons, sent = {}, {}, None
    while True:
        try:
            update = updates.send(sent)
        except StopIteration:
            break
        sent = Cancel(1) if update.request == 1 and update.finish_reason is None else None
        tokens.setdefault(update.request, []).extend(update.tokens)
        assert update.request not in reasons
        if update.finish_reason:
            reasons[update.request] = update.finish_reason
    assert reasons == {0: "length", 1: "cancelled", 2: "length", 3: "length"}
    assert 0 < len(tokens[1]) < 14 and tokens[1] == alone[1][: len(tokens[1])]
    assert {n: tokens[n] for n in (0, 2, 3)} == {n: alone[n] for n in (0, 2, 3)}


def test_requests_can_be_cancelled_by_their_source():
    items = [Request(PROMPT, 0), Request([5], 1), Cancel(0), Cancel(7)]
    reasons = {u.request: u.finish_reason for u in serve(tiny_llama(), "autoregressive", items, **LIMITS)}
    assert reasons == {0: "cancelled", 1: "length"}
