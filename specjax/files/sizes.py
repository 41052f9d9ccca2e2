"""Numbers of bytes as texts."""

from __future__ import annotations

GIB = 1 << 30
MIB = 1 << 20
SMALL = GIB / 10
"""Sizes below this one are written in MiB, because two decimals of a GiB would hide them."""


def gib(size: float) -> str:
    """Format bytes as GiB, or as MiB below 0.1 GiB."""
    return f"{size / MIB:.3g} MiB" if 0 < size < SMALL else f"{size / GIB:.2f} GiB"


def gib_cell(size: float) -> str:
    """Format bytes for a table column in GiB. Sizes below 0.1 GiB include their unit."""
    return gib(size).removesuffix(" GiB")
