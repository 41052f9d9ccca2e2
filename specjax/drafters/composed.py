"""Calls and facts that a composed drafter passes on to the drafters inside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specjax.errors import UsageError
from specjax.types import Drafter, PyTree, Target


def read_each(drafters: Sequence[Drafter], params: Sequence, states: Sequence, *chunk) -> tuple[PyTree, ...]:
    """Return the states of all drafters after a chunk of the prompt: (context, tokens, count, output)."""
    each = zip(drafters, params, states, strict=True)
    return tuple(
        drafter.hooks.prefill(drafter_params, state, *chunk) if drafter.hooks.prefill else state
        for drafter, drafter_params, state in each
    )


def remember_each(drafters: Sequence[Drafter], params: Sequence, states: Sequence) -> tuple[PyTree, ...]:
    """Return the parameters of all drafters for a later call, from `Hooks.export`."""
    each = zip(drafters, params, states, strict=True)
    return tuple(
        drafter.hooks.export(drafter_params, state) if drafter.hooks.export else drafter_params
        for drafter, drafter_params, state in each
    )


def taps_of_each(drafters: Sequence[Drafter]) -> tuple[int, ...]:
    """Return the taps that the drafters share; each drafter reads them in the order of its own traits.

    Raises: UsageError if two drafters read different taps.
    """
    choices = {drafter.traits.taps for drafter in drafters if drafter.traits.taps}
    if len(choices) > 1:
        raise UsageError(f"the drafters read different layers of the target, {sorted(choices)}; give all the same taps")
    return next(iter(choices), ())


def widths_of_each(drafters: Sequence[Drafter], *more: int) -> Callable[[int, Target], tuple[int, ...]] | None:
    """Return `Hooks.widths` for the widths of all drafters and `more`, or None if no width depends on the batch."""
    if not any(drafter.hooks.widths for drafter in drafters):
        return None
    return lambda batch, target: (*more, *(w for drafter in drafters for w in drafter.pass_widths(batch, target)))


def longest_of_each(drafters: Sequence[Drafter], max_depth: int) -> int | None:
    """Return `Traits.max_accepted` of a drafter that drafts up to `max_depth` tokens with all of them.

    Raises: UsageError if one of them cannot read so many accepted tokens; it would lose its position in the text.
    """
    limits = [drafter.traits.max_accepted for drafter in drafters if drafter.traits.max_accepted is not None]
    if limits and min(limits) <= max_depth:
        raise UsageError(
            f"a step may accept {max_depth} drafted tokens, and one of the drafters reads at most {min(limits) - 1}; "
            f"make it with max_accepted={max_depth + 1}, or let the other drafters draft less"
        )
    return min(limits, default=None)
