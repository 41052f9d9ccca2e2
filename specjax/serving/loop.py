"""The loop of `serve`: requests enter and leave the rows of one running batch (continuous batching).

Yu et al.: Orca: A Distributed Serving System for Transformer-Based Generative Models (OSDI 2022).

Rule: the batch has `slots` rows. When a row has ended, the next request gets the row. Its prompt is prefilled as a
batch of one, and the result is written over the row in every array of the state. Then the step of `decode` continues
with all rows. Two programs, the step and the admission, serve every request, because all settings are arrays with one
entry per row. The drafter's learned parameters are passed on to the next request.
Guarantee: the guarantee of `decode` with the same settings. A row's randomness depends on its request's key and on
positions. So a text does not depend on its time of arrival or on its neighbours, with one exception. Rows can share
learned state or draft lengths (`auto`, `choice`, `bass`, goodput, drafters that export). Then the draws of rejection
rules may depend on the neighbours, as in any batch.
Deviation: a prompt is prefilled completely while the other rows wait.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from typing import Any

from specjax.engine.job import Job
from specjax.errors import UsageError
from specjax.numerics.global_arrays import spans_hosts
from specjax.numerics.sampling import threefry
from specjax.parallel import hosts
from specjax.persistence.program_cache import ProgramCache
from specjax.serving.batch import Batch, Served
from specjax.serving.requests import Limits, Request
from specjax.types import PyTree

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

    def __init__(self, requests: Iterable[Request | None], is_shared: bool):
        self.requests, self.is_shared, self.has_more = iter(requests), is_shared, True
        self._early: Any = None  # item that this host received before host 0

    def poll(self) -> Request | None:
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
        return tuple(request._replace(key=threefry(request.key), processors=processors))
    except (UsageError, TypeError, AttributeError):  # not a valid request, which `Batch.admit` refuses
        return repr(request)


def serve_requests(
    job: Job, requests: Iterable[Request | None], limits: Limits, cache: ProgramCache | None = None
) -> Generator[Served, PyTree, None]:
    """Serve requests as `specjax.serve` documents.

    Args:
      job: a job with the number of rows, the longest prompt and the most tokens that any request may have.
    """
    batch = Batch(job, limits, cache)
    source = _Source(requests, is_shared=spans_hosts(job.parts.target.params))
    while True:
        while source.has_more and batch.has_room:
            request = source.poll()
            if request is None:
                break
            refusal = batch.admit(request)
            if refusal is not None:
                batch.set_params((yield refusal))
        if not batch.step() and not batch.has_results and source.has_more:
            time.sleep(IDLE)
        for served in batch.collect():
            batch.set_params((yield served))
        if batch.is_idle and not source.has_more:
            return
