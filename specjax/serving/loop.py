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

import time
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple

from specjax.engine.job import Job
from specjax.errors import UsageError
from specjax.numerics.global_arrays import spans_hosts
from specjax.numerics.sampling import threefry
from specjax.parallel import hosts
from specjax.persistence.program_cache import ProgramCache
from specjax.serving.batch import Batch, Served
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
        max_slowdown: float = MAX_SLOWDOWN,
    ):  # fmt: skip
        """Compile the programs. The arguments are those of `Batch` and `Pace`."""
        self.batch = Batch(job, limits, cache, prefix_bytes)
        self.is_shared = spans_hosts(job.parts.target.params)
        self._pace = Pace(max_slowdown)

    def turn(self) -> Iterator[Served]:
        """Read a chunk of a prompt or none, dispatch a step, and yield the results of the previous step."""
        batch, is_decoding = self.batch, self.batch.is_decoding
        reads = batch.is_reading and (not is_decoding or self._may_read())
        if reads:
            batch.read(wait=not is_decoding)
        elif not is_decoding:
            batch.read_ended()
        batch.step()
        yield from batch.collect()
        self._pace.record(decodes=is_decoding, reads=reads)

    def _may_read(self) -> bool:
        may_read = self._pace.may_read
        return bool(hosts.choose_first(int(may_read))) if self.is_shared else may_read


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

    def scheduler(self) -> Scheduler:
        """Compile the programs and build the scheduler."""
        job, limits, programs, prefix_bytes, max_slowdown = self
        return Scheduler(job, limits, programs, prefix_bytes=prefix_bytes, max_slowdown=max_slowdown)


def serve_requests(setup: ServeSetup, requests: Iterable[Request | Cancel | None]) -> Generator[Served, Any, None]:
    """Serve requests as `specjax.serve` documents."""
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
