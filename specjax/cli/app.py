"""Commands and their names. Heavy imports are inside the commands, so that `specjax --help` is quick."""

from __future__ import annotations

import contextlib
import os
from typing import Annotated

import typer
import typer.completion

from specjax.cli.commands import (
    bench,
    chat,
    check_bits,
    compare_verifiers,
    compile,
    datastore,
    explain,
    generate,
    inspect,
    methods,
    plan,
    train,
)
from specjax.cli.options import completion
from specjax.cli.options.panels import group
from specjax.errors import UsageError

GUESSES = {"--model": "the model itself is --target MODEL", "-m": "the model is --target MODEL"}
"""What people write who come from elsewhere, and what it is called here."""

COMPLETING = "_SPECJAX_COMPLETE"
"""Set by the completion that `specjax --install-completion` gives a shell."""

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("explain")(explain.explain)
app.command("bench")(bench.bench)
app.command("compare-verifiers")(compare_verifiers.compare_verifiers)
app.command("compile")(compile.compile_)
app.command("plan")(plan.plan)
app.command("train")(train.train)
app.command("methods")(methods.methods)
app.command("inspect")(inspect.inspect)
app.command("check-bits")(check_bits.check_bits)
app.add_typer(datastore.app, name="datastore")


def _show_version(wanted: bool) -> None:
    if wanted:
        from specjax import __version__

        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def _specjax(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Speculative and parallel decoding in JAX.

    Exit codes: 0 done, 1 refused comparison, 2 bad input, 3 another host failed, 130 interrupted.
    """


def run(arguments: list[str]) -> int:
    """Run a command; returns the exit code. Typer's own call would take interrupts and unexpected errors for itself."""
    command = typer.main.get_command(app)
    group(command)
    if COMPLETING in os.environ:  # a shell asks what could come next; it wants typer's own call
        typer.completion.completion_init()
        bash = os.environ[COMPLETING] == "complete_bash"
        with completion.joined_bash_words() if bash else contextlib.nullcontext():
            command.main(arguments, prog_name="specjax")
    try:
        with command.make_context("specjax", arguments) as context:
            return command.invoke(context) or 0
    except typer.Exit as error:
        return error.exit_code
    except Exception as error:  # the parser's classes are click's or typer's own, by the version of typer
        if not hasattr(error, "format_message"):
            raise
        said, param = error.format_message(), getattr(error, "param", None)
        fix = GUESSES.get(getattr(error, "option_name", None) or (param.opts[0] if param else ""))
        if "extra argument" in said:
            fix = "put a text of several words in quotes"
        if fix is None:
            raise
        raise UsageError(f"{said}; {fix}") from None
