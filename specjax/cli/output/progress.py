"""How far a long run is, where neither its text nor a bar shows it."""

from __future__ import annotations

import time

from specjax.cli.output.console import Console

SAY_EVERY = 30.0  # seconds


class Pace:
    """Says on `log` how many prompts are done: at the first one, and then now and then."""

    def __init__(self, log: Console, total: int, shown: bool):
        """shown: something else shows it."""
        self.log, self.total, self.shown = log, total, shown
        self.started, self.said = time.monotonic(), -SAY_EVERY

    def tell(self, done: int) -> None:
        passed = time.monotonic() - self.started
        if self.shown or done >= self.total or passed - self.said < SAY_EVERY:
            return
        self.said = passed
        self.log.print(f"{done} of {self.total} prompts, {passed:.0f} s", style="dim")
