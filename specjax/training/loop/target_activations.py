"""What the target says of texts, read once and kept: later epochs do not run it again, and other runs neither.

A head learns from the target's features and last states alone, a draft model from the last states, and these are the
same in every epoch, and for every head with the same taps. Kept in bfloat16 they are 2 (F + D) bytes a token: of
SmolLM2 with three taps 4.6 KB, of an 8B model 33 KB.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.files.atomic import write_atomic
from specjax.numerics.global_arrays import gather
from specjax.parallel.hosts import check_same
from specjax.persistence.fingerprint import digest, of_model
from specjax.training.data.packing import Lesson, Text, numbered, pack
from specjax.training.measure.acceptance_eval import on_devices
from specjax.training.objectives.unroll import Reading, states
from specjax.types import Array, Target

if TYPE_CHECKING:
    from specjax.training.objectives.trainables import Learner

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
    text is added when it has been read, so that a reading that was ended goes on. Another run waits until one has read
    all of its texts. Of several hosts all see the folder.
    """

    def __init__(self, folder: str | Path, gib: float, listen: Callable[[int, int], Any] = lambda done, of: None):
        """gib: the most that it may hold. listen: (tokens read, tokens in all), as they are read."""
        self.folder, self.gib, self.listen = Path(folder), gib, listen

    def check(self, target: Target | None, learner: Learner) -> dict[str, Any]:
        """Whose states a head learns from, as the folder has it or is going to.

        Raises: UsageError for a head that reads more of the target, for the states of another target or of other taps,
          and for a folder that cannot be.
        """
        if target is None or learner.taps is None:
            raise UsageError(
                f"what {learner.kind} learns is not a function of the target's states alone, so none can be kept; "
                "leave --keep-states out"
            )
        about = {"target": of_model(target), "taps": list(learner.taps)}
        with self._in_words():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._compare(about)
        return about

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        """Raises: UsageError in place of what a folder cannot do."""
        try:
            yield
        except OSError as error:
            raise UsageError(
                f"{self.folder} cannot hold the states of these texts ({error}); make room, or give another folder"
            ) from error

    def _compare(self, about: dict[str, Any]) -> None:
        """Raises: UsageError where the folder has others' states."""
        path = self.folder / ABOUT
        if not path.exists():
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            others = [name for name, value in about.items() if found.get(name) != value]
        except (ValueError, AttributeError):
            others = [ABOUT]
        if others:
            raise UsageError(f"{self.folder} holds states with another {others[0]}; give another folder, or delete it")

    def read(self, target: Target | None, learner: Learner, texts: Sequence[Text], rows: int, length: int) -> Stored:
        """Of all tokens of the texts up to `length`, `rows` by `length` to a pass.

        Raises: UsageError as `check`, for too many texts, and for a folder without room.
        """
        about = self.check(target, learner)
        assert target is not None and learner.taps is not None
        cut = [Text(text.tokens[:length], min(text.answer, length)) for text in texts]
        names = [digest(tuple(map(int, text.tokens))) for text in cut]
        said = functools.partial(states, taps=learner.taps)
        shapes: Any = [jax.ShapeDtypeStruct((rows, length), dtype) for dtype in (jnp.int32, jnp.int32, jnp.bool)]
        shape = jax.eval_shape(said, target, Lesson(*shapes))
        features, width = shape.features.shape[-1], shape.features.shape[-1] + shape.hidden.shape[-1]
        with self._in_words(), _alone(self.folder):
            if not jax.process_index():
                self._compare(about)  # another run may have been first
                self._prepare(about, width)
            check_same("prepared", "folders of states")  # the others wait
            known, end = self._known()
            new = {name: text for name, text in zip(names, cut, strict=True) if name not in known and text.tokens}
            check_same((end, list(new)), f"states in {self.folder}, which all have to see,")
            if new:
                self._check_room(end, sum(len(text.tokens) for text in new.values()), width)
                self._add(target, said, new, end, rows, length)
                known, end = self._known()
            else:
                self.listen(end - 1, end - 1)
            values = np.memmap(self.folder / KEPT, jnp.bfloat16, "r", shape=(end, width))
        places = _places(texts, cut, [known.get(name, 0) for name in names])  # one without tokens is nowhere
        return Stored(values, places, features, shape.hidden.dtype)

    def _prepare(self, about: dict[str, Any], width: int) -> None:
        """Make the folder, or take off what a run that was ended has half written."""
        path, index, kept = self.folder / ABOUT, self.folder / INDEX, self.folder / KEPT
        if not path.exists():
            index.unlink(missing_ok=True)
            write_atomic(path, json.dumps(about).encode())
        size = 2 * width
        there = kept.stat().st_size // size if kept.exists() else 0
        if not there:
            write_atomic(kept, bytes(size))
            there = 1
        whole, end = [], 1
        for line in index.read_text(encoding="utf-8").split("\n") if index.exists() else ():
            tokens = _tokens(line)
            if tokens is None or end + tokens > there:
                break
            whole.append(line + "\n")
            end += tokens
        write_atomic(index, "".join(whole).encode())
        os.truncate(kept, size * end)

    def _known(self) -> tuple[dict[str, int], int]:
        """(where each text that is there begins, where the next one would)."""
        entries = [json.loads(line) for line in (self.folder / INDEX).read_text(encoding="utf-8").splitlines()]
        ends = np.cumsum([1, *(entry["tokens"] for entry in entries)]).tolist()
        return {entry["text"]: begin for entry, begin in zip(entries, ends, strict=False)}, ends[-1]

    def _check_room(self, end: int, more: int, width: int) -> None:
        needed = 2 * (end + more) * width / GIB
        if needed > self.gib:
            beside = f", with the {end - 1} that are there," if end > 1 else ""
            raise UsageError(
                f"the states of {more} tokens{beside} are {needed:.2f} GiB, more than --keep-states {self.gib:g}; give "
                "more, or fewer texts"
            )

    def _add(
        self, target: Target, said: Callable[..., Reading], new: dict[str, Text], end: int, rows: int, length: int
    ) -> None:
        """Read texts, by name, behind what is there."""
        texts, passed = list(new.values()), jax.jit(said)
        entries = iter([(name, len(text.tokens)) for name, text in new.items()])
        total = sum(len(text.tokens) for text in texts)
        done = 0
        for lesson, numbers in zip(pack(texts, rows, length), pack(numbered(texts), rows, length), strict=True):
            found = gather(passed(target, on_devices(target, lesson)))
            number = np.ravel(numbers.tokens)
            order = np.argsort(number, kind="stable")  # as the texts have them, behind those that are no tokens
            order = order[np.count_nonzero(number == 0) :]
            begun, done = done, done + len(order)
            if not jax.process_index():
                values = np.concatenate([found.features, found.hidden], -1).reshape(number.size, -1)[order]
                with (self.folder / KEPT).open("ab") as file:
                    file.write(values.astype(jnp.bfloat16).tobytes())
                with (self.folder / INDEX).open("a", encoding="utf-8") as index:
                    while begun < done:
                        name, size = next(entries)
                        index.write(json.dumps({"text": name, "tokens": size}) + "\n")
                        begun += size
            self.listen(end - 1 + done, end - 1 + total)
        check_same("read", "states")  # the others wait for what the first host has written


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other run on this machine reads into the folder, which is there, meanwhile."""
    try:
        import fcntl
    except ImportError:  # not on this system
        yield
        return
    with (folder / "lock").open("w") as file:
        if not jax.process_index():
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _tokens(line: str) -> int | None:
    """Of a line of the index; None: it is none."""
    try:
        entry = json.loads(line)
        return entry["tokens"] if isinstance(entry["text"], str) and entry["tokens"] >= 0 else None
    except (ValueError, KeyError, TypeError):
        return None


def _places(texts: Sequence[Text], cut: Sequence[Text], begins: Sequence[int]) -> np.ndarray:
    """`Stored.places`."""
    places = np.zeros(1 + sum(len(text.tokens) for text in texts), np.int64)
    at = 1
    for text, kept, begin in zip(texts, cut, begins, strict=True):
        places[at : at + len(kept.tokens)] = begin + np.arange(len(kept.tokens))
        at += len(text.tokens)
    return places
