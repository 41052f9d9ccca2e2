"""Calls of tools, in the forms of two families of models."""

import json

import openai
import pytest
from served import LetterTokenizer, expected

from specjax import UsageError, processors
from specjax.server.structured.tools import ToolParser, form_of, pattern_of_calls, required_call

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "</x>é"}}\n</tool_call>'
OTHER = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
BARE = '{"name": "add", "parameters": {"a": 1}}'
NOTHING = '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'
ADD, STOP = ("add", {"a": 1, "b": "</x>é"}), ("stop", {})


def parsed(text, size):
    parser = ToolParser({"add", "stop"})
    content, calls = "", []
    for start in range(0, len(text), size):
        more, new = parser.feed(text[start : start + size])
        content, calls = content + more, calls + new
    more, new = parser.finish()
    return content + more, [(call.name, json.loads(call.arguments)) for call in calls + new]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(("text", "content", "calls"), [
    ("plain < text", "plain < text", []), ("", "", []), (CALL, "", [ADD]), (f"{CALL}\n{OTHER}\n", "", [ADD, STOP]),
    (f"I add. {CALL}", "I add. ", [ADD]), (f"{OTHER} done", "done", [STOP]), (NOTHING, NOTHING, []),
    ("<tool_call>{broken</tool_call> x", "<tool_call>{broken</tool_call> x", []),
    ("<tool_call>\n{", "<tool_call>\n{", []),
    (OTHER.removesuffix("</tool_call>"), "", [STOP]), (BARE, "", [("add", {"a": 1})]),
    (f"<|python_tag|>{BARE}; {BARE}", "", [("add", {"a": 1})] * 2), ('{"a": 1}', '{"a": 1}', []),
    (f"{BARE} and", f"{BARE} and", []), (f"x {BARE}", f"x {BARE}", []), ("<tool", "<tool", []), ("<|py", "<|py", []),
    ('{"name": ["add"]}', '{"name": ["add"]}', []),
])  # fmt: skip
def test_calls_in_pieces_of_any_size(text, content, calls, size):
    assert parsed(text, size) == (content, calls)


TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
        "type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}}, "required": ["a", "b"]}}},
    {"type": "function", "function": {"name": "stop"}},
]  # fmt: skip
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(client, **options):
    fields = {"messages": MESSAGES, "tools": TOOLS, "seed": 1} | options
    return client.chat.completions.create(model="tiny", **fields)


def pattern(tokenizer, functions, several):
    return pattern_of_calls(required_call(functions, several=several).text, form_of(tokenizer))


def test_a_tool_that_must_be_called(client):
    pytest.importorskip("outlines_core")
    named = {"type": "function", "function": {"name": "add"}}
    answer = chat(client, tool_choice=named).choices[0]
    (call,) = answer.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "add" and arguments["a"] in (1, 2) and isinstance(arguments["b"], bool)
    assert answer.finish_reason == "tool_calls" and answer.message.content is None and call.id.startswith("call_")
    tokenizer, schema = LetterTokenizer(), TOOLS[0]["function"]["parameters"]
    automaton = processors.regex(pattern(tokenizer, {"add": schema}, several=False), tokenizer)
    dumped = [{"type": "function", "function": tool["function"]} for tool in TOOLS]
    ids = tokenizer.chat(MESSAGES, tools=dumped)
    text = tokenizer.decode(expected(ids, 1, 96, processors=[processors.constraint(automaton)]))
    inside = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
    assert len(inside) == len(text) - 23 and json.loads(inside)["arguments"] == arguments
    events = [event.choices[0] for event in chat(client, tool_choice=named, stream=True)]
    deltas = [call for event in events for call in event.delta.tool_calls or ()]
    assert [(delta.index, delta.function.name) for delta in deltas] == [(0, "add")]
    assert json.loads(deltas[0].function.arguments) == arguments and events[-1].finish_reason == "tool_calls"
    assert not any(event.delta.content for event in events)


def test_a_call_that_is_cut_is_no_text(client):
    pytest.importorskip("outlines_core")
    choice = chat(client, tool_choice="required", max_tokens=30).choices[0]
    assert choice.finish_reason == "length" and not choice.message.content and not choice.message.tool_calls
    events = [event.choices[0] for event in chat(client, tool_choice="required", max_tokens=30, stream=True)]
    assert events[-1].finish_reason == "length" and not any(event.delta.content for event in events)


def test_a_choice_of_tools(client):
    pytest.importorskip("outlines_core")
    answer = chat(client, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert len(answer.message.tool_calls) == 1
    for choice in ("none", "auto", openai.omit):  # a random model writes no call
        message = chat(client, tool_choice=choice).choices[0].message
        assert message.tool_calls is None and message.content


def test_the_turns_of_a_chat_with_calls(client, server, monkeypatch):
    turns = []
    monkeypatch.setattr(LetterTokenizer, "chat", lambda self, messages, **_: turns.append(messages) or [1, 70])
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        *MESSAGES, {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]  # fmt: skip
    chat(client, messages=messages, max_tokens=1)
    _, assistant, tool = turns[-1]
    assert (
        assistant["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}} and assistant["content"] == ""
    )
    assert tool == {"role": "tool", "content": "3", "tool_call_id": "call_1"}


@pytest.mark.parametrize(("options", "sentence"), [
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "a function that is not in tools"),
    ({"tool_choice": "required", "tools": []}, "needs tools"), ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "two tools have the same name"), ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "several constraints"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
     "an image must be a data URL, such as data:image/png;base64,...; the server downloads nothing"),
])  # fmt: skip
def test_what_is_refused(client, options, sentence):
    with pytest.raises(openai.BadRequestError, match=sentence):
        chat(client, **options)


def test_parameters_that_cannot_be_enforced():
    with pytest.raises(UsageError, match=r"the parameters of f cannot be enforced: .*patternProperties"):
        pattern(None, {"f": {"type": "object", "patternProperties": {"a": {}}}}, several=False)


def test_forms():
    class Llama:
        chat_template = '{{ "<|python_tag|>" }}'

    assert form_of(Llama()) == "bare" and form_of(LetterTokenizer()) == "tagged"
    text = pattern(Llama(), {"f": {"enum": [{}]}}, several=True)
    assert text == r'\{"name": "f", "parameters": \{\}\}'
