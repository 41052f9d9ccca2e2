"""Conversion of a user's own model, a Flax module or a function, to a `Target` without changes.

Without `cache`, every pass reads the whole text again. That is slow, but correct for any causal model
(`specjax.models.custom_caches.text_cache_fields`). With `cache`, the model stores its own keys and values in slots, as
gemma and Tunix models do (`slot_cache_fields`). `specjax.check_model` checks that a model behaves as expected.
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

OPTIONAL_ARGUMENTS = {"positions": "positions", "cache": "cache", "mask": "mask", "attention_mask": "mask"}
"""Argument names that a model may have, and the kind of value that each gets."""


@dataclass(frozen=True)
class ForwardCall:
    """A user's forward pass with its parameters as an argument. It is hashable, and equal calls are the same model."""

    run: Callable[..., Any]  # (definition, params, tokens, **arguments)
    definition: Any  # a graph definition, a Linen module or a function
    optional: frozenset[tuple[str, str]]  # (parameter name, kind) of its optional arguments
    name: str

    def accepts(self, kind: str) -> bool:
        return any(kind == other for _, other in self.optional)

    def __call__(self, params: PyTree, tokens: Array, **arguments: Any) -> tuple[Array, PyTree]:
        """Return logits float32[B, T, V] and the new cache."""
        out = self.run(self.definition, params, tokens, **{name: arguments[kind] for name, kind in self.optional})
        if isinstance(out, tuple):
            logits, cache = out[0], out[1] if len(out) > 1 else None
        else:
            logits, cache = getattr(out, "logits", out), getattr(out, "cache", None)
        shape = getattr(logits, "shape", None)
        if shape is None or len(shape) != 3 or shape[:2] != tokens.shape:
            description = type(logits).__name__ if shape is None else list(shape)
            raise UsageError(
                f"{self.name} must return logits [B, T, V] for tokens {list(tokens.shape)}, not {description}"
            )
        return logits.astype(jnp.float32), cache


def as_target(
    model: nnx.Module | linen.Module | Callable[..., Any],
    params: PyTree = None,
    *,
    max_positions: int,
    cache: Callable[[int, int], PyTree] | None = None,
    trees: bool | None = None,
    name: str | None = None,
) -> Target:
    """Turn your own model into a target or draft model. Its parameters are used in place, without a copy.

    Args:
      model: an NNX module, called as `model(tokens)`; a Linen module, called as `model.apply(params, tokens)`; or a
        function `model(params, tokens)`. It returns logits [B, T, V], alone, as the first item of a tuple, or as
        `.logits`. It also gets the following keyword arguments if its signature has them: `positions` int32[B, T];
        `mask` or `attention_mask`, bool [B, T, S], the S tokens of its input or cache that each token sees; and
        `cache`.
      params: parameters of an NNX module (default: its own), variables or parameters of a Linen module, or anything for
        a function.
      max_positions: number of tokens of the longest text it can read.
      cache: `cache(batch, slots)` returns an empty cache: arrays with an axis of rows and one of slots, and integers
        with the slot of the next token, the same for all rows. The model writes T tokens into T slots from there on,
        and returns `(logits, cache)`, or both as attributes. None: it gets `cache=None` and the whole text in every
        pass.
      trees: whether the model can process token trees. Default: True if it takes a mask. Set it to False for a model
        that counts input indices instead of positions, as some sliding windows do. Without `cache` such a model then
        reads plain texts; with `cache` its results would be wrong.
      name: name of the model. Default: the name of the module's class or of the function.

    Equal modules, or the same function, with the same `cache` are the same model: a second call of `decode` compiles
    nothing. Dropout and similar layers must be off.

    Raises: UsageError for a model that needs other arguments, or returns no logits.
    """
    max_positions = _check_max_positions(max_positions)
    call, params = _make_call(model, params, name)
    params = jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), params)  # Python numbers
    if trees is None:
        trees = call.accepts("mask")
    if cache is not None and not call.accepts("cache"):
        raise UsageError(
            f"cache needs a model with a parameter `cache`, which {call.name} lacks; add it, or leave cache out"
        )
    for kind, names in (("mask", "`mask` or `attention_mask`"), ("positions", "`positions`")):
        if (trees or cache is not None) and not call.accepts(kind):
            reason = "a cache needs" if cache is not None else "trees need"
            raise UsageError(
                f"{call.name} has no parameter {names}, which {reason}; add it, or leave cache out and set trees=False"
            )
    fields = _make_cache_fields(call, cache, max_positions, trees)
    vocab_size = _vocab_size(fields, params)
    return Target(Model(vocab_size=vocab_size, max_positions=max_positions, name=call.name, **fields), params)


