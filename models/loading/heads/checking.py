"""Self-check of a loaded head: its agreement with the target, and the most likely reason for a low one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specjax.catalog.schemes import without_scheme
from specjax.models.heads.agreement import agreement, read_text
from specjax.models.loading.heads import LoadedHead
from specjax.models.loading.heads.registry import format_of
from specjax.models.loading.heads.settings import HeadVariant
from specjax.models.loading.heads.target_fit import hub_name
from specjax.types import Target

LOW = 0.2
"""Below this agreement something is wrong: published heads reach 0.5 to 0.8, a small one trained for an hour 0.3."""
FALL = 0.4  # a later draft below this part of the draft before it is suspicious
MIN_GAIN = 0.15  # accepted tokens per draft that another interpretation of the tensors must add

QUESTION = "Why is the sky blue, and why is it red in the evening?"
ANSWER = (
    "The sky is blue because the molecules of the air scatter short waves of light far more than long ones. In the "
    "evening the sun is low, and most of the blue light is lost on the long way through the air. What is left is red "
    "and orange."
)
"""The text of the check, as a chat."""


class SelfCheck(NamedTuple):
    """The result of a self-check."""

    agreement: float  # share of positions where the first draft is the target's most likely token
    places: int  # number of positions
    reason: str | None  # the most likely reason, if the files seem to be read wrongly or the agreement is low
    depths: tuple[float, ...] = ()  # the same share for the first draft, the second, and so on


def check_head(loaded: LoadedHead, target: Target, tokens: Sequence[int]) -> SelfCheck:
    """Compare a head with its target on a text, at four depths.

    Other interpretations of the files are tried if the first draft agrees less than LOW, if a later one agrees far less
    than the one before it, or if the files leave a setting open.
    """
    variants = format_of(loaded.kind).variants(loaded.head, target.model.capabilities.num_layers)
    text = read_text(target, tokens, [loaded.head, *(variant.head for variant in variants)])
    depths, places = agreement(target, loaded.head, text), len(tokens) - 1
    is_low, falls = depths[0] < LOW, any(later < FALL * depth for depth, later in itertools.pairwise(depths))
    if not (is_low or falls):
        variants = [variant for variant in variants if _names(variant) & set(loaded.assumed)]
    best, reason = _accepted(depths) + MIN_GAIN, _other_reason(loaded, target) if is_low else None
    for variant in variants:
        other = agreement(target, variant.head, text)
        if other[0] >= LOW and _accepted(other) > best:
            best, reason = _accepted(other), _describe(variant, other)
    return SelfCheck(depths[0], places, reason, depths)


def _accepted(depths: tuple[float, ...]) -> float:
    """Return the expected number of accepted drafts of a chain, if the depths are independent."""
    return float(np.sum(np.cumprod(depths)))


def _names(variant: HeadVariant) -> set[str]:
    """Return the settings that a variant changes."""
    return {setting.partition("=")[0] for setting in variant.setting.split()}


def _describe(variant: HeadVariant, depths: tuple[float, ...]) -> str:
    shares = ", ".join(f"{depth:.0%}" for depth in depths)
    change = "with that change" if not variant.setting else f"with --head-set {variant.setting}"
    return f"{variant.reason} ({change} they agree at {shares})"


def _other_reason(loaded: LoadedHead, target: Target) -> str:
    """Return the most likely reason if the files were interpreted correctly."""
    name = without_scheme(target.model.name)
    if loaded.trained_for and _short_name(loaded.trained_for) != _short_name(name):
        return f"it was trained for {loaded.trained_for}, and the target is {name}"
    return (
        "it was trained for another target or fine-tune, or for another prompt format, such as with or without "
        "thinking, or it was hardly trained"
    )


def _short_name(name: str) -> str:
    return hub_name(name).rstrip("/").rsplit("/", 1)[-1].lower()
