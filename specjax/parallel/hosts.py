"""Programs of several processes: hosts of a TPU pod slice, nodes of a GPU cluster, or processes on one CPU.

Every process runs the same script and launches the same programs in the same order. JAX's runtime (`jax.distributed`)
connects them, notices when one stops and ends the others. This module adds error messages of one sentence, a check for
hosts with different inputs, and messages about a failed host.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import hashlib
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import numpy as np

from specjax.errors import UsageError
from specjax.version import __version__

EXIT_OTHER_HOST_FAILED = 3
"""Exit code of a host that ends because another host failed."""

_HEARTBEAT_KEYS = "specjax/hosts/alive"
_FAILURE_KEYS = "specjax/hosts/failed"
_FINISHED = "finished"
_EXIT = "exit-"
"""Prefix of the key for the code of a host's `sys.exit`, which is no failure yet: the host may continue."""
_COORDINATOR = "coordinator"
_COLLECTIVES = ("Gloo", "NCCL", "UNAVAILABLE")
_ended = threading.Event()
_connection_failed = threading.Event()
_exit_code: int | None = None
"""Code of the last `sys.exit` of the main thread, if it was not 0 and the program has not continued since."""


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = 300,
    heartbeat: float = 30,
) -> None:
    """Connect to the other processes. Call it once in every process, before any other call to JAX.

    Args:
      coordinator: "HOST:PORT" of process 0, with a free port. It and the next two arguments are only needed if JAX
        detects no cluster (Cloud TPUs, GKE, Slurm or Open MPI).
      num_processes, process_id: the number of processes, and the id of this one, from 0.
      timeout: seconds to wait for all processes.
      heartbeat: seconds without a heartbeat after which JAX considers a process dead and ends the others.

    Raises: UsageError for arguments that do not fit each other, and if not all processes connect in time.
    """
    _check_arguments(coordinator, num_processes, process_id)
    deadline = time.monotonic() + timeout
    if coordinator is not None and process_id not in (None, 0):
        _wait_for_coordinator(coordinator, timeout)
    explicit = None not in (coordinator, num_processes, process_id)
    errors: list[Exception] = []

    def connect():
        try:
            jax.distributed.initialize(
                coordinator, num_processes, process_id,
                cluster_detection_method="deactivate" if explicit else None,
                initialization_timeout=round(timeout) + 600,  # when JAX itself times out, it aborts the process
                heartbeat_timeout_seconds=round(heartbeat),
            )  # fmt: skip
        except Exception as error:
            errors.append(error)

    # Run in a thread, because the call cannot be interrupted.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(max(deadline - time.monotonic(), 1))
    if thread.is_alive():
        _connection_failed.set()
        atexit.register(_exit_now, 1)
        expected = f"{num_processes} processes" if num_processes else "all processes"
        where = f" at {coordinator}" if coordinator else ""
        raise UsageError(
            f"waited {timeout:g} s{where} for {expected}, but not all of them connected; start one on every host, with "
            "the same coordinator and number of processes, or set a longer timeout"
        )
    if errors:
        raise UsageError(_explain_error(errors[0], coordinator, num_processes, process_id)) from errors[0]
    _start_monitor(heartbeat)


def is_distributed() -> bool:
    """Return True if `initialize` (or `jax.distributed.initialize`) connected this process to others."""
    return jax.distributed.is_initialized()


def check_same(value, what: str) -> None:
    """Check that a value is the same in all processes. Every process must call it, and all of them raise the error.

    Args:
      value: bytes, or a value with a complete `repr` (strings, numbers, lists, dicts).
      what: its name in the plural, for the message.

    Raises: UsageError that names the processes that differ from process 0.
    """
    check_all_same({what: value})


