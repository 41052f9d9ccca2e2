"""What `serve` is asked for: requests with settings of their own, and a source of them that never blocks."""

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

from specjax.engine.prepare import Settings
from specjax.errors import UsageError
from specjax.serving.detokenizer import Decodes
from specjax.types import Array, Processor, PyTree, Sampling

MOST_EOS = 8
"""Ids that may end a request, if `serve` itself has no more: their number is a shape of the program."""
AHEAD = 64
"""Items that `arrivals` takes from its source before they are asked for."""


class Request(NamedTuple):
    """One text to decode. None: as `serve` has it."""

    prompt: Sequence[int]
    key: Array | int  # one PRNG key, or a seed; its text is that of `decode(..., [prompt], key=key[None])`
    max_new_tokens: int | None = None  # at most that of `serve`
    inputs: PyTree = None  # what its text is conditioned on, arrays without the axis B, for models that take them
    temperature: float | None = None  # 0 is greedy
    top_k: int | None = None  # of the vocabulary's size or more: off
    top_p: float | None = None  # 1: off
    eos: int | Sequence[int] | None = None  # (): none
    stop: Sequence[str] | None = ()  # strings before which its text ends; `serve` needs the tokenizer
    min_p: float | None = None  # 0: off; only if `serve` has one
    processors: Sequence[Processor] | None = None  # those of `serve`, with settings of its own


class Limits(NamedTuple):
    """What requests are measured by, and what they are where they do not say."""

    longest_prompt: int
    max_new_tokens: int
    vocab_size: int
    settings: Settings
    inputs: PyTree = None  # of one request, for its form
    tokenizer: Decodes | None = None

    @property
    def num_eos(self) -> int:
        return max(MOST_EOS, _ids(self.settings.eos).size)


class RowSettings(NamedTuple):
    """How a row is decoded, or with an axis B in front how all are; numpy."""

    sampling: Sampling
    eos: np.ndarray  # int32[E], filled up with -1


def row_settings(limits: Limits, request: Request | None = None) -> RowSettings:
    """Of a request, or where there is none, those of `serve`.

    Raises: UsageError for a setting outside its range.
    """
    ours, vocab = limits.settings, limits.vocab_size
    own = request or Request((), jnp.zeros(()))
    chosen = lambda name: getattr(ours if getattr(own, name) is None else own, name)
    temperature, top_k, top_p, eos = map(chosen, ("temperature", "top_k", "top_p", "eos"))
    if ours.min_p is None and own.min_p is not None:
        raise UsageError("its min_p needs one of serve, such as min_p=0.0; without, the program has none")
    min_p = chosen("min_p")
    for name, value in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
        if value is not None and np.ndim(value):
            raise UsageError(f"{name} must be one number in serve; give requests their own")
    Settings(temperature, top_k, top_p, eos, min_p=min_p)
    ids = _ids(eos)
    if ids.size > limits.num_eos:
        raise UsageError(f"eos has {ids.size} ids, more than the {limits.num_eos} that a request may have")
    values: tuple[Any, ...] = (
        np.float32(temperature),
        np.int32(vocab if top_k is None else min(int(top_k), vocab)),
        np.float32(1.0 if top_p is None else top_p),
        None if min_p is None else np.float32(min_p),
    )
    return RowSettings(Sampling(*values), np.pad(ids, (0, limits.num_eos - ids.size), constant_values=-1))


def _ids(eos) -> np.ndarray:
    return np.atleast_1d(np.asarray(() if eos is None else eos, np.int32))


def processor_settings(limits: Limits, request: Request | None = None) -> list[PyTree]:
    """What the processors of a request are set to, or where there is none, those of `serve`.

    Raises: UsageError for settings of several rows, or other processors than those of `serve`.
    """
    ours = list(limits.settings.processors)
    theirs = ours if request is None or request.processors is None else list(request.processors)
    if any(jnp.shape(x)[:1] != (1,) for x in jax.tree.leaves([processor.settings for processor in theirs])):
        raise UsageError("processors must have settings for one row in serve; give requests their own")
    form = lambda tree: (jax.tree.structure(tree), [jnp.shape(x) for x in jax.tree.leaves(tree)])
    shared = lambda processors: jax.tree.leaves([processor.params for processor in processors])
    if theirs is not ours and not (
        form(ours) == form(theirs) and all(x is y for x, y in zip(shared(ours), shared(theirs), strict=True))
    ):
        raise UsageError(
            "its processors must be those of serve, in the same order and with as much room, with other settings"
        )
    for processor in theirs:
        processor.check(processor, limits.vocab_size)
    return [processor.settings for processor in theirs]


def check(request: Request, limits: Limits) -> int:
    """How many tokens it may have. Raises: UsageError for a request that does not fit, besides its settings."""
    prompt, vocab = np.asarray(request.prompt), limits.vocab_size
    count = limits.max_new_tokens if request.max_new_tokens is None else operator.index(request.max_new_tokens)
    if prompt.ndim != 1 or (prompt.size and prompt.dtype.kind not in "iu"):
        raise UsageError("its prompt must be a list of token ids")
    if not 1 <= prompt.size <= limits.longest_prompt:
        raise UsageError(f"its prompt has {prompt.size} tokens, not 1 to longest_prompt ({limits.longest_prompt})")
    wrong = prompt[(prompt < 0) | (prompt >= vocab)]
    if wrong.size:
        raise UsageError(f"its prompt has the token {wrong[0]}, outside of the model's vocabulary of {vocab}")
    if not 1 <= count <= limits.max_new_tokens:
        raise UsageError(f"its max_new_tokens is {count}, not 1 to that of serve ({limits.max_new_tokens})")
    form = lambda tree: (jax.tree.structure(tree), [(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(tree)])
    if form(request.inputs) != form(limits.inputs):
        raise UsageError("its inputs do not have the form of those that serve was given")
    stop = request.stop or ()
    if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
        raise UsageError("its stop must be a list of strings, none of them empty")
    if stop and limits.tokenizer is None:
        raise UsageError("it has stop strings, for which serve needs tokenizer=")
    return count


Item = TypeVar("Item")


def arrivals(source: Iterable[Item]) -> Generator[Item | None, None, None]:
    """The items of a source that may keep one waiting, such as lines of `sys.stdin`; None where there is none yet.

    The source is read in a thread, a few items ahead. What it raises is raised here. When this generator is closed or
    dropped, the thread closes the source, after the item for which it may be waiting; it does not keep the process.
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
