"""The head that comes with specjax: of the demo model, so that a first try drafts with what was trained for it."""

from __future__ import annotations

from pathlib import Path

NAME = "smollm2-135m-eagle3"
"""What `load_head` and --draft call it."""
FOLDER = Path(__file__).parents[2] / "shipped" / NAME


def shipped(target: str | Path | None) -> str | None:
    """The name of the head that comes with specjax for a target, as `specjax.load` takes it; None: there is none."""
    from specjax.models.loading import DEMO

    return NAME if target in (None, DEMO) and FOLDER.is_dir() else None
