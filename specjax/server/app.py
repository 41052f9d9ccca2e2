"""The application: endpoints, authorisation, limits and errors."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from specjax.errors import UsageError
from specjax.processors.bad_words import encode_words
from specjax.server.answers import Answer, AnswerSettings, ClientGoneError, Form
from specjax.server.chat import CHAT
from specjax.server.completions import COMPLETION
from specjax.server.engine_thread import Engine
from specjax.server.errors import ApiError
from specjax.server.images import ImageReader
from specjax.server.sampling import TokenTexts, make_requests
from specjax.server.schemas import (
    ChatFields,
    ChatMessage,
    CompletionFields,
    DetokenizeFields,
    FieldsT,
    SampledFields,
    TokenizeFields,
    Tool,
    parse_fields,
)
from specjax.server.structured.store import AutomatonStore
from specjax.types import PyTree
from specjax.version import __version__

LOG = logging.getLogger("specjax.server")
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
MAX_BODY = 4 << 20
"""Default of the largest body of a request, in bytes."""


@dataclasses.dataclass(frozen=True)
class Service:
    """A model that is served, and who may use it."""

    engine: Engine
    tokenizer: Any
    names: tuple[str, ...]  # of the model; the first one is in the answers about models
    fingerprint: str
    api_keys: tuple[str, ...] = ()  # () for no authorisation
    max_body: int = MAX_BODY
    step_metrics: str = "none"
    images: ImageReader | None = None  # None: the server reads text only
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    texts: TokenTexts = dataclasses.field(init=False)
    automata: AutomatonStore = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "texts", TokenTexts(self.tokenizer))
        object.__setattr__(self, "automata", AutomatonStore(self.tokenizer, self.engine.setup.limits))

    @property
    def max_length(self) -> int:
        """Return the largest number of tokens of a prompt and its text."""
        limits = self.engine.setup.limits
        return limits.longest_prompt + limits.max_new_tokens

    def app(self) -> Starlette:
        """Return the application. Its lifespan is that of the decoding thread."""
        routes = [
            Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
            Route("/v1/completions", self._guarded(self.complete), methods=["POST"]),
            Route("/v1/models", self._guarded(self.models)),
            Route("/v1/models/{name:path}", self._guarded(self.model)),
            Route("/tokenize", self._guarded(self.tokenize), methods=["POST"]),
            Route("/detokenize", self._guarded(self.detokenize), methods=["POST"]),
            Route("/health", self.health), Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/version", self.version), Route("/metrics", self.metrics), Route("/load", self.load),
            Route("/", self.page),
        ]  # fmt: skip
        handlers: Any = {
            ApiError: _api_error, HTTPException: _http_error, ClientGoneError: _client_gone,
            ClientDisconnect: _client_gone, Exception: _bug,
        }  # fmt: skip
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self.engine.stop)

    def _guarded(self, endpoint: Callable[[HttpRequest], Awaitable[Response]]):
        """Return an endpoint that needs the key, if there is one."""

        async def guarded(http: HttpRequest) -> Response:
            key = _bearer_key(http).encode()
            if self.api_keys and not any([hmac.compare_digest(key, other.encode()) for other in self.api_keys]):
                raise ApiError(401, "the request needs a key of this server", code="invalid_api_key")
            return await endpoint(http)

        return guarded

    async def chat(self, http: HttpRequest) -> Response:
        """Answer /v1/chat/completions."""
        fields = await self._read(http, ChatFields)
        ids, inputs = await self._encode_chat(fields.messages, fields.chat_template_kwargs, fields.callable_tools)
        return await self._answer(http, CHAT, fields, [ids], inputs=inputs)

    async def complete(self, http: HttpRequest) -> Response:
        """Answer /v1/completions."""
        fields = await self._read(http, CompletionFields)
        prompts = [
            await _in_thread(self.tokenizer.encode, prompt) if isinstance(prompt, str) else prompt
            for prompt in fields.prompts
        ]  # fmt: skip
        echoes = [
            prompt if isinstance(prompt, str) else await _in_thread(self.tokenizer.decode, prompt)
            for prompt in fields.prompts if fields.echo
        ]  # fmt: skip
        return await self._answer(http, COMPLETION, fields, prompts, echoes)

    async def models(self, http: HttpRequest) -> Response:
        """Answer /v1/models."""
        return JSONResponse({"object": "list", "data": [self._describe(name) for name in self.names]})

    async def model(self, http: HttpRequest) -> Response:
        """Answer /v1/models/{name}."""
        name = http.path_params["name"]
        self._check_model(name)
        return JSONResponse(self._describe(name))

    async def tokenize(self, http: HttpRequest) -> Response:
        """Answer /tokenize."""
        fields = await self._read(http, TokenizeFields)
        if fields.messages is not None:
            ids, _ = await self._encode_chat(fields.messages, None)
        else:
            ids = await _in_thread(self.tokenizer.encode, fields.prompt, special=fields.add_special_tokens)
        document = {"tokens": list(ids), "count": len(ids), "max_model_len": self.max_length}
        if fields.return_token_strs:
            document["token_strs"] = [self.texts.text(token) for token in ids]
        return JSONResponse(document)

    async def detokenize(self, http: HttpRequest) -> Response:
        """Answer /detokenize."""
        fields = await self._read(http, DetokenizeFields)
        vocab = self.engine.setup.limits.vocab_size
        wrong = next((token for token in fields.tokens if token >= vocab), None)
        if wrong is not None:
            raise ApiError(400, f"there is no token {wrong}; the vocabulary has {vocab}", param="tokens")
        text = await _in_thread(self.tokenizer.decode, fields.tokens)
        return JSONResponse({"prompt": text, "content": text})

    async def health(self, http: HttpRequest) -> Response:
        """Answer /health."""
        is_healthy = self.engine.is_healthy
        return JSONResponse({"status": self.engine.state}, 200 if is_healthy else 503)

    async def version(self, http: HttpRequest) -> Response:
        """Answer /version."""
        return JSONResponse({"version": __version__})

    async def load(self, http: HttpRequest) -> Response:
        """Answer /load with the number of requests that run or wait."""
        load = self.engine.load
        return JSONResponse({"server_load": load.num_running + load.num_waiting})

    async def metrics(self, http: HttpRequest) -> Response:
        """Answer /metrics."""
        return PlainTextResponse(
            self.engine.metrics.text(self.engine.load), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def page(self, http: HttpRequest) -> Response:
        """Answer with the page of a chat, which loads nothing else."""
        text = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": PAGE_POLICY})

    def _describe(self, name: str) -> dict[str, Any]:
        return {
            "id": name, "object": "model", "created": self.created, "owned_by": "specjax", "root": self.names[0],
            "max_model_len": self.max_length,
        }  # fmt: skip

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise ApiError(
                404, f"there is no model {name[:80]!r}; this server has {', '.join(self.names)}", param="model",
                code="model_not_found",
            )  # fmt: skip

    async def _encode_chat(
        self, messages: list[ChatMessage], variables: dict[str, Any] | None, tools: list[Tool] | None = None
    ) -> tuple[list[int], PyTree]:  # fmt: skip
        """Return the ids of a chat, and the inputs of its images; None without images."""
        turns = [message.as_turn() for message in messages]
        pictures = await _in_thread(lambda: [picture for message in messages for picture in message.pictures])
        shown = {"tools": [tool.model_dump(exclude_none=True) for tool in tools]} if tools else {}
        options = {**(variables or {}), **shown}
        if not pictures:
            return await _in_thread(self.tokenizer.chat, turns, **options), None
        if self.images is None:
            raise ApiError(
                400,
                "this server reads text only; leave the images out, or start it with --image-tiles for a model that "
                "reads images",
                param="messages",
            )
        return await _in_thread(self.images.read, turns, pictures, options)

    async def _read(self, http: HttpRequest, kind: type[FieldsT]) -> FieldsT:
        """Return the fields of a request. Raises: ApiError for a large body, a wrong field or an unknown model."""
        encoding = http.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise ApiError(415, f"the body has the encoding {encoding[:40]!r}; send it without compression")
        body = bytearray()
        async for part in http.stream():
            body += part
            if len(body) > self.max_body:
                raise ApiError(413, f"the body has more than {self.max_body} bytes", code="body_too_large")
        fields = parse_fields(kind, bytes(body))
        self._check_model(getattr(fields, "model", None))
        return fields

    async def _answer(
        self,
        http: HttpRequest,
        form: Form,
        fields: SampledFields,
        prompts: list[list[int]],
        echoes: Sequence[str] = (),
        inputs: PyTree = None,
    ) -> Response:
        """Decode the prompts of a call. inputs: those of its images; None: it has none."""
        limits = self.engine.setup.limits
        inputs = limits.inputs if inputs is None else inputs
        constraint, automaton = fields.constraint, None
        if constraint is not None:
            automaton = await self.automata.automaton(constraint)
        key = _bearer_key(http)
        owner = hashlib.sha256(key.encode()).hexdigest() if key else ""
        words = await _in_thread(self._encode_words, fields.bad_words) if fields.bad_words else []
        requests = make_requests(fields, prompts, limits, tuple(self.tokenizer.eos), automaton, owner, words, inputs)
        host = http.client.host if http.client else ""
        call = self.engine.submit(requests, f"{host} {owner} {fields.user or ''}")
        settings = AnswerSettings(self.engine, self.tokenizer, self.texts, self.fingerprint, self.step_metrics)
        return await Answer(settings, form, fields, call, echoes).respond(http.receive)

    def _encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the tokens of bad words."""
        return encode_words(words, functools.partial(self.tokenizer.encode, special=False))


def _bearer_key(http: HttpRequest) -> str:
    """Return the key of a request, or an empty text."""
    kind, _, key = http.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


async def _in_thread(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return the result of a tokenizer. Raises: ApiError for a text that it refuses."""
    try:
        return await asyncio.to_thread(function, *arguments, **options)
    except UsageError as error:
        raise ApiError(400, str(error)) from None
    except TypeError as error:  # a variable of the template has the name of an argument
        raise ApiError(400, f"chat_template_kwargs do not fit ({error})", param="chat_template_kwargs") from None


async def _api_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.document(), error.status, error.headers)


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = http.method, http.url.path[:80]
    words = {
        404: f"this server has no endpoint {path}; see docs/serving.md for its endpoints",
        405: f"the endpoint {path} does not take {method} requests",
    }.get(error.status_code, error.detail)  # fmt: skip
    return JSONResponse(ApiError(error.status_code, words).document(), error.status_code, error.headers)


async def _client_gone(http: HttpRequest, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _bug(http: HttpRequest, error: Exception) -> Response:
    return JSONResponse(ApiError(500, "the server failed; see its log").document(), 500)
