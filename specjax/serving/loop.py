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

from specjax.engine.job import Job
from specjax.persistence.program_cache import ProgramCache
from specjax.serving.batch import Batch, Served
from specjax.serving.requests import Limits, Request
from specjax.types import PyTree

IDLE = 0.002
"""Seconds to wait for a source that has no request yet, if no row is decoding."""


def serve_requests(
    job: Job, requests: Iterable[Request | None], limits: Limits, cache: ProgramCache | None = None
) -> Generator[Served, PyTree, None]:
    """Serve requests as `specjax.serve` documents.

    Args:
      job: a job with the number of rows, the longest prompt and the most tokens that any request may have.
    """
    batch = Batch(job, limits, cache)
    source, has_more = iter(requests), True
    while True:
        while has_more and batch.has_room:
            try:
                request = next(source)
            except StopIteration:
                has_more = False
                break
            if request is None:
                break
            refusal = batch.admit(request)
            if refusal is not None:
                batch.set_params((yield refusal))
        if not batch.step() and not batch.has_results and has_more:
            time.sleep(IDLE)
        for served in batch.collect():
            batch.set_params((yield served))
        if batch.is_idle and not has_more:
            return
