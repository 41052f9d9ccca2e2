"""Answers as the `openai` client reads them. Every text is the one of `decode`."""

import jax
import numpy as np
import openai
import pytest
from served import LENGTH, LetterTokenizer, expected, make_target

TOKENIZER = LetterTokenizer()
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "abcabcab"}]
IDS = TOKENIZER.chat(MESSAGES)


def text_of(ids, seed=0, length=LENGTH, **settings):
    return TOKENIZER.decode(expected(ids, seed, length, **settings))


def chat(client, **options):
    return client.chat.completions.create(model="tiny", messages=MESSAGES, **options)


def complete(client, prompt, **options):
    return client.completions.create(model="tiny", prompt=prompt, **options)


def test_a_chat(client):
    answer = chat(client, seed=5, temperature=0.8, max_completion_tokens=20)
    choice = answer.choices[0]
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == "tiny"
    assert answer.system_fingerprint == "fp_0" and choice.message.role == "assistant"
    assert choice.message.content == text_of(IDS, 5, 20, temperature=0.8) and choice.logprobs is None
    tokens = expected(IDS, 5, 20, temperature=0.8)
    assert answer.usage.completion_tokens == len(tokens)
    assert choice.finish_reason == ("stop" if tokens[-1] == 2 else "length")
    assert answer.usage.prompt_tokens == len(IDS)
    assert answer.usage.total_tokens == len(IDS) + answer.usage.completion_tokens


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 3, "temperature": 1.3, "top_p": 0.9}])
def test_a_stream_has_the_same_text(client, options):
    events = list(chat(client, stream=True, stream_options={"include_usage": True}, **options))
    assert len({event.id for event in events}) == 1
    assert {event.object for event in events} == {"chat.completion.chunk"}
    *chunks, last, usage = events
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert all(chunk.usage is None and chunk.choices[0].finish_reason is None for chunk in chunks)
    assert last.choices[0].finish_reason in ("stop", "length") and last.choices[0].delta.content is None
    text = "".join(chunk.choices[0].delta.content for chunk in chunks)
    assert text == chat(client, **options).choices[0].message.content and len(chunks) > 4
    assert usage.choices == [] and usage.usage.total_tokens == len(IDS) + usage.usage.completion_tokens


def test_completions_take_texts_and_ids(client):
    ids = TOKENIZER.encode("abab")
    texts = [text_of(ids, 7, 12)]
    for prompt in ("abab", ids):
        assert [choice.text for choice in complete(client, prompt, seed=7, max_tokens=12).choices] == texts
    for prompts in (["abab", "abab"], [ids, ids]):
        answer = complete(client, prompts, temperature=0, max_tokens=12)
        assert [choice.text for choice in answer.choices] == [text_of(ids, 0, 12, temperature=0.0)] * 2
        assert [choice.index for choice in answer.choices] == [0, 1] and answer.usage.prompt_tokens == 2 * len(ids)


def test_several_texts_have_keys_of_the_seed(client):
    answer = complete(client, "abab", n=3, seed=11, max_tokens=10)
    ids, key = TOKENIZER.encode("abab"), jax.random.key(11)
    keys = [key, jax.random.fold_in(key, 1), jax.random.fold_in(key, 2)]
    assert [choice.text for choice in answer.choices] == [TOKENIZER.decode(expected(ids, k, 10)) for k in keys]
    assert answer.usage.prompt_tokens == len(ids)
    streamed = ["", "", ""]
    for event in complete(client, "abab", n=3, seed=11, max_tokens=10, stream=True):
        streamed[event.choices[0].index] += event.choices[0].text
    assert streamed == [choice.text for choice in answer.choices]


def test_without_a_seed_texts_differ(client):
    options = {"max_tokens": 30, "temperature": 2, "extra_body": {"ignore_eos": True}}  # short texts may be equal
    answers = [complete(client, "abab", **options).choices[0].text for _ in range(2)]
    assert answers[0] != answers[1]


def test_stop_strings_and_ids(client):
    plain = complete(client, "abab", temperature=0, max_tokens=20).choices[0].text
    stop = plain[6:8]
    answer = complete(client, "abab", temperature=0, max_tokens=20, stop=[stop, "never"])
    assert answer.choices[0].text == plain[: plain.index(stop)] and answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == stop
    streamed = complete(client, "abab", temperature=0, max_tokens=20, stop=stop, stream=True)
    assert "".join(event.choices[0].text for event in streamed) == plain[: plain.index(stop)]
    token = TOKENIZER.encode(plain[5], special=False)[0] if ord(plain[5]) < 127 else ord(plain[5]) - 0x400
    answer = complete(client, "abab", temperature=0, max_tokens=20, extra_body={"stop_token_ids": [token]})
    assert answer.choices[0].text == plain[: plain.index(plain[5])] and answer.choices[0].stop_reason == token


