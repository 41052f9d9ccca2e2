"""Requests of `serve`, each with its own settings, and `arrivals`, a source of requests that never blocks."""

from __future__ import annotations

import contextlib
import operator
import queue
import threading
from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax.engine.prepare import EOS_PADDING, EOS_UNIT, Settings, check_input_values
from specjax.errors import UsageError
from specjax.processors.automaton import Automaton
from specjax.serving.automata import check_room, num_pieces
from specjax.serving.detokenizer import Detokenizer, TextDecoder
from specjax.types import Array, Model, Processor, PyTree, Sampling

AHEAD = 64
"""Maximum number of items that `arrivals` reads ahead from its source."""


class Request(NamedTuple):
    """A text to decode, with its settings. A setting of None means the setting of `serve`."""

    prompt: Sequence[int]
    key: Array | int  # PRNG key or seed; the text equals that of `decode(..., [prompt], key=key[None])`
    max_new_tokens: int | None = None  # at most the value of `serve`
    inputs: PyTree = None  # arrays without the batch axis that condition the text, for models with such inputs
    temperature: float | None = None  # 0 is greedy
    top_k: int | None = None  # off if it is the vocabulary size or more
    top_p: float | None = None  # 1 is off
    eos: int | Sequence[int] | None = None  # () for no eos
    stop: Sequence[str] | None = ()  # stop strings, which are not part of the text; `serve` needs a tokenizer
    min_p: float | None = None  # 0 is off; only if `serve` has a min_p
    processors: Sequence[Processor] | None = None  # the processors of `serve`, with other settings
    alternatives: int | None = (
        None  # number of `TokenLogprobs.alternatives`, at most that of `serve`; None: no logprobs
    )
    salt: str | None = None  # prompts with different salts, such as those of two users, share no prefixes
    constraint: Automaton | None = None  # of the text; only if `serve` has a constraint_mib
    shows_control: bool = False  # True: the text has control tokens, if the tokenizer has `decode(ids, special=True)`
    includes_stop: bool = False  # True: the text has the stop string or the eos that ends it
    min_unstopped: int = 0  # number of tokens in which stop strings are not looked for
    scores_prompt: bool = False  # True: `Served.prompt_logprobs` is set, with as many `alternatives` as those of a text


class Cancel(NamedTuple):
    """An item of the requests that ends request number `request`. It has no effect on a request that has ended."""

    request: int


