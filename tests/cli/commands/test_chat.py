"""`specjax chat`."""

from __future__ import annotations

import io
import sys

import pytest

import specjax
from specjax.cli.output.console import visible
from specjax.cli.runs import session as sessions
from specjax.persistence.program_cache import ProgramCache
from specjax.persistence.program_files import LAST


@pytest.fixture
def chat(cli, monkeypatch):
    """`chat(lines, *arguments)`: the command with these lines on stdin."""

    def run(lines, *arguments):
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
        return cli("chat", "--max-new-tokens", 12, "--context", CONTEXT, *arguments)

    return run


CONTEXT = 160


def answer(*messages: str, count: int = 12) -> str:
    """Return the answer to the last turns that fit."""
    target, tokenizer = specjax.load()
    written = lambda messages: tokenizer.chat([{"content": words} for words in messages])
    while len(ids := written(messages)) > CONTEXT and len(messages) > 1:
        messages = messages[2:]
    result = specjax.decode(target, "autoregressive", [ids], key=0, max_new_tokens=count, eos=tokenizer.eos)
    return tokenizer.decode([i for i in result.to_lists()[0] if i not in tokenizer.eos])


def test_a_turn_is_answered_by_all_that_was_said(chat):
    first = answer("Be brief.", "hello")
    second = answer("Be brief.", "hello", first, "and now?")
    alone = answer("hello")
    done = chat(
        ["/stats", "hello", "and now?", "", "/stats", "/clear", "/system", "hello", "/undo", "hello", "/what", "/help",
         "/image a.png", "/exit", "never"], "--system", "Be brief.",
    )  # fmt: skip
    assert done.code == 0
    assert done.out == "".join(f"{visible(text)}\n" for text in (first, second, alone, alone))
    assert (
        "no answers yet" in done.err
        and "reads no images" in done.err
        and "24 tokens" in done.err
        and "unknown command /what" in done.err
    )
    for line in (
        "(all turns are forgotten)",
        "(no system prompt)",
        "(the last turn is forgotten)",
        "/clear        forget",
    ):
        assert line in done.err


def test_the_oldest_turns_are_forgotten_where_they_do_not_fit(chat):
    turns = []
    for letter in "abc":
        turns += [letter * 60, answer(*turns, letter * 60)]
    done = chat([letter * 60 for letter in "abc"])
    assert done.code == 0 and "the oldest turn is forgotten" in done.err
    assert done.out == "".join(f"{visible(text)}\n" for text in turns[1::2])


def test_what_is_too_long_is_said_and_the_chat_goes_on(chat):
    done = chat(["a" * 300, "hello"])
    assert done.code == 0 and "prompt" in done.err and done.out == visible(answer("hello")) + "\n"


def test_a_second_chat_finds_its_programs(chat, tmp_path, monkeypatch):
    monkeypatch.delenv("SPECJAX_NO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sessions, "use_compilation_cache", lambda enabled: None)  # XLA's cache is of the whole process
    hits, of = [], ProgramCache.programs

    def noted(self, *arguments):
        programs = of(self, *arguments)
        hits.append(self.hit)
        return programs

    monkeypatch.setattr(ProgramCache, "programs", noted)
    new = "--method", "prompt_lookup", "--max-new-tokens", 11  # of no other chat: XLA cannot keep all that has run
    texts = [chat(["hello"], *new, "--system", system).out for system in ("Be brief.", "Be brief.", "Be long.")]
    assert texts[0] == texts[1] == visible(answer("Be brief.", "hello", count=11)) + "\n"
    assert hits == [False, True, True]
    assert len([path for path in (tmp_path / "specjax" / "programs").iterdir() if path.suffix == LAST]) == 1


def test_bad_input(refused):
    assert "--context must be at least 64" in refused("chat", "--context", 8)
    assert "leaves 32 of 512 tokens" in refused("chat", "--max-new-tokens", 480)
    assert "--context must be at most 500" in refused("chat", "--max-new-tokens", 12, "--context", 600)
    assert "unknown method" in refused("chat", "--method", "minerva")
