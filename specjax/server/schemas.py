"""The fields of requests. Unknown fields are ignored, and wrong types are errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specjax.server.errors import ApiError
from specjax.server.images import check_url, decode_url
from specjax.server.structured.constraints import Constraint
from specjax.server.structured.tools import NO_PARAMETERS, required_call

MAX_N, MAX_STOPS, MAX_STOP_LENGTH, MAX_TOP_LOGPROBS, MAX_BIASES, MAX_BAD_WORDS = 8, 16, 128, 20, 304, 16

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "suffix": ("",), "prompt_logprobs": (), "truncate_prompt_tokens": (), "length_penalty": (1, 1.0),
    "continue_final_message": (False,), "add_generation_prompt": (True,), "guided_grammar": (),
    "functions": ([],),
    "function_call": ("none",), "audio": (), "modalities": (["text"],), "use_beam_search": (False,),
    "allowed_token_ids": ([],), "prompt_embeds": (),
}  # fmt: skip
"""Known fields that the server does not support, and the values besides null that change nothing."""

Text = Annotated[str, Field(max_length=MAX_STOP_LENGTH, min_length=1)]
Id = Annotated[int, Field(ge=0, lt=1 << 31)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Pattern = Annotated[str, Field(max_length=1 << 16)]
Choice = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024)]
ANY_OBJECT = {"type": "object"}


class Fields(BaseModel):
    """Fields of a JSON object, without conversion of types."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool = False


class JsonSchema(Fields):
    """A schema with its name. `strict` changes nothing: every text satisfies its schema."""

    name: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self):
        if (self.json_schema is not None) != (self.type == "json_schema"):
            amount = "a" if self.json_schema is None else "no"
            raise ValueError(f"response_format {self.type} needs {amount} json_schema")
        return self

    @property
    def constraint(self) -> Constraint | None:
        """Return the constraint of the text, or None."""
        if self.json_schema is not None:
            return Constraint.of_schema(self.json_schema.schema_)
        return Constraint.of_schema(ANY_OBJECT) if self.type == "json_object" else None


class StructuredOutputs(Fields):
    """The form of the text, in the fields of vLLM."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())
    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: Pattern | None = None
    choice: Choice | None = None
    json_object: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_unsupported(cls, values: Any) -> Any:
        for name in ("grammar", "structural_tag") if isinstance(values, Mapping) else ():
            if values.get(name) is not None:
                raise ValueError(f"structured_outputs with a {name} is not supported; use json, regex or choice")
        return values

    @property
    def constraints(self) -> list[Constraint]:
        """Return the constraints of the text."""
        return [
            *([Constraint.of_schema(self.json_)] if self.json_ is not None else []),
            *([Constraint("regex", self.regex)] if self.regex is not None else []),
            *([Constraint.of_choice(self.choice)] if self.choice is not None else []),
            *([Constraint.of_schema(ANY_OBJECT)] if self.json_object else []),
        ]


class SampledFields(Fields):
    """Fields that chats and completions share. None is the default of the server."""

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None  # -1 and 0 are off
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[Id] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] | None = None
    bad_words: Annotated[list[Text], Field(max_length=MAX_BAD_WORDS)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None  # and the next two are older names of fields of structured_outputs
    guided_regex: Pattern | None = None
    guided_choice: Choice | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    best_of: int | None = None
    user: str | None = None
    cache_salt: str | None = None
    return_drafts: bool | None = None  # of specjax: the accepted tokens of each chunk of a stream

    @model_validator(mode="before")
    @classmethod
    def _check_unsupported(cls, values: Any) -> Any:
        for name, neutral in UNSUPPORTED.items() if isinstance(values, Mapping) else ():
            if values.get(name) is not None and values[name] not in neutral:
                raise ValueError(f"{name} is not supported; leave it out")
        return values

    @model_validator(mode="after")
    def _check_lengths(self):
        if self.best_of not in (None, self.count):
            raise ValueError("best_of is not supported; set n, and choose among the texts")
        if self.min_tokens and self.constraints:
            raise ValueError("min_tokens and a constraint cannot both be met; leave min_tokens out")
        if self.min_tokens and self.length is not None and self.min_tokens > self.length:
            raise ValueError(f"min_tokens is {self.min_tokens}, above max_tokens ({self.length}); lower it")
        return self

    @model_validator(mode="after")
    def _check_constraints(self):
        if len(self.constraints) > 1:
            names = "response_format, structured_outputs and tool_choice"
            raise ValueError(f"the text has several constraints; give one of {names}")
        return self

    @property
    def constraints(self) -> list[Constraint]:
        """Return the constraints of the text, at most one in valid fields."""
        older = StructuredOutputs(json=self.guided_json, regex=self.guided_regex, choice=self.guided_choice)
        of_format = None if self.response_format is None else self.response_format.constraint
        newer = [] if self.structured_outputs is None else self.structured_outputs.constraints
        return [*([] if of_format is None else [of_format]), *newer, *older.constraints]

    @property
    def constraint(self) -> Constraint | None:
        """Return the constraint of the text, or None."""
        return next(iter(self.constraints), None)

    @property
    def called_names(self) -> frozenset[str]:
        """Return the names of the functions that the text may call."""
        return frozenset()

    @property
    def forced_call(self) -> Constraint | None:
        """Return the constraint of a text that must call a tool, or None."""
        return None

    @property
    def count(self) -> int:
        """Return the number of texts per prompt."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Return True if a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def length(self) -> int | None:
        """Return the maximum number of new tokens, or None."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Return the number of alternatives with log-probabilities. None: no log-probabilities."""
        return None

    @property
    def scores_prompt(self) -> bool:
        """Return True if the answer has the log-probabilities of the prompts."""
        return False


