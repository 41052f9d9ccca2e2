"""Answers to calls: one JSON document, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from specjax.server.engine_thread import Call, Engine, Ticket
from specjax.server.errors import ApiError, raise_unfinished
from specjax.server.metrics import describe_steps
from specjax.server.sampling import TokenTexts
from specjax.server.schemas import SampledFields
from specjax.server.structured.tools import ToolCall, ToolParser
from specjax.serving.batch import Served
from specjax.types import TokenLogprobs


@dataclasses.dataclass
class ServedChoice:
    """A text of an answer, from its updates."""

    ticket: Ticket
    tokens: list[int] = dataclasses.field(default_factory=list)
    texts: list[str] = dataclasses.field(default_factory=list)
    logprobs: list[Any] = dataclasses.field(default_factory=list)
    steps: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (drafted, accepted)
    calls: list[ToolCall] = dataclasses.field(default_factory=list)
    parser: ToolParser | None = None  # None: the text has no calls of tools
    is_call: bool = False  # True if the text must be a call, so that the rest of it is one that was cut
    echo: str = ""  # text before that of the model
    num_shown: int = 0  # number of tokens whose log-probabilities were returned
    unshown: list[tuple[int, Any]] = dataclasses.field(default_factory=list)  # other tokens, with log-probabilities
    cached: int = 0
    reason: str | None = None

    def show(self, served: Served) -> Served | None:
        """Return the tokens whose text an update returns, with their log-probabilities. None: it has none of them.

        A token that ends the text, or that may begin a stop string, is not among them.
        """
        if served.logprobs is not None:
            self.unshown += zip(served.tokens, zip(*served.logprobs, strict=True), strict=True)
        count = min(served.num_shown - self.num_shown, len(self.unshown))
        if count <= 0:
            return None
        entries, self.unshown, self.num_shown = self.unshown[:count], self.unshown[count:], served.num_shown
        tokens, logprobs = zip(*entries, strict=True)
        arrays: Any = map(np.stack, zip(*logprobs, strict=True))
        return served._replace(tokens=list(tokens), logprobs=TokenLogprobs(*arrays))

    def add(self, served: Served) -> tuple[str, list[ToolCall]]:
        """Add an update. Return its text without calls of tools, and these calls."""
        self.tokens += served.tokens
        self.cached = max(self.cached, served.cached)
        self.reason = served.finish_reason
        if served.tokens:
            self.steps.append((served.drafted, served.accepted))
        text, calls = (served.text, []) if self.parser is None else self.parser.feed(served.text)
        if self.parser is not None and served.finish_reason is not None:
            more, last = self.parser.finish()
            text, calls = text + more, [*calls, *last]
        text = "" if self.is_call else text
        self.texts.append(text)
        self.calls += calls
        return text, calls

    @property
    def text(self) -> str:
        """Return the text so far, without calls of tools."""
        return "".join(self.texts)

    @property
    def finish_reason(self) -> str | None:
        """Return the reason of the end, in the words of the API."""
        reason = "stop" if self.reason == "eos" else self.reason
        return "tool_calls" if self.calls and reason == "stop" else reason

    def stop_reason(self, tokenizer: Any) -> str | int | None:
        """Return the stop string or the id of `stop_token_ids` that ended the text."""
        if self.reason == "eos":
            return None if self.tokens[-1] in tokenizer.eos else self.tokens[-1]
        if self.reason == "stop":
            text, stops = tokenizer.decode(self.tokens), self.ticket.request.stop or ()
            return min((stop for stop in stops if stop in text), key=text.find, default=None)
        return None


class Form(NamedTuple):
    """The form of the answers of one endpoint."""

    prefix: str  # of the ids
    object: str
    chunk_object: str
    choice: Callable[[int, ServedChoice, Any, Any], dict[str, Any]]  # index, choice, logprobs, stop reason
    first: Callable[[int, str], dict[str, Any] | None]  # index, echo -> the first choice of a stream, if there is one
    delta: Callable[[int, str, Any, list[dict[str, Any]]], dict[str, Any]]  # index, text, logprobs, calls of tools
    last: Callable[[int, str | None, Any], dict[str, Any]]  # index, finish reason, stop reason
    logprobs: Callable[[Served, int, TokenTexts], Any]  # update, characters before it
    join: Callable[[list[Any]], Any]  # of the logprobs of several updates
    prompt_logprobs: Callable[[Sequence[int], TokenLogprobs, TokenTexts], Any] | None = None  # prompt, its logprobs


class AnswerSettings(NamedTuple):
    """Settings of all answers of a server."""

    engine: Engine
    tokenizer: Any
    texts: TokenTexts
    fingerprint: str
    step_metrics: str = "none"  # or "summary" or "detailed"


class Answer:
    """The answer to one call."""

    def __init__(
        self, settings: AnswerSettings, form: Form, fields: SampledFields, call: Call, echoes: Sequence[str] = ()
    ):  # fmt: skip
        """Create the answer. echoes: the text before that of each prompt, if there is one."""
        self.settings, self.form, self.fields, self.call = settings, form, fields, call
        self.choices = [ServedChoice(ticket) for ticket in call.tickets]
        for index, choice in enumerate(self.choices):
            choice.echo = echoes[index // fields.count] if echoes else ""
            choice.parser = ToolParser(fields.called_names) if fields.called_names else None
            choice.is_call = fields.forced_call is not None
        self._updates = call.updates()
        self._head = {
            "id": f"{form.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": fields.model,
            "system_fingerprint": settings.fingerprint,
        }  # fmt: skip

    async def respond(self, receive: Receive) -> Response:
        """Return the response. Raises: ApiError if there is no text, and ClientGoneError."""
        try:
            if not self.fields.stream:
                return JSONResponse(await until_gone(receive, self._document()))
            first = await until_gone(receive, anext(self._updates))
            raise_unfinished(first[1])
            return EventStream(self._events(first), lambda: self.settings.engine.cancel(self.call))
        except BaseException:
            self.settings.engine.cancel(self.call)
            raise

    async def _document(self) -> dict[str, Any]:
        async for index, served in self._updates:
            raise_unfinished(served)
            self._add_prompt(self.choices[index], served)
            self._add(index, served)
        make, tokenizer = self.form.choice, self.settings.tokenizer
        choices = [
            make(index, choice, self._joined(choice), choice.stop_reason(tokenizer))
            for index, choice in enumerate(self.choices)
        ]
        return {**self._head, "object": self.form.object, "choices": choices, "usage": self.usage(), **self._metrics()}

    async def _events(self, first: tuple[int, Served]) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream."""
        try:
            # echoes with log-probabilities come with the first update of their text
            for index in range(0 if self.fields.scores_prompt else len(self.choices)):
                choice = self.form.first(index, self.choices[index].echo)
                if choice is not None:
                    yield self._chunk(choice)
            for event in self._update_events(*first):
                yield event
            async for index, served in self._updates:
                for event in self._update_events(index, served):
                    yield event
            if self.fields.includes_usage:
                yield _event(self._chunk_of(choices=[], usage=self.usage(), **self._metrics()))
        except ApiError as error:
            yield _event(error.document())
        yield b"data: [DONE]\n\n"

    def _update_events(self, index: int, served: Served) -> list[bytes]:
        """Return the events of an update. Raises: ApiError for the end of a text that is not complete."""
        raise_unfinished(served)
        choice, events = self.choices[index], []
        of_prompt = self._add_prompt(choice, served)
        if of_prompt is not None:
            events.append(self._chunk(self.form.delta(index, choice.echo, of_prompt, [])))
        text, calls, logprobs = self._add(index, served)
        if text or calls or logprobs is not None or (served.tokens and self.fields.return_drafts):
            first = len(choice.calls) - len(calls)
            documents = [{"index": first + place, **call.document()} for place, call in enumerate(calls)]
            delta = self.form.delta(index, text, logprobs, documents)
            if self.fields.return_drafts:
                words = [self.settings.texts.text(token) for token in served.tokens]
                delta["drafts"] = {"tokens": words, "accepted": served.accepted, "drafted": served.drafted}
            events.append(self._chunk(delta))
        if choice.reason is not None:
            stop = choice.stop_reason(self.settings.tokenizer)
            events.append(self._chunk(self.form.last(index, choice.finish_reason, stop)))
        return events

    def _add(self, index: int, served: Served) -> tuple[str, list[ToolCall], Any]:
        """Add an update to its choice. Return its text, its calls and its log-probabilities."""
        choice = self.choices[index]
        logprobs = None
        if self.fields.length == 0:  # the scheduler adds at least one token
            reason = served.finish_reason and "length"
            served = served._replace(tokens=[], text="", logprobs=None, accepted=0, num_shown=0, finish_reason=reason)
        shown = choice.show(served)
        if shown is not None:
            start = len(choice.echo) + len(choice.text)
            logprobs = self.form.logprobs(shown, start, self.settings.texts)
            choice.logprobs.append(logprobs)
        return *choice.add(served), logprobs

    def _add_prompt(self, choice: ServedChoice, served: Served) -> Any:
        """Add the log-probabilities of a prompt to its choice, and return them. None: the update has none."""
        if served.prompt_logprobs is None or self.form.prompt_logprobs is None:
            return None
        prompt = [*map(int, choice.ticket.request.prompt)]
        logprobs = self.form.prompt_logprobs(prompt, served.prompt_logprobs, self.settings.texts)
        choice.logprobs.append(logprobs)
        return logprobs

    def _joined(self, choice: ServedChoice) -> Any:
        is_reported = self.fields.alternatives is not None
        return self.form.join(choice.logprobs) if is_reported else None

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return _event(self._chunk_of(choices=[choice], **({"usage": None} if self.fields.includes_usage else {})))

    def _chunk_of(self, **values: Any) -> dict[str, Any]:
        return {**self._head, "object": self.form.chunk_object, **values}

    def usage(self) -> dict[str, Any]:
        """Return the numbers of tokens. Each prompt counts once."""
        by_prompt = self.choices[:: self.fields.count]
        prompt = sum(len(choice.ticket.request.prompt) for choice in by_prompt)
        completion = sum(len(choice.tokens) for choice in self.choices)
        return {
            "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(choice.cached for choice in by_prompt)},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }  # fmt: skip

    def _metrics(self) -> dict[str, Any]:
        kind = self.settings.step_metrics
        if kind == "none":
            return {}
        if len(self.choices) > 1:
            return {"metrics": None}
        max_depth = self.settings.engine.setup.max_depth
        choice = self.choices[0]
        steps = describe_steps(choice.steps, max_depth, detailed=kind == "detailed")
        return {"metrics": {"speculative_decoding": steps, **choice.ticket.milliseconds()}}


def _event(document: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(document, ensure_ascii=False, allow_nan=False)}\n\n".encode()


class ClientGoneError(Exception):
    """The client has closed its connection."""


async def until_gone(receive: Receive, work: Awaitable[Any]) -> Any:
    """Return the result of `work`. Raises: ClientGoneError if the client leaves, and cancels the work."""
    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_leave(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await each


async def _leave(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """A stream of server-sent events that ends its call when the client leaves."""

    def __init__(self, events: AsyncGenerator[bytes, None], on_end: Callable[[], None]):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            with contextlib.suppress(ClientGoneError, OSError):
                await until_gone(receive, self.stream_response(send))
        finally:
            self._on_end()
