"""`specjax serve`: the flags, and a server in a process of its own."""

import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
import served
from tiers import those

import specjax.cli as cli_module
from specjax.cli.commands.serve import ServerOptions
from specjax.server import run
from specjax.server.engine_thread import THREAD
from specjax.serving.pace import MAX_SLOWDOWN
from specjax.serving.prefixes import PREFIX_GIB


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", 70000], "--port must be from 0 to 65535, not 70000"),
        (["--slots", 0], "--slots must be at least 1, not 0"),
        (["--max-slowdown", 0.5], "--max-slowdown must be a number of at least 1, not 0.5"),
        (["--image-patches", 64], "--image-patches 64 needs images; add --image-tiles, or leave it out"),
        (["--api-key", ""], "--api-key is empty"),
        (["--per-request-metrics", "all"], "--per-request-metrics must be none, summary or detailed"),
        (["--port", 0, "--longest-prompt", 500], "--longest-prompt must be at most 448"),
        (["--port", 0, "--max-new-tokens", 600], "--max-new-tokens 600 leaves no room"),
        (["--host", "999.1.1.1"], "cannot listen on 999.1.1.1, port 8000"),
        (["--slots", 3, "--data", 2], "--slots 3 cannot be split over --data 2; give a multiple"),
        (["--process-id", 1], "--process-id needs --distributed"),
        (["--data", 64, "--slots", 64], "--data, --model, --expert, --sequence: "),
        (["one", "--target", "two"], "the model is given twice, as one and as --target two"),
        (["no-such-model"], "no-such-model"),
    ],
)
def test_wrong_flags(refused, flags, message):
    assert message in refused("serve", "--max-new-tokens", 64, *flags)


def test_defaults_are_those_of_python():
    options = ServerOptions()
    assert (options.prefix_gib, options.max_slowdown) == (PREFIX_GIB, MAX_SLOWDOWN)


def test_the_slowdown_may_be_unlimited():
    assert ServerOptions(max_slowdown=math.inf).max_slowdown == math.inf


def test_a_port_that_is_taken(refused):
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert "(Address already in use); give another --port" in refused("serve", "--port", other.getsockname()[1])


@pytest.mark.parametrize("mesh", those([()], [(), ("--data", 2, "--model", 1)]))
def test_the_command_serves_until_a_signal(cli, monkeypatch, mesh):
    listeners, answers, listen = [], [], run.listen
    monkeypatch.setattr(run, "listen", lambda host, port: listeners.append(listen(host, port)) or listeners[-1])
    start = run.HttpServer.startup

    async def startup(self, sockets=None):
        await start(self, sockets)
        threading.Thread(target=ask, args=(self,)).start()

    def ask(server):
        try:
            ask_once(server)
        finally:
            os.kill(os.getpid(), 15)

    def ask_once(server):
        while server.service.engine.state == "starting":
            time.sleep(0.01)
        url = f"http://127.0.0.1:{listeners[0].getsockname()[1]}/v1"
        headers = {"Authorization": "Bearer secret"}
        body = {"model": "mine", "prompt": "abcabc", "max_tokens": 12, "temperature": 0, "seed": 0}
        answers.append(httpx.post(f"{url}/completions", json=body, headers=headers, timeout=60).json())

    monkeypatch.setattr(run.HttpServer, "startup", startup)
    flags = (
        "--longest-prompt",
        40,
        "--max-new-tokens",
        20,
        "--slots",
        2,
        "--port",
        0,
        "--api-key",
        "secret",
    )
    result = cli("serve", *flags, *mesh, "--served-model-name", "mine", "--method", "prompt_lookup")
    assert result.code == 0 and "serving mine at http://127.0.0.1:" in result.err
    assert answers[0]["model"] == "mine" and answers[0]["usage"]["completion_tokens"] == 12


COMPILING = """
import sys

sys.path.insert(0, sys.argv.pop())
import host_worker
import jax
import specjax.cli
from specjax.server.engine_thread import Engine
from specjax.serving.loop import ServeSetup


def compile_for_ever(self, **options):
    print("compiling", flush=True)
    add = jax.jit(lambda x: x + 1)
    while True:
        jax.block_until_ready(add(0))


def main_of_a_process(arguments, run=specjax.cli.main):
    sys.argv[1:] = arguments
    run()


specjax.cli.main = main_of_a_process
ServeSetup.scheduler, Engine.stop.__defaults__ = compile_for_ever, (0.1,)
host_worker.cli("serve", "--port", "0", "--longest-prompt", "40", "--max-new-tokens", "20", "--shutdown-seconds", "0")
"""


def test_a_process_does_not_wait_for_a_thread_that_decodes():
    thread = threading.Thread(target=time.sleep, args=(0.2,), name=THREAD)
    thread.start()
    assert cli_module._has_busy_threads()
    thread.join()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("numbers", "code"), [([signal.SIGTERM], 0), ([signal.SIGINT] * 2, 130)])
def test_a_signal_ends_a_process_whose_thread_is_busy(numbers, code):
    """The thread may not return from XLA into an interpreter that has ended: the process would abort."""
    lib = str(pathlib.Path(served.__file__).parent)
    command = [sys.executable, "-c", COMPILING, lib]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "compiling\n"
        time.sleep(0.5)
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.05)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "Fatal" not in errors and "Traceback" not in errors


def test_a_missing_package_is_named(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "starlette", None)
    assert "the package starlette; run pip install 'specjax[server]'" in refused("serve")
