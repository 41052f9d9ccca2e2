"""What the target says of texts, read once and kept: later epochs do not run it again, and other runs neither.

A head learns from the target's features and last states alone, and these are the same in every epoch, and for every
head with the same taps. Kept in bfloat16 they are 2 (F + D) bytes a token: of SmolLM2 with three taps 4.6 KB, of an 8B
model 33 KB.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.parallel.arrays import gather
from specjax.parallel.fingerprint import digest, of_model
from specjax.parallel.hosts import check_same
from specjax.training.lessons import Text, numbered, pack
from specjax.training.rounds import Reading, states
from specjax.training.served import on_devices
from specjax.types import Array, Target

if TYPE_CHECKING:
    from specjax.training.learners import Learner

ABOUT, INDEX, KEPT = "readings.json", "readings.jsonl", "readings.bfloat16"
GIB = 2**30


class Stored(NamedTuple):
    """Of every token of some texts."""

    values: np.ndarray  # bfloat16[1 + tokens, F + D], the first of no token
    places: (
        np.ndarray
    )  # int64[1 + tokens of the texts]: where those of a token are, by its number among all (`numbered`)
    features: int  # F
    dtype: Any  # of what the target gave

    def of(self, columns: Array) -> Reading:
        """Of the tokens with these numbers int32[B, T], as of a lesson."""
        values = jnp.asarray(self.values[self.places[np.asarray(columns)]]).astype(self.dtype)
        return Reading(values[..., : self.features], values[..., self.features :], None)


class Shelf:
    """A folder where runs keep what the target says. Texts that are there already are not read again.

    `readings.json` says whose states they are, `readings.jsonl` which texts', in the order of `readings.bfloat16`. A
    text is added when it has been read, so that a reading that was ended goes on.
    """

    def __init__(self, folder: str | Path, gib: float, listen: Callable[[int, int], Any] = lambda done, of: None):
        """gib: the most that it may hold. listen: (tokens read, tokens in all), as they are read."""
        self.folder, self.gib, self.listen = Path(folder), gib, listen

    def read(self, target: Target | None, learner: Learner, texts: Sequence[Text], rows: int, length: int) -> Stored:
        """Of all tokens of the texts up to `length`, `rows` by `length` to a pass.

        Raises: UsageError for a head that reads more of the target, for too many texts, a folder with the states of
          another target or of other taps, and one without room.
        """
        if target is None or learner.taps is None:
            raise UsageError(
                f"what {learner.kind} learns is not a function of the target's states alone, so none can be kept; "
                "leave --keep-states out"
            )
        cut = [Text(text.tokens[:length], min(text.answer, length)) for text in texts]
        names = [digest(tuple(map(int, text.tokens))) for text in cut]
        said = functools.partial(states, taps=learner.taps)
        shape = jax.eval_shape(said, target, pack(cut[:1], rows, length)[0])
        width = shape.features.shape[-1] + shape.hidden.shape[-1]
        about = {
            "target": [target.model.name, of_model(target)], "taps": list(learner.taps), "width": width,
            "dtype": str(shape.hidden.dtype),
        }  # fmt: skip
        try:
            known, end = self._known(about)
            new = {name: text for name, text in zip(names, cut, strict=True) if name not in known}
            whole = end + sum(len(text.tokens) for text in new.values())
            needed = 2 * whole * width / GIB
            if needed > self.gib:
                raise UsageError(
                    f"the states of {whole - 1} tokens are {needed:.2f} GiB, more than --keep-states {self.gib:g}; "
                    "give more, or fewer texts"
                )
            if new:
                self._add(target, said, new, end, (whole, width), rows, length)
                known, _ = self._known(about)
            else:
                self.listen(end - 1, end - 1)
            values = np.memmap(self.folder / KEPT, jnp.bfloat16, "r", shape=(whole, width))
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.folder} cannot hold the states of these texts ({error}); make room") from error
        return Stored(
            values, _places(texts, cut, [known[name] for name in names]), shape.features.shape[-1], shape.hidden.dtype
        )

    def _known(self, about: dict[str, Any]) -> tuple[dict[str, int], int]:
        """(where each text that is there begins, where the next one would). Raises: UsageError for others' states."""
        path, index = self.folder / ABOUT, self.folder / INDEX
        self.folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            if not jax.process_index():
                index.unlink(missing_ok=True)
                path.write_text(json.dumps(about), encoding="utf-8")
            return {}, 1
        found = json.loads(path.read_text(encoding="utf-8"))
        others = [name for name, value in about.items() if found.get(name) != value]
        if others:
            raise UsageError(f"{self.folder} holds states with another {others[0]}; give another folder, or delete it")
        *lines, last = (index.read_text(encoding="utf-8") if index.exists() else "").split("\n")
        if last and not jax.process_index():  # cut off
            index.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        entries = list(map(json.loads, lines))
        ends = np.cumsum([1, *(entry["tokens"] for entry in entries)]).tolist()
        return {entry["text"]: begin for entry, begin in zip(entries, ends, strict=False)}, ends[-1]

    def _add(
        self, target: Target, said: Callable[..., Reading], new: dict[str, Text], end: int, shape: tuple[int, int],
        rows: int, length: int,
    ) -> None:  # fmt: skip
        """Read texts, by name, behind what is there."""
        texts, first = list(new.values()), not jax.process_index()
        ends = np.cumsum([len(text.tokens) for text in texts])
        entries = [json.dumps({"text": name, "tokens": len(text.tokens)}) + "\n" for name, text in new.items()]
        path, passed, done = self.folder / KEPT, jax.jit(said), 0
        values = np.memmap(path, jnp.bfloat16, "r+" if path.exists() else "w+", shape=shape) if first else None
        lessons, columns = pack(texts, rows, length), pack(numbered(texts), rows, length)
        for lesson, numbers in zip(lessons, columns, strict=True):
            found = gather(passed(target, on_devices(target, lesson)))
            number = np.asarray(numbers.tokens)
            if values is not None:
                values[np.where(number > 0, end - 1 + number, 0)] = np.concatenate([found.features, found.hidden], -1)
                values.flush()
                with (self.folder / INDEX).open("a", encoding="utf-8") as index:
                    before, done = done, int(np.searchsorted(ends, number.max(), "right"))
                    index.writelines(entries[before:done])
            self.listen(end - 1 + int(number.max()), shape[0] - 1)
        check_same("read", "states")  # the others wait for what the first host has written


def _places(texts: Sequence[Text], cut: Sequence[Text], begins: Sequence[int]) -> np.ndarray:
    """`Stored.places`."""
    places = np.zeros(1 + sum(len(text.tokens) for text in texts), np.int64)
    at = 1
    for text, kept, begin in zip(texts, cut, begins, strict=True):
        places[at : at + len(kept.tokens)] = begin + np.arange(len(kept.tokens))
        at += len(text.tokens)
    return places