def check_all_same(values: Mapping[str, Any]) -> None:
    """Check several values by name with one exchange, as `check_same` does. Arrays in lists are compared completely.

    Raises: UsageError that names the first value that differs.
    """
    global _exit_code
    _exit_code = None  # a caller has caught the exit, and the process continues
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    digests = np.stack([_digest(value) for value in values.values()])
    gathered = multihost_utils.process_allgather(digests).reshape(jax.process_count(), *digests.shape)
    for number, what in enumerate(values):
        differing = [str(i) for i, other in enumerate(gathered[:, number]) if (other != gathered[0, number]).any()]
        if differing:
            raise UsageError(
                f"the {what} of host {', '.join(differing)} differ from those of host 0; start all hosts with the same "
                "command, files and versions"
            )


def _digest(value: Any) -> np.ndarray:
    """Return a digest int32[16] of bytes, of the arrays of a tree, or of the `repr` of any other value."""
    content = hashlib.sha256()
    for leaf in jax.tree.leaves(value):
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array | np.ndarray):
            leaf = np.asarray(leaf)
            content.update(f"{leaf.shape}{leaf.dtype}".encode() + leaf.tobytes())
        else:
            content.update(leaf if isinstance(leaf, bytes) else repr(leaf).encode())
        content.update(b"\0")
    content.update(str(jax.tree.structure(value)).encode())
    return np.frombuffer(content.digest()[:16], np.uint8).astype(np.int32)


def choose_first(value: int) -> int:
    """Return the value of host 0. Every process must call it."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def versions() -> dict[str, str]:
    """Return the versions that determine the launched programs, for `check_same`."""
    return {"specjax": __version__, "jax": jax.__version__}


def fail(sentence: str, code: int) -> None:
    """End this process immediately. The other processes print the sentence and end soon afterwards.

    With a single process nothing happens. `initialize` arranges the call for uncaught exceptions. A process that only
    raises would wait for the others at its exit, while they wait for it in a collective that it never joins.
    """
    if _connection_failed.is_set():
        _exit_now(code)
    client = coordination_client()
    if client is None:
        return
    if _ended.is_set():  # the monitor is about to exit because another host failed
        time.sleep(30)
    _ended.set()
    try:
        # Use a separate key, because the monitor thread may still write the heartbeat of this host.
        client.key_value_set(f"{_FAILURE_KEYS}/{jax.process_index()}", sentence, allow_overwrite=True)
        _wait_for_others(jax.process_index())
    except Exception:  # the coordinator has stopped
        pass
    _exit_now(code)


def _wait_for_others(process_id: int) -> None:
    """Wait until the other processes have read the reason, before a collective fails. The coordinator waits longest."""
    time.sleep(2 * _FailureMonitor.period + _FailureMonitor.grace + (process_id == 0))


def _exit_now(code: int) -> None:
    """Exit immediately. A normal exit would wait for the other processes, or abort if this one still connects."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _check_arguments(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    if coordinator is not None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise UsageError(f'coordinator must be HOST:PORT, not "{coordinator}"')
    if num_processes is not None and num_processes < 1:
        raise UsageError(f"num_processes must be at least 1, not {num_processes}")
    if process_id is not None and process_id < 0:
        raise UsageError(f"process_id must be at least 0, not {process_id}")
    if num_processes is not None and process_id is not None and process_id >= num_processes:
        raise UsageError(
            f"process_id must be below num_processes, from 0 to {num_processes - 1}, not {process_id}; "
            "the first process has id 0"
        )


def _wait_for_coordinator(coordinator: str, timeout: float) -> None:
    """Wait until the coordinator accepts connections. Otherwise JAX would end the process with a stack trace.

    Raises: UsageError if it does not respond in time.
    """
    host, _, port = coordinator.rpartition(":")
    deadline, reason = time.monotonic() + timeout, "no answer"
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=min(5, timeout)).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(0.2)
    raise UsageError(
        f"coordinator {coordinator} did not answer within {timeout:g} s ({reason}); check the address, that process 0 "
        "runs there, and that the port is open"
    )


