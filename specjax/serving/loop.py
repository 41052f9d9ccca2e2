"""The loop of `serve`: requests enter and leave the rows of one running batch (continuous batching).

Yu et al.: Orca: A Distributed Serving System for Transformer-Based Generative Models (OSDI 2022).

Rule: the batch has `slots` rows. When a row has ended, the next request gets the row. Its prompt is read in chunks, as
a batch of one, between the steps of the other rows (`Pace`). Chunks that an earlier prompt began with are copied
instead (`PrefixStore`). Then the result is written over the row in every array of the state, and the step continues
with all rows. The same programs serve every request, because all settings are arrays with one entry per row. The
drafter's learned parameters are passed on to the next request.
Guarantee: the guarantee of `decode` with the same settings. A row's randomness depends on its request's key and on
positions. So a text does not depend on its time of arrival or on its neighbours, with one exception. Rows can share
learned state or draft lengths (`auto`, `choice`, `bass`, goodput, drafters that export). Then the draws of rejection
rules may depend on the neighbours, as in any batch.
Deviation: the draft model of `rapid` reads its prompt as a whole, while the other rows wait.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple

from specjax.engine.job import Job
from specjax.errors import UsageError
from specjax.numerics.global_arrays import spans_hosts
from specjax.numerics.sampling import threefry
from specjax.parallel import hosts
from specjax.parallel.messages import Channel
from specjax.persistence.program_cache import ProgramCache
from specjax.serving import host_commands
from specjax.serving.batch import Batch, Served
from specjax.serving.host_commands import Commands
from specjax.serving.pace import MAX_SLOWDOWN, Pace
from specjax.serving.requests import Cancel, Limits, Request

WAITING, ARRIVED, ENDED = range(3)
"""States of a source of requests: it has no request yet, it has one, or it has no more."""
_END = object()
IDLE = 0.002
"""Seconds to wait for a source that has no request yet, if no row is decoding."""


class _Source:
    """The requests of `serve`.

    If the target spans several hosts, host 0 decides when the next request comes, and the other hosts wait for it. So
    sources that yield None at different times, such as `arrivals`, keep the hosts together.
    """

    def __init__(self, requests: Iterable[Request | Cancel | None], is_shared: bool):
        self.requests, self.is_shared, self.has_more = iter(requests), is_shared, True
        self._early: Any = None  # item that this host received before host 0

    def poll(self) -> Request | Cancel | None:
        """Return the next request, or None if there is none yet or no more.

        Raises: UsageError if the requests of the hosts differ.
        """
        item = self._receive()
        state = ENDED if item is _END else WAITING if item is None else ARRIVED
        if self.is_shared:
            state = hosts.choose_first(state)
            if state == WAITING:
                self._early = item
                return None
            while item is None:
                time.sleep(IDLE)
                item = self._receive()
            hosts.check_same(None if item is _END else _content(item), "requests")
        self.has_more = state != ENDED
        return None if item is _END else item

    def _receive(self) -> Any:
        """Return the next request, None if there is none yet, or _END."""
        item, self._early = self._early, None
        return next(self.requests, _END) if item is None else item


def _content(request: Any) -> Any:
    """Return the values of a request, without the functions of its processors."""
    try:
        processors = [processor.settings for processor in request.processors or ()]
        constraint = None if request.constraint is None else request.constraint.content()
        return tuple(request._replace(key=threefry(request.key), processors=processors, constraint=constraint))
    except (UsageError, TypeError, AttributeError):  # not a valid request, which `Batch.admit` refuses
        return repr(request)


class Scheduler:
    """The batch of `serve`, and the decision in each turn whether a prompt is read."""

    def __init__(
        self, job: Job, limits: Limits, cache: ProgramCache | None = None, *, prefix_bytes: int = 0,
        max_slowdown: float = MAX_SLOWDOWN, leads: bool = False,
    ):  # fmt: skip
        """Compile the programs. The arguments are those of `Batch` and `Pace`.

        leads: True if only this host has the requests, and the others `follow` it.
        """
        self.batch = Batch(job, limits, cache, prefix_bytes)
        self.is_shared = spans_hosts(job.parts.target.params)
        self._pace, self._num_changes = Pace(max_slowdown), 0
        self._fills_rows = math.isinf(max_slowdown)  # read all prompts before a step
        self._channel = Channel("serve") if leads and self.is_shared else None
        self._commands: list[Request | Cancel] = []  # since the previous turn, for the other hosts

    def admit(self, request: Request) -> Served | None:
        """Give a request a free row, as `Batch.admit` does."""
        if self._channel is None:
            return self.batch.admit(request)
        try:
            host_commands.encode(Commands([request]))
        except (UsageError, TypeError, ValueError, AttributeError) as error:
            invalid = Request((), 0)  # all hosts refuse it, and count it
            self._commands.append(invalid)
            refusal = self.batch.admit(invalid)
            reason = str(error) if isinstance(error, UsageError) else f"it is not a valid Request ({error})"
            return refusal and refusal._replace(error=reason)
        self._commands.append(request)
        return self.batch.admit(request)

    def cancel(self, number: int) -> Served | None:
        """End a request, as `Batch.cancel` does."""
        self._commands.append(Cancel(number))
        return self.batch.cancel(number)

    def turn(self, reads: bool | None = None) -> Iterator[Served]:
        """Read a chunk of a prompt or none, dispatch a step, and yield the results of the previous step.

        Without a limit of the slowdown, all chunks of all prompts are read, so that no row is idle in the step.

        reads: the decision of another host, whether a chunk is read although rows decode. None: this host decides.
        """
        batch, is_decoding = self.batch, self.batch.is_decoding
        if reads is None:
            reads = self._may_read() if batch.is_reading and is_decoding else False
            self._send(Commands(self._commands, reads))
        self._commands = []
        reads = batch.is_reading and (not is_decoding or reads)
        if reads:
            batch.read(wait=not is_decoding)
            while self._fills_rows and batch.is_reading:
                batch.read(wait=not is_decoding)
        elif not is_decoding:
            batch.read_ended()
        batch.step()
        yield from batch.collect()
        changes, self._num_changes = batch.num_changes != self._num_changes, batch.num_changes
        self._pace.record(decodes=is_decoding, reads=reads, changes=changes)

    def close(self) -> None:
        """End the hosts that follow this one."""
        self._send(Commands([], is_last=True))

    def _send(self, commands: Commands) -> None:
        if self._channel is not None:
            self._channel.send(host_commands.encode(commands))

    def _may_read(self) -> bool:
        may_read = self._fills_rows or self._pace.may_read
        is_common = self.is_shared and self._channel is None
        return bool(hosts.choose_first(int(may_read))) if is_common else may_read

    @property
    def is_asked_to_end(self) -> bool:
        """Return True if a host that follows this one was told to end."""
        return self._channel is not None and bool(self._channel.replies())


def follow(setup: ServeSetup, is_told_to_end: Callable[[], bool] = lambda: False) -> None:
    """Run the turns of the scheduler of host 0, which `leads`, until it ends. Call it on every other host.

    is_told_to_end: returns True when this host shall end, about which it then tells host 0.
    """
    scheduler, channel, has_replied = setup.scheduler(), Channel("serve"), False
    while True:
        message = channel.receive()
        if is_told_to_end() and not has_replied:
            channel.reply("end")
            has_replied = True
        if message is None:
            continue
        commands = host_commands.decode(message, setup.limits)
        if commands.is_last:
            return
        for item in commands.items:
            if isinstance(item, Cancel):
                scheduler.batch.cancel(item.request)
            else:
                scheduler.batch.admit(item)
        for _ in scheduler.turn(commands.reads):
            pass


class ServeSetup(NamedTuple):
    """The checked arguments of `serve`, from which the programs are compiled."""

    job: Job  # with the number of rows, the longest prompt and the most tokens that any request may have
    limits: Limits
    programs: ProgramCache | None = None
    prefix_bytes: int = 0
    max_slowdown: float = MAX_SLOWDOWN

    @property
    def slots(self) -> int:
        """Return the number of rows of the batch."""
        return len(self.job.lengths)

    @property
    def max_depth(self) -> int:
        """Return the depth of the longest draft."""
        return self.job.parts.drafter.size.max_depth

    def scheduler(self, *, leads: bool = False) -> Scheduler:
        """Compile the programs and build the scheduler. `leads` is as in `Scheduler`."""
        job, limits, programs, prefix_bytes, max_slowdown = self
        return Scheduler(job, limits, programs, prefix_bytes=prefix_bytes, max_slowdown=max_slowdown, leads=leads)


class Serving(Generator[Served, Any, None]):
    """The generator that `specjax.serve` returns."""

    def __init__(self, setup: ServeSetup, requests: Iterable[Request | Cancel | None]):
        """Create the generator. Nothing is compiled before its first update.

        Args:
          setup: the checked arguments. Drivers with an own source of requests, such as the HTTP server, build a
            scheduler from them and do not use the generator.
        """
        self.setup = setup
        self._updates = _serve_requests(setup, requests)

    def send(self, value: Any) -> Served:
        """Return the next update after a value was sent, as `specjax.serve` documents."""
        return self._updates.send(value)

    def throw(self, *error: Any) -> Served:
        """Raise an error where the generator waits, and return its next update."""
        return self._updates.throw(*error)


def _serve_requests(setup: ServeSetup, requests: Iterable[Request | Cancel | None]) -> Generator[Served, Any, None]:
    scheduler = setup.scheduler()
    batch, source = scheduler.batch, _Source(requests, scheduler.is_shared)
    while True:
        while source.has_more and batch.has_room:
            item = source.poll()
            if item is None:
                break
            yield from _exchange(batch, batch.cancel(item.request) if isinstance(item, Cancel) else batch.admit(item))
        for served in scheduler.turn():
            yield from _exchange(batch, served)
        if batch.is_idle:
            if not source.has_more:
                return
            if not batch.has_ended_texts:
                time.sleep(IDLE)


def _exchange(batch: Batch, served: Served | None) -> Generator[Served, Any, None]:
    """Yield an update, if there is one, and apply what the caller sends in return."""
    while served is not None:
        sent, served = (yield served), None
        if isinstance(sent, Cancel):
            served = batch.cancel(sent.request)
        else:
            batch.set_params(sent)
