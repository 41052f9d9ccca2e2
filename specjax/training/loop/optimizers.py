"""Optax optimizers of recipes, and the split of parameters into trained and frozen ones."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.training.objectives.recipes import Recipe
from specjax.types import PyTree

TABLES = frozenset(("embed", "embeddings", "head", "heads", "prompts", "predecessor", "successor", "w1", "w2", "wide"))
"""Modules, or lists of modules, with a row for each token. Muon's orthogonal steps do not suit them. The rows of tokens
that a step does not contain would change too, and the change of every row would grow with the number of rows."""


@functools.cache
def make_optimizer(recipe: Recipe, steps: int) -> Any:
    """Return an `optax.GradientTransformation` for a run of `steps` steps. Equal recipes share one object."""
    import optax
    from optax import contrib

    rate = make_learning_rate(recipe, steps)
    beta_1, beta_2 = recipe.betas
    adamw = functools.partial(optax.adamw, rate, beta_1, beta_2, weight_decay=recipe.weight_decay, mask=is_matrix)
    if recipe.optimizer == "adamw":
        return optax.chain(optax.clip_by_global_norm(recipe.clip), adamw())
    muon = contrib.muon(
        rate, weight_decay=recipe.weight_decay, consistent_rms=0.2, adam_b1=beta_1, adam_b2=beta_2,
        adam_learning_rate=lambda step: recipe.tables * rate(step), muon_weight_dimension_numbers=_muon_dimensions,
    )  # fmt: skip
    return optax.chain(optax.clip_by_global_norm(recipe.clip), muon)


def make_learning_rate(recipe: Recipe, steps: int) -> Any:
    """Return a function (step) -> learning rate: a warm-up, then the recipe's schedule.

    The schedules other than "constant" decay to a tenth of the peak.
    """
    import optax

    peak, warmup = recipe.learning_rate, max(int(recipe.warmup * steps), 1)
    decay_steps = max(steps - warmup, 1)
    decay = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, decay_steps, 0.1),
        "linear": lambda: optax.linear_schedule(peak, 0.1 * peak, decay_steps),
        "constant": lambda: optax.constant_schedule(peak),
    }[recipe.schedule]()
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, warmup), decay], [warmup])


def is_matrix(params: PyTree) -> PyTree:
    """Return True for matrices, which get weight decay, and False for norms and biases."""
    return jax.tree_util.tree_map_with_path(lambda path, x: x.ndim - _stack_axes(path) >= 2, params)


def _stack_axes(path: tuple) -> int:
    """Return the number of leading axes that index layers: 1 if all layers share one array, else 0."""
    names = _names(path)
    return int(names[0] == "layers" and not names[1].isdigit())


def _names(path: tuple) -> list[str]:
    return [str(getattr(entry, "key", entry)) for entry in path]


def _has_prefix(name: str, prefix: str) -> bool:
    """Return True if a parameter has this name or belongs to this module."""
    return f"{name}/".startswith(f"{prefix}/")


def is_table(path: tuple) -> bool:
    """Return True if a parameter is the weight of one of `TABLES`."""
    modules = [name for name in _names(path)[:-1] if not name.isdigit()]
    return bool(modules) and modules[-1] in TABLES


def _muon_dimensions(params: PyTree) -> PyTree:
    """Return Muon's dimension numbers for matrices [.., out, in], and None for parameters that use Adam.

    Each layer of stacked parameters is a matrix of its own.
    """
    from optax import contrib

    def dimensions(path, x):
        uses_muon = x.ndim - _stack_axes(path) == 2 and not is_table(path)
        return contrib.MuonDimensionNumbers(x.ndim - 1, x.ndim - 2) if uses_muon else None

    return jax.tree_util.tree_map_with_path(dimensions, params)


def check_frozen(params: PyTree, frozen: Sequence[str]) -> None:
    """Raise a UsageError for a name that matches no parameter."""
    names = ["/".join(_names(path)) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for prefix in frozen:
        if not any(_has_prefix(name, prefix) for name in names):
            modules = sorted({name.partition("/")[0] for name in names})
            raise UsageError(f'no parameter or module is named "{prefix}"; choose from {", ".join(modules)}')


def split_params(params: PyTree, frozen: tuple[str, ...]) -> tuple[PyTree, PyTree]:
    """Return (trained, frozen) parameters, each with None in place of the leaves of the other.

    Integer arrays, and parameters and modules with a name in `frozen`, are frozen.
    """

    def is_frozen(path, x) -> bool:
        name = "/".join(_names(path))
        return not jnp.issubdtype(x.dtype, jnp.floating) or any(_has_prefix(name, prefix) for prefix in frozen)

    trained = jax.tree_util.tree_map_with_path(lambda path, x: None if is_frozen(path, x) else x, params)
    fixed = jax.tree_util.tree_map_with_path(lambda path, x: x if is_frozen(path, x) else None, params)
    return trained, fixed


def merge_params(trained: PyTree, frozen: PyTree) -> PyTree:
    """Merge the two results of `split_params`."""
    return jax.tree.map(lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda x: x is None)
