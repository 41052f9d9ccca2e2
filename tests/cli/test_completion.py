"""Completion in a shell: commands and flags."""

import pytest


@pytest.mark.parametrize(
    ("words", "at", "found"),
    [
        ("specjax gener", 1, {"generate"}),
        ("specjax co", 1, {"compare-verifiers", "compile"}),
        ("specjax generate --temp", 2, {"--temperature"}),
        ("specjax datastore b", 2, {"build"}),
    ],
)
def test_words_are_completed(cli, monkeypatch, words, at, found):
    monkeypatch.setenv("_SPECJAX_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(at))
    assert set(cli().out.split()) == found


def test_a_shell_is_told_how_to_ask(cli, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # tests run below shells of every name
    shown = cli("--show-completion", "bash")
    assert shown.code == 0 and "_SPECJAX_COMPLETE=complete_bash" in shown.out
