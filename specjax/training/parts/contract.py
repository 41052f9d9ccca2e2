"""Contract of trained parts of methods: the inputs of their training, and its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.catalog import Option
from specjax.diffusion.types import Denoiser
from specjax.errors import UsageError
from specjax.training.data.judged_files import JudgedResponse
from specjax.training.data.packing import TrainingText
from specjax.types import Array, Target

Data = Literal["responses", "prompts", "judged"]


@dataclass(frozen=True)
class PartJob:
    """The inputs of a training run."""

    target: Target
    folder: Path
    options: Mapping[str, Any]  # of the entry, all of them
    texts: Sequence[TrainingText] = ()  # responses, or texts of a file
    prompts: Sequence[Sequence[int]] = ()
    judged: Sequence[JudgedResponse] = ()
    draft: Target | None = None
    denoiser: Denoiser | None = None
    tokenizer: Any = None  # saved with a changed model: a folder or a tokenizer
    inputs: Mapping[str, Any] = field(default_factory=dict)  # arguments that the caller makes from words and models
    max_new_tokens: int = 256
    temperature: float = 0.0
    batch_size: int = 16  # texts that are written together
    rows: int = 4
    length: int = 512
    epochs: int = 1
    seed: int = 0
    learning_rate: float | None = None

    @property
    def rate(self) -> dict[str, Any]:
        """Return the learning rate as an argument, or nothing."""
        return {} if self.learning_rate is None else {"learning_rate": self.learning_rate}

    def batch(self) -> tuple[Array, Array, Array]:
        """Return (tokens int32[N, T], prompt lengths int32[N], lengths int32[N]) of all texts, cut at `length`."""
        cut = [text.cut(self.length) for text in self.texts]
        if not cut:
            raise UsageError("there are no texts to train on; give more prompts, or a larger `length`")
        size = max(len(text.tokens) for text in cut)
        rows = np.array([[*text.tokens, *[0] * (size - len(text.tokens))] for text in cut], np.int32)
        lengths = (np.array([number(text) for text in cut], np.int32) for number in _LENGTHS)
        return (jnp.asarray(rows), *map(jnp.asarray, lengths))  # type: ignore[return-value]


_LENGTHS = (lambda text: text.prompt_length, lambda text: len(text.tokens))


LOOP_SETTINGS = frozenset({"rows", "epochs", "learning_rate"})
"""Fields of a job about the training loop, which not all parts read."""

_OWN_PROMPTS = frozenset({"own_prompts", "answers", "batch_size", "max_new_tokens"})
_DATA_FLAGS: Mapping[str, frozenset[str]] = {
    "responses": _OWN_PROMPTS | {"temperature"}, "prompts": _OWN_PROMPTS, "judged": frozenset(),
}  # fmt: skip


class PartResult(NamedTuple):
    """A written part."""

    flags: str  # of `specjax generate`, which use it
    numbers: dict[str, float]  # results of the training, by name


class PartKind(NamedTuple):
    """A kind of part that can be trained."""

    summary: str
    train: Callable[[PartJob], PartResult]
    options: tuple[Option, ...] = ()
    data: Data = "responses"
    takes_draft: bool = False
    denoises: bool = False  # True: the target is a diffusion model
    changes_target: bool = False  # True: the weights of the target are trained
    settings: frozenset[str] = frozenset({"learning_rate"})  # fields of `PartJob` that the training reads

    @property
    def flags(self) -> frozenset[str]:
        """Return the flags of `specjax train` that the part reads, besides those of all parts."""
        return _DATA_FLAGS[self.data] | self.settings


STEPS = Option("steps", "int", 200, "optimisation steps over all texts")


def describe_losses(losses: Array | np.ndarray) -> dict[str, float]:
    """Return the first and the last loss by name; nothing without steps.

    Raises: UsageError for a last loss that is not finite. Call it before the result is written.
    """
    values = np.asarray(losses)
    if not np.isfinite(values[-1:]).all():
        raise UsageError(f"the loss became {values[-1]}, and nothing is written; train with a smaller learning rate")
    return {"first_loss": float(values[0]), "last_loss": float(values[-1])} if len(values) else {}
