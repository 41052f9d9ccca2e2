"""Several processes, one program: hosts of a TPU pod slice, nodes of a GPU cluster, or processes on one CPU.

Every process runs the same script and launches the same programs in the same order; JAX's own runtime
(`jax.distributed`) connects them, notices when one stops and ends the others. What is added here: errors in one
sentence, hosts that were started with different inputs, and word of a host that failed.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import socket
import sys
import threading
import time

import jax
import numpy as np

from specjax.errors import UsageError
from specjax.version import __version__

FAILED = 3
"""Exit code of a host that ends because another one did."""

_SIGNS = "specjax/hosts/alive"
_FAILURES = "specjax/hosts/failed"
_FINISHED = "finished"
_COLLECTIVES = ("Gloo", "NCCL", "UNAVAILABLE")
_ended = threading.Event()
_gave_up = threading.Event()


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = 300,
    heartbeat: float = 30,
) -> None:
    """Join the other processes. Call it before anything else of JAX, once, in every process.

    Args:
      coordinator: "HOST:PORT" of process 0, which must be free there. With the next two, only needed where JAX finds no
        cluster: it knows Cloud TPUs, GKE, Slurm and Open MPI.
      num_processes, process_id: how many, and which this one is, from 0.
      timeout: seconds to wait until all are there.
      heartbeat: seconds without a sign of life after which a process counts as dead and JAX ends the others.

    Raises: UsageError for settings that do not fit together, and if the others are not there in time.
    """
    _check(coordinator, num_processes, process_id)
    deadline = time.monotonic() + timeout
    if coordinator is not None and process_id not in (None, 0):
        _reach(coordinator, timeout)
    explicit = None not in (coordinator, num_processes, process_id)
    errors: list[Exception] = []

    def connect():
        try:
            jax.distributed.initialize(
                coordinator, num_processes, process_id,
                cluster_detection_method="deactivate" if explicit else None,
                initialization_timeout=round(timeout) + 600,  # where JAX itself gives up, it aborts the process
                heartbeat_timeout_seconds=round(heartbeat),
            )  # fmt: skip
        except Exception as error:
            errors.append(error)

    # In a thread, since the call cannot be interrupted.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(max(deadline - time.monotonic(), 1))
    if thread.is_alive():
        _gave_up.set()
        atexit.register(_leave, 1)
        wanted = f"{num_processes} processes" if num_processes else "all processes"
        where = f" at {coordinator}" if coordinator else ""
        raise UsageError(
            f"waited {timeout:g} s{where} for {wanted}, but not all of them came; start one on every host, with the "
            "same coordinator and number of processes, or allow more time"
        )
    if errors:
        raise UsageError(_explain(errors[0], coordinator, num_processes, process_id)) from errors[0]
    _start_watch(heartbeat)


def is_distributed() -> bool:
    """Whether `initialize` (or `jax.distributed.initialize`) connected this process to others."""
    return jax.distributed.is_initialized()


def check_same(value, what: str) -> None:
    """Compare a value over all processes, by its digest. Every process must call it, and every one raises.

    Args:
      value: bytes, or something with a `repr` that says all of it (strings, numbers, lists, dicts).
      what: its name in the plural, for the message.

    Raises: UsageError that names the processes that differ from process 0.
    """
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    data = value if isinstance(value, bytes) else repr(value).encode()
    digest = np.frombuffer(hashlib.sha256(data).digest()[:16], np.uint8).astype(np.int32)
    digests = multihost_utils.process_allgather(digest).reshape(jax.process_count(), -1)
    others = [str(i) for i, other in enumerate(digests) if (other != digests[0]).any()]
    if others:
        raise UsageError(
            f"the {what} of host {', '.join(others)} differ from those of host 0; start all hosts with the same "
            "command, files and versions"
        )


def versions() -> dict[str, str]:
    """Of what decides which programs are launched: for `check_same`."""
    return {"specjax": __version__, "jax": jax.__version__}


def fail(sentence: str, code: int) -> None:
    """End this process at once, and the others soon with the sentence. Does nothing in a program of one process.

    `initialize` sees to it that an exception that nobody catches ends here.
    A process that only raised would wait for the others, and they for it, in a collective that it never joins.
    """
    if _gave_up.is_set():
        _leave(code)
    client = _client()
    if client is None:
        return
    if _ended.is_set():  # the watch is about to leave, for another host's reason
        time.sleep(30)
    _ended.set()
    try:
        # A key of its own: the watch, in its thread, may still write that of the host.
        client.key_value_set(f"{_FAILURES}/{jax.process_index()}", sentence, allow_overwrite=True)
        _linger(jax.process_index())
    except Exception:  # the coordinator is gone
        pass
    _leave(code)


def _linger(process_id: int) -> None:
    """Stay until the others have read why, before a collective breaks off; longest where they ask."""
    time.sleep(2 * _Watch.period + _Watch.grace + (process_id == 0))


def _leave(code: int) -> None:
    """Exit without goodbye: JAX would wait for the other processes, or abort this one while it still connects."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _check(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
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
            "the first process is 0"
        )