def _explain_error(error: Exception, coordinator, num_processes, process_id) -> str:
    names = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in names.items() if value is None]
    if missing and "defined" in str(error):
        return (
            f"no cluster was found (Cloud TPU, GKE, Slurm, Open MPI), and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing; pass coordinator, num_processes and process_id"
        )
    if "before" in str(error) and "initialize" in str(error):
        return "initialize must be the first call to JAX, before jax.devices() and others"
    return f"the hosts could not be connected ({str(error).strip().splitlines()[0]})"


def coordination_client():
    """Return the client of JAX's coordination service, or None if there is only one process."""
    from jax._src import distributed  # Orbax and other libraries import it from this module too

    return distributed.global_state.client


class _FailureMonitor:
    """A thread that watches the other processes.

    Every process reads the reported failures every `period` seconds, and ends if there is one. It also ends if another
    host has called `sys.exit` and neither ended nor continued for the time of a heartbeat. Heartbeats are written
    every `interval` seconds, and only host 0 reads them. So the work of all n hosts grows with n and not with n^2. Host
    0 warns about a silent process, but JAX's own heartbeats decide if that process is dead.
    """

    period = 1.0
    grace = 1.0  # seconds in which a process with the same error can print its own message

    def __init__(self, client, process_id: int, heartbeat: float):
        self.client, self.me, self.heartbeat = client, str(process_id), heartbeat
        self.interval = max(self.period, heartbeat / 6)
        self.last: dict[str, tuple[str, float]] = {}
        self.warned: set[str] = set()
        self.count = 0  # heartbeats of this process
        self.exits: dict[str, float] = {}  # the time at which the exit of another host was read
        self.reported_exit: int | None = None  # the exit of this process that the other hosts can read
        self.last_beat = self.last_answer = time.monotonic()

    def run(self) -> None:
        while not _ended.wait(self.period):
            self.poll()

    def poll(self) -> None:
        """Write a heartbeat if it is time, and check the other hosts. A call that fails is repeated the next time."""
        time_now = time.monotonic()
        heartbeats: list[tuple[str, str]] = []
        try:
            if not self.count or time_now - self.last_beat >= self.interval:
                self.client.key_value_set(f"{_HEARTBEAT_KEYS}/{self.me}", str(self.count + 1), allow_overwrite=True)
                self.count, self.last_beat = self.count + 1, time_now
                heartbeats = self.client.key_value_dir_get(_HEARTBEAT_KEYS) if self.me == "0" else []
            self.report_exit()
            failures = self.client.key_value_dir_get(_FAILURE_KEYS)
        except Exception:
            self.warn_about_coordinator(time_now)
            return
        self.last_answer = time_now
        self.warned.discard(_COORDINATOR)
        by_host = lambda entries: {key.rsplit("/", 1)[1]: value for key, value in entries}
        self.check_hosts(by_host(heartbeats), by_host(failures))

    def report_exit(self) -> None:
        """Write the code of a `sys.exit` of this process for the other hosts, or remove it if the process continues."""
        code, key = _exit_code, f"{_FAILURE_KEYS}/{_EXIT}{self.me}"
        if code == self.reported_exit or _ended.is_set():
            return
        if code is None:
            self.client.key_value_delete(key)
        else:
            self.client.key_value_set(key, str(code), allow_overwrite=True)
        self.reported_exit = code

    def is_stuck(self, key: str) -> bool:
        """Return True if a host called `sys.exit` a heartbeat ago and is still there, and this host did not call it."""
        since = self.exits.setdefault(key, time.monotonic())
        return _exit_code is None and time.monotonic() - since > self.heartbeat

    def warn_about_coordinator(self, time_now: float) -> None:
        """Print one warning if the coordinator has not answered for half a heartbeat."""
        silent = time_now - self.last_answer > self.heartbeat / 2
        if silent and _COORDINATOR not in self.warned and not _ended.is_set():
            self.warned.add(_COORDINATOR)
            _print_warning("host 0, the coordinator, no longer responds; if it is dead, JAX ends this host too")

    def check_hosts(self, heartbeats: dict[str, str], failures: dict[str, str]) -> None:
        """End this process if another one has failed. Warn about hosts that are silent."""
        time_now = time.monotonic()
        self.exits = {key: since for key, since in self.exits.items() if key in failures}
        for key, sentence in failures.items():
            host = key.removeprefix(_EXIT)
            if host == self.me:
                continue
            if key != host:
                if not self.is_stuck(key):
                    continue
                sentence = f"its program called sys.exit({sentence}), and has neither ended nor continued since"
            if not _ended.wait(self.grace):
                _ended.set()
                _print_warning(f"host {host} failed: {sentence}")
                if self.me == "0":
                    _wait_for_others(0)
                os._exit(EXIT_OTHER_HOST_FAILED)
            return
        for host, value in heartbeats.items():
            if host == self.me or value == _FINISHED:
                continue
            if self.last.get(host, ("", 0.0))[0] != value:
                self.last[host] = value, time_now
                self.warned.discard(host)
            elif time_now - self.last[host][1] > self.heartbeat / 2 and host not in self.warned:
                self.warned.add(host)
                _print_warning(
                    f"host {host} has been silent for {time_now - self.last[host][1]:.0f} s; if it is dead, JAX ends "
                    f"this host too after {self.heartbeat:g} s"
                )


