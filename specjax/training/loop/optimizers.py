"""Optax by the words of a recipe, for the parameters that are trained."""

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
"""Modules, or lists of them, with a row for each token. Muon's orthogonal steps make no sense of those: rows that a
step did not see would move too, and the others by more the more rows there are."""


@functools.cache
def optimizer_of(recipe: Recipe, steps: int) -> Any:
    """An `optax.GradientTransformation` for a run of so many steps. Equal recipes give the same object."""
    import optax
    from optax import contrib

    rate = schedule_of(recipe, steps)
    first, second = recipe.betas
    adamw = functools.partial(optax.adamw, rate, first, second, weight_decay=recipe.weight_decay, mask=is_matrix)
    if recipe.optimizer == "adamw":
        return optax.chain(optax.clip_by_global_norm(recipe.clip), adamw())
    muon = contrib.muon(
        rate, weight_decay=recipe.weight_decay, consistent_rms=0.2, adam_b1=first, adam_b2=second,
        adam_learning_rate=lambda step: recipe.tables * rate(step), muon_weight_dimension_numbers=_dimensions,
    )  # fmt: skip
    return optax.chain(optax.clip_by_global_norm(recipe.clip), muon)


def schedule_of(recipe: Recipe, steps: int) -> Any:
    """(step) -> learning rate: a warm-up, then what the recipe says, down to a tenth."""
    import optax

    top, warmup = recipe.learning_rate, max(int(recipe.warmup * steps), 1)
    rest = max(steps - warmup, 1)
    after = {
        "cosine": lambda: optax.cosine_decay_schedule(top, rest, 0.1),
        "linear": lambda: optax.linear_schedule(top, 0.1 * top, rest),
        "constant": lambda: optax.constant_schedule(top),
    }[recipe.schedule]()
    return optax.join_schedules([optax.linear_schedule(top / warmup, top, warmup), after], [warmup])


def is_matrix(params: PyTree) -> PyTree:
    """True for weights, which decay; norms and biases do not."""
    return jax.tree_util.tree_map_with_path(lambda path, x: x.ndim - _stacked(path) >= 2, params)


def _stacked(path: tuple) -> int:
    """How many axes of a parameter are those of its stack, in front of its own: 1 where all layers are one array."""
    names = _names(path)
    return int(names[0] == "layers" and not names[1].isdigit())


def _names(path: tuple) -> list[str]:
    return [str(getattr(entry, "key", entry)) for entry in path]


def _is_below(name: str, prefix: str) -> bool:
    """Whether a parameter is that of a name, or one below it."""
    return f"{name}/".startswith(f"{prefix}/")


def is_table(path: tuple) -> bool:
    """Whether a parameter is the weight of one of `TABLES`."""
    owners = [name for name in _names(path)[:-1] if not name.isdigit()]
    return bool(owners) and owners[-1] in TABLES


def _dimensions(params: PyTree) -> PyTree:
    """For Muon: which parameters are matrices [.., out, in] to be orthogonalised, each layer's alone; of the others
    Adam takes care."""
    from optax import contrib

    def one(path, x):
        is_one = x.ndim - _stacked(path) == 2 and not is_table(path)
        return contrib.MuonDimensionNumbers(x.ndim - 1, x.ndim - 2) if is_one else None

    return jax.tree_util.tree_map_with_path(one, params)


def check_frozen(params: PyTree, frozen: Sequence[str]) -> None:
    """Raises: UsageError for a name that no parameter is below."""
    names = ["/".join(_names(path)) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for prefix in frozen:
        if not any(_is_below(name, prefix) for name in names):
            known = sorted({name.partition("/")[0] for name in names})
            raise UsageError(f'no parameter is named "{prefix}", or below it; there are {", ".join(known)}')


def split(params: PyTree, frozen: tuple[str, ...]) -> tuple[PyTree, PyTree]:
    """(what is trained, the rest), each with None in place of the other's: whole numbers and `frozen` names stay."""

    def stays(path, x) -> bool:
        name = "/".join(_names(path))
        return not jnp.issubdtype(x.dtype, jnp.floating) or any(_is_below(name, prefix) for prefix in frozen)

    trained = jax.tree_util.tree_map_with_path(lambda path, x: None if stays(path, x) else x, params)
    rest = jax.tree_util.tree_map_with_path(lambda path, x: x if stays(path, x) else None, params)
    return trained, rest


def joined(trained: PyTree, rest: PyTree) -> PyTree:
    """What `split` took apart."""
    return jax.tree.map(lambda a, b: b if a is None else a, trained, rest, is_leaf=lambda x: x is None)
