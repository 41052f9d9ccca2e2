"""The heads that come with specjax, for the demo model.

They were trained on two CPU cores, on responses of the target. docs/heads.md has their acceptance lengths, and the
card.json in each folder has the commands that reproduce them.
"""

from __future__ import annotations

from pathlib import Path

NAMES = ("smollm2-135m-eagle3", "smollm2-135m-p-eagle")
"""The names that `load_head` and --draft accept. `specjax.catalog.defaults` chooses the default."""


def find_folder(name: str) -> Path:
    """Return the folder of one of NAMES."""
    return Path(__file__).parents[2] / "shipped" / name
