"""Files of prompts and conversations in the formats of ShareGPT, OpenAI and others."""

import json

import pytest

from specjax.errors import UsageError
from specjax.training.data.conversation_files import parse_entry, read_text_file

HI, YES = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
NO = {"weight": 0}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"messages": [HI, YES]}, [HI, YES]),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}, [HI, YES]),
        ({"conversation": [{"role": "Human", "content": "hi"}, {"role": "bot", "content": "yes"}]}, [HI, YES]),
        ({"system": "be", "messages": [HI, YES]}, [{"role": "system", "content": "be"}, HI, YES]),
        ({"messages": [{"role": "developer", "content": "be"}, HI]}, [{"role": "system", "content": "be"}, HI]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, YES | NO]}, [HI, YES | NO]),
        ({"turns": ["hi", "why"]}, [HI, {"role": "user", "content": "why"}]),
        ({"turns": ["hi"], "category": "qa"}, "hi"),
        ({"prompt": "hi"}, "hi"),
        ({"prompt": [HI], "completion": [YES]}, [HI, YES]),
        ({"prompt": "hi", "response": "yes"}, [HI, YES]),
        ({"instruction": "hi", "input": "", "output": "yes"}, [HI, YES]),
        ({"instruction": "add", "input": "1 2"}, "add\n\n1 2"),
        ({"instruction": "add", "context": "1 2", "response": "yes"}, [{"role": "user", "content": "add\n\n1 2"}, YES]),
        ({"prompt": "hi", "chosen": [HI, YES], "rejected": [HI]}, [HI, YES]),
        ({"text": "once"}, "once"),
        ([HI, YES], [HI, YES]),
        ("hi", "hi"),
    ],
)  # fmt: skip
def test_an_entry_is_a_text_or_a_conversation(entry, expected):
    assert parse_entry(entry) == expected


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({}, 'no text: it needs "messages"'),
        ({"messages": [YES]}, "no message of the user"),
        ({"messages": [YES, HI]}, "begins with an answer"),
        ({"messages": [{"role": "judge", "content": "hi"}]}, 'the role "judge" is not one of'),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 'part of type "image_url"'),
        ({"messages": [{"role": "user"}]}, "a message has no text"),
        ({"messages": "hi"}, "is no list of messages"),
        ({"messages": [HI], "tools": [{}]}, 'has "tools", which are not read'),
        ({"instruction": "hi", "history": [["a", "b"]], "output": "c"}, 'has "history", which are not read'),
        ({"prompt": 3}, '"prompt" is no text, but 3'),
        ({"turns": [" "]}, '"turns" is empty'),
        ({"prompt": "\ud800"}, "half of a surrogate pair"),
        (7, "the entry is no text"),
    ],
)
def test_an_entry_that_cannot_be_used_is_named(entry, words):
    with pytest.raises(UsageError, match=words):
        parse_entry(entry)


def test_lines_lists_and_texts_are_read_and_bad_entries_are_numbered(tmp_path):
    entries = [{"messages": [HI, YES]}, {"nothing": 1}, {"prompt": "hi"}]
    (tmp_path / "list.json").write_text(json.dumps(entries, indent=1))
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, entries)) + "\n\n{broken\n")
    (tmp_path / "lines.txt").write_text("hi\r\n\n[1] a note\n")
    json_list, lines, texts = (read_text_file(tmp_path / name) for name in ("list.json", "lines.jsonl", "lines.txt"))
    assert json_list.sources == lines.sources == [[HI, YES], "hi"]
    assert [entry.number for entry in json_list.bad] == [2] and [entry.number for entry in lines.bad] == [2, 5]
    assert "not valid JSON" in lines.bad[1].error and lines.bad[0].error == json_list.bad[0].error
    assert "no text: it needs" in lines.bad[0].error
    assert texts.sources == ["hi", "[1] a note"] and not texts.bad
    (tmp_path / "bad.json").write_text('[{"x": 1}]')
    with pytest.raises(UsageError, match="has no text that can be used"):
        read_text_file(tmp_path / "bad.json")
    with pytest.raises(UsageError, match=r"cannot read .*none.json"):
        read_text_file(tmp_path / "none.json")
