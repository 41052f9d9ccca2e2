"""The command line: `specjax generate`, `bench`, `compare-verifiers`, `compile`, `plan`, `inspect`, `methods`,
`datastore`.

Heavy imports are inside the commands, so that `specjax --help` is quick.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Annotated

import typer

from specjax.cli import bench, compare_verifiers, compile, datastore, generate, inspect, methods, plan
from specjax.cli.console import complain, show_traceback, visible
from specjax.cli.files import FULL
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
app.command("inspect")(inspect.inspect)
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
    with Interrupts() as interrupts:
        try:
            _prepare()
            code = _run(list(sys.argv[1:] if arguments is None else arguments))
            sys.stdout.flush()
        except UsageError as error:
            code = _complain(str(error))
        except KeyboardInterrupt as error:
            code = _interrupted(str(error))
        except BrokenPipeError:  # the reader of our output went away
            _drop_output()
            code = _tell_hosts("the reader of its output went away", 1)
        except Exception as error:
            if interrupts.came:  # which a library has made another error of
                code = _interrupted()
            elif isinstance(error, OSError) and error.errno in FULL:
                code = _full(error)
            elif hasattr(error, "format_message"):  # of the argument parser
                code = _complain(error.format_message()) if error.format_message() else 2
            else:
                raise
    raise SystemExit(code if isinstance(code, int) else 0)


def _prepare() -> None:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    sys.excepthook = show_traceback
    prepare_environment()  # else libtpu, where it is installed to compile, warns of the TPU that is not there


def _run(arguments: list[str]) -> int:
    """The exit code. Typer's own call would take interrupts and unexpected errors for itself."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("specjax", arguments) as context:
            return command.invoke(context) or 0
    except typer.Exit as error:
        return error.exit_code


class Interrupts:
    """Ctrl-C raises KeyboardInterrupt once; the second one ends the process, whatever it is doing."""

    came = False

    def __enter__(self) -> Interrupts:
        # Else they are ignored, as in the background, or somebody else's affair, as of a test.
        self._ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._ours = self._ours and threading.current_thread() is threading.main_thread()
        if self._ours:
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def _interrupt(self, number, frame) -> None:
        if self.came:
            os.write(2, b"specjax: interrupted twice\n")
            os._exit(130)
        self.came = True
        raise KeyboardInterrupt

    def __exit__(self, *error) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _complain(sentence: str) -> int:
    complain(sentence)
    return _tell_hosts(sentence, 2)


def _interrupted(kept: str = "") -> int:
    """`kept`: where a command left what it had done, as its KeyboardInterrupt says."""
    complain(f"interrupted; {kept}" if kept else "interrupted")
    return _tell_hosts("interrupted", 130)


def _full(error: OSError) -> int:
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()
    return _complain(f"cannot write {error.filename or 'the output'} ({error.strerror}); make room and run it again")


def _drop_output() -> None:
    """Python would try to write the rest of it at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell_hosts(sentence: str, code: int) -> int:
    """On several hosts, end the others too; does not return there."""
    from specjax.parallel import hosts

    hosts.fail(visible(sentence), code)
    return code
