"""The commands by name. Each command imports its heavy modules itself, so that `specjax --help` is quick."""

from __future__ import annotations

import contextlib
import os
from typing import Annotated

import typer
import typer.completion

from specjax.cli.commands import (
    bench,
    chat,
    compare_verifiers,
    datastore,
    explain,
    generate,
    methods,
    serve,
    train,
    transcribe,
)
from specjax.cli.commands.models import check_bits, compile, group_experts, inspect, plan, quantize
from specjax.cli.options import completion
from specjax.cli.options.panels import assign_panels
from specjax.errors import UsageError

HINTS = {"--model": "the model is --target MODEL", "-m": "the model is --target MODEL"}
"""Flags of other programs, and the fix."""

COMPLETION_VARIABLE = "_SPECJAX_COMPLETE"
"""The environment variable of the shell completion that `specjax --install-completion` installs."""

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("explain")(explain.explain)
app.command("transcribe")(transcribe.transcribe)
app.command("bench")(bench.bench)
app.command("compare-verifiers")(compare_verifiers.compare_verifiers)
app.command("compile")(compile.compile_)
app.command("plan")(plan.plan)
app.command("train")(train.train)
app.command("methods")(methods.methods)
app.command("inspect")(inspect.inspect)
app.command("quantize")(quantize.quantize)
app.command("group-experts")(group_experts.group_experts)
app.command("check-bits")(check_bits.check_bits)
app.add_typer(datastore.app, name="datastore")


def _show_version(show: bool) -> None:
    if show:
        from specjax import __version__

        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def _specjax(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Speculative and parallel decoding in JAX.

    Exit codes: 0 success, 1 texts or bits differ, 2 wrong input, 3 another host failed, 130 interrupted.
    """


def run(arguments: list[str]) -> int:
    """Run a command and return its exit code. Typer's own call would handle interrupts and unexpected errors itself."""
    command = typer.main.get_command(app)
    assign_panels(command)
    if COMPLETION_VARIABLE in os.environ:  # a call of the shell's completion, which needs typer's own call
        typer.completion.completion_init()
        is_bash = os.environ[COMPLETION_VARIABLE] == "complete_bash"
        with completion.joined_bash_words() if is_bash else contextlib.nullcontext():
            command.main(arguments, prog_name="specjax")
    try:
        with command.make_context("specjax", arguments) as context:
            return command.invoke(context) or 0
    except typer.Exit as error:
        return error.exit_code
    except Exception as error:  # the parser's classes are click's or typer's own, depending on the version of typer
        if not hasattr(error, "format_message"):
            raise
        message, param = error.format_message(), getattr(error, "param", None)
        fix = HINTS.get(getattr(error, "option_name", None) or (param.opts[0] if param else ""))
        if "extra argument" in message:
            fix = "put a text of several words in quotes"
        if fix is None:
            raise
        raise UsageError(f"{message}; {fix}") from None
