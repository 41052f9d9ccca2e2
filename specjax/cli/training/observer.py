"""Progress of `specjax train` on the terminal."""

from __future__ import annotations

import time

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specjax.cli.output.console import Console
from specjax.cli.training.setting_flags import name_flags
from specjax.training.loop.trainer import TrainingProgress
from specjax.training.observer import TrainingObserver


class ConsoleObserver(TrainingObserver):
    """An observer that shows progress bars and prints measurements."""

    def __init__(self, log: Console):
        self.log = log
        self._bar: Progress | None = None
        self._title, self._started, self._loss = "", 0.0, ""

    def on_note(self, note: str) -> None:
        self.close()
        self.log.print(name_flags(note), style="dim", soft_wrap=True)

    def on_responses(self, stage: str, done: int, total: int, tokens: int) -> None:
        seconds = time.perf_counter() - self._started
        self._update(stage, done, total, f"{tokens / seconds:.0f} tokens/s" if done else "")
        if done == total:
            self.close()
            self.log.print(f"{stage}: {total} prompts, {tokens} tokens, {seconds:.0f} s", style="dim")

    def on_run(self, name: str) -> None:
        self.close()

    def on_activations(self, done: int, total: int) -> None:
        self._update("target", done, total, "tokens read by the target")
        if done == total:
            self.close()

    def on_step(self, progress: TrainingProgress) -> None:
        loss = "" if progress.loss is None else f"loss {progress.loss:.3f}"
        rate = ""
        if loss:
            speed = progress.tokens / max(progress.seconds, 1e-9)
            rate = f"{loss}  first draft {progress.accuracy[0]:.0%}  {speed:.0f} tokens/s"
        self._update("training", progress.step, progress.steps, rate)
        measured = progress.measured
        if measured is not None:
            where = f"step {progress.step}: {loss}" if loss else "at the start"
            best = ", the best so far" if progress.best else ""
            line = f"{where}, {measured.per_pass:.3f} tokens per pass, first draft {measured.first:.1%}{best}"
            self.log.print(line, style="dim")
        if progress.step == progress.steps:
            self.close()

    def _update(self, title: str, done: int, total: int, rate: str) -> None:
        if self._bar is None or self._title != title:
            self.close()
            columns = TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self.log, transient=True)
            self._bar.start()
            self._bar.add_task("", total=total, rate=rate)
            self._title, self._started = title, time.perf_counter()
        self._bar.update(self._bar.task_ids[0], total=total, completed=done, rate=rate)

    def close(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = None
