"""The command line: `specjax generate`, `chat`, `explain`, `bench`, `train`, `methods`, and tools around them.

This module handles errors, interrupts and exit codes. Slow imports follow after Ctrl-C is handled.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from types import FrameType

from specjax.errors import UsageError

NEEDED = "typer", "rich", "prompt_toolkit"
"""Packages of the extra `cli`."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit. arguments: default: those of this process."""
    with Interrupts() as interrupts:
        try:
            _check_packages()
            _prepare()
            from specjax.cli.app import run

            code = run(list(sys.argv[1:] if arguments is None else arguments))
            sys.stdout.flush()
        except BaseException as error:
            code = _handle_error(error, interrupts)
    code = code if isinstance(code, int) else 0
    if arguments is None and _has_busy_threads():
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def _handle_error(error: BaseException, interrupts: Interrupts) -> int:
    """Report an error and return the exit code. Errors that no user can fix are raised again."""
    if isinstance(error, UsageError):
        return _report(str(error))
    if isinstance(error, KeyboardInterrupt):
        return _report_interrupt(str(error))
    if isinstance(error, BrokenPipeError):  # the reader of the output has closed it
        _drop_output()
        return _end_hosts("the reader of its output has closed", 1)
    if not isinstance(error, Exception):
        raise error
    if interrupts.received:  # a library has raised another error after Ctrl-C
        return _report_interrupt()
    if isinstance(error, OSError) and _is_full(error):
        return _report_full(error)
    if isinstance(error, OSError) and error.filename is not None:  # a file was removed or changed during the run
        return _report(f"cannot use {error.filename} ({error.strerror}); check the file, and run the command again")
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):  # XLA's words
        return _report(f"out of memory: {error}; use a smaller batch, shorter texts or a smaller model")
    if hasattr(error, "format_message"):  # an error of the argument parser
        return _report(error.format_message()) if error.format_message() else 2
    raise error


def _has_busy_threads() -> bool:
    """Return True if a thread that writes no files is inside XLA.

    Python would wait 4.5 to 7 s for threads that load compiled programs, which nobody needs any more. It aborts if the
    thread of a server returns from XLA after the end of the interpreter.
    """
    prefixes = (
        ("specjax.persistence.program_cache", "READING"), ("specjax.server.engine_thread", "THREAD"),
    )  # fmt: skip
    modules = [(sys.modules.get(module), name) for module, name in prefixes]  # an import would load JAX
    names = tuple(getattr(module, name) for module, name in modules if module is not None)
    return bool(names) and any(thread.name.startswith(names) for thread in threading.enumerate())


def _check_packages() -> None:
    """Exit with code 2 if a package of the command line is missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        os.write(2, f"specjax: the command line needs {', '.join(missing)}; run pip install 'specjax[cli]'\n".encode())
        raise SystemExit(2)


def _prepare() -> None:
    """Prepare the streams, the traceback and the environments of the compilers."""
    from specjax.cli.output.console import show_traceback, show_warning
    from specjax.files import cuda_compiler, libtpu

    # A stream that the shell has closed, as with >&-, is None; the next opened file would get its number.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    sys.excepthook, warnings.showwarning = show_traceback, show_warning
    libtpu.prepare_environment()  # installed as a compiler, it would warn about a missing TPU
    cuda_compiler.prepare_environment()


class Interrupts:
    """Ctrl-C raises KeyboardInterrupt once; the second one ends the process immediately."""

    received = False

    def __enter__(self) -> Interrupts:
        # Interrupts are ignored in background processes, and tests may have handlers of their own.
        self._is_active = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._is_active = self._is_active and threading.current_thread() is threading.main_thread()
        if self._is_active:
            self._hook, sys.unraisablehook = sys.unraisablehook, self._handle_unraisable
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def _interrupt(self, number, frame) -> None:
        if self.received:
            _exit_now("interrupted twice")
        if _imports_jax(frame):  # extensions print or drop errors during their import
            _exit_now("interrupted")
        self.received = True
        raise KeyboardInterrupt

    def _handle_unraisable(self, unraisable) -> None:
        """Send the interrupt again a moment later if it came in a callback, such as the garbage collector's.

        Python drops errors of such callbacks. One interrupt in four was lost while JAX was at work.
        """
        if not (self.received and issubclass(unraisable.exc_type, KeyboardInterrupt)):
            self._hook(unraisable)
            return
        self.received = False
        timer = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()

    def __exit__(self, *error) -> None:
        if self._is_active:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.unraisablehook = self._hook


def _imports_jax(frame: FrameType | None) -> bool:
    """Return True if jax or numpy is being imported."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") in ("jax", "numpy"):
            return True
        frame = frame.f_back
    return False


def _exit_now(reason: str) -> None:
    os.write(2, f"specjax: {reason}\n".encode())
    os._exit(130)


def _report(message: str) -> int:
    """Print an error; return exit code 2."""
    from specjax.cli.output.console import print_error

    print_error(message)
    return _end_hosts(message, 2)


def _report_interrupt(place: str = "") -> int:
    """Print that the run was interrupted, and the place of its results; return exit code 130."""
    from specjax.cli.output.console import print_error

    print_error(f"interrupted; {place}" if place else "interrupted")
    return _end_hosts("interrupted", 130)


def _is_full(error: OSError) -> bool:
    from specjax.cli.output.files import FULL

    return error.errno in FULL


def _report_full(error: OSError) -> int:
    """Print that a disk is full; return exit code 2."""
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()
    return _report(
        f"cannot write {error.filename or 'the output'} ({error.strerror}); free some space and run it again"
    )


def _drop_output() -> None:
    """Send the remaining output to the null device; Python would try to write it at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end_hosts(message: str, code: int) -> int:
    """Return the exit code. On several hosts, end the other hosts and this process instead."""
    hosts = sys.modules.get("specjax.parallel.hosts")  # an import would load JAX
    if hosts is not None:
        from specjax.cli.output.console import visible

        hosts.fail(visible(message), code)
    return code
