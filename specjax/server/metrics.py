"""Counters of the server in the text format of Prometheus, with the names of vLLM, and those of one request."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from specjax.serving.batch import Served

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0
)  # fmt: skip
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
"""Upper bounds of the buckets of histograms."""


class Load(NamedTuple):
    """The requests of a moment."""

    num_running: int  # they have a row
    num_waiting: int  # they are in the queue
    usage: float  # part of the cache that is filled, from 0 to 1


@dataclasses.dataclass(eq=False, kw_only=True)
class RequestTimes:
    """Times of a request in seconds of `time.perf_counter`, and its numbers of tokens."""

    num_prompt: int
    arrival: float
    admitted: float | None = None
    first: float | None = None  # time of the first token
    last: float | None = None  # time of the newest token
    num_tokens: int = 0

    def add(self, served: Served, seconds: float) -> None:
        """Count the tokens of an update that came at a time."""
        self.num_tokens += len(served.tokens)
        if served.tokens:
            self.first = seconds if self.first is None else self.first
            self.last = seconds

    def milliseconds(self) -> dict[str, float | None]:
        """Return the times for an answer."""
        first, last = self.first or self.arrival, self.last or self.arrival
        admitted, seconds = self.admitted or self.arrival, last - first
        is_long = self.num_tokens > 1 and seconds > 0
        return {
            "time_to_first_token_ms": 1e3 * (first - self.arrival), "queue_time_ms": 1e3 * (admitted - self.arrival),
            "generation_time_ms": 1e3 * seconds,
            "mean_itl_ms": 1e3 * seconds / (self.num_tokens - 1) if is_long else None,
            "tokens_per_second": (self.num_tokens - 1) / seconds if is_long else None,
        }  # fmt: skip


class Histogram:
    """Counts of values by bucket."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        place = next((i for i, bound in enumerate(self.bounds) if value <= bound), len(self.bounds))
        self.counts[place] += 1
        self.sum += value

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Yield the lines of the text format."""
        totals = list(itertools.accumulate(self.counts))
        for bound, total in zip((*map(str, self.bounds), "+Inf"), totals, strict=True):
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self.sum:.9g}"
        yield f"{name}_count{{{labels}}} {totals[-1]}"


HISTOGRAMS = {
    "time_to_first_token_seconds": (SECONDS, "Time from the arrival of a request to its first token."),
    "inter_token_latency_seconds": (SECONDS, "Time between two tokens of a request."),
    "e2e_request_latency_seconds": (SECONDS, "Time from the arrival of a request to its last token."),
    "request_queue_time_seconds": (SECONDS, "Time of a request in the queue."),
    "request_prefill_time_seconds": (SECONDS, "Time from the admission of a request to its first token."),
    "request_decode_time_seconds": (SECONDS, "Time from the first token of a request to its last one."),
    "request_prompt_tokens": (TOKENS, "Tokens of the prompt of a request."),
    "request_generation_tokens": (TOKENS, "Tokens of the text of a request."),
}


class Metrics:
    """Totals over all requests. Only the decoding thread writes them, except `num_rejected`."""

    def __init__(self, model: str, max_depth: int):
        """Create the counters. `max_depth` is the depth of the longest draft."""
        escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self.labels = f'model_name="{escaped}",engine="0"'
        self.num_prompt_tokens = self.num_tokens = self.num_rejected = self.num_cached = 0
        self.num_drafts = self.num_drafted = self.num_accepted = 0
        self.accepted_by_position = [0] * max_depth
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.histograms = {name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()}
        self._lock = threading.Lock()

    def record(self, times: RequestTimes, served: Served, seconds: float) -> None:
        """Record an update of a request that came at a time, before the request counts it."""
        with self._lock:
            if served.tokens:
                self._record_tokens(times, served, seconds)
            if served.drafted:
                self.num_drafts += 1
                self.num_drafted += served.drafted
                self.num_accepted += served.accepted
                for position in range(min(served.accepted, len(self.accepted_by_position))):
                    self.accepted_by_position[position] += 1
            if served.finish_reason is not None:
                self._record_end(times, served, seconds)

    def _record_tokens(self, times: RequestTimes, served: Served, seconds: float) -> None:
        add = lambda name, value: self.histograms[name].add(value)
        self.num_tokens += len(served.tokens)
        if times.last is not None:
            for _ in served.tokens:
                add("inter_token_latency_seconds", (seconds - times.last) / len(served.tokens))
            return
        admitted = times.arrival if times.admitted is None else times.admitted
        add("time_to_first_token_seconds", seconds - times.arrival)
        add("request_queue_time_seconds", admitted - times.arrival)
        add("request_prefill_time_seconds", seconds - admitted)
        add("request_prompt_tokens", times.num_prompt)
        self.num_prompt_tokens += times.num_prompt
        self.num_cached += served.cached

    def _record_end(self, times: RequestTimes, served: Served, seconds: float) -> None:
        reason = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "abort"}
        self.finished[reason.get(served.finish_reason or "", "error")] += 1
        if times.first is not None or served.tokens:
            add = lambda name, value: self.histograms[name].add(value)
            add("e2e_request_latency_seconds", seconds - times.arrival)
            add("request_decode_time_seconds", seconds - (seconds if times.first is None else times.first))
            add("request_generation_tokens", times.num_tokens + len(served.tokens))

    def text(self, load: Load) -> str:
        """Return all metrics in the text format, version 0.0.4."""
        gauges = {
            "num_requests_running": (load.num_running, "Requests that have a row."),
            "num_requests_waiting": (load.num_waiting, "Requests in the queue."),
            "kv_cache_usage_perc": (load.usage, "Part of the cache that is filled, from 0 to 1."),
        }
        counters = {
            "prompt_tokens": (self.num_prompt_tokens, "Tokens of prompts."),
            "generation_tokens": (self.num_tokens, "Tokens of texts."),
            "prefix_cache_queries": (self.num_prompt_tokens, "Tokens of prompts that were looked up."),
            "prefix_cache_hits": (self.num_cached, "Tokens of prompts that were copied instead of read."),
            "num_preemptions": (0, "Requests that lost their row; there are none."),
            "admission_rejections": (self.num_rejected, "Requests that were refused because the queue was full."),
            "spec_decode_num_drafts": (self.num_drafts, "Drafts."),
            "spec_decode_num_draft_tokens": (self.num_drafted, "Drafted tokens, by the depth of drafts."),
            "spec_decode_num_accepted_tokens": (self.num_accepted, "Accepted drafted tokens."),
        }
        with self._lock:
            lines = [line for name, x in gauges.items() for line in self._lines(name, "gauge", x[1], [("", x[0])])]
            for name, (value, words) in counters.items():
                lines += self._lines(f"{name}_total", "counter", words, [("", value)])
            depths = [(f',position="{i}"', count) for i, count in enumerate(self.accepted_by_position)]
            name = "spec_decode_num_accepted_tokens_per_pos_total"
            lines += self._lines(name, "counter", "Accepted tokens by their place in the draft.", depths)
            reasons = [(f',finished_reason="{reason}"', count) for reason, count in self.finished.items()]
            lines += self._lines("request_success_total", "counter", "Requests that ended.", reasons)
            for name, histogram in self.histograms.items():
                lines += self._lines(name, "histogram", HISTOGRAMS[name][1], [])
                lines += histogram.lines(f"vllm:{name}", self.labels)
        return "\n".join([*lines, ""])

    def _lines(self, name: str, kind: str, words: str, values: Iterable[tuple[str, float]]) -> list[str]:
        head = [f"# HELP vllm:{name} {words}", f"# TYPE vllm:{name} {kind}"]
        return head + [f"vllm:{name}{{{self.labels}{labels}}} {value}" for labels, value in values]


def describe_steps(steps: list[tuple[int, int]], max_depth: int, *, detailed: bool) -> dict[str, Any]:
    """Return the field `metrics.speculative_decoding` of a response.

    Args:
      steps: (drafted, accepted) of each step of the text. Steps without a draft count as plain steps.
    """
    drafts = [(drafted, accepted) for drafted, accepted in steps if drafted]
    drafted, accepted = sum(d for d, _ in drafts), sum(a for _, a in drafts)
    histogram = [0] * (max_depth + 1)
    for _, number in drafts:
        histogram[number] += 1
    document: dict[str, Any] = {
        "mean_acceptance_length": 1 + accepted / max(len(drafts), 1),
        "draft_acceptance_rate": accepted / max(drafted, 1),
        "acceptance_histogram": histogram,
        "num_spec_steps": len(drafts),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": max_depth,
        "num_plain_steps": len(steps) - len(drafts),
    }
    if detailed:
        document |= {"per_step_accepted": [a for _, a in drafts], "per_step_drafted": [d for d, _ in drafts]}
    return document
