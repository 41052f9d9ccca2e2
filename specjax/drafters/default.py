"""The default drafter of a target, built from `specjax.catalog.defaults`."""

from __future__ import annotations

import jax

from specjax import controllers, costs, trees
from specjax.catalog.defaults import NATIVE, Defaults, defaults
from specjax.drafters.making import make_drafter
from specjax.models.heads.contract import DraftHead
from specjax.models.loading.heads import load_head
from specjax.parallel import place
from specjax.types import Controller, Drafter, Model, Target


def default_drafter(
    target: Target, draft: Target | DraftHead | None = None, *, name: str | None = None, shipped: bool = True
) -> tuple[Drafter, Controller | None]:
    """Return the default drafter and controller of a target; the controller is None for the longest drafts.

    Args:
      draft: a draft model or a draft head of the target. name: a method, if it is chosen already.
      shipped: False ignores the draft head that comes with specjax or with the target, unless `name` needs it. Inside
        of `jit` it is ignored, too, since its parameters would become constants of the program.

    Raises: UsageError for a draft that does not fit the target or the method.
    """
    choice = defaults(target, draft, jax.default_backend(), drafter=name)
    if choice.head is not None and (shipped or name is not None) and not _is_traced(target):
        draft = load_default_head(choice.head, target)
    drafter = make_drafter(choice.drafter, target, draft, **default_options(choice))
    return drafter, default_controller(choice, target, draft)


def default_options(choice: Defaults) -> dict:
    """Return the keyword arguments of the factory, the tree included."""
    return dict(choice.options) | ({} if choice.tree is None else {"tree": trees.parse(choice.tree)})


def default_controller(choice: Defaults, target: Target, draft: Target | DraftHead | None) -> Controller | None:
    """Build the controller of a choice with the costs of its passes."""
    if choice.controller is None:
        return None
    draft_cost = costs.of_draft(target, draft) if isinstance(draft, Target) else 0.0
    return controllers.parse(
        choice.controller, None, costs.dtype_of(target), draft_cost=draft_cost, shares=costs.shares_of(target)
    )


_default_heads: dict[tuple[str, Model], DraftHead] = {}


def load_default_head(name: str, target: Target) -> DraftHead:
    """Load a head that comes with specjax or with the target, once per model: it shares no array with the target."""
    model, place_of_files = target.model, target.native.source if name == NATIVE else name
    if (place_of_files, model) not in _default_heads:
        with jax.ensure_compile_time_eval():  # inside of `jit`, arrays of the trace would stay in the cache
            head = load_head(name, target)
            head = head if model.mesh is None else head.replace(params=place(head.params, model.mesh))
        _default_heads[place_of_files, model] = head
    return _default_heads[place_of_files, model]


def _is_traced(target: Target) -> bool:
    """Return True inside of a `jit` that has the target as an argument."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(target.params))
