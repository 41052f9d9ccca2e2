"""Models of a user's own: a Flax module or a function, as it stands, becomes a `Target`.

What it remembers is one of two things. Without `cache`, the text: every pass reads all of it again, which is slow, and
right for any causal model (`specjax.models.custom_caches.of_text`). With `cache`, what the model itself keeps of each
token, in slots as gemma and Tunix have them (`of_slots`). `specjax.check_model` says whether a model does as it should.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from specjax.errors import UsageError
from specjax.models import custom_caches
from specjax.types import Array, Model, PyTree, Target

NAMES = {"positions": "positions", "cache": "cache", "mask": "mask", "attention_mask": "mask"}
"""Parameters that a model is given where it has them, and what each is."""


@dataclass(frozen=True)
class Call:
    """A user's forward pass with its parameters as an argument. Hashable: equal ones are one model."""

    run: Callable[..., Any]  # (definition, params, tokens, **given)
    definition: Any  # a graph definition, a Linen module or a function
    takes: frozenset[tuple[str, str]]  # names of its parameters, and what they are
    name: str

    def wants(self, what: str) -> bool:
        return any(kind == what for _, kind in self.takes)

    def __call__(self, params: PyTree, tokens: Array, **given: Any) -> tuple[Array, PyTree]:
        """(logits float32[B, T, V], the cache that came back)."""
        out = self.run(self.definition, params, tokens, **{name: given[kind] for name, kind in self.takes})
        if isinstance(out, tuple):
            logits, cache = out[0], out[1] if len(out) > 1 else None
        else:
            logits, cache = getattr(out, "logits", out), getattr(out, "cache", None)
        shape = getattr(logits, "shape", None)
        if shape is None or len(shape) != 3 or shape[:2] != tokens.shape:
            found = type(logits).__name__ if shape is None else list(shape)
            raise UsageError(f"{self.name} must give logits [B, T, V] for tokens {list(tokens.shape)}, not {found}")
        return logits.astype(jnp.float32), cache


def target_of(
    model: nnx.Module | linen.Module | Callable[..., Any],
    params: PyTree = None,
    *,
    max_positions: int,
    cache: Callable[[int, int], PyTree] | None = None,
    trees: bool | None = None,
    name: str | None = None,
) -> Target:
    """A model of your own as a target or draft model. Its parameters are used as they lie, without a copy.

    Args:
      model: an NNX module, called as `model(tokens)`; a Linen module, as `model.apply(params, tokens)`; or a function
        `model(params, tokens)`. It gives logits [B, T, V], alone or first of a tuple, or as `.logits`. By keyword it is
        further given those of these that its signature names: `positions` int32[B, T]; `mask` or `attention_mask`, bool
        [B, T, S], which of the S tokens that it reads or has in its cache each token sees; and `cache`.
      params: of an NNX module by default its own; variables or parameters of a Linen module; of a function anything.
      max_positions: tokens of the longest text it reads.
      cache: `cache(batch, slots)` makes its empty cache: arrays with an axis of rows and one of slots, and integers
        that say at which slot the next token goes, the same for all rows. The model writes what it keeps of T tokens
        into T slots from there on, and gives `(logits, cache)`, or both as attributes. None: it is called without one
        (`cache=None`), on the whole text in every pass.
      trees: whether it can be given trees. Default: if it takes a mask. False for a model that counts places of its
        input instead of positions, as sliding windows of some do; without `cache` it reads plain texts then, and with
        `cache` it would be wrong.
      name: default: that of the module's class or of the function.

    Equal modules, or the same function, with the same `cache` are the same model: a second call of `decode` compiles
    nothing. Dropout and the like must be off.

    Raises: UsageError for a model that asks for something else, or gives no logits.
    """
    max_positions = _whole(max_positions)
    call, params = _call_of(model, params, name)
    params = jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), params)  # Python's own numbers
    if trees is None:
        trees = call.wants("mask")
    if cache is not None and not call.wants("cache"):
        raise UsageError(f"cache is of models with a parameter `cache`, which {call.name} has not; leave cache out")
    for what, names in (("mask", "`mask` or `attention_mask`"), ("positions", "`positions`")):
        if (trees or cache is not None) and not call.wants(what):
            reason = "its own cache needs" if cache is not None else "trees need"
            raise UsageError(
                f"{call.name} has no parameter {names}, which {reason}; give it one, or leave cache out and set "
                "trees=False"
            )
    memory = _memory_of(call, cache, max_positions, trees)
    vocab_size = _vocabulary(memory, params)
    return Target(Model(vocab_size=vocab_size, max_positions=max_positions, name=call.name, **memory), params)


