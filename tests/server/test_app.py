"""Endpoints that decode nothing: malformed bodies, limits, the key, tokens."""

import asyncio
import gzip
import json

import pytest
from served import LetterTokenizer, ask, make_app

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


MESSAGES = [{"role": "user", "content": "hi"}]
WRONG = [
    (CHAT, b'{"type":"hiccup"}', "model"), (CHAT, b"schema:123", None), (CHAT, b"", None), (CHAT, b"[]", None),
    (CHAT, b'{"model":"tiny","messages":[{"role":"user","content":"\xff"}]}', None), (CHAT, b"[" * 10000, None),
    (CHAT, {"messages": MESSAGES}, "model"), (CHAT, {"model": "tiny"}, "messages"),
    *((CHAT, {"model": "tiny", "messages": x}, "messages") for x in (None, "hi", [123], [{}], [])),
    (CHAT, {"model": "tiny", "messages": [{"role": 123, "content": "x"}]}, "messages"),
    (CHAT, {"model": "tiny", "messages": [{"role": "king", "content": "x"}]}, "messages"),
    (CHAT, {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    *(
        (CHAT, {"model": "tiny", "messages": MESSAGES, **fields}, next(iter(fields)))
        for fields in (
            {"temperature": "1"}, {"temperature": -1}, {"temperature": True}, {"top_p": 0}, {"top_p": 2}, {"n": 0},
            {"n": 9}, {"n": 1.5}, {"max_tokens": 0}, {"max_tokens": "5"}, {"stream": "yes"}, {"stop": [1]},
            {"stop": ["a"] * 17}, {"stop": ""}, {"seed": 1 << 63}, {"top_logprobs": 21}, {"logprobs": 1},
            {"logit_bias": {"x": 1}}, {"logit_bias": [1]}, {"presence_penalty": 3}, {"stop_token_ids": [-1]},
            {"user": 5}, {"response_format": "json"}, {"min_p": 1.1}, {"repetition_penalty": 0},
            {"temperature": 1e308}, {"logit_bias": {"3": 1e30}}, {"repetition_penalty": 1e300}, {"max_tokens": 10**30},
        )
    ),
    (CHAT, {"model": "tiny", "messages": MESSAGES, "top_logprobs": 2}, None),
    (CHAT, b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}', None),
    (CHAT, {"model": "tiny", "messages": MESSAGES, "chat_template_kwargs": {"chat_template": "{{ x }}"}}, None),
    (CHAT, {"model": "tiny", "messages": MESSAGES, "chat_template_kwargs": {"loud": 1}}, "chat_template_kwargs"),
    (CHAT, b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"temperature":NaN}', None),
    *((COMPLETIONS, {"model": "tiny", "prompt": x}, "prompt") for x in (None, [], [[]], [1.5], [True], ["a", 1], {})),
    *((COMPLETIONS, {"model": "tiny", "prompt": "a", **x}, None) for x in (
        {"max_tokens": 0}, {"suffix": "b"}, {"best_of": 2}, {"guided_grammar": "a"},
        {"min_tokens": 3, "max_tokens": 2}, {"min_tokens": -1}, {"min_tokens": 10**30},
        {"min_tokens": 1, "guided_regex": "a"},
    )),
    (COMPLETIONS, {"model": "tiny", "prompt": [259]}, None),
    (COMPLETIONS, {"model": "tiny", "prompt": "a", "logprobs": 99}, "logprobs"),
    (COMPLETIONS, {"model": "tiny", "prompt": "a", "logit_bias": {"259": 1}}, None),
    (COMPLETIONS, {"model": "tiny", "prompt": "a", "stop_token_ids": [300]}, None),
    (COMPLETIONS, {"model": "tiny", "prompt": "a", "stop_token_ids": list(range(3, 20))}, None),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_malformed_bodies(path, body, param):
    options = {"content": body} if isinstance(body, bytes) else {"json": body}
    answer = ask("POST", path, **options)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert param is None or (error["param"] or "").startswith(param), error


def test_unknown_fields_are_ignored_and_a_full_queue_answers():
    body = {"model": "tiny", "messages": MESSAGES, "invented": {"x": 1}, "echo": None, "tools": [], "n": None}
    assert ask("POST", CHAT, json=body).status_code == 429


def test_the_key():
    for headers in (
        {},
        {"Authorization": "Bearer other"},
        {"Authorization": "secret"},
        {"Authorization": "Basic secret"},
    ):
        for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("POST", "/tokenize")):
            answer = ask(method, path, headers=headers, service={"api_keys": ("other key", "secret")})
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    headers = {"Authorization": "Bearer secret"}
    assert ask("GET", "/v1/models", headers=headers, service={"api_keys": ("other key", "secret")}).status_code == 200
    for path in ("/health", "/ping", "/version", "/metrics", "/load"):
        assert ask("GET", path, service={"api_keys": ("other key", "secret")}).status_code == 200


def test_a_client_that_leaves_while_it_sends(caplog):
    """The server answers nothing, and logs no error."""
    sent = []

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    app = make_app()
    scope = {
        "type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b"", "headers": [],
        "http_version": "1.1", "scheme": "http", "server": ("test", 80), "client": ("test", 1), "root_path": "",
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 499 and not caplog.records


def test_a_compressed_body_is_refused():
    body = gzip.compress(json.dumps({"model": "tiny", "messages": MESSAGES}).encode())
    answer = ask("POST", CHAT, content=body, headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 415 and "send it without compression" in answer.json()["error"]["message"]


def test_parts_of_an_earlier_refusal_are_read():
    parts = [{"type": "refusal", "refusal": "No."}, {"type": "text", "text": "Never."}]
    messages = [{"role": "assistant", "content": parts}]
    ids = ask("POST", "/tokenize", json={"messages": messages}).json()["tokens"]
    assert ids == LetterTokenizer().chat([{"role": "assistant", "content": "No.Never."}])


def test_limits_and_unknown_paths():
    answer = ask("POST", CHAT, content=b"x" * 200, service={"max_body": 100})
    assert answer.status_code == 413 and "more than 100 bytes" in answer.json()["error"]["message"]
    answer = ask("POST", "/v1/responses", json={})
    assert answer.status_code == 404 and "no endpoint /v1/responses" in answer.json()["error"]["message"]
    answer = ask("GET", CHAT)
    assert answer.status_code == 405 and "does not take GET requests" in answer.json()["error"]["message"]


def test_tokens():
    answer = ask("POST", "/tokenize", json={"model": "tiny", "prompt": "ab", "return_token_strs": True}).json()
    assert answer == {"tokens": [1, 68, 69], "count": 3, "max_model_len": 192, "token_strs": ["", "a", "b"]}
    assert ask("POST", "/tokenize", json={"prompt": "ab", "add_special_tokens": False}).json()["tokens"] == [68, 69]
    assert ask("POST", "/tokenize", json={"messages": MESSAGES}).json()["tokens"] == LetterTokenizer().chat(MESSAGES)
    assert ask("POST", "/tokenize", json={"model": "tiny"}).status_code == 400
    assert ask("POST", "/detokenize", json={"tokens": [68, 69]}).json() == {"prompt": "ab", "content": "ab"}
    assert ask("POST", "/detokenize", json={"tokens": [259]}).status_code == 400
    assert ask("POST", "/detokenize", json={"model": "other", "tokens": []}).status_code == 404