def _check_max_positions(max_positions: int) -> int:
    try:
        number = 0 if isinstance(max_positions, bool) else operator.index(max_positions)
    except TypeError:
        number = 0
    if number < 1:
        raise UsageError(f"max_positions must be a whole number of at least 1, not {max_positions!r}")
    return number


def _make_call(model: Any, params: PyTree, name: str | None) -> tuple[ForwardCall, PyTree]:
    """Return the forward call of a model, and its parameters."""
    if isinstance(model, type):
        raise UsageError(f"model is the class {model.__name__}; pass an instance of it")
    if isinstance(model, nnx.Module):
        definition, state = nnx.split(model)
        params = nnx.to_pure_dict(state) if params is None else params
        params = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
        name = name or type(model).__name__
        return ForwardCall(_run_nnx, definition, _optional_arguments(type(model).__call__, name), name), params
    if params is None:
        raise UsageError(
            "a Linen module or a function needs params, because arrays that it closes over become constants of the "
            "program; pass () if there are none"
        )
    if isinstance(model, linen.Module):
        name = name or type(model).__name__
        return ForwardCall(_run_linen, model, _optional_arguments(type(model).__call__, name), name), params
    if not callable(model):
        raise UsageError(f"model must be a Flax module or a function, not {type(model).__name__}")
    name = name or str(getattr(model, "__name__", type(model).__name__))
    return ForwardCall(_run_function, model, _optional_arguments(model, name), name), params


def _run_nnx(definition, params, tokens, **arguments):
    return nnx.merge(definition, nnx.State(params))(tokens, **arguments)


def _run_linen(module, params, tokens, **arguments):
    variables = params if "params" in params else {"params": params}
    return module.apply(variables, tokens, **arguments)


def _run_function(function, params, tokens, **arguments):
    return function(params, tokens, **arguments)


def _optional_arguments(function: Callable[..., Any], name: str) -> frozenset[tuple[str, str]]:
    """Return the entries of OPTIONAL_ARGUMENTS that a function has after the parameters, or `self`, and the tokens."""
    parameters = list(inspect.signature(function).parameters.values())[2:]
    for parameter in parameters:
        is_required = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if is_required and parameter.name not in OPTIONAL_ARGUMENTS:
            raise UsageError(
                f"{name} needs the argument `{parameter.name}`, which specjax does not pass; wrap it in a function of "
                "(params, tokens) and of those of positions, cache and mask that it uses"
            )
    return frozenset(
        (parameter.name, OPTIONAL_ARGUMENTS[parameter.name])
        for parameter in parameters
        if parameter.name in OPTIONAL_ARGUMENTS
    )


def _vocab_size(fields: dict[str, Any], params: PyTree) -> int:
    """Return the number of logits. Only shapes are evaluated."""

    def forward(params):
        cache = fields["init_cache"](params, None, 1, 2)
        mask = jnp.tril(jnp.ones((1, 2, 2), bool))
        return fields["forward"](params, jnp.zeros((1, 2), jnp.int32), cache, positions=jnp.arange(2)[None], mask=mask)

    return jax.eval_shape(forward, params)[0].logits.shape[2]


def _make_cache_fields(call: ForwardCall, cache: Callable[[int, int], PyTree] | None, max_positions: int, trees: bool):
    try:
        return _cached_cache_fields(call, cache, max_positions, trees)
    except TypeError:  # an unhashable call makes a new model each time
        return _cached_cache_fields.__wrapped__(call, cache, max_positions, trees)


@functools.cache
def _cached_cache_fields(call: ForwardCall, cache, max_positions: int, trees: bool) -> dict[str, Any]:
    """Return the fields of a `Model` that depend on its cache."""
    if cache is None:
        return custom_caches.text_cache_fields(call, call.name, max_positions, trees)
    return custom_caches.slot_cache_fields(call, call.name, max_positions, trees, cache)
