"""The published figures of chips."""

from __future__ import annotations

from specjax.costs.chips import CHIPS


def test_clocks_are_those_of_the_chips():
    """Peak over the work of a cycle: 1.05 and 1.75 GHz are published of v4 and v5p, 1.5 of v5e."""
    clocks = {name: round(chip.clock / 1e9, 2) for name, chip in CHIPS.items()}
    assert clocks == {"v4": 1.05, "v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "tpu7x": 2.2}
    assert all(chip.source for chip in CHIPS.values())
