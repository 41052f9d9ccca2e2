"""Self-check of a loaded head: its agreement with the target, and the most likely reason for a low one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specjax.models.heads.agreement import agreement, read_text
from specjax.models.loading.heads import LoadedHead
from specjax.models.loading.heads.registry import format_of
from specjax.types import Target

LOW = 0.2
"""Below this agreement something is wrong: published heads reach 0.5 to 0.8, a small one trained for an hour 0.3."""
MIN_GAIN = 0.1  # another interpretation of the tensors must be better by this

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
    reason: str | None  # the most likely reason, if the agreement is low


def check_head(loaded: LoadedHead, target: Target, tokens: Sequence[int]) -> SelfCheck:
    """Compare a head with its target on a text. If they agree less than LOW, try other interpretations of its files."""
    variants = format_of(loaded.kind).variants(loaded.head, target.model.capabilities.num_layers)
    text = read_text(target, tokens, [loaded.head, *variants.values()])
    value, places = agreement(target, loaded.head, text), len(tokens) - 1
    if value >= LOW:
        return SelfCheck(value, places, None)
    best, reason = value + MIN_GAIN, _other_reason(loaded, target)
    for variant_reason, head in variants.items():
        variant_value = agreement(target, head, text)
        if variant_value > best:
            best, reason = variant_value, f"{variant_reason} (with that change they agree at {variant_value:.0%})"
    return SelfCheck(value, places, reason)


def _other_reason(loaded: LoadedHead, target: Target) -> str:
    """Return the most likely reason if the files were interpreted correctly."""
    name = target.model.name
    if loaded.trained_for and _short_name(loaded.trained_for) != _short_name(name):
        return f"it was trained for {loaded.trained_for}, and the target is {name}"
    return (
        "it was trained for another target or fine-tune, or for another prompt format, such as with or without thinking"
    )


def _short_name(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].lower()
