"""Counters of all requests and of one: identities between them, and the text format of Prometheus."""

import httpx
import pytest
from served import running

from specjax.server.metrics import Histogram, describe_steps


def check_identities(document, detailed=True):
    """Check the seven identities without which AIPerf drops a record."""
    histogram, steps = document["acceptance_histogram"], document["num_spec_steps"]
    accepted, drafted = document["num_accepted_draft_tokens"], document["num_draft_tokens"]
    assert isinstance(histogram, list) and all(type(count) is int for count in histogram)
    assert len(histogram) == document["num_spec_tokens"] + 1
    assert sum(histogram) == steps
    assert sum(j * count for j, count in enumerate(histogram)) == accepted
    assert accepted <= drafted
    if detailed:
        for name, total in (("per_step_accepted", accepted), ("per_step_drafted", drafted)):
            assert len(document[name]) == steps and sum(document[name]) == total
    assert not steps or document["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)


def test_the_example_of_the_documentation():
    steps = [(3, 0)] * 39 + [(3, 1)] + [(3, 3)] * 3 + [(0, 0)] * 2
    document = describe_steps(steps, 3, detailed=True)
    check_identities(document)
    assert document["acceptance_histogram"] == [39, 1, 0, 3] and document["num_plain_steps"] == 2
    assert (document["num_spec_steps"], document["num_draft_tokens"]) == (43, 129)
    assert document["mean_acceptance_length"] == pytest.approx(1.2326, abs=1e-4)
    assert document["draft_acceptance_rate"] == pytest.approx(0.0775, abs=1e-4)
    check_identities(describe_steps([], 3, detailed=False), detailed=False)


def test_a_histogram():
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 3):
        histogram.add(value)
    assert list(histogram.lines("x", 'a="b"')) == [
        'x_bucket{a="b",le="1"} 2', 'x_bucket{a="b",le="2"} 3', 'x_bucket{a="b",le="+Inf"} 4', 'x_sum{a="b"} 6',
        'x_count{a="b"} 4',
    ]  # fmt: skip


def read_metrics(url):
    text = httpx.get(f"{url}/metrics").text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_the_counters_of_a_server():
    with running(step_metrics="detailed") as server, httpx.Client(base_url=server.url, timeout=60) as client:
        sent = {"model": "tiny", "prompt": "abababab", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
        documents = [client.post("/v1/completions", json=sent).json() for _ in range(2)]
        streamed = client.post(
            "/v1/completions", json=sent | {"stream": True, "stream_options": {"include_usage": True}}
        ).text  # fmt: skip
        assert '"speculative_decoding": {' in streamed.split("\n\n")[-3]
        assert client.post("/v1/completions", json=sent | {"n": 2, "max_tokens": 4}).json()["metrics"] is None
        counters = read_metrics(server.url)
        head = client.get("/metrics").headers["content-type"]
    assert head.startswith("text/plain; version=0.0.4")
    total = lambda name, more="": counters[f'vllm:{name}{{model_name="tiny",engine="0"{more}}}']
    steps = [document["metrics"]["speculative_decoding"] for document in documents]
    for document, of_steps in zip(documents, steps, strict=True):
        check_identities(of_steps)
        emitted = of_steps["num_accepted_draft_tokens"] + of_steps["num_spec_steps"] + of_steps["num_plain_steps"]
        assert emitted >= document["usage"]["completion_tokens"] == 40
        assert document["metrics"]["time_to_first_token_ms"] > 0
    assert total("generation_tokens_total") == 3 * 40 + 2 * 4 and total("prompt_tokens_total") == 5 * 9
    assert total("request_success_total", ',finished_reason="length"') == 5
    depths = [total("spec_decode_num_accepted_tokens_per_pos_total", f',position="{i}"') for i in range(3)]
    assert sum(depths) == total("spec_decode_num_accepted_tokens_total") > 0 and depths == sorted(depths)[::-1]
    assert total("spec_decode_num_accepted_tokens_total") <= total("spec_decode_num_draft_tokens_total")
    assert total("time_to_first_token_seconds_count") == total("e2e_request_latency_seconds_count") == 5
    assert total("inter_token_latency_seconds_count") < total("generation_tokens_total")
    assert total("num_requests_running") == total("num_requests_waiting") == total("kv_cache_usage_perc") == 0