def _whole(max_positions: int) -> int:
    try:
        number = 0 if isinstance(max_positions, bool) else operator.index(max_positions)
    except TypeError:
        number = 0
    if number < 1:
        raise UsageError(f"max_positions must be a whole number of at least 1, not {max_positions!r}")
    return number


def _call_of(model: Any, params: PyTree, name: str | None) -> tuple[Call, PyTree]:
    """How to run it, and its parameters."""
    if isinstance(model, type):
        raise UsageError(f"model is the class {model.__name__}; give a module, which calling the class makes")
    if isinstance(model, nnx.Module):
        definition, state = nnx.split(model)
        params = nnx.to_pure_dict(state) if params is None else params
        params = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
        name = name or type(model).__name__
        return Call(_run_nnx, definition, _takes(type(model).__call__, name), name), params
    if params is None:
        raise UsageError(
            "params of a Linen module or of a function must be given, as what a function closes over becomes a "
            "constant of the program; pass () if there are none"
        )
    if isinstance(model, linen.Module):
        name = name or type(model).__name__
        return Call(_run_linen, model, _takes(type(model).__call__, name), name), params
    if not callable(model):
        raise UsageError(f"model must be a Flax module or a function, not {type(model).__name__}")
    name = name or str(getattr(model, "__name__", type(model).__name__))
    return Call(_run_function, model, _takes(model, name), name), params


def _run_nnx(definition, params, tokens, **given):
    return nnx.merge(definition, nnx.State(params))(tokens, **given)


def _run_linen(module, params, tokens, **given):
    variables = params if "params" in params else {"params": params}
    return module.apply(variables, tokens, **given)


def _run_function(function, params, tokens, **given):
    return function(params, tokens, **given)


def _takes(function: Callable[..., Any], name: str) -> frozenset[tuple[str, str]]:
    """Of NAMES those that it has behind the parameters, or `self`, and the tokens."""
    parameters = list(inspect.signature(function).parameters.values())[2:]
    for one in parameters:
        needed = one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        if needed and one.name not in NAMES:
            raise UsageError(
                f"{name} takes `{one.name}`, which it cannot be given; pass a function of (params, tokens) and of "
                "those of positions, cache and mask that it needs, which calls it"
            )
    return frozenset((one.name, NAMES[one.name]) for one in parameters if one.name in NAMES)


def _vocabulary(memory: dict[str, Any], params: PyTree) -> int:
    """How many logits it gives. Nothing is computed."""

    def forward(params):
        cache = memory["begin"](params, None, 1, 2)
        mask = jnp.tril(jnp.ones((1, 2, 2), bool))
        return memory["forward"](params, jnp.zeros((1, 2), jnp.int32), cache, positions=jnp.arange(2)[None], mask=mask)

    return jax.eval_shape(forward, params)[0].logits.shape[2]


def _memory_of(call: Call, cache: Callable[[int, int], PyTree] | None, max_positions: int, trees: bool):
    try:
        return _made(call, cache, max_positions, trees)
    except TypeError:  # what cannot be hashed is a model of its own each time
        return _made.__wrapped__(call, cache, max_positions, trees)


@functools.cache
def _made(call: Call, cache, max_positions: int, trees: bool) -> dict[str, Any]:
    """The fields of a `Model` that have to do with what it remembers."""
    if cache is None:
        return custom_caches.of_text(call, call.name, max_positions, trees)
    return custom_caches.of_slots(call, call.name, max_positions, trees, cache)