def _reach(coordinator: str, timeout: float) -> None:
    """Raises: UsageError if nothing answers in time. JAX would end the process with a stack trace."""
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


def _explain(error: Exception, coordinator, num_processes, process_id) -> str:
    names = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in names.items() if value is None]
    if missing and "defined" in str(error):
        return (
            f"no cluster was found (Cloud TPU, GKE, Slurm, Open MPI), and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing; give coordinator, num_processes and process_id"
        )
    if "before" in str(error) and "initialize" in str(error):
        return "initialize must come before anything else of JAX, such as jax.devices(); call it first"
    return f"the hosts could not be connected ({str(error).strip().splitlines()[0]})"


def _client():
    """Of JAX's coordination service; None: this process is alone."""
    from jax._src import distributed  # where other libraries, such as Orbax, take it from

    return distributed.global_state.client


class _Watch:
    """Looks, every `period` seconds, what the other processes last said.

    It warns of a process that is silent; whether it is dead, JAX's own heartbeats decide. It ends this process only
    when another one said that it failed.
    """

    period = 1.0
    grace = 1.0  # for a process that is about to raise the same error, to say so itself

    def __init__(self, client, process_id: int, heartbeat: float):
        self.client, self.me, self.heartbeat = client, str(process_id), heartbeat
        self.last: dict[str, tuple[str, float]] = {}
        self.warned: set[str] = set()

    def run(self) -> None:
        count = 0
        while not _ended.wait(self.period):
            count += 1
            try:
                self.client.key_value_set(f"{_SIGNS}/{self.me}", str(count), allow_overwrite=True)
                signs, failures = map(self.client.key_value_dir_get, (_SIGNS, _FAILURES))
            except Exception:
                if not _ended.is_set():
                    _say("host 0, the coordinator, does not answer any more; JAX ends this host too")
                return
            self.look(*({key.rsplit("/", 1)[1]: value for key, value in said} for said in (signs, failures)))

    def look(self, signs: dict[str, str], failures: dict[str, str]) -> None:
        now = time.monotonic()
        for host, sentence in failures.items():
            if host == self.me:
                continue
            if not _ended.wait(self.grace):
                _ended.set()
                _say(f"host {host} failed: {sentence}")
                if self.me == "0":
                    _linger(0)
                os._exit(FAILED)
            return
        for host, value in signs.items():
            if host == self.me or value == _FINISHED:
                continue
            if self.last.get(host, ("", 0.0))[0] != value:
                self.last[host] = value, now
                self.warned.discard(host)
            elif now - self.last[host][1] > self.heartbeat / 2 and host not in self.warned:
                self.warned.add(host)
                _say(
                    f"host {host} has been silent for {now - self.last[host][1]:.0f} s; if it is dead, JAX ends this "
                    f"host too after {self.heartbeat:g} s"
                )


def _start_watch(heartbeat: float) -> None:
    watch = _Watch(_client(), jax.process_index(), heartbeat)
    thread = threading.Thread(target=watch.run, daemon=True, name="specjax-hosts")

    def end():
        _ended.set()
        thread.join(2)
        with contextlib.suppress(Exception):  # where the coordinator is gone
            watch.client.key_value_set(f"{_SIGNS}/{watch.me}", _FINISHED, allow_overwrite=True)

    thread.start()
    atexit.register(end)  # runs before JAX leaves the cluster
    sys.excepthook = _tell_after(sys.excepthook)


def _tell_after(show):
    """An excepthook that ends the other hosts too."""

    def hook(kind, error, trace):
        if _ended.is_set():
            fail("", FAILED)
        show(kind, error, trace)
        lines = str(error).strip().splitlines() or [""]
        sentence, code = f"{kind.__name__}: {lines[0]}", 1
        if any(word in sentence for word in _COLLECTIVES):
            sentence, code = f"a collective failed, as it does when another host stops ({sentence[:200]})", FAILED
            _say(sentence)
        fail(sentence, code)

    return hook


def _say(sentence: str) -> None:
    sys.stdout.flush()
    os.write(2, f"specjax: {' '.join(sentence.split())}\n".encode())