def padded_size(num_eos: int) -> int:
    """Return the number of eos ids that a request may have, if `serve` has so many."""
    return max(-(-num_eos // EOS_UNIT), 1) * EOS_UNIT


class Limits(NamedTuple):
    """Limits that every request must respect, and the default settings of requests."""

    longest_prompt: int
    max_new_tokens: int
    vocab_size: int
    settings: Settings
    inputs: PyTree = None  # example inputs of one request, for their shapes
    tokenizer: TextDecoder | None = None
    max_alternatives: int | None = None  # None: requests have no logprobs
    constraint_mib: float = 0.0  # room for the automata of all running requests; 0: requests have none
    can_score: bool = False  # True if requests may have `scores_prompt`
    model: Model | None = None  # the model of the target, which checks the inputs of a request

    @property
    def num_eos(self) -> int:
        """Return the number of eos ids per row, E."""
        return padded_size(_ids(self.settings.eos).size)


class RowSettings(NamedTuple):
    """Settings of one row as numpy arrays, or of all rows with a leading axis B."""

    sampling: Sampling
    eos: np.ndarray  # int32[E], padded with EOS_PADDING
    reports: np.ndarray | None = None  # bool[], True if `Info.raw_logprobs` is read


def row_settings(limits: Limits, request: Request | None = None) -> RowSettings:
    """Return the settings of a request, or the defaults of `serve` if there is no request.

    Raises: UsageError for a setting outside its range.
    """
    defaults, vocab = limits.settings, limits.vocab_size
    request = request or Request((), jnp.zeros(()))
    setting = lambda name: getattr(defaults if getattr(request, name) is None else request, name)
    temperature, top_k, top_p, eos = map(setting, ("temperature", "top_k", "top_p", "eos"))
    if defaults.min_p is None and request.min_p is not None:
        raise UsageError("its min_p needs a min_p of serve; pass min_p=0.0 to serve")
    min_p = setting("min_p")
    for name, value in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
        if value is not None and np.ndim(value):
            raise UsageError(f"{name} must be one number in serve; set it per request instead")
    Settings(temperature, top_k, top_p, eos, min_p=min_p).check_eos(vocab)
    ids = _ids(eos)
    if ids.size > limits.num_eos:
        raise UsageError(f"eos has {ids.size} ids, more than the {limits.num_eos} that a request may have")
    values: tuple[Any, ...] = (
        np.float32(temperature),
        np.int32(vocab if top_k is None else min(int(top_k), vocab)),
        np.float32(1.0 if top_p is None else top_p),
        None if min_p is None else np.float32(min_p),
    )
    padding = 0, limits.num_eos - ids.size
    reports = None if limits.max_alternatives is None else np.array(request.alternatives is not None)
    return RowSettings(Sampling(*values), np.pad(ids, padding, constant_values=EOS_PADDING), reports)


def _ids(eos) -> np.ndarray:
    return np.atleast_1d(np.asarray(() if eos is None else eos, np.int32))


def processor_settings(limits: Limits, request: Request | None = None) -> list[PyTree]:
    """Return the settings of a request's processors, or the defaults of `serve` if there is no request.

    Raises: UsageError for settings of several rows, or for other processors than those of `serve`.
    """
    defaults = list(limits.settings.processors)
    processors = defaults if request is None or request.processors is None else list(request.processors)
    if any(jnp.shape(x)[:1] != (1,) for x in jax.tree.leaves([processor.settings for processor in processors])):
        raise UsageError("processors must have settings for one row in serve; set them per request instead")
    form = lambda tree: (jax.tree.structure(tree), [jnp.shape(x) for x in jax.tree.leaves(tree)])
    shared = lambda processors: jax.tree.leaves([processor.params for processor in processors])
    if processors is not defaults and not (
        form(defaults) == form(processors)
        and all(x is y for x, y in zip(shared(defaults), shared(processors), strict=True))
    ):
        raise UsageError(
            "its processors must be those of serve, in the same order and of the same sizes, with other settings"
        )
    for processor in processors:
        processor.check(processor, limits.vocab_size)
    return [processor.settings for processor in processors]


def check_request(request: Request, limits: Limits) -> int:
    """Check everything except the settings of a request, and return its number of new tokens.

    Raises: UsageError if the request does not fit.
    """
    prompt, vocab = np.asarray(request.prompt), limits.vocab_size
    count = limits.max_new_tokens if request.max_new_tokens is None else operator.index(request.max_new_tokens)
    if prompt.ndim != 1 or (prompt.size and prompt.dtype.kind not in "iu"):
        raise UsageError("its prompt must be a list of token ids")
    if not 1 <= prompt.size <= limits.longest_prompt:
        raise UsageError(f"its prompt has {prompt.size} tokens, not 1 to longest_prompt ({limits.longest_prompt})")
    unknown = prompt[(prompt < 0) | (prompt >= vocab)]
    if unknown.size:
        raise UsageError(f"its prompt has the token {unknown[0]}, outside of the model's vocabulary of {vocab}")
    if not 1 <= count <= limits.max_new_tokens:
        raise UsageError(f"its max_new_tokens is {count}, not from 1 to the limit of serve ({limits.max_new_tokens})")
    form = lambda tree: (jax.tree.structure(tree), [(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(tree)])
    if form(request.inputs) != form(limits.inputs):
        raise UsageError("its inputs do not have the structure, shapes and dtypes of the inputs of serve")
    inputs = jax.tree.map(lambda x: x[None] if hasattr(x, "ndim") else np.asarray(x)[None], request.inputs)
    check_input_values(limits.model, vocab, inputs, prompt[None], np.array([prompt.size]), count)
    if request.scores_prompt and not limits.can_score:
        raise UsageError("its scores_prompt needs max_alternatives of serve, and a model with `unembed`")
    if request.scores_prompt and request.alternatives is None:
        raise UsageError("its scores_prompt needs a number of alternatives; set alternatives=0 for the tokens alone")
    limit = limits.max_alternatives
    if request.alternatives is not None and (limit is None or not 0 <= operator.index(request.alternatives) <= limit):
        largest = "serve reports no logprobs" if limit is None else f"serve reports at most {limit}"
        raise UsageError(f"its alternatives are {request.alternatives}, but {largest}; pass max_alternatives= to serve")
    _check_constraint(request, limits)
    stop = request.stop or ()
    if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
        raise UsageError("its stop must be a list of strings that are not empty")
    if stop and limits.tokenizer is None:
        raise UsageError("it has stop strings, which need a tokenizer; pass tokenizer= to serve")
    return count


def make_detokenizer(limits: Limits, request: Request) -> Detokenizer | None:
    """Return what makes the text of a request, or None if `serve` has no tokenizer."""
    tokenizer: Any = limits.tokenizer
    if tokenizer is None:
        return None
    decoder = _ControlDecoder(tokenizer) if request.shows_control else tokenizer
    return Detokenizer(
        decoder, request.stop or (), includes_stop=request.includes_stop, min_tokens=request.min_unstopped
    )  # fmt: skip


class _ControlDecoder(NamedTuple):
    """A decoder that shows control tokens."""

    tokenizer: Any

    def decode(self, ids: list[int], /) -> str:
        return self.tokenizer.decode(ids, special=True)


def _check_constraint(request: Request, limits: Limits) -> None:
    """Check that the automaton of a request fits. Raises: UsageError if it does not."""
    automaton, room = request.constraint, limits.constraint_mib
    if automaton is None:
        return
    if not num_pieces(room):
        raise UsageError("it has a constraint, but serve has no room for automata; pass constraint_mib= to serve")
    if automaton.highest >= limits.vocab_size:
        raise UsageError(
            f"its constraint has tokens up to {automaton.highest}, but the model's vocabulary has {limits.vocab_size}; "
            "compile it for the model's own tokenizer"
        )
    check_room(automaton, room, limits.vocab_size, "constraint_mib")


Item = TypeVar("Item")


def arrivals(source: Iterable[Item]) -> Generator[Item | None, None, None]:
    """Yield the items of a source that may block, such as lines of `sys.stdin`, and None while there is no item.

    A thread reads the source, a few items ahead. Exceptions of the source are raised here. When this generator is
    closed or dropped, the thread closes the source, possibly after one more item. The thread does not keep the process
    alive.
    """
    items: queue.Queue[tuple[Item | None, BaseException | None, bool]] = queue.Queue(AHEAD)
    is_closed = threading.Event()

    def put(item: Item | None, error: BaseException | None = None, last: bool = False) -> None:
        while not is_closed.is_set():
            with contextlib.suppress(queue.Full):
                return items.put((item, error, last), timeout=0.1)

    def read() -> None:
        try:
            for item in source:
                put(item)
                if is_closed.is_set():
                    break
        except BaseException as error:
            put(None, error, last=True)
        else:
            put(None, last=True)
        finally:
            if isinstance(source, Generator):
                source.close()

    threading.Thread(target=read, name="specjax-arrivals", daemon=True).start()
    try:
        while True:
            try:
                item, error, last = items.get_nowait()
            except queue.Empty:
                yield None
                continue
            if error is not None:
                raise error
            if last:
                return
            yield item
    finally:
        is_closed.set()
