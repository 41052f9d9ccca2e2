"""The defaults of decoding: drafter, options, controller and tree for a target. It imports no JAX.

The Python functions with `None` and the command line without flags both read them from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from specjax.catalog.method import Method
from specjax.catalog.methods import METHODS, find_drafter
from specjax.catalog.schemes import without_scheme

IMAGE_PATCHES = 1024
"""Patches of an image, for models that read images of any size."""


class Defaults(NamedTuple):
    """The choices for one target, draft and backend."""

    drafter: str  # the name of a row of METHODS
    options: Mapping[str, Any] = MappingProxyType({})  # keyword arguments of the drafter's factory
    controller: str | None = None  # a form of `specjax.controllers`; None: always draft as deep as possible
    tree: str | None = None  # a form of `specjax.trees`; None: the tree that the options set
    head: str | None = None  # a head to load and use as the draft: one that comes with specjax, or NATIVE


class ShippedHead(NamedTuple):
    """A draft head that comes with specjax, and the target that it fits."""

    name: str
    vocab_size: int
    num_layers: int

    def fits(self, model: Any) -> bool:
        """Return True if a model has the target's shapes and returns the activations that the head reads."""
        able = model.capabilities
        return (model.vocab_size, able.num_layers) == (self.vocab_size, self.num_layers) and able.trees and able.taps


SHIPPED_HEADS = {"smollm2-135m": ShippedHead("smollm2-135m-eagle3", vocab_size=49152, num_layers=30)}
"""The draft heads that are used by default, by the name of the target."""

NATIVE, NATIVE_METHOD = "native", "mtp"
"""The name of the multi-token-prediction module in the target's own files, and of the method that drafts with it."""

DRAFT_MODEL = Defaults("two_model", MappingProxyType({"num_tokens": 7}), controller="goodput")
"""The choices for a draft model: up to 7 tokens, as many as the goodput controller chooses.

Qwen2.5-Coder 0.5B with its 1.5B in bfloat16, on two cores, reached 1.10 to 1.47 of plain decoding on Spec-Bench's six
tasks, prefill excluded. A fixed draft length of four reached 0.74 to 1.69, and less than 1 on three tasks."""


def defaults(target: Any, draft: Any, backend: str, *, drafter: str | None = None) -> Defaults:
    """Return the choices for a target.

    Args:
      target: a `specjax.Target`.
      draft: a draft model (`Target`), a draft head (`DraftHead`), or None.
      backend: the JAX backend, such as "cpu".
      drafter: the name of a method that was chosen already; its options and tree are returned.

    Raises: UsageError for an unknown method, or one that is no drafter.
    """
    head = getattr(draft, "head", None)
    name = drafter or default_method(
        None if draft is None else "model" if head is None else head.kind, target.model.capabilities.trees
    )
    row = find_drafter(name)
    takes_native = draft is None and drafter in (None, NATIVE_METHOD)
    native = NATIVE if takes_native and can_draft_natively(target) else None
    max_depth = None if native is None else native_depth(target)
    options, tree = default_budget(row, backend, max_depth if head is None else head.max_depth)
    if drafter is not None:
        return Defaults(name, options, tree=tree, head=native)
    if name == "two_model":
        return DRAFT_MODEL
    if native is not None:
        return Defaults(name, options, tree=tree, head=native)
    shipped = SHIPPED_HEADS.get(without_scheme(target.model.name))
    is_shipped = draft is None and shipped is not None and shipped.fits(target.model)
    return Defaults(name, options, tree=tree, head=shipped.name if shipped is not None and is_shipped else None)


def can_draft_natively(target: Any) -> bool:
    """Return True if the files of a target have a multi-token-prediction module whose layer specjax has."""
    native, able = getattr(target, "native", None), target.model.capabilities
    return native is not None and native.lacking is None and able.trees and able.taps


def native_depth(target: Any) -> int | None:
    """Return the maximum draft length of the modules in the files of a target; None: no limit.

    A single module drafts any length, and several modules draft one token each.
    """
    return target.native.count if target.native.count > 1 else None


def default_method(draft: str | None, trees: bool = True) -> str:
    """Return the name of the default drafter.

    Args:
      draft: "model" for a draft model, the kind of a draft head, or None.
      trees: False for a target that accepts chains only.
    """
    if draft is None:
        return "auto" if trees else "prompt_lookup"
    if draft == "model":
        return "two_model"
    return draft if METHODS[draft].alone else "auto"


def default_budget(row: Method, backend: str, max_depth: int | None = None) -> tuple[dict[str, Any], str | None]:
    """Return the options and the tree of a method: a wide tree where wide passes are cheap, small options on a CPU.

    max_depth: the maximum draft length of the draft head, which limits both; None: no limit.
    """
    if backend == "cpu":
        if "head" not in row.needs or max_depth is None:
            return dict(row.cpu_options), None
        return {name: min(size, max_depth) for name, size in row.cpu_options.items()}, None
    if row.wide_tree is None:
        return {}, None
    return {}, "x".join(row.wide_tree.split("x")[:max_depth])
