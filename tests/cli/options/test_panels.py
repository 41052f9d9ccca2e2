"""Help in groups, and what people write who come from elsewhere."""

import pytest
import typer

from specjax.cli.app import app, run
from specjax.cli.options.panels import PANELS, assign_panels
from specjax.errors import UsageError


def flags_of(command):
    flags = {param.opts[0]: param for param in command.params if param.param_type_name == "option"}
    for sub in getattr(command, "commands", {}).values():
        flags |= flags_of(sub)
    return flags


def test_every_flag_of_a_group_exists_and_long_commands_are_grouped():
    command = typer.main.get_command(app)
    grouped = {flag for flags in PANELS.values() for flag in flags.split()}
    assert grouped <= set(flags_of(command))
    assign_panels(command)
    first = [flag for flag, param in flags_of(command.commands["generate"]).items() if param.rich_help_panel is None]
    assert len([flag for flag in first if flag != "--stop"]) <= 6  # what stands before the groups
    assert flags_of(command.commands["methods"])["--rules"].rich_help_panel is None


@pytest.mark.parametrize(
    "words", [["generate", "--model", "Qwen/x", "hi"], ["train", "--model", "x"], ["methods", "-m", "x"]]
)
def test_a_guess_is_answered(words):
    with pytest.raises(UsageError, match="--target MODEL"):
        run(words)


def test_methods_fit_a_narrow_terminal(capsys, monkeypatch):
    for columns, paper in (("80", False), ("140", True)):
        monkeypatch.setenv("COLUMNS", columns)
        run(["methods"])
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= int(columns)
        assert ("2211.17192" in out) == paper