def test_logprobs_are_those_of_the_model(client):
    answer = chat(client, seed=2, max_tokens=8, temperature=0.5, logprobs=True, top_logprobs=4)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    assert all(bytes(entry.bytes).decode() == entry.token and len(entry.top_logprobs) == 4 for entry in content)
    tokens = expected(IDS, 2, 8, temperature=0.5)
    rows = np.asarray(raw_logprobs(IDS + tokens))[len(IDS) - 1 : -1]
    values = [entry.logprob for entry in content]
    np.testing.assert_allclose(values, rows[np.arange(len(values)), tokens[: len(values)]], atol=2e-4)
    best = np.sort(rows, 1)[:, ::-1][: len(values), :4]
    np.testing.assert_allclose([[x.logprob for x in entry.top_logprobs] for entry in content], best, atol=2e-4)
    events = chat(client, seed=2, max_tokens=8, temperature=0.5, logprobs=True, stream=True)
    parts = [event.choices[0].logprobs for event in events]
    assert [entry.logprob for part in parts if part for entry in part.content] == values
    old = complete(client, "abab", temperature=0, max_tokens=6, logprobs=2).choices[0]
    assert "".join(old.logprobs.tokens) == old.text and old.logprobs.text_offset == list(range(len(old.text)))
    assert len(old.logprobs.token_logprobs) == len(old.logprobs.top_logprobs) == len(old.text)


def test_logprobs_are_those_of_the_text_without_its_stop_string(client):
    """A stream holds back a token that may begin a stop string, with its log-probability."""
    options = {"seed": 2, "max_tokens": 20, "temperature": 0.5, "logprobs": True}
    full = chat(client, **options).choices[0].message.content
    for stop in (full[5], full[4:7], [full[3] + "?", full[6:8]], full[7:9] + "?"):
        choice = chat(client, stop=stop, **options).choices[0]
        text = choice.message.content
        assert "".join(entry.token for entry in choice.logprobs.content) == text
        assert full.startswith(text) and (len(text) < len(full)) == (choice.finish_reason == "stop")
        sent = 0
        for event in chat(client, stop=stop, stream=True, **options):
            part = event.choices[0]
            words = "".join(entry.token for entry in part.logprobs.content) if part.logprobs else ""
            assert words == (part.delta.content or "")
            sent += len(words)
        assert sent == len(text)


def raw_logprobs(tokens):
    target, size = make_target(), len(tokens)
    cache = target.model.init_cache(target.params, None, 1, size)
    mask, positions = np.tril(np.ones((1, size, size), bool)), np.arange(size)[None]
    ids = np.array([tokens], np.int32)
    logits = target.model.forward(target.params, ids, cache, positions=positions, mask=mask)[0].logits[0]
    return jax.nn.log_softmax(logits, -1)


def test_penalties_and_bias(client):
    from specjax import processors

    ids = TOKENIZER.encode("abab")
    options = {"temperature": 0, "max_tokens": 16}
    changed = [
        ({"extra_body": {"repetition_penalty": 1.5}}, processors.repetition(1.5)),
        ({"presence_penalty": 2.0}, processors.presence(2.0)),
        ({"frequency_penalty": 1.5}, processors.frequency(1.5)),
        ({"logit_bias": {"40": 30.0}}, processors.bias({40: 30.0})),
    ]
    plain, texts = text_of(ids, 0, 16, temperature=0.0), []
    for values, processor in changed:
        texts.append(complete(client, "abab", **options, **values).choices[0].text)
        assert texts[-1] == text_of(ids, 0, 16, temperature=0.0, processors=[processor])
    assert any(text != plain for text in texts)
    assert complete(client, "abab", **options).choices[0].text == plain


def test_the_history_of_a_chat_is_cached(client):
    question = {"role": "user", "content": "x" * 60}
    first = client.chat.completions.create(model="tiny", messages=[question], temperature=0, max_tokens=4)
    second = client.chat.completions.create(model="tiny", messages=[question], temperature=0, max_tokens=4)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= 32
    assert first.choices[0].message.content == second.choices[0].message.content
    salted = client.chat.completions.create(
        model="tiny", messages=[question], temperature=0, max_tokens=4, extra_body={"cache_salt": "mine"}
    )
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_parts_of_messages_and_variables_of_the_template(client):
    parts = [{"type": "text", "text": "abc"}, {"type": "text", "text": "abcab"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    answer = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=9)
    assert answer.choices[0].message.content == text_of(IDS, 0, 9, temperature=0.0)
    loud = chat(client, temperature=0, max_tokens=9, extra_body={"chat_template_kwargs": {"shout": True}})
    assert loud.choices[0].message.content == text_of(TOKENIZER.chat(MESSAGES, shout=True), 0, 9, temperature=0.0)


def test_errors_have_the_classes_of_the_client(client):
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'; this server has tiny, alias"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(
        openai.BadRequestError, match="the prompt has 101 tokens, and this server takes at most"
    ) as stop:
        complete(client, "a" * 100)
    assert stop.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="max_tokens is 97, and this server writes at most 96"):
        complete(client, "a", max_tokens=97)
    with pytest.raises(openai.BadRequestError, match="the template refuses this"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "refuse me"}])


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("alias").owned_by == "specjax"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
