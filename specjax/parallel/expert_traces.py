"""Traces of a mixture: the experts that its routers choose for the tokens of texts."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import io_callback

from specjax.arrays.modes import jit
from specjax.errors import UsageError
from specjax.files.untrusted import shorten
from specjax.models.bridge import abstract_module
from specjax.models.experts.counting import mixture_layers
from specjax.models.experts.feed import MixtureFeed
from specjax.numerics.validation import check_integer
from specjax.types import Array, PyTree, Target


class ExpertTraces(NamedTuple):
    """Experts that the router of each layer chose for tokens of texts."""

    tokens: np.ndarray  # int32[N]
    experts: np.ndarray  # int16[L, N, k], for the L layers with a mixture
    num_experts: int
    vocab_size: int


def mixture_config(target: Target) -> Any:
    """Return the config of a mixture of experts.

    Raises: UsageError for other models, and for a mixture that is sharded or has groups.
    """
    config = target.model.config
    if getattr(config, "experts", None) is None:
        raise UsageError(f"{target.model.name} has no experts to group; choose a mixture of experts")
    if target.model.mesh is not None:
        raise UsageError(f"{target.model.name} is already sharded; group its experts before specjax.shard")
    if config.experts.shuffling is not None:
        raise UsageError(f"the experts of {config.name} are in groups already; pass the target as it was loaded")
    return config


def trace_experts(target: Target, texts: Sequence[Sequence[int]], *, window: int = 256) -> ExpertTraces:
    """Return the experts that each layer chooses for the tokens of texts.

    Args:
      target: a mixture of experts from `specjax.models`, before `specjax.shard`.
      texts: token ids. They are cut into windows that are read alone.
      window: tokens of a window. All windows run in one compiled program.

    Raises: UsageError for a model without experts, a window that is no positive integer, or texts with other contents
      than tokens of the vocabulary.
    """
    config = mixture_config(target)
    check_integer("window", window)
    ids = [_token_ids(text, config) for text in texts]
    pieces = [text[i : i + window] for text in ids for i in range(0, len(text), window)]
    run, received, lock = _tracing_pass(target.model)
    parts = [np.zeros((len(mixture_layers(config)), 0, config.experts.routing.num_chosen), np.int16)]
    for piece in pieces:
        with lock:
            received.clear()
            run(target.params, np.pad(piece, (0, window - len(piece)))).block_until_ready()
            jax.effects_barrier()
            parts.append(np.stack(received)[:, : len(piece)])
    tokens = np.concatenate([np.zeros(0, np.int32), *pieces])
    return ExpertTraces(tokens, np.concatenate(parts, 1), config.experts.num_experts, config.vocab_size)


def _token_ids(text: Any, config: Any) -> np.ndarray:
    """Return a text as int32[T]. Raises: UsageError for other contents than a sequence of tokens of the vocabulary."""
    try:
        ids = np.asarray(text)
    except ValueError:  # sequences of different lengths
        ids = np.zeros((0, 0))
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise UsageError(f"each text must be a sequence of token ids, not {shorten(repr(text), 60)}")
    if ids.size and (ids.min() < 0 or ids.max() >= config.vocab_size):
        raise UsageError(
            f"the texts have tokens from {ids.min()} to {ids.max()}, but {config.name} has {config.vocab_size}; use "
            "the tokenizer of the model"
        )
    return ids.astype(np.int32)


class _TracingRouter(nnx.Module):
    """A router that passes its choices to a function on the host, in the order of the layers."""

    def __init__(self, router: Any, receive: Callable[[np.ndarray], None]):
        self.router, self.receive = router, receive

    def __call__(self, x: Array) -> Any:
        choice = self.router(x)
        io_callback(self.receive, None, choice.experts, ordered=True)
        return choice


class _TracingPass(NamedTuple):
    """A compiled pass over tokens int32[T], and the list to which it appends the choices int16[T, k] of each layer."""

    run: Callable[[PyTree, Any], Array]
    received: list[np.ndarray]
    lock: threading.Lock  # of the list


@functools.lru_cache(maxsize=8)
def _tracing_pass(model: Any) -> _TracingPass:
    """Return the tracing pass of a model, so that a second call compiles nothing."""
    received: list[np.ndarray] = []
    receive = lambda experts: received.append(np.asarray(experts, np.int16))
    module = abstract_module(model.config)
    for _, part in nnx.iter_graph(module):
        if isinstance(part, MixtureFeed):
            router: Any = _TracingRouter(part.router, receive)
            part.router = router
    graphdef = nnx.split(module)[0]

    @jit
    def run(params: PyTree, tokens: Array) -> Array:
        count = len(tokens)
        cache = model.init_cache(params, None, 1, count)
        mask = jnp.tril(jnp.ones((1, count, count), bool))
        module = nnx.merge(graphdef, nnx.State(_with_tracing_routers(params)))
        output, _ = module(tokens[None], cache, positions=jnp.arange(count)[None], mask=mask)
        return output.hidden

    return _TracingPass(run, received, threading.Lock())


def _with_tracing_routers(params: PyTree) -> PyTree:
    """Return the parameters of a model whose routers are `_TracingRouter`s."""
    if not isinstance(params, dict):
        return params
    wrap = lambda name, part: {"router": part} if name == "router" else _with_tracing_routers(part)
    return {name: wrap(name, part) for name, part in params.items()}
