"""A server on a port of this machine, until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn

from specjax.errors import UsageError
from specjax.server.app import Service
from specjax.serving.loop import ServeSetup, follow

ANSWER_SECONDS = 5
"""Time for the answers of requests that ended because the server ends."""
SIGNAL_TICKS = 10
"""Ticks of 0.1 s after which signals to other hosts are noticed."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Port 0 is any free port. Raises: UsageError if the address is not free."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number is not None and number > 0 else error
        raise UsageError(f"cannot listen on {host}, port {port} ({reason}); give another --port or --host") from None


class HttpServer(uvicorn.Server):
    """A server that answers what runs before it ends. A second Ctrl-C ends it immediately."""

    def __init__(self, service: Service, *, shutdown_seconds: float = 30.0):
        """Create the server of a service. shutdown_seconds: longest time for running requests after a signal."""
        config = uvicorn.Config(
            service.app(), log_config=None, access_log=False, lifespan="on", timeout_keep_alive=30,
            timeout_graceful_shutdown=math.ceil(shutdown_seconds) + ANSWER_SECONDS, server_header=False,
        )  # fmt: skip
        super().__init__(config)
        self.service, self.shutdown_seconds = service, shutdown_seconds

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Refuse new requests, and end after the running ones."""
        if self.should_exit and sig == signal.SIGINT:
            os.write(2, b"specjax: interrupted twice\n")
            os._exit(128 + sig)  # tasks that are cancelled instead would print tracebacks
        self.service.engine.drain()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running requests. Those that take too long end with an error, which their clients receive."""
        timer = asyncio.create_task(self._stop_later())
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    async def _stop_later(self) -> None:
        await asyncio.sleep(self.shutdown_seconds)
        await asyncio.to_thread(self.service.engine.stop)

    async def on_tick(self, counter: int) -> bool:
        """End if the programs cannot be compiled. A server that fails later stays, and its health is bad."""
        engine = self.service.engine
        if counter % SIGNAL_TICKS == 0 and not self.should_exit and engine.is_asked_to_end:
            self.handle_exit(signal.SIGTERM, None)
        return await super().on_tick(counter) or (engine.error is not None and not engine.is_compiled)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals during a run. Without this, the signal would end the process after the graceful end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def run_server(service: Service, listener: socket.socket, *, shutdown_seconds: float = 30.0) -> None:
    """Serve until a signal. Raises: the error that ended the decoding thread before any request."""
    HttpServer(service, shutdown_seconds=shutdown_seconds).run(sockets=[listener])
    if service.engine.error is not None:
        raise service.engine.error


def follow_server(setup: ServeSetup) -> None:
    """Run the steps of the server on host 0, until it ends. Call it on all other hosts, in the main thread.

    A first signal ends the server on all hosts, after the running requests. A second one ends this host immediately.
    """
    signals: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if signals:
            sys.exit(128 + number)
        signals.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    follow(setup, lambda: bool(signals))
