"""The command line: `specjax generate`, `bench`, `compare-verifiers`, `compile`, `plan`, `inspect`,
`check-bits`, `methods`, `datastore`.

Here is how it ends, whatever happens. What takes time to import comes after Ctrl-C is in good hands.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

from specjax.errors import UsageError

NEEDED = "typer", "rich", "prompt_toolkit"
"""Packages of the extra `cli`."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (default: of this process) and exit."""
    with Interrupts() as interrupts:
        try:
            _check_packages()
            _prepare()
            from specjax.cli.app import run

            code = run(list(sys.argv[1:] if arguments is None else arguments))
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
            elif isinstance(error, OSError) and _is_full(error):
                code = _full(error)
            elif isinstance(error, OSError) and error.filename is not None:  # gone, changed or closed to us meanwhile
                code = _complain(f"cannot use {error.filename} ({error.strerror})")
            elif isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):  # as XLA says it
                code = _complain(f"there is not enough memory: {error}; ask for less at once, or of a smaller model")
            elif hasattr(error, "format_message"):  # of the argument parser
                code = _complain(error.format_message()) if error.format_message() else 2
            else:
                raise
    code = code if isinstance(code, int) else 0
    if arguments is None and _is_reading():  # for passes that nobody waits for, and Python would: 4.5 to 7 s of SmolLM2
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def _is_reading() -> bool:
    """Whether compiled programs are still read, and nothing is written."""
    kept = sys.modules.get("specjax.persistence.program_cache")  # else there are none, and it would import JAX
    return kept is not None and any(thread.name.startswith(kept.READING) for thread in threading.enumerate())


def _check_packages() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        os.write(2, f"specjax: the command line needs {', '.join(missing)}; run pip install 'specjax[cli]'\n".encode())
        raise SystemExit(2)


def _prepare() -> None:
    from specjax.cli.output.console import show_traceback
    from specjax.files.libtpu import prepare_environment

    # What was closed before the start, as by >&-, is None, and the next file that is opened would take its number.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    sys.excepthook = show_traceback
    prepare_environment()  # else libtpu, where it is installed to compile, warns of the TPU that is not there


class Interrupts:
    """Ctrl-C raises KeyboardInterrupt once; the second one ends the process, whatever it is doing."""

    came = False

    def __enter__(self) -> Interrupts:
        # Else they are ignored, as in the background, or somebody else's affair, as of a test.
        self._ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._ours = self._ours and threading.current_thread() is threading.main_thread()
        if self._ours:
            self._hook, sys.unraisablehook = sys.unraisablehook, self._dropped
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def _interrupt(self, number, frame) -> None:
        if self.came:
            _leave("interrupted twice")
        if _imports_jax(frame):  # nothing is done yet, and extensions print what is raised in them, or drop it
            _leave("interrupted")
        self.came = True
        raise KeyboardInterrupt

    def _dropped(self, unraisable) -> None:
        """Where a library is called back, as by the garbage collector, nothing can be raised: once more, a bit later.

        One in four came to nothing so while JAX was at work.
        """
        if not (self.came and issubclass(unraisable.exc_type, KeyboardInterrupt)):
            self._hook(unraisable)
            return
        self.came = False
        again = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()

    def __exit__(self, *error) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.unraisablehook = self._hook


def _imports_jax(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") in ("jax", "numpy"):
            return True
        frame = frame.f_back
    return False


def _leave(why: str) -> None:
    os.write(2, f"specjax: {why}\n".encode())
    os._exit(130)


def _complain(sentence: str) -> int:
    from specjax.cli.output.console import complain

    complain(sentence)
    return _tell_hosts(sentence, 2)


def _interrupted(kept: str = "") -> int:
    """`kept`: where a command left what it had done, as its KeyboardInterrupt says."""
    from specjax.cli.output.console import complain

    complain(f"interrupted; {kept}" if kept else "interrupted")
    return _tell_hosts("interrupted", 130)


def _is_full(error: OSError) -> bool:
    from specjax.cli.output.files import FULL

    return error.errno in FULL


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
    hosts = sys.modules.get("specjax.parallel.hosts")  # else there are none, and it would import JAX
    if hosts is not None:
        from specjax.cli.output.console import visible

        hosts.fail(visible(sentence), code)
    return code
