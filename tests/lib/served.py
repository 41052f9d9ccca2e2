"""A tiny model with a vocabulary of letters behind the HTTP server, in a thread, on a free port of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import threading
import time

import httpx
import jax

import specjax
from specjax.models import LlamaConfig, init_params, make_model
from specjax.server.app import Service
from specjax.server.engine_thread import READY, Engine, Policy
from specjax.server.metrics import Metrics
from specjax.server.run import HttpServer, listen
from specjax.server.sampling import serve_options

CONFIG = LlamaConfig(
    vocab_size=259, width=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, mlp_width=32, max_positions=512,
    name="tiny",
)  # fmt: skip
LONGEST, LENGTH, SLOTS = 96, 96, 4


class LetterTokenizer:
    """Each id from 3 on is a letter; id 1 begins a text and a turn, id 2 ends a text."""

    eos = (2,)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [1] * special + [ord(x) - (29 if ord(x) < 128 else 0x400) for x in text]

    def decode(self, ids, *, special: bool = False) -> str:
        return "".join(self._letter(i) if i >= 3 else "<s>" * special for i in ids)

    def spellings(self) -> list[bytes | None]:
        return [None] * 3 + [self._letter(i).encode() for i in range(3, 259)]

    def _letter(self, i: int) -> str:
        return chr(i + 29) if i < 98 else chr(0x400 + i)

    def chat(self, messages, *, tools=None, shout=False) -> list[int]:
        if any(message["content"] == "refuse me" for message in messages):
            raise specjax.UsageError("the template refuses this")
        texts = (f"{message['role'][0]}:{message['content']}" for message in messages)
        return [id for text in texts for id in self.encode(text.upper() if shout else text)] + [1]


@functools.cache
def make_target() -> specjax.Target:
    """Return a model of large weights, whose greedy texts depend on their past and have no near-ties."""
    params = jax.tree.map(lambda x: 4 * x, init_params(CONFIG, jax.random.key(0)))
    return specjax.Target(make_model(CONFIG), params)


@functools.cache
def make_drafter():
    return specjax.drafters.prompt_lookup(3, min_ngram=1)


def build_setup(**changes):
    """Return a setup of the server with other options."""
    tokenizer = LetterTokenizer()
    options = serve_options(CONFIG.vocab_size, tokenizer.eos) | changes
    return specjax.serve(
        make_target(), make_drafter(), slots=SLOTS, longest_prompt=LONGEST, max_new_tokens=LENGTH, tokenizer=tokenizer,
        eos=tokenizer.eos, temperature=1.0, min_p=0.0, prefix_gib=0.01, constraint_mib=1, **options,
    ).setup  # fmt: skip


make_setup = functools.cache(build_setup)  # the setup of most tests, which share the compiled programs


@dataclasses.dataclass
class Running:
    """A server that runs."""

    url: str
    service: Service
    http: HttpServer
    thread: threading.Thread

    @property
    def engine(self) -> Engine:
        return self.service.engine


@contextlib.contextmanager
def running(policy: Policy | None = None, wait: bool = True, setup=None, shutdown_seconds: float = 20, **service):
    """Run a server, by default until its programs are compiled."""
    setup = setup or make_setup()
    engine = Engine(setup, policy or Policy(), Metrics("tiny", setup.max_depth))
    tokenizer = service.pop("tokenizer", None) or LetterTokenizer()
    built = Service(engine, tokenizer, ("tiny", "alias"), "fp_0", **service)
    http, listener = HttpServer(built, shutdown_seconds=shutdown_seconds), listen("127.0.0.1", 0)
    port = listener.getsockname()[1]  # a server that fails closes it soon
    thread = threading.Thread(target=http.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        while wait and not engine.is_healthy:
            assert engine.error is None, engine.error
            time.sleep(0.02)
        yield Running(f"http://127.0.0.1:{port}", built, http, thread)
    finally:
        http.handle_exit(15, None)
        thread.join(30)


def expected(ids: list[int], seed: int | jax.Array = 0, length: int = LENGTH, **settings) -> list[int]:
    """Return the tokens of `decode` for one prompt."""
    options = {"temperature": 1.0, "eos": LetterTokenizer.eos} | settings
    key = (jax.random.key(seed) if isinstance(seed, int) else seed)[None]
    result = specjax.decode(make_target(), make_drafter(), [ids], key=key, max_new_tokens=length, **options)
    return result.to_lists()[0]


def make_app(**service):
    """Return the application without its thread."""
    engine = Engine(make_setup(), Policy(max_waiting=0), Metrics("tiny", 3))
    engine.state = READY
    return Service(engine, LetterTokenizer(), ("tiny",), "fp_0", **service).app()


def ask(method, path, *, headers=None, service=None, **options):
    """Send a request to the application without its thread."""
    app = make_app(**(service or {}))

    async def send():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, headers=headers, **options)

    return asyncio.run(send())
