"""Observer of the progress of `train_drafter`."""

from __future__ import annotations

from specjax.training.loop.trainer import TrainingProgress


class TrainingObserver:
    """An observer of progress. All methods do nothing by default. Override some of them to display progress."""

    def on_note(self, note: str) -> None:
        """Receive a remark, such as the number of prompts that were left out."""

    def on_responses(self, stage: str, done: int, total: int, tokens: int) -> None:
        """Receive the number of generated responses. Args: stage: "answering" or "writing prompts"."""

    def on_activations(self, done: int, total: int) -> None:
        """Receive the number of tokens whose activations are cached."""

    def on_run(self, name: str) -> None:
        """Receive the name of a training run that begins: "-BUDGET", or an empty string if there is only one run."""

    def on_step(self, progress: TrainingProgress) -> None:
        """Receive the result of a training step."""