def _start_monitor(heartbeat: float) -> None:
    watch = _FailureMonitor(coordination_client(), jax.process_index(), heartbeat)
    thread = threading.Thread(target=watch.run, daemon=True, name="specjax-hosts")

    def end():
        if _exit_code is not None and not _ended.is_set():
            fail(f"its program ended with sys.exit({_exit_code})", _exit_code)
        _ended.set()
        thread.join(2)
        with contextlib.suppress(Exception):  # the coordinator has stopped
            watch.client.key_value_set(f"{_HEARTBEAT_KEYS}/{watch.me}", _FINISHED, allow_overwrite=True)

    thread.start()
    atexit.register(end)  # runs before JAX leaves the cluster
    sys.excepthook = _wrap_excepthook(sys.excepthook)
    sys.exit = _record_exit
    for name in ("exit", "quit"):  # which the module site defines, except in frozen programs
        if hasattr(builtins, name):
            setattr(builtins, name, _record_exit)


def _record_exit(status: Any = None, /) -> NoReturn:
    """Do the work of `sys.exit`, and store its code.

    A host that ends with an error ends the others, which would wait for it in a collective. Python does not pass the
    code to functions of `atexit`.
    """
    global _exit_code
    if threading.current_thread() is threading.main_thread():
        code = status if isinstance(status, int) else int(status is not None)
        _exit_code = code & 0xFF or None
    raise SystemExit(status)


def fail_with(error: BaseException) -> None:
    """End this process and the others because of an exception, as `fail` does."""
    if coordination_client() is None:
        return
    if _ended.is_set():
        fail("", EXIT_OTHER_HOST_FAILED)
    lines = str(error).strip().splitlines() or [""]
    sentence, code = f"{type(error).__name__}: {lines[0]}", 1
    if any(word in sentence for word in _COLLECTIVES):
        sentence, code = (
            f"a collective operation failed, probably because another host stopped ({sentence[:200]})",
            EXIT_OTHER_HOST_FAILED,
        )
        _print_warning(sentence)
    fail(sentence, code)


def _wrap_excepthook(show):
    """Return an excepthook that also ends the other hosts."""

    def hook(kind, error, trace):
        if _ended.is_set():
            fail("", EXIT_OTHER_HOST_FAILED)
        show(kind, error, trace)
        fail_with(error)

    return hook


def _print_warning(sentence: str) -> None:
    sys.stdout.flush()
    os.write(2, f"specjax: {' '.join(sentence.split())}\n".encode())
