"""The head that comes with specjax: of the demo model, so that a head can be tried where there is none yet.

It was trained on two CPU cores in four and a half hours, the target's answers included: docs/heads.md says what it
serves.
"""

from __future__ import annotations

from pathlib import Path

NAME = "smollm2-135m-eagle3"
"""What `load_head` and --draft call it."""
FOLDER = Path(__file__).parents[2] / "shipped" / NAME