class TextPart(Fields):
    """A part of a message. Other parts, such as images, are errors."""

    type: Literal["text"]
    text: str


class RefusalPart(Fields):
    """A part of an earlier answer in which a model refused."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """Return the text of the part."""
        return self.refusal


class ImageUrl(Fields):
    """The place of an image. `detail` is ignored: images have the resolution of the model."""

    url: str
    detail: str | None = None


class ImagePart(Fields):
    """An image of a message of the user."""

    type: Literal["image_url"]
    image_url: ImageUrl


class CalledFunction(Fields):
    """A function with its arguments, in JSON."""

    name: str
    arguments: str | dict[str, Any] = "{}"

    @property
    def values(self) -> Any:
        """Return the arguments as templates read them: an object, or the text if it is not JSON."""
        try:
            return json.loads(self.arguments) if isinstance(self.arguments, str) else self.arguments
        except (ValueError, RecursionError):
            return self.arguments


class CalledTool(Fields):
    """A call of a tool in a message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolFunction(Fields):
    """A function that the model may call."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Fields):
    """A tool; all of them are functions."""

    type: Literal["function"]
    function: ToolFunction


class NamedFunction(Fields):
    """The name of a function."""

    name: str


class NamedTool(Fields):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


def _check_image(part: Mapping[str, Any], role: Any) -> None:
    """Check a part of a message that is an image. Raises: ValueError."""
    if role != "user":
        raise ValueError("only messages of the user can have images; leave the part image_url out")
    place = part.get("image_url")
    url = place.get("url") if isinstance(place, Mapping) else None
    if not isinstance(url, str):
        raise ValueError('a part image_url needs {"image_url": {"url": "data:image/png;base64,..."}}')
    check_url(url)


class ChatMessage(Fields):
    """A message of a chat."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Annotated[TextPart | RefusalPart | ImagePart, Field(discriminator="type")]] | None = None
    tool_calls: list[CalledTool] | None = None
    name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_parts(cls, values: Any) -> Any:
        content = values.get("content") if isinstance(values, Mapping) else None
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and kind not in ("text", "refusal", "image_url"):
                raise ValueError(f"the server reads text and images; leave out the part of type {kind[:40]}")
            if kind == "image_url":
                _check_image(part, values.get("role"))
        return values

    @property
    def pictures(self) -> list[bytes]:
        """Return the images of the message. Raises: UsageError for data that are not base64."""
        parts = self.content if isinstance(self.content, list) else []
        return [decode_url(part.image_url.url) for part in parts if isinstance(part, ImagePart)]

    def as_turn(self) -> dict[str, Any]:
        """Return the message for the chat template."""
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self._shown()}
        if self.tool_calls:
            turn["tool_calls"] = [
                {"id": call.id, "type": "function",
                 "function": {"name": call.function.name, "arguments": call.function.values}}
                for call in self.tool_calls
            ]  # fmt: skip
        names = [self.name, self.tool_call_id]
        return turn | {key: x for key, x in zip(("name", "tool_call_id"), names, strict=True) if x is not None}

    def _shown(self) -> str | list[dict[str, str]]:
        """Return the text of the message, or its parts if there are images."""
        if not isinstance(self.content, list):
            return self.content or ""
        if not any(isinstance(part, ImagePart) for part in self.content):
            return "".join(part.text for part in self.content if not isinstance(part, ImagePart))
        show = lambda part: {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text}
        return list(map(show, self.content))


class ChatFields(SampledFields):
    """Fields of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_chat(self):
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("two tools have the same name; give each one its own")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError("tool_choice names a function that is not in tools; add it, or choose another one")
        if self.tool_choice == "required" and not names:
            raise ValueError('tool_choice "required" needs tools; add some')
        if "chat_template" in (self.chat_template_kwargs or {}):
            raise ValueError("chat_template_kwargs must not have a chat_template; the server has its model's own")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs; set logprobs to true")
        return self

    @property
    def callable_tools(self) -> list[Tool]:
        """Return the tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def called_names(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.callable_tools)

    @property
    def constraints(self) -> list[Constraint]:
        return [*super().constraints, *([] if self.forced_call is None else [self.forced_call])]

    @property
    def forced_call(self) -> Constraint | None:
        only = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        if only is None and self.tool_choice != "required":
            return None
        functions = {
            tool.function.name: tool.function.parameters or NO_PARAMETERS
            for tool in self.callable_tools if only in (None, tool.function.name)
        }  # fmt: skip
        return required_call(functions, several=only is None and self.parallel_tool_calls is not False)

    @property
    def length(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionFields(SampledFields):
    """Fields of /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Id], Field(min_length=1)]
        | Annotated[list[Annotated[list[Id], Field(min_length=1)]], Field(min_length=1)]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None

    @model_validator(mode="after")
    def _check_echo(self):
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0, which only echo allows; set it to at least 1")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each of them a text or ids."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def scores_prompt(self) -> bool:
        return bool(self.echo) and self.logprobs is not None


class TokenizeFields(Fields):
    """Fields of /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_prompt(self):
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeFields(Fields):
    """Fields of /detokenize."""

    model: str | None = None
    tokens: list[Id]


FieldsT = TypeVar("FieldsT", bound=Fields)


def parse_fields(kind: type[FieldsT], body: bytes) -> FieldsT:
    """Parse the JSON of a request. Raises: ApiError that names the first wrong field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"] if part in kind.model_fields or isinstance(part, int))
        words = first["msg"].removeprefix("Value error, ")
        raise ApiError(400, f"{place}: {words}" if place else words, param=place or None) from None
