"""METHODS: every method by name, of all kinds, and the drafter of a name.

The README's list, the command line's choices, the planner and the conformance tests come from it.
"""

from __future__ import annotations

from specjax.catalog.decoders import DECODERS
from specjax.catalog.drafters import DRAFTERS
from specjax.catalog.method import Kind, Method
from specjax.errors import UsageError
from specjax.retrieval.datastore import Datastore
from specjax.types import Drafter, Target

METHODS: dict[str, Method] = {**DRAFTERS, **DECODERS}


def of_kind(kind: Kind) -> dict[str, Method]:
    """The rows of a kind."""
    return {name: method for name, method in METHODS.items() if method.kind == kind}


def find_drafter(name: str) -> Method:
    """The row of a drafter. Raises: UsageError for an unknown name, or the name of a loop of its own."""
    if name not in METHODS:
        raise UsageError(f'unknown method "{name}"; choose one of {", ".join(DRAFTERS)}')
    method = METHODS[name]
    if method.kind != "drafter":
        loop = f"specjax.decoders.{method.make.__name__}"
        raise UsageError(f"method {name} is a loop of its own, not a drafter; call {loop}(...) in Python")
    return method


def make_drafter(
    name: str, target: Target, draft: Target | None = None, *, datastore: Datastore | None = None, **options
) -> Drafter:
    """The drafter of a method by name. `options`: those that its row declares, and what else its factory takes.

    Raises: UsageError for an unknown name, a loop of its own, a missing draft model, or a missing or mismatched
      datastore.
    """
    method = find_drafter(name)
    if "draft" in method.needs and draft is None:
        raise UsageError(f"method {name} needs a draft model; give one with --draft (draft= in Python)")
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
