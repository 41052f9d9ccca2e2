"""Tests of the progress of a long run."""

from specjax.cli.output import progress
from specjax.cli.output.console import Console


def test_the_first_and_then_now_and_then(capsys, monkeypatch):
    clock = iter([0.0, 2.0, 31.0, 33.0, 90.0, 99.0])  # made; after each prompt
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    lines = progress.ProgressLines(Console(), 5, shown=False)
    for done in range(1, 6):
        lines.update(done)
    assert capsys.readouterr().out.splitlines() == [
        "1 of 5 prompts, 2 s",
        "3 of 5 prompts, 33 s",
        "4 of 5 prompts, 90 s",
    ]


def test_nothing_where_it_is_seen(capsys):
    progress.ProgressLines(Console(), 5, shown=True).update(1)
    assert capsys.readouterr().out == ""
