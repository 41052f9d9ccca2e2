"""Matplotlib figures as PNG bytes. The import of matplotlib is deferred until a figure is created."""

from __future__ import annotations

import io
import warnings
from typing import Any

from specjax.errors import optional_import


def new_figure(width: float, height: float) -> Any:
    """Create an empty figure of the given size in inches. Raises: UsageError without matplotlib."""
    with optional_import("plots", "drawing needs"):
        from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def to_png(figure: Any) -> bytes:
    """Render a figure as PNG bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # matplotlib draws a box instead
        FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def hide_top_right_spines(axes: Any) -> None:
    """Hide the top and right spines."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
