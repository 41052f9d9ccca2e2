"""Progress lines of a long run that shows neither text nor a bar."""

from __future__ import annotations

import time

from specjax.cli.output.console import Console

INTERVAL = 30.0  # seconds


class ProgressLines:
    """Prints the number of finished prompts on `log`: at the first one, and then every INTERVAL seconds."""

    def __init__(self, log: Console, total: int, shown: bool):
        """Create the lines. shown: True if something else shows the progress."""
        self.log, self.total, self.shown = log, total, shown
        self.start, self.last = time.monotonic(), -INTERVAL

    def update(self, num_done: int) -> None:
        """Print a line if it is due."""
        seconds = time.monotonic() - self.start
        if self.shown or num_done >= self.total or seconds - self.last < INTERVAL:
            return
        self.last = seconds
        self.log.print(f"{num_done} of {self.total} prompts, {seconds:.0f} s", style="dim")
