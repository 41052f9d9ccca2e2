"""Passes of one width, where a test is not about widths.

A program has a pass for each of its drafter's `widths`, and every one is the whole target, traced and compiled. That
the others give the same text is proven in the folders that are not named here, for every method of the catalogue, and
by `make test-all`, which runs all tests with all widths.
"""

import dataclasses

from specjax.engine.parts import Parts

FOLDERS = {
    *("adaptive", "analysis", "collaborate", "decoders", "diffusion", "drafters"),
    *("models", "parallel", "processors", "training", "trees", "verifiers"),
}


def parts_of_one_width(*arguments, **named) -> Parts:
    """In place of `Parts`: of a drafter whose passes are all as wide as its tree."""
    parts = Parts(*arguments, **named)
    return dataclasses.replace(parts, drafter=dataclasses.replace(parts.drafter, widths=()))
