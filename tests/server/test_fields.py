"""Fields that users of other servers send: lengths, ends, echoes, salts."""

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
from served import LetterTokenizer, expected, make_target

from specjax import processors

TOKENIZER = LetterTokenizer()
IDS = TOKENIZER.encode("abab")


def complete(client, prompt="abab", **options):
    fields = {"temperature": 0, "max_tokens": 20} | options
    names = {"temperature", "max_tokens", "n", "seed", "stop", "stream", "echo", "best_of", "logit_bias", "logprobs"}
    more = {name: fields.pop(name) for name in fields.keys() - names}
    return client.completions.create(model="tiny", prompt=prompt, extra_body=more, **fields)


def text(client, **options):
    return complete(client, **options).choices[0].text


def letter(client, place):
    """Return a letter of the greedy text, and its id."""
    word = text(client)[place]
    return word, TOKENIZER.encode(word, special=False)[0] if ord(word) < 128 else ord(word) - 0x400


def test_echo(client):
    plain = text(client)
    assert text(client, echo=True) == "abab" + plain
    assert [choice.text for choice in complete(client, [IDS, IDS], echo=True).choices] == ["abab" + plain] * 2
    events = complete(client, echo=True, stream=True, n=2)
    streamed = ["", ""]
    for event in events:
        streamed[event.choices[0].index] += event.choices[0].text
    assert streamed == ["abab" + plain] * 2


def raw_logprobs(ids):
    """Return log_softmax of the model after each of the ids, float32[T, V]."""
    target, length = make_target(), len(ids)
    cache = target.model.init_cache(target.params, None, 1, length)
    mask, positions = jnp.tril(jnp.ones((1, length, length), bool)), jnp.arange(length)[None]
    forward = jax.jit(lambda tokens: target.model.forward(target.params, tokens, cache, positions=positions, mask=mask))
    return np.asarray(jax.nn.log_softmax(forward(jnp.array([ids]))[0].logits[0]))


def test_echo_with_logprobs_scores_the_prompt(client):
    """The form is that of the API: the first token has none, and max_tokens may be 0."""
    prompt = "abab" * 12
    ids = TOKENIZER.encode(prompt)
    plain = complete(client, prompt, max_tokens=3, logprobs=2).choices[0]
    answer = complete(client, prompt, max_tokens=3, logprobs=2, echo=True, n=2)
    streamed = [[], []]
    for event in complete(client, prompt, max_tokens=3, logprobs=2, echo=True, n=2, stream=True):
        streamed[event.choices[0].index].append(event.choices[0])
    expected = raw_logprobs(ids)[:-1]
    values = expected[np.arange(len(ids) - 1), ids[1:]]
    for choice, parts in zip(answer.choices, streamed, strict=True):
        logprobs = choice.logprobs
        assert choice.text == "".join(part.text for part in parts) == prompt + plain.text
        assert logprobs.tokens[1 : len(ids)] == list(prompt)
        assert logprobs.tokens[len(ids) :] == plain.logprobs.tokens
        assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
        assert logprobs.text_offset[: len(ids)] == [0, *range(len(prompt))]
        assert logprobs.text_offset[len(ids) :] == [len(prompt) + x for x in plain.logprobs.text_offset]
        np.testing.assert_allclose(logprobs.token_logprobs[1 : len(ids)], values, atol=2e-5)
        np.testing.assert_allclose(logprobs.token_logprobs[len(ids) :], plain.logprobs.token_logprobs, atol=2e-5)
        best = [max(tops.values()) for tops in logprobs.top_logprobs[1 : len(ids)]]
        np.testing.assert_allclose(best, expected.max(1), atol=2e-5)
        assert logprobs.tokens == [x for part in parts if part.logprobs for x in part.logprobs.tokens]
    only = complete(client, prompt, max_tokens=0, logprobs=0, echo=True)
    assert only.choices[0].text == prompt and only.choices[0].finish_reason == "length"
    assert only.usage.completion_tokens == 0 and len(only.choices[0].logprobs.tokens) == len(ids)
    assert complete(client, prompt, max_tokens=0, echo=True).choices[0].text == prompt
    with pytest.raises(openai.BadRequestError, match="max_tokens is 0, which only echo allows"):
        complete(client, prompt, max_tokens=0)


def test_min_tokens_delay_ends_and_stop_strings(client):
    plain = text(client)
    stop, end = letter(client, 3)
    first = plain.index(stop)
    assert text(client, stop=stop) == plain[:first] == text(client, stop_token_ids=[end])
    assert text(client, stop=stop, min_tokens=first) == plain[:first]
    later = text(client, stop=stop, min_tokens=first + 1)
    assert later.startswith(plain[: first + 1]) and len(later) > first
    ours = processors.min_length(8, [2, end])
    tokens = expected(IDS, 0, 20, temperature=0.0, eos=(2, end), processors=[ours])
    answer = complete(client, stop_token_ids=[end], min_tokens=8).choices[0]
    assert len(tokens) >= 8 and answer.text == TOKENIZER.decode(tokens[:-1] if tokens[-1] == end else tokens)


def test_the_text_may_end_with_what_stopped_it(client):
    plain = text(client)
    stop, end = letter(client, 3)
    until_stop = plain[: plain.index(stop) + 1]
    assert text(client, stop=stop, include_stop_str_in_output=True) == until_stop
    assert text(client, stop_token_ids=[end], include_stop_str_in_output=True) == until_stop
    events = complete(client, stop=stop, include_stop_str_in_output=True, stream=True)
    assert "".join(event.choices[0].text for event in events) == until_stop


def test_control_tokens_may_be_shown(client):
    options = {"logit_bias": {"1": 100}, "max_tokens": 3}
    assert text(client, **options) == text(client, **options, skip_special_tokens=True) == ""
    assert text(client, **options, skip_special_tokens=False) == "<s><s><s>"


def test_bad_words(client):
    plain = text(client)
    words = [plain[3:5], plain[8]]
    ours = processors.bad_words([TOKENIZER.encode(word, special=False) for word in words])
    tokens = expected(IDS, 0, 20, temperature=0.0, eos=LetterTokenizer.eos, processors=[ours])
    assert text(client, bad_words=words) == TOKENIZER.decode(tokens) != plain
    assert not any(word in TOKENIZER.decode(tokens) for word in words)
    assert text(client, bad_words=[]) == plain == text(client)
    with pytest.raises(openai.BadRequestError, match="a bad word has 17 tokens, more than 16; shorten it"):
        complete(client, bad_words=["a" * 17])


def test_best_of(client):
    assert text(client, best_of=1) == text(client)
    with pytest.raises(openai.BadRequestError, match="best_of is not supported; set n, and choose among the texts"):
        complete(client, best_of=4, n=2)


def test_a_text_does_not_depend_on_its_place_in_the_call(client):
    alone = complete(client, n=2, seed=4, temperature=1)
    both = complete(client, ["other", "abab"], n=2, seed=4, temperature=1)
    assert [choice.text for choice in both.choices[2:]] == [choice.text for choice in alone.choices]
    unseeded = complete(client, ["abab", "abab"], temperature=2, max_tokens=30)
    assert unseeded.choices[0].text != unseeded.choices[1].text


def test_users_with_different_keys_share_no_prefixes(server):
    def cached(key, **options):
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
            answer = complete(client, "q" * 80, max_tokens=2, **options)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached("mine") == 0 and cached("mine") >= 32
    assert cached("yours") == 0 and cached("mine", cache_salt="x") == 0 and cached("yours") >= 32
