"""METHODS: every method by name, of all kinds, and the drafter of a name.

The list in docs/methods.md, the command line's choices, the planner and the conformance tests come from it.
"""

from __future__ import annotations

import difflib

from specjax.catalog.adaptive import ADAPTIVE
from specjax.catalog.collaboration import COLLABORATIONS
from specjax.catalog.decoders import DECODERS
from specjax.catalog.diffusion import DIFFUSION
from specjax.catalog.drafters import DRAFTERS
from specjax.catalog.heads import HEADS
from specjax.catalog.method import Kind, Method
from specjax.diffusion import Denoiser
from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.retrieval.datastore import Datastore
from specjax.types import Drafter, Target

METHODS: dict[str, Method] = {**DRAFTERS, **HEADS, **DECODERS, **DIFFUSION, **COLLABORATIONS, **ADAPTIVE}


def of_kind(kind: Kind) -> dict[str, Method]:
    """The rows of a kind."""
    return {name: method for name, method in METHODS.items() if method.kind == kind}


def find_drafter(name: str) -> Method:
    """The row of a drafter. Raises: UsageError for an unknown name, or the name of a loop of its own."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, 1)
        fix = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(of_kind('drafter'))}"
        raise UsageError(f'unknown method "{name}"; {fix}')
    method = METHODS[name]
    if method.kind == "diffusion":
        raise UsageError(f"method {name} decodes diffusion models; call specjax.denoise, or give --target one of these")
    if method.kind == "adaptive":
        raise UsageError(
            f"method {name} chooses layers of the target and drafts nothing; use --adapt {name}, or --method thinned "
            f"--set depth={name} (specjax.adaptive in Python)"
        )
    if method.kind != "drafter":
        home = "decoders" if method.kind == "decoder" else "collaborate.methods"
        loop = f"specjax.{home}.{method.make.__name__}"
        raise UsageError(f"method {name} is a loop of its own, not a drafter; call {loop}(...) in Python")
    return method


def make_drafter(
    name: str, target: Target, draft: Target | DraftHead | Denoiser | None = None, *,
    datastore: Datastore | None = None, **options,
) -> Drafter:  # fmt: skip
    """The drafter of a method by name. `options`: those that its row declares, and what else its factory takes.

    draft: a smaller model, a learned head of the target or a denoiser, where the method has a use for one.

    Raises: UsageError for an unknown name, a loop of its own, a missing or unfit draft model or head, or a missing or
      mismatched datastore.
    """
    method = find_drafter(name)
    _check_draft(method, draft)
    if "fill" in method.needs and "fill" not in options:
        raise UsageError(f"method {name} needs a model of masked blocks; in Python give fill=, params= and mask_token=")
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
    """Raises: UsageError for a model or a head that is missing, or is not what the method drafts with."""
    name = method.name
    if "denoiser" in method.needs and not isinstance(draft, Denoiser):
        raise UsageError(f"method {name} drafts with a specjax.Denoiser, not with {type(draft).__name__}; give draft=")
    if "denoiser" not in method.needs and isinstance(draft, Denoiser):
        others = ", ".join(row for row, other in METHODS.items() if "denoiser" in other.needs)
        raise UsageError(f"method {name} does not draft with a denoiser; choose one of {others}, or leave draft out")
    head = draft.head.kind if isinstance(draft, DraftHead) else None
    if "draft" in method.needs and (draft is None or (head and not method.uses("head"))):
        found = f", and this is a learned head; choose method {head}" if head else "; give one with --draft"
        raise UsageError(f"method {name} needs a draft model{found} (draft= in Python)")
    if "head" in method.needs and head is None:
        found = ", and this is a whole model; choose method two_model" if draft else "; give one with --draft"
        raise UsageError(f"method {name} needs a learned head of the target{found} (draft= in Python)")
    if "head" in method.needs and head != name:
        raise UsageError(f"method {name} needs a head of its own kind, and this is one of {head}; choose method {head}")
