"""What a drafter made of several others passes on to each of them."""

from __future__ import annotations

from collections.abc import Sequence

from specjax.errors import UsageError
from specjax.types import Drafter, PyTree


def read_each(several: Sequence[Drafter], params: Sequence, states: Sequence, *chunk) -> tuple[PyTree, ...]:
    """Their states after a chunk of the prompt, as `Hooks.prefill` has it: context, tokens, count, output."""
    each = zip(several, params, states, strict=True)
    return tuple(
        drafter.hooks.prefill(own, state, *chunk) if drafter.hooks.prefill else state for drafter, own, state in each
    )


def remember_each(several: Sequence[Drafter], params: Sequence, states: Sequence) -> tuple[PyTree, ...]:
    """Their parameters for a later call, as `Hooks.export` has it."""
    each = zip(several, params, states, strict=True)
    return tuple(drafter.hooks.export(own, state) if drafter.hooks.export else own for drafter, own, state in each)


def taps_of_each(several: Sequence[Drafter]) -> tuple[int, ...]:
    """The target's streams that they read, which each finds in the order in which it named them.

    Raises: UsageError where two read other ones.
    """
    named = {drafter.traits.taps for drafter in several if drafter.traits.taps}
    if len(named) > 1:
        raise UsageError(f"the drafters read different layers of the target, {sorted(named)}; give all the same taps")
    return next(iter(named), ())


def longest_of_each(several: Sequence[Drafter], deepest: int) -> int | None:
    """`Traits.max_accepted` of what drafts up to `deepest` tokens by them.

    Raises: UsageError where one of them cannot take in so many, and would lose count of the text.
    """
    known = [drafter.traits.max_accepted for drafter in several if drafter.traits.max_accepted is not None]
    if known and min(known) <= deepest:
        raise UsageError(
            f"a round may accept {deepest} drafted tokens, and one of the drafters takes in {min(known) - 1}; make it "
            f"with longest={deepest + 1}, or let the others draft less"
        )
    return min(known, default=None)
