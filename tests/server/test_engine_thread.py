"""Load, clients that leave, full queues, deadlines and the end of the server."""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from served import LetterTokenizer, expected, running

from specjax.server.engine_thread import Policy

TOKENIZER = LetterTokenizer()


def body(prompt="abab", **options):
    return {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, **options}


def wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


async def post_all(url, bodies):
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))


def test_a_hundred_requests_at_the_same_time(server):
    prompts = ["abab", "xyzxyz", "hello hello", "12121212", "q"]
    texts = {p: TOKENIZER.decode(expected(TOKENIZER.encode(p), 0, 12, temperature=0.0)) for p in prompts}
    bodies = [body(prompts[i % 5], stream=i % 3 == 0) for i in range(100)]
    answers = asyncio.run(post_all(server.url, bodies))
    for sent, answer in zip(bodies, answers, strict=True):
        assert answer.status_code == 200, answer.text
        assert read_text(answer) == texts[sent["prompt"]]
    assert server.engine.load == (0, 0, 0)


def read_text(answer):
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()["choices"][0]["text"]
    *events, end = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert end == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def test_clients_that_leave_free_their_rows(server):
    aborted = server.engine.metrics.finished["abort"]
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for stream in (True, False):
            sent = body(n=4, max_tokens=40, stream=stream, ignore_eos=True)
            if stream:
                with client.stream("POST", "/v1/completions", json=sent) as answer:
                    next(answer.iter_bytes())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post("/v1/completions", json=sent, timeout=0.02)
            wait_until(lambda: server.engine.load == (0, 0, 0))
        assert server.engine.metrics.finished["abort"] > aborted
        assert client.post("/v1/completions", json=body()).status_code == 200


def test_a_full_queue_and_deadlines(server):
    engine, policy = server.engine, server.engine.policy
    try:
        engine.policy = Policy(max_waiting=6)
        answers = asyncio.run(post_all(server.url, [body(n=4, max_tokens=40) for _ in range(8)]))
        codes = {answer.status_code for answer in answers}
        assert codes == {200, 429}
        busy = next(answer for answer in answers if answer.status_code == 429)
        assert busy.headers["retry-after"] == "1" and busy.json()["error"]["code"] == "busy"
        engine.policy = Policy(total_seconds=0.0)
        answer = asyncio.run(post_all(server.url, [body()]))[0]
        assert answer.status_code == 504 and "took more than 0 s" in answer.json()["error"]["message"]
        engine.policy = Policy(queue_seconds=0.0)
        answers = asyncio.run(post_all(server.url, [body(n=4, max_tokens=40), body(n=4, max_tokens=40)]))
        assert 503 in {answer.status_code for answer in answers}
        engine.policy = Policy(max_pending=-1)
        answer = asyncio.run(post_all(server.url, [body()]))[0]
        assert answer.status_code == 503 and "reads too slowly" in answer.json()["error"]["message"]
    finally:
        engine.policy = policy
    wait_until(lambda: engine.load == (0, 0, 0))
    assert asyncio.run(post_all(server.url, [body()]))[0].status_code == 200


def test_the_end_waits_for_what_runs(server):
    with running(wait=False) as other, httpx.Client(base_url=other.url, timeout=60) as client:
        wait_until(lambda: other.http.started)
        if not other.engine.is_healthy:
            assert client.get("/health").status_code == 503
            assert client.post("/v1/completions", json=body()).status_code == 503
        wait_until(lambda: other.engine.is_healthy, 60)
        with client.stream("POST", "/v1/completions", json=body(max_tokens=40, stream=True)) as answer:
            parts = answer.iter_text()
            first = next(parts)
            other.http.handle_exit(15, None)
            assert other.engine.state == "draining"
            text = first + "".join(parts)
        assert text.endswith("data: [DONE]\n\n") and '"finish_reason": "' in text
        other.thread.join(30)
        assert not other.thread.is_alive() and not other.engine._thread.is_alive()


def test_the_end_waits_no_longer_than_it_may(server):
    """Requests that still run then end with an error, in streams too."""
    with running(shutdown_seconds=0.01) as other, ThreadPoolExecutor() as pool:
        bodies = [body(n=4, max_tokens=96, ignore_eos=True, stream=stream) for stream in (True, False, False)]
        answers = [pool.submit(httpx.post, f"{other.url}/v1/completions", json=sent, timeout=60) for sent in bodies]
        wait_until(lambda: other.engine.load.num_running == 4 and other.engine.load.num_waiting == 8)
        other.http.handle_exit(15, None)
        stream, *documents = [answer.result() for answer in answers]
        other.thread.join(30)
    assert {answer.status_code for answer in documents} == {503} and "the server stops" in documents[0].text
    assert "the server stops" in stream.text
    assert stream.status_code == 503 or stream.text.endswith("data: [DONE]\n\n")


def test_an_error_of_the_loop_ends_all_requests(monkeypatch, server):
    def fail(self):
        raise RuntimeError("the device is lost")

    with running() as other:
        monkeypatch.setattr("specjax.serving.loop.Scheduler.turn", fail)
        answer = asyncio.run(post_all(other.url, [body()]))[0]
        assert answer.status_code == 500 and "decoding failed (RuntimeError)" in answer.json()["error"]["message"]
        assert httpx.get(f"{other.url}/health").status_code == 503
        assert httpx.post(f"{other.url}/v1/completions", json=body()).status_code == 503


def test_a_server_whose_programs_do_not_compile_ends(monkeypatch):
    def fail(self, **options):
        raise MemoryError("no room")

    monkeypatch.setattr("specjax.serving.loop.ServeSetup.scheduler", fail)
    with running(wait=False) as other:
        other.thread.join(20)
        assert not other.thread.is_alive() and isinstance(other.engine.error, MemoryError)


def test_a_call_of_more_texts_than_may_wait(server):
    answer = asyncio.run(post_all(server.url, [body(["a"] * 300)]))[0]
    assert answer.status_code == 400 and "300 texts, and this server takes at most 260" in answer.text


@pytest.mark.parametrize("options", [
    {"temperature": 1e-30}, {"temperature": 1e-45}, {"temperature": 100}, {"top_p": 1e-30, "temperature": 1},
    {"min_p": 1, "temperature": 1}, {"repetition_penalty": 100}, {"repetition_penalty": 0.01},
    {"logit_bias": {str(i): -100 for i in range(259)}}, {"seed": -(1 << 63)}, {"top_k": 0, "temperature": 1},
])  # fmt: skip
def test_extreme_settings(server, options):
    answer = asyncio.run(post_all(server.url, [body(max_tokens=4) | options]))[0]
    assert answer.status_code == 200, answer.text
