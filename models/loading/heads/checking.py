"""Whether a head that was read says what the target does, and what is likeliest wrong where it does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specjax.models.heads.agreement import agreement, read_text
from specjax.models.loading.heads import LoadedHead, kinds
from specjax.types import Target

LOW = 0.2
"""Agreement below which something is wrong: published heads have 0.5 to 0.8, a small one of an hour 0.3."""
MORE = 0.1  # by which another reading must be better

QUESTION = "Why is the sky blue, and why is it red in the evening?"
ANSWER = (
    "The sky is blue because the molecules of the air scatter short waves of light far more than long ones. In the "
    "evening the sun is low, and most of the blue light is lost on the long way through the air. What is left is red "
    "and orange."
)
"""The text, as a chat."""


class SelfCheck(NamedTuple):
    """How often the first draft was the target's token, and over how many places."""

    agreement: float
    places: int
    reason: str | None  # the likeliest, of a low one


def check_head(loaded: LoadedHead, target: Target, tokens: Sequence[int]) -> SelfCheck:
    """Compare a head with its target on a text; where they agree less than LOW, try other readings of its files."""
    others = kinds.of(loaded.kind).variants(loaded.head, target.model.capabilities.num_layers)
    text = read_text(target, tokens, [loaded.head, *others.values()])
    found, places = agreement(target, loaded.head, text), len(tokens) - 1
    if found >= LOW:
        return SelfCheck(found, places, None)
    best, reason = found + MORE, _elsewhere(loaded, target)
    for what, head in others.items():
        other = agreement(target, head, text)
        if other > best:
            best, reason = other, f"{what} (with that they agree at {other:.0%})"
    return SelfCheck(found, places, reason)


def _elsewhere(loaded: LoadedHead, target: Target) -> str:
    """Why a head is of no use that was read as it was written."""
    name = target.model.name
    if loaded.trained_for and _short(loaded.trained_for) != _short(name):
        return f"it was trained for {loaded.trained_for}, and the target is {name}"
    return (
        "it was trained for another target or fine-tune, or for another format of prompts, such as with or without "
        "thinking"
    )


def _short(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].lower()
