"""Bodies that hypothesis makes: the server answers each one, and never with status 500."""

import json

import hypothesis
import pytest
from hypothesis import strategies as st
from served import ask

from specjax.server.schemas import ChatFields, CompletionFields

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", [{"role": "user", "content": "hi"}]
numbers = st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False)
scalars = st.none() | st.booleans() | numbers | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
LIKELY = {
    "temperature": st.floats(0, 2), "top_p": st.floats(0, 1), "top_k": st.integers(-2, 300), "n": st.integers(0, 9),
    "min_p": st.floats(0, 1), "seed": st.integers(), "max_tokens": st.integers(0, 99), "min_tokens": st.integers(0, 9),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "logprobs": st.booleans() | st.integers(0, 21),
    "stop_token_ids": st.lists(st.integers(-1, 300), max_size=9), "ignore_eos": st.booleans(), "echo": st.booleans(),
    "logit_bias": st.dictionaries(st.integers(-1, 300).map(str), st.floats(-101, 101), max_size=3),
    "response_format": st.fixed_dictionaries({"type": st.sampled_from(["json_schema", "x"]), "json_schema": values}),
    "structured_outputs": st.dictionaries(st.sampled_from(["grammar", "choice"]), values, max_size=2),
    "tools": st.lists(values, max_size=2), "tool_choice": st.sampled_from(["none", "auto", "required"]) | values,
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["shout", "tools", "messages", "chat_template"]), values),
}  # fmt: skip


def check_status(path, field, value, more):
    body = {"model": "tiny", **({"messages": MESSAGES} if path == CHAT else {"prompt": "ab"}), **more, field: value}
    answer = ask("POST", path, content=json.dumps(body))  # its queue has no room, so that valid requests end with 429
    assert answer.status_code in (400, 404, 429), (body, answer.text)
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]


def fields_of(kind):
    return st.sampled_from(sorted(kind.model_fields))


def cases_of(path, kind):
    """Return (path, name of a field, its value)."""
    of_field = lambda name: st.tuples(st.just(path), st.just(name), LIKELY.get(name, values) | values)
    return fields_of(kind).flatmap(of_field)


cases = cases_of(CHAT, ChatFields) | cases_of(COMPLETIONS, CompletionFields)
others = st.dictionaries(st.sampled_from(sorted(LIKELY)), st.none()).flatmap(
    lambda names: st.fixed_dictionaries({name: LIKELY[name] for name in names})
)


def run(count):
    settings = hypothesis.settings(max_examples=count, deadline=None, database=None, derandomize=count < 1000)

    @settings
    @hypothesis.given(cases, others)
    def check(case, more):
        check_status(*case, more)

    check()


def test_no_body_makes_the_server_fail():
    run(25)


@pytest.mark.exhaustive
def test_no_body_of_many_makes_the_server_fail():
    run(3000)


@pytest.mark.parametrize("body", [b"null", b"1", b'"x"', b"{", b"\xff\xfe", b'{"model":"tiny"' + b" " * 100, b"{}" * 9])
def test_bodies_that_are_no_objects(body):
    for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
        assert ask("POST", path, content=body).status_code == 400
