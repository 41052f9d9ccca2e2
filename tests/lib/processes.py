"""Several real processes that run one program on this machine: two fake devices each, connected by gloo."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from quick_compile import flags

WORKER = pathlib.Path(__file__).parent / "host_worker.py"


class Ended(NamedTuple):
    """A process after its end."""

    code: int
    out: str
    err: str


class Hosts:
    """Processes that are still running. Leave the context, and they are not."""

    def __init__(self, count: int, *arguments: str, per_host=lambda host: (), names=lambda host: {}, port=None):
        """`arguments` are the worker's; one that is "PORT", "HOST", "ADDRESS", "COUNT" or in `names` is replaced."""
        port = free_port() if port is None else port
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags(devices=2), "SPECJAX_NO_CACHE": "1"}
        self.folder = tempfile.TemporaryDirectory()
        self.processes = []
        for host in range(count):
            values = {"PORT": str(port), "HOST": str(host), "ADDRESS": f"127.0.0.1:{port}", "COUNT": str(count)}
            values |= names(host)
            command = [values.get(a, str(a)) for a in (*arguments, *per_host(host))]
            with open(self._file(host, "out"), "wb") as out, open(self._file(host, "err"), "wb") as err:
                self.processes.append(
                    subprocess.Popen([sys.executable, str(WORKER), *command], stdout=out, stderr=err, env=environment)
                )

    def _file(self, host: int, kind: str) -> str:
        return os.path.join(self.folder.name, f"{kind}{host}")

    def read(self, host: int, kind: str = "out") -> str:
        return pathlib.Path(self._file(host, kind)).read_text(errors="replace")

    def wait_for(self, host: int, words: str, timeout: float = 120) -> None:
        """Until a process has printed the words."""
        deadline = time.monotonic() + timeout
        while words not in self.read(host):
            assert self.processes[host].poll() is None, self.read(host, "err")
            assert time.monotonic() < deadline, (words, self.read(host), self.read(host, "err"))
            time.sleep(0.05)

    def kill(self, host: int) -> None:
        self.processes[host].send_signal(signal.SIGKILL)

    def wait(self, timeout: float = 240) -> list[Ended]:
        """Until all have ended; a hang fails the test."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.wait(max(deadline - time.monotonic(), 0.1))
        return [
            Ended(process.returncode, self.read(i), self.read(i, "err")) for i, process in enumerate(self.processes)
        ]

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *error) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.folder.cleanup()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
