"""Checks of abilities that some models lack, such as those with recurrent layers.

Each check raises one sentence with the model, the method that needs the ability, and the fix.
"""

from __future__ import annotations

from specjax.catalog.schemes import compressed_form
from specjax.errors import UsageError
from specjax.types import Model


def check_rewinds(model: Model, user: str, fix: str | None = None) -> None:
    """Check that a model can remove tokens from its cache.

    Args:
      user: the method or part that removes tokens, the subject of the sentence.
      fix: an imperative clause. None: choose another model, or a cache that is not compressed.

    Raises: UsageError if it cannot.
    """
    if model.rewind is None:
        raise UsageError(
            f"the model {model.name} cannot rewind its cache, which {user} needs; {fix or _rewindable_cache(model)}"
        )


def _rewindable_cache(model: Model) -> str:
    """Return the clause that names a change after which the model, or another one, can rewind."""
    cache_dtype = getattr(model.config, "cache_dtype", None)
    if compressed_form(cache_dtype) is None:
        return "use a model with a key/value cache"
    return f'use the cache dtype "int8" or the default instead of "{cache_dtype}"'


def check_complete_cache(model: Model, user: str) -> None:
    """Check that a model decodes with the cache of its prefill, for a part that makes caches of its own.

    Raises: UsageError if the model compresses the cache after the prompt, as with `speckv`.
    """
    if model.finish_prompt is not None:
        raise UsageError(f"{user} does not compress caches, as {model.name} does; pass the target without it")


def check_partial_passes(model: Model, user: str) -> int:
    """Check that a model can run a part of its layers, and return the number of its layers.

    Raises: UsageError if it cannot.
    """
    able = model.capabilities
    if able.num_layers < 1 or not able.layer_skipping:
        raise UsageError(f"the model {model.name} cannot run a part of its layers, which {user} needs; {_fix(model)}")
    return able.num_layers


def _fix(model: Model) -> str:
    if model.config is not None:
        return "choose a method that runs whole passes, such as auto"
    return "choose a method such as auto, or set num_layers and layer_skipping in Model.capabilities"


def check_grouped_layers(model: Model, user: str) -> None:
    """Check that a model can run the attention of several layers on one stream. Raises: UsageError if it cannot."""
    if model.capabilities.groups == ():
        raise UsageError(
            f"the model {model.name} cannot run its layers in groups, which {user} needs; use two_model with it"
        )


def check_later_tokens(model: Model, user: str) -> None:
    """Check that the tokens of a pass may see later ones. Raises: UsageError if the model reads them in order."""
    if model.capabilities.reads_in_order:
        raise UsageError(
            f"the model {model.name} reads tokens in order, and {user} needs tokens that see later ones; use a model "
            "whose layers all attend"
        )


def check_shared_keys(model: Model, user: str) -> tuple[int, int]:
    """Return the layers whose keys and values other models may read from the cache: a local and a global one.

    Raises: UsageError if the model shares none.
    """
    layers = model.capabilities.shared_keys
    if layers is None:
        raise UsageError(
            f"the model {model.name} shares no keys of its cache, which {user} needs; use the Gemma 4 model that the "
            "assistant was trained for"
        )
    return layers
