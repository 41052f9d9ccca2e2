"""Tests that the output of the command line contains no control characters of other people's texts."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

import specjax
import specjax.cli
from specjax.cli.output.console import Console, drop_library_messages, print_error, print_json, show_traceback, visible
from specjax.cli.output.text import TextStream
from specjax.cli.runs import environment

TITLE = "\x1b]0;owned\x07"
HOSTILE = f"a{TITLE}b\x9b31m\u202egpj\u2066\x7f\r\b"
SHOWN = r"a\x1b]0;owned\x07b\x9b31m\u202egpj\u2066\x7f\r\x08"


def test_a_sentence_is_short(refused):
    for arguments in (("generate", "abc", "--target", "a" * 9000), ("generate", "abc", "--seed", "a" * 9000)):
        assert 100 < len(refused(*arguments)) < 2100


def test_callbacks_that_nobody_waits_for(capsys):
    loop = asyncio.new_event_loop()
    loop.close()
    for from_user_code in (False, True):
        try:
            loop.call_soon_threadsafe(print)
        except RuntimeError as error:
            trace = error.__traceback__
            show_traceback(RuntimeError, error, trace if from_user_code else trace.tb_next)
        assert ("Event loop is closed" in capsys.readouterr().err) == from_user_code


@pytest.mark.parametrize("error", [None, specjax.UsageError("why"), ValueError("other")])
def test_libraries_that_complain_too(error, capfd):
    with contextlib.suppress(Exception), drop_library_messages():
        os.write(2, b"thread panicked\n")
        if error is not None:
            raise error
    os.write(2, b"then\n")
    assert capfd.readouterr().err == ("then\n" if isinstance(error, specjax.UsageError) else "thread panicked\nthen\n")


def test_visible():
    assert visible(HOSTILE) == SHOWN
    assert visible(SHOWN) == SHOWN, "once is enough"
    harmless = "line\n\ttab é 中文 עברית \u200f 👩‍👩‍👧 [bold] :smile:"
    assert visible(harmless) == harmless
    assert visible("\ud800") == r"\ud800"


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("as_text", [False, True])
def test_every_way_to_print(terminal, as_text, monkeypatch):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    out = Console()
    out.file, out._force_terminal, out.legacy_windows = io.StringIO(), terminal, False
    out._color_system = out._detect_color_system() if terminal else None
    word = Text(HOSTILE) if as_text else HOSTILE
    out.print(word, style="bold green", soft_wrap=True)
    out.rule(word)
    table = Table(title=word)
    table.add_column(word)
    table.add_row(word)
    out.print(table)
    with out.status(word):
        pass
    with Progress(TextColumn("{task.description}"), console=out) as bar:
        bar.add_task(HOSTILE)
    shown = out.file.getvalue()
    for bad in (TITLE, "\x1b]", "\x07", "\x9b", "\u202e", "\u2066", "\x7f", "\b"):
        assert bad not in shown, bad
    assert r"a\x1b]0;owned" in shown
    assert ("\x1b[" in shown) == terminal, "rich's own are there"


def test_strings_are_no_markup():
    out = Console()
    out.file = io.StringIO()
    out.print("[/x] [bold]a[/] :smile:", soft_wrap=True)
    with environment.stage(out, "loading [/x]", "loaded"):
        pass
    assert "[/x] [bold]a[/] :smile:" in out.file.getvalue()


def test_json_reads_back(capsys):
    document = {"text": HOSTILE + "é\ud800", HOSTILE: [1]}
    print_json(document)
    written = capsys.readouterr().out
    assert json.loads(written) == document
    assert visible(written) == written and "é" in written


def test_errors(capsys):
    print_error(f"no file\n{HOSTILE}")
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        show_traceback(type(error), error, error.__traceback__)
    shown = capsys.readouterr().err
    assert shown.startswith(r"specjax: no file a\x1b]0;owned")
    assert visible(shown) == shown and "Traceback" in shown


def test_of_a_command(cli, refused, monkeypatch):
    def load(source=None, **options):
        raise specjax.UsageError(f"the architecture {HOSTILE} is unknown")

    monkeypatch.setattr(specjax, "load", load)
    sentence = refused("generate", "hi", "--target", HOSTILE)
    assert visible(sentence) == sentence and r"\x1b]0;owned" in sentence
    assert r"\x1b" in refused("methods", HOSTILE)
    assert r"\x1b" in refused(TITLE)


class Letters:
    eos = ()

    def decode(self, ids) -> str:
        return "".join(HOSTILE[i] for i in ids)


def test_generated_text():
    stream = TextStream(Letters(), ())
    shown = "".join(stream.push(i, drafted=i % 2 == 0).plain for i in range(len(HOSTILE)))
    assert shown == stream.text.plain == SHOWN
    assert stream.plain == HOSTILE, "JSON has it as it is"


def test_nothing_else_prints():
    """No file of the command line prints past `console.py`."""
    for file in Path(specjax.cli.__file__).parent.rglob("*.py"):
        if file.name == "console.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.module != "rich.console", file
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("print", "typer.secho", "click.echo", "sys.stdout.write"), file
                assert called != "typer.echo" or ast.unparse(node.args[0]) == "__version__", file


def test_as_a_module():
    run = subprocess.run(
        [sys.executable, "-m", "specjax.cli", "--version"], capture_output=True, text=True, timeout=120
    )
    assert (run.returncode, run.stdout.strip()) == (0, specjax.__version__), run.stderr


def test_a_warning_about_a_checkpoint_is_a_note(capsys):
    """Other warnings keep Python's form."""
    from specjax.cli.output.console import show_warning
    from specjax.errors import CheckpointWarning

    show_warning(CheckpointWarning("odd\x1b field"), CheckpointWarning, "library.py", 3)
    assert capsys.readouterr().err == "specjax: note: odd\\x1b field\n"
    show_warning(UserWarning("other"), UserWarning, "library.py", 3)
    assert "library.py:3: UserWarning: other" in capsys.readouterr().err
