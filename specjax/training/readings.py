"""What the target says of texts, read once and kept: later epochs do not run it again.

A head learns from the target's features and last states alone, and these are the same in every epoch. Kept in bfloat16
they are 2 (F + D) bytes a token: of SmolLM2 with three taps 4.6 KB, of an 8B model 33 KB.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.parallel.arrays import gather
from specjax.parallel.fingerprint import digest
from specjax.training.lessons import Text, numbered, pack
from specjax.training.rounds import Reading
from specjax.training.served import on_devices
from specjax.types import Array, Target

if TYPE_CHECKING:
    from specjax.training.learners import Learner

ABOUT, KEPT = "readings.json", "readings.bfloat16"
GIB = 2**30


class Stored(NamedTuple):
    """Of every token of some texts, in their order."""

    values: np.ndarray  # bfloat16[1 + tokens, F + D], the first of no token
    features: int  # F
    dtype: Any  # of what the target gave

    def of(self, columns: Array) -> Reading:
        """Of the tokens with these numbers int32[B, T], as of a lesson."""
        values = jnp.asarray(self.values[np.asarray(columns)]).astype(self.dtype)
        return Reading(values[..., : self.features], values[..., self.features :], None)


class Shelf:
    """A folder where a run keeps what the target says. One that is there already, of the same texts, is used again."""

    def __init__(self, folder: str | Path, gib: float, listen: Callable[[int, int], Any] = lambda done, of: None):
        """gib: the most that it may hold. listen: (tokens read, tokens in all), as they are read."""
        self.folder, self.gib, self.listen = Path(folder), gib, listen

    def read(self, target: Target | None, learner: Learner, texts: Sequence[Text], rows: int, length: int) -> Stored:
        """Of all tokens of the texts up to `length`, `rows` by `length` to a pass.

        Raises: UsageError for a head that reads more of the target, for too many texts, and a folder without room.
        """
        if target is None or learner.reads is None:
            raise UsageError(
                f"what {learner.kind} learns is not a function of the target's states alone, so none can be kept; "
                "leave --keep-states out"
            )
        lessons, columns = pack(texts, rows, length), pack(numbered(texts), rows, length)
        shape = jax.eval_shape(learner.reads, target, lessons[0])
        features, width = shape.features.shape[-1], shape.features.shape[-1] + shape.hidden.shape[-1]
        count = sum(len(text.tokens) for text in texts)
        needed = 2 * count * width / GIB
        if needed > self.gib:
            raise UsageError(
                f"the states of {count} tokens are {needed:.2f} GiB, more than --keep-states {self.gib:g}; give more, "
                "or fewer texts"
            )
        about = {
            "target": target.model.name, "texts": digest([tuple(map(int, text.tokens)) for text in texts]),
            "kind": learner.kind, "config": repr(learner.config), "length": length,
        }  # fmt: skip
        path, known = self.folder / KEPT, self.folder / ABOUT
        try:
            if known.exists() and json.loads(known.read_text(encoding="utf-8")) == about:
                values = np.memmap(path, jnp.bfloat16, "r", shape=(count + 1, width))
                self.listen(count, count)
                return Stored(values, features, shape.hidden.dtype)
            self.folder.mkdir(parents=True, exist_ok=True)
            known.unlink(missing_ok=True)
            values = np.memmap(path, jnp.bfloat16, "w+", shape=(count + 1, width))
            passed, done = jax.jit(learner.reads), 0
            for lesson, numbers in zip(lessons, columns, strict=True):
                said = gather(passed(target, on_devices(target, lesson)))
                values[np.asarray(numbers.tokens)] = np.concatenate([said.features, said.hidden], -1)
                done += int(np.count_nonzero(numbers.tokens))
                self.listen(done, count)
            values.flush()
            known.write_text(json.dumps(about), encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.folder} cannot hold {needed:.2f} GiB of states ({error}); make room") from error
        return Stored(values, features, shape.hidden.dtype)
