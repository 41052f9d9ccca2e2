"""Texts with JSON schemas and regular expressions. Each one is that of `decode` with the same processor."""

import asyncio
import functools
import json

import httpx
import jsonschema
import openai
import pytest
from served import LetterTokenizer, expected

from specjax import UsageError, processors
from specjax.processors import byte_automaton
from specjax.processors.constraint import following
from specjax.serving import admission, automata

pytest.importorskip("outlines_core")
TOKENIZER = LetterTokenizer()
MESSAGES = [{"role": "user", "content": "abcabcab"}]
IDS = TOKENIZER.chat(MESSAGES)
SCHEMA = {
    "type": "object", "required": ["b", "a"], "additionalProperties": False,
    "properties": {"b": {"enum": ["x", "yy"]}, "a": {"type": "boolean"}},
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
WORDS = "(ab|cd)+e"
PATTERNS = [WORDS, r"a\.b|c\|d|\{", *(f"{letter}{{1,9}}" for letter in "abcde")]


@functools.cache
def constraint():
    """Return one constraint with all automata, so that `decode` compiles one program. The first one is SCHEMA's."""
    schema = processors.json_schema(SCHEMA, TOKENIZER)
    return processors.constraint(schema, *(processors.regex(pattern, TOKENIZER) for pattern in PATTERNS))


def wanted(pattern, seed=3, **settings):
    number = None if pattern is None else 1 + PATTERNS.index(pattern) if pattern != "schema" else 0
    ours = following(constraint(), number)
    return TOKENIZER.decode(expected(IDS, seed, processors=[ours], **settings))


def chat(client, **options):
    return client.chat.completions.create(model="tiny", messages=MESSAGES, **{"seed": 3} | options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema(client, temperature):
    answer = chat(client, response_format=FORMAT, temperature=temperature)
    text = wanted("schema", temperature=temperature)
    assert answer.choices[0].message.content == text and answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(text), SCHEMA)
    events = chat(client, response_format=FORMAT, temperature=temperature, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in events) == text


@pytest.mark.parametrize("fields", [
    {"guided_regex": WORDS}, {"structured_outputs": {"regex": WORDS}}, {"guided_choice": ["a.b", "c|d", "{"]},
    {"structured_outputs": {"choice": ["a.b", "c|d", "{"]}}, {"guided_json": SCHEMA},
    {"structured_outputs": {"json": json.dumps(SCHEMA)}},
])  # fmt: skip
def test_fields_of_other_servers(client, fields):
    text = json.dumps(fields)
    pattern = PATTERNS[1] if "choice" in text else WORDS if "regex" in text else "schema"
    assert chat(client, extra_body=fields).choices[0].message.content == wanted(pattern)


def test_requests_with_different_constraints_share_the_batch_and_compile_nothing(server, client):
    chat(client, extra_body={"guided_regex": "z+"}, max_tokens=2)
    sizes = admission.begin._cache_size(), automata._put._cache_size()

    async def ask_all():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            bodies = [{"guided_regex": f"{letter}{{1,9}}"} if letter != "-" else {} for letter in "ab-cabde-c"]
            shared = {"model": "tiny", "messages": MESSAGES, "seed": 3}
            return await asyncio.gather(*(http.post("/v1/chat/completions", json=shared | body) for body in bodies))

    texts = [answer.json()["choices"][0]["message"]["content"] for answer in asyncio.run(ask_all())]
    for letter, text in zip("ab-cabde-c", texts, strict=True):
        assert text == wanted(None if letter == "-" else f"{letter}{{1,9}}")
    assert (admission.begin._cache_size(), automata._put._cache_size()) == sizes


@pytest.mark.parametrize(("fields", "sentence"), [
    ({"guided_regex": "["}, "the regular expression is invalid"),
    ({"guided_json": {"type": "object", "patternProperties": {}}}, "patternProperties"),
    ({"guided_json": "{"}, "the JSON schema is not JSON"),
    ({"guided_regex": "(?:abcdefghijklmnopqrstuvwxyz){600}"}, r"takes 1.6. MiB, .* room for 1; raise --constraint-mib"),
    ({"guided_regex": "a", "guided_json": {}}, "several constraints"),
    ({"guided_regex": "a", "response_format": FORMAT}, "several constraints"),
    ({"response_format": {"type": "json_schema"}}, "response_format json_schema needs a json_schema"),
    ({"structured_outputs": {"grammar": "root"}}, "structured_outputs with a grammar is not supported"),
    ({"guided_choice": []}, "at least 1 item"),
])  # fmt: skip
def test_constraints_that_are_refused(client, fields, sentence):
    with pytest.raises(openai.BadRequestError, match=sentence):
        chat(client, extra_body=fields)


def test_limits_of_time(monkeypatch):
    with pytest.raises(UsageError, match=r"takes more than 0.05 s to compile; limit its lengths"):
        processors.regex("a", TOKENIZER, seconds=0.05)
    monkeypatch.setattr(byte_automaton.json, "dumps", lambda _: "[]")  # the process fails, as without memory
    with pytest.raises(UsageError, match="takes too much memory to compile"):
        processors.regex("a", TOKENIZER, seconds=10)


def test_a_large_schema_is_refused():
    everything = {"$defs": {"a": {"properties": {x: {"$ref": "#/$defs/a"} for x in "abcdefghijklmnopqrst"}}}}
    with pytest.raises(UsageError, match="too large at #/"):
        processors.json_schema(everything | {"$ref": "#/$defs/a"}, TOKENIZER)
