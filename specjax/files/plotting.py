"""Pictures as bytes. matplotlib is imported when one is begun."""

from __future__ import annotations

import io
import warnings
from typing import Any

from specjax.errors import needing


def begun(width: float, height: float) -> Any:
    """An empty figure, in inches. Raises: UsageError without matplotlib."""
    with needing("plots", "drawing needs"):
        from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def png(figure: Any) -> bytes:
    """What is drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a box stands for it
        FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def open_corner(axes: Any) -> None:
    """Without the lines above and on the right."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
