"""Checks of the arrays that drafters, models, verifiers and controllers return.

They check types, shapes and dtypes while a step is traced, so they have no cost at run time.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.numerics.validation import check_same, form_of, name_of
from specjax.types import Array, Drafter, Output, TokenTree, Verdict
from specjax.verifiers.node_logits import all_rows

__all__ = ["check_limit", "check_output", "check_same", "check_tree", "check_verdict", "name_of"]

_KINDS: dict[str, Any] = {"i": jnp.integer, "b": jnp.bool_, "f": jnp.floating}
_WORDS = {"i": "integers", "b": "booleans", "f": "floats"}


def check_tree(drafter: Drafter, tree: TokenTree, batch: int, vocab: int) -> None:
    """Check that a draft is a `TokenTree` of the drafter's size. Raises: UsageError."""
    item, n = f"the drafter's propose ({name_of(drafter.propose)})", drafter.num_nodes
    if not isinstance(tree, TokenTree):
        raise UsageError(f"{item} must return (TokenTree, state), but its first result is a {type(tree).__name__}")
    for field, kind in (("tokens", "i"), ("parents", "i"), ("valid", "b")):
        _check_array(item, f"tree.{field}", getattr(tree, field), kind, (batch, n))
    if tree.logits is not None:
        rows = jax.eval_shape(functools.partial(all_rows, tree.logits))
        _check_array(item, "tree.logits", rows, "f", (batch, n, vocab))


def check_output(model: Any, output: Output, batch: int, width: int) -> None:
    """Check that the logits of `forward` have the model's vocabulary. Raises: UsageError."""
    _check_array(f"forward of the model {model.name}", "logits", output.logits, "f", (batch, width, model.vocab_size))


def check_verdict(verifier: Any, verdict: Verdict, batch: int, width: int) -> None:
    """Check that a verifier returns a `Verdict` of the width of its tree. Raises: UsageError."""
    item = f"the rule {verifier.name}"
    if not isinstance(verdict, Verdict):
        raise UsageError(f"{item} must return a Verdict, not a {type(verdict).__name__}")
    for field, shape in (("path", (batch, width)), ("num_nodes", (batch,)), ("next_token", (batch,))):
        _check_array(item, field, getattr(verdict, field), "i", shape)


def check_limit(limit: Array, batch: int) -> None:
    """Check that a controller returns one draft length per row. Raises: UsageError."""
    _check_array("the controller", "limit", limit, "i", (batch,))


def _check_array(item: str, field: str, value: Any, kind: str, shape: tuple[int, ...]) -> None:
    if not hasattr(value, "dtype") or not jnp.issubdtype(value.dtype, _KINDS[kind]) or value.shape != shape:
        form = form_of(value) if hasattr(value, "dtype") else type(value).__name__
        raise UsageError(f"{item} must return {field} as {_WORDS[kind]} {list(shape)}, not {form}")
