"""Drafters by name: `make_drafter`, and drafters that contain another drafter."""

from __future__ import annotations

from specjax.catalog.method import Method
from specjax.catalog.methods import METHODS, find_drafter, find_inner_drafter
from specjax.catalog.options import read_call
from specjax.diffusion.types import Denoiser
from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.retrieval.datastore import Datastore
from specjax.types import Drafter, Target


def make_drafter(
    name: str, target: Target, draft: Target | DraftHead | Denoiser | None = None, *,
    datastore: Datastore | None = None, **options,
) -> Drafter:  # fmt: skip
    """Return the drafter of a method by name.

    Args:
      draft: a smaller model, a draft head of the target or a denoiser, if the method uses one.
      options: the options of the method's row, and other keyword arguments of its factory.

    Raises: UsageError for an unknown name, a method with its own loop, a missing or unfit draft model or head, or a
      missing or mismatched datastore.
    """
    method = find_drafter(name)
    _check_draft(method, draft)
    if "fill" in method.needs and "fill" not in options:
        raise UsageError(f"method {name} needs a model of masked blocks; in Python pass fill=, params= and mask_token=")
    if "datastore" in method.needs and datastore is None:
        raise UsageError(f"method {name} needs a datastore; give one with --datastore (datastore= in Python)")
    if method.uses("datastore") and datastore is not None:
        if datastore.vocab_size > target.model.vocab_size:
            raise UsageError(
                f"the datastore has {datastore.vocab_size} tokens in its vocabulary and the target "
                f"{target.model.vocab_size}; build one with the target's own tokenizer"
            )
        options["datastore"] = datastore
    return method.make(target, draft, **options)


def _check_draft(method: Method, draft: Target | DraftHead | Denoiser | None) -> None:
    """Check that a draft model or head fits the method.

    Raises: UsageError if it is missing or does not fit.
    """
    name = method.name
    if "denoiser" in method.needs and not isinstance(draft, Denoiser):
        raise UsageError(f"method {name} drafts with a specjax.Denoiser, not with {type(draft).__name__}; give draft=")
    if "denoiser" not in method.needs and isinstance(draft, Denoiser):
        fitting = ", ".join(row for row, other in METHODS.items() if "denoiser" in other.needs)
        raise UsageError(f"method {name} does not draft with a denoiser; choose one of {fitting}, or leave draft out")
    head = draft.head.kind if isinstance(draft, DraftHead) else None
    if "draft" in method.needs and (draft is None or (head and not method.uses("head"))):
        reason = f", and draft is a draft head; choose method {head}" if head else "; give one with --draft"
        raise UsageError(f"method {name} needs a draft model{reason} (specjax.make_drafter in Python)")
    if "head" in method.needs and head is None:
        reason = ", and draft is a whole model; choose method two_model" if draft else "; give one with --draft"
        raise UsageError(f"method {name} needs a draft head of the target{reason} (specjax.make_drafter in Python)")
    if "head" in method.needs and head != name:
        raise UsageError(
            f"method {name} needs a draft head of its own kind, and draft is of kind {head}; choose method {head}"
        )


def make_inner_drafter(
    spec: str | Drafter, target: Target, datastore: Datastore | None = None, size: int | None = None
) -> Drafter:
    """Return the drafter that another one contains: `spec` itself, or the one of a text such as `suffix:7,bias=2`.

    Args:
      target: the model that verifies the inner drafter's tokens.
      size: the number of drafted tokens, unless the text sets it.

    Raises: UsageError for a text that names no inner drafter, or a missing datastore.
    """
    if isinstance(spec, Drafter):
        return spec
    method = find_inner_drafter(spec)
    options = read_call(spec, method.options)
    if size is not None and method.size is not None:
        options = {method.size: size} | options
    if datastore is None and "datastore" in method.needs:
        raise UsageError(f"{method.name} needs a datastore; give one with --datastore (datastore= in Python)")
    if datastore is not None and method.uses("datastore"):
        options["datastore"] = datastore
    return method.make(target, None, **options)
