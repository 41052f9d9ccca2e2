"""The command line: `specjax generate`, `bench`, `compare-verifiers`, `compile`, `plan`, `methods` and `datastore`.

Heavy imports are inside the commands, so that `specjax --help` is quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from specjax.cli import bench, compare_verifiers, compile, datastore, generate, methods, plan
from specjax.errors import UsageError
from specjax.libtpu import prepare_environment

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(generate.generate)
app.command("bench")(bench.bench)
app.command("compare-verifiers")(compare_verifiers.compare_verifiers)
app.command("compile")(compile.compile_)
app.command("plan")(plan.plan)
app.command("methods")(methods.methods)
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (default: of this process) and exit."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    prepare_environment()  # else libtpu, where it is installed to compile, warns of the TPU that is not there
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(args=arguments, prog_name="specjax", standalone_mode=False)
        sys.stdout.flush()
    except UsageError as error:
        code = _complain(str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = _tell_hosts("interrupted", 130)
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = _tell_hosts("the reader of its output went away", 1)
    except Exception as error:
        if not hasattr(error, "format_message"):  # not one of the argument parser's
            raise
        code = _complain(error.format_message()) if error.format_message() else 2
    raise SystemExit(code if isinstance(code, int) else 0)


def _complain(sentence: str) -> int:
    print(f"specjax: {' '.join(sentence.split())}", file=sys.stderr)
    return _tell_hosts(sentence, 2)


def _tell_hosts(sentence: str, code: int) -> int:
    """On several hosts, end the others too; does not return there."""
    from specjax.parallel import hosts

    hosts.fail(sentence, code)
    return code
