"""What a user's own drafter, model, rule or controller gives back, checked while a step is traced: at no cost later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.types import Array, Drafter, Output, PyTree, TokenTree, Verdict

_KINDS: dict[str, Any] = {"i": jnp.integer, "b": jnp.bool_, "f": jnp.floating}
_WORDS = {"i": "integers", "b": "booleans", "f": "floats"}


def name_of(function: Callable) -> str:
    """Where a part's function is from, as a reader would look for it."""
    function = getattr(function, "func", function)  # of a partial
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"


def check_tree(drafter: Drafter, tree: TokenTree, batch: int, vocab: int) -> None:
    """Raises: UsageError for a draft that is not a `TokenTree` of the drafter's size."""
    who, n = f"the drafter's propose ({name_of(drafter.propose)})", drafter.num_nodes
    if not isinstance(tree, TokenTree):
        raise UsageError(f"{who} must return (TokenTree, state), not a {type(tree).__name__} first")
    for field, kind in (("tokens", "i"), ("parents", "i"), ("valid", "b")):
        _check(who, f"tree.{field}", getattr(tree, field), kind, (batch, n))
    if tree.logits is not None:
        _check(who, "tree.logits", tree.logits, "f", (batch, n, vocab))


def check_output(model: Any, output: Output, batch: int, width: int) -> None:
    """Raises: UsageError for a model whose `forward` gives other logits than its vocabulary has."""
    _check(f"forward of the model {model.name}", "logits", output.logits, "f", (batch, width, model.vocab_size))


def check_verdict(verifier: Any, verdict: Verdict, batch: int, width: int) -> None:
    """Raises: UsageError for a rule that does not give a `Verdict` of the tree it was given."""
    who = f"the rule {verifier.name}"
    if not isinstance(verdict, Verdict):
        raise UsageError(f"{who} must return a Verdict, not a {type(verdict).__name__}")
    for field, shape in (("path", (batch, width)), ("num_nodes", (batch,)), ("next_token", (batch,))):
        _check(who, field, getattr(verdict, field), "i", shape)


def check_limit(limit: Array, batch: int) -> None:
    """Raises: UsageError for a controller that does not say one depth per row."""
    _check("the controller", "limit", limit, "i", (batch,))


def check_same(who: str, before: PyTree, after: PyTree) -> None:
    """Raises: UsageError where a state that a loop carries does not come back in the form it went in."""
    old, new = str(jax.tree.structure(before)), str(jax.tree.structure(after))
    if old != new:
        raise UsageError(f"{who} must return its state in the form it got: {old}, not {new}")
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
        if _form(x) != _form(y):
            place = jax.tree_util.keystr(path) or "its state"
            raise UsageError(f"{who} must return {place} as it got it: {_form(x)}, not {_form(y)}")


def _check(who: str, field: str, value: Any, kind: str, shape: tuple[int, ...]) -> None:
    if not hasattr(value, "dtype") or not jnp.issubdtype(value.dtype, _KINDS[kind]) or value.shape != shape:
        got = _form(value) if hasattr(value, "dtype") else type(value).__name__
        raise UsageError(f"{who} must give {field} as {_WORDS[kind]} {list(shape)}, not {got}")


def _form(x: Any) -> str:
    return f"{x.dtype if hasattr(x, 'dtype') else jnp.result_type(x)}{list(jnp.shape(x))}"
