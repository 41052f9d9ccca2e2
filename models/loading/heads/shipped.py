"""The head that comes with specjax: of the demo model, so that a head can be tried where there is none yet.

It was trained on two CPU cores in three hours, the target's answers included: docs/heads.md says what it serves.
"""

from __future__ import annotations

from pathlib import Path

from specjax.models.loading import DEMO

NAME = "smollm2-135m-eagle3"
"""What `load_head` and --draft call it."""
FOLDER = Path(__file__).parents[2] / "shipped" / NAME


def head_of(target: str | None) -> Path | None:
    """The folder of the one of a target, by what `load` calls that."""
    return FOLDER if target in (None, DEMO) else None
