"""The thread that decodes, and the calls that clients wait for.

One thread has the scheduler of `specjax.serve`. It admits waiting requests in a fair order, runs one turn after the
other, and passes the updates to the event loop once per turn. A client that reads slowly only makes its own call's
buffer longer. Its call ends when the buffer has `max_pending` updates.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, NamedTuple

from specjax.engine.prefill import CHUNK
from specjax.parallel import hosts
from specjax.server.errors import OVERFLOW, QUEUE_TIMEOUT, STOPPED, TIMEOUT, ApiError
from specjax.server.metrics import Load, Metrics, RequestTimes
from specjax.serving.batch import Served
from specjax.serving.fair_queue import FairQueue
from specjax.serving.loop import Scheduler, ServeSetup
from specjax.serving.requests import Request

LOG = logging.getLogger("specjax.server")
STARTING, READY, DRAINING, FAILED = "starting", "ready", "draining", "failed"
"""States of the engine."""
THREAD = "specjax-engine"
"""Name of the thread."""
STUCK_SECONDS = 300.0
"""Time of a turn after which the engine counts as failed."""


class Policy(NamedTuple):
    """Limits of the queue and of the calls."""

    max_waiting: int = 256  # requests that wait for a row
    queue_seconds: float = 120.0  # longest time in the queue
    total_seconds: float = 600.0  # longest time from arrival to the last token
    max_pending: int = 2048  # updates of a request that its client has not read


@dataclasses.dataclass(eq=False, kw_only=True)
class Ticket(RequestTimes):
    """A request of a call: its place in the call, and its times."""

    call: Call
    index: int
    request: Request
    is_done: bool = False


class Call:
    """The requests that one client sent together. `updates` yields their results."""

    def __init__(self, requests: Sequence[Request], client: str):
        self.client, self.loop, arrival = client, asyncio.get_running_loop(), time.perf_counter()
        self.tickets = [
            Ticket(call=self, index=index, request=request, num_prompt=len(request.prompt), arrival=arrival)
            for index, request in enumerate(requests)
        ]
        self._pending: deque[tuple[int, Served]] = deque()
        self._arrived = asyncio.Event()

    @property
    def num_pending(self) -> int:
        """Return the number of updates that were not read."""
        return len(self._pending)

    def put(self, index: int, served: Served) -> None:
        """Add an update, from any thread."""
        self._pending.append((index, served))

    def wake(self) -> None:
        """Wake the reader, in the event loop."""
        self._arrived.set()

    async def updates(self) -> AsyncGenerator[tuple[int, Served], None]:
        """Yield (index of a request, update) until all requests have ended."""
        unfinished = len(self.tickets)
        while unfinished:
            self._arrived.clear()
            while self._pending:
                index, served = self._pending.popleft()
                unfinished -= served.finish_reason is not None
                yield index, served
            if unfinished and not self._pending:
                await self._arrived.wait()


class Engine:
    """The decoding thread with its queue. `submit` and `cancel` are called in the event loop."""

    def __init__(
        self, setup: ServeSetup, policy: Policy, metrics: Metrics, on_ready: Callable[[], Any] | None = None,
    ):  # fmt: skip
        """Create the engine. `on_ready` is called when all programs are compiled."""
        self.setup, self.policy, self.metrics, self.state = setup, policy, metrics, STARTING
        self.error: BaseException | None = None
        self.is_compiled = False  # True from the first READY on
        self._on_ready, self._changed = on_ready, threading.Condition()
        self._waiting: FairQueue[Ticket] = FairQueue()
        self._running: dict[int, Ticket] = {}  # by the number of the request in the batch
        self._cancelled: list[Call] = []
        self._touched: set[Call] = set()  # calls with new updates in this turn
        self._num_admitted, self._is_stopped = 0, False
        self._turn_started: float | None = None
        self._scheduler: Scheduler | None = None
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)

    def start(self) -> None:
        """Start the thread, which first compiles the programs."""
        self._thread.start()

    @property
    def is_healthy(self) -> bool:
        """Return True if the engine takes requests."""
        started = self._turn_started
        return self.state == READY and (started is None or time.perf_counter() - started < STUCK_SECONDS)

    @property
    def is_asked_to_end(self) -> bool:
        """Return True if another host of this server was told to end."""
        return self._scheduler is not None and self._scheduler.is_asked_to_end

    @property
    def load(self) -> Load:
        """Return the numbers of requests, and the part of the cache that the running ones fill."""
        limits, running = self.setup.limits, list(self._running.values())
        capacity = self.setup.slots * (limits.longest_prompt + limits.max_new_tokens)
        return Load(len(running), len(self._waiting), sum(x.num_prompt + x.num_tokens for x in running) / capacity)

    def submit(self, requests: Sequence[Request], client: str) -> Call:
        """Put the requests of a call into the queue. Raises: ApiError if the queue is full or the engine has ended."""
        if self.state != READY:
            raise ApiError(503, f"the server is {self.state} and takes no requests", code=self.state)
        limit = self.policy.max_waiting + self.setup.slots
        if len(requests) > limit:
            raise ApiError(400, f"the call has {len(requests)} texts, and this server takes at most {limit} at once")
        call = Call(requests, client)
        with self._changed:
            if len(self._waiting) + len(requests) > self.policy.max_waiting + self._num_free:
                self.metrics.num_rejected += len(requests)
                raise ApiError(429, f"{len(self._waiting)} requests are waiting; try again later", code="busy")
            for ticket in call.tickets:
                cost = ticket.num_prompt + (ticket.request.max_new_tokens or 0)
                self._waiting.push(call.client, ticket, cost)
            self._changed.notify()
        return call

    @property
    def _num_free(self) -> int:
        """Return the number of rows without a request, whose next requests do not have to wait."""
        return 0 if self._scheduler is None else max(self.setup.slots - len(self._running), 0)

    def cancel(self, call: Call) -> None:
        """End the requests of a call whose client has left. A call that has ended stays as it is."""
        if all(ticket.is_done for ticket in call.tickets):
            return
        with self._changed:
            self._cancelled.append(call)
            self._changed.notify()

    def drain(self) -> None:
        """Take no more requests. Those that wait or run finish."""
        with self._changed:
            if self.state in (READY, STARTING):
                self.state = DRAINING

    def stop(self, seconds: float = 5.0) -> None:
        """End all requests and the thread, and wait for it."""
        self.drain()
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self._scheduler = scheduler = self.setup.scheduler(leads=True)
            self._warm_up(scheduler)
            self.is_compiled = True
            with self._changed:
                is_first = self.state == STARTING  # otherwise a signal has come
                self.state = READY if is_first else self.state
            if is_first and self._on_ready is not None:
                self._on_ready()
            while not self._is_stopped:
                self._wait(scheduler)
                self._turn_started = time.perf_counter()
                self._turn(scheduler)
                self._turn_started = None
            self._end_all(STOPPED, "the server stops")
            scheduler.close()
        except BaseException as error:  # an error of a device, for example; the server answers with it
            self.state, self.error = FAILED, error
            LOG.exception("the decoding thread failed")
            self._end_all("failed", f"decoding failed ({type(error).__name__}); see the log of the server")
            hosts.fail_with(error)

    def _warm_up(self, scheduler: Scheduler) -> None:
        """Compile all programs with a text that has two chunks. The second request copies the first one's chunks."""
        size = min(self.setup.limits.longest_prompt, 2 * CHUNK + 1)
        count = min(self.setup.limits.max_new_tokens, 2)
        for _ in range(2):
            inputs = self.setup.limits.inputs
            scheduler.admit(Request([0] * size, 0, count, inputs, eos=(), stop=(), salt="warm-up"))
            self._num_admitted += 1
            while not scheduler.batch.is_idle:
                for _ in scheduler.turn():
                    pass

    def _wait(self, scheduler: Scheduler) -> None:
        """Wait until there is work."""
        batch = scheduler.batch
        with self._changed:
            while not (
                self._is_stopped or self._cancelled or self._waiting or not batch.is_idle or batch.has_ended_texts
            ):
                self._changed.wait()

    def _turn(self, scheduler: Scheduler) -> None:
        self._cancel(scheduler)
        self._admit(scheduler)
        for served in list(scheduler.turn()):
            self._deliver(self._running[served.request], served)
        self._wake()

    def _cancel(self, scheduler: Scheduler) -> None:
        """End the requests whose clients have left or read too slowly, and those whose time is over."""
        with self._changed:
            calls, self._cancelled = self._cancelled, []
            waiting = list(self._waiting)
        for call in calls:
            for ticket in call.tickets:
                self._end(scheduler, ticket, "cancelled", "the client has left")
        seconds, policy = time.perf_counter(), self.policy
        for ticket in (*waiting, *self._running.values()):
            age = seconds - ticket.arrival
            if ticket.call.num_pending > policy.max_pending * len(ticket.call.tickets):
                self._end(scheduler, ticket, OVERFLOW, "the client reads too slowly")
            elif age > policy.total_seconds:
                self._end(scheduler, ticket, TIMEOUT, f"the request took more than {policy.total_seconds:g} s")
            elif ticket.admitted is None and age > policy.queue_seconds:
                message = f"the request waited for more than {policy.queue_seconds:g} s"
                self._end(scheduler, ticket, QUEUE_TIMEOUT, message)

    def _end(self, scheduler: Scheduler, ticket: Ticket, reason: str, message: str) -> None:
        """End a request that waits or runs."""
        if ticket.is_done:
            return
        with self._changed:
            self._waiting.remove(ticket)
        number = next((number for number, running in self._running.items() if running is ticket), -1)
        scheduler.cancel(number)
        self._deliver(ticket, Served(number, [], 0, reason, message))

    def _admit(self, scheduler: Scheduler) -> None:
        """Give the free rows to waiting requests."""
        while scheduler.batch.has_room:
            with self._changed:
                if not self._waiting:
                    return
                ticket = self._waiting.pop()
            ticket.admitted = time.perf_counter()
            number, self._num_admitted = self._num_admitted, self._num_admitted + 1
            self._running[number] = ticket
            refusal = scheduler.admit(ticket.request)
            if refusal is not None:
                self._deliver(ticket, refusal)

    def _deliver(self, ticket: Ticket, served: Served) -> None:
        """Pass an update to the call of its request."""
        seconds = time.perf_counter()
        self.metrics.record(ticket, served, seconds)
        ticket.add(served, seconds)
        if served.finish_reason is not None:
            ticket.is_done = True
            self._running.pop(served.request, None)
        ticket.call.put(ticket.index, served._replace(drafter=None))
        self._touched.add(ticket.call)

    def _wake(self) -> None:
        """Wake the readers of the calls with new updates, once per turn."""
        calls, self._touched = self._touched, set()
        if calls:
            try:
                next(iter(calls)).loop.call_soon_threadsafe(_wake_all, calls)
            except RuntimeError:  # the event loop has ended, and nobody reads
                LOG.debug("updates after the end of the event loop")

    def _end_all(self, reason: str, message: str) -> None:
        with self._changed:
            tickets = [*self._waiting, *self._running.values()]
            self._waiting = FairQueue()
        self._running = {}
        for ticket in tickets:
            if not ticket.is_done:
                self._deliver(ticket, Served(-1, [], 0, reason, message))
        self._wake()


def _wake_all(calls: Iterable[Call]) -> None:
    for call in calls:
        call.wake()
