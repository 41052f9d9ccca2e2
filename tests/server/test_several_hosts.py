"""A server of two real processes with two devices each, and the client of OpenAI."""

from __future__ import annotations

import re
import signal
import threading
import time

import jax
import numpy as np
import openai
import pytest
from host_worker import load_conftest
from processes import Hosts

import specjax
from specjax import Request
from specjax.parallel import hosts
from specjax.server.sampling import serve_options
from specjax.serving import host_commands
from specjax.serving.host_commands import Commands
from specjax.serving.requests import Cancel

FLAGS = ("--distributed", "--coordinator", "ADDRESS", "--num-processes", "COUNT", "--process-id", "HOST")
COMMAND = (
    "cli", "serve", *FLAGS, "--data", "2", "--model", "2", "--slots", "4", "--longest-prompt", "200",
    "--max-new-tokens", "40", "--method", "prompt_lookup", "--port", "0", "--heartbeat", "6",
)  # fmt: skip
HISTORY = "Once upon a time, a fox met a crow in the wood. " * 3
PROMPTS = ("abcabcabc", HISTORY, HISTORY + "And", "x")


def client_of(running: Hosts) -> openai.OpenAI:
    deadline = time.monotonic() + 400
    while (line := re.search(r"http://127\.0\.0\.1:\d+/v1", running.read(0, "err"))) is None:
        assert running.processes[0].poll() is None and time.monotonic() < deadline, running.read(0, "err")
        time.sleep(0.1)
    return openai.OpenAI(base_url=line[0], api_key="x", max_retries=0, timeout=120)


def expected(prompt: str, seed: int) -> str:
    conftest = load_conftest()
    ids = conftest.ByteTokenizer().encode(prompt)
    target = conftest.make_target(conftest.CONFIG, seed=0)
    options = {"max_new_tokens": 12, "temperature": 0.7, "eos": (2,)}
    drafter = specjax.make_drafter("prompt_lookup", target)
    result = specjax.decode(target, drafter, [ids], key=jax.random.key(seed)[None], **options)
    return conftest.ByteTokenizer().decode(result.to_lists()[0])


@pytest.mark.exhaustive
def test_two_hosts_answer_as_one_device_and_end_together():
    """The texts are those of one device, also beside a client that leaves. A signal to host 1 ends both."""
    with Hosts(2, *COMMAND) as running:
        client, texts = client_of(running), {}
        model = client.models.list().data[0].id
        left = client.completions.create(model=model, prompt="z", max_tokens=40, stream=True)
        next(iter(left))
        left.close()

        def ask(number: int) -> None:
            answer = client.completions.create(
                model=model, prompt=PROMPTS[number], max_tokens=12, temperature=0.7, seed=number
            )
            texts[number] = answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens

        ask(1)
        threads = [threading.Thread(target=ask, args=(number,)) for number in (0, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        biased = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "b"}], max_tokens=5, logit_bias={"100": 100}, n=2
        )
        running.processes[1].send_signal(signal.SIGTERM)
        ended = running.wait(60)
    assert [process.code for process in ended] == [0, 0], ended
    assert {number: text for number, (text, _) in texts.items()} == {n: expected(PROMPTS[n], n) for n in range(4)}
    assert texts[2][1] >= 128 and texts[1][1] == 0
    assert [choice.message.content for choice in biased.choices] == ["aaaaa"] * 2
    assert "serving" not in ended[1].err


@pytest.mark.exhaustive
def test_a_host_that_dies_ends_the_server():
    with Hosts(2, *COMMAND) as running:
        client = client_of(running)
        stream = client.completions.create(
            model=client.models.list().data[0].id, prompt="z", max_tokens=40, stream=True
        )
        next(iter(stream))
        running.kill(1)
        survivor = running.wait(60)[0]
    assert survivor.code not in (0, None)
    assert any(
        words in survivor.err for words in ("another host stopped", "JAX distributed service detected", "Gloo")
    ), survivor.err


def test_commands_arrive_as_they_were():
    conftest = load_conftest()
    target = conftest.make_target(conftest.CONFIG, seed=0)
    shared = serve_options(target.model.vocab_size, ())
    setup = specjax.serve(target, None, slots=2, longest_prompt=9, max_new_tokens=9, min_p=0.0, **shared).setup
    limits = setup.limits
    processors = [processor.replace(settings=processor.settings) for processor in limits.settings.processors]
    sent = Request(
        np.array([1, 2]), jax.random.key(5), 4, temperature=np.float32(0.5), eos=[3], stop=["é"], processors=processors,
        salt="me",
    )  # fmt: skip
    items = [Cancel(3), sent, Request([7], 9)]
    result = host_commands.decode(host_commands.encode(Commands(items, reads=True)), limits)
    cancel, request, plain = result.items
    assert (cancel, result.reads, result.is_last) == (Cancel(3), True, False)
    assert request.key == sent.key and plain.key == jax.random.key(9) and plain.processors is None
    assert (request.prompt, request.temperature, request.stop, request.salt) == ([1, 2], 0.5, ["é"], "me")
    for mine, other in zip(request.processors, processors, strict=True):
        for x, y in zip(jax.tree.leaves(mine.settings), jax.tree.leaves(other.settings), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)


def test_a_failure_of_one_process_is_no_matter_of_hosts():
    hosts.fail_with(ValueError("reason"))  # returns, because there is one process
