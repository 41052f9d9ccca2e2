"""Cached activations of the target, so that later epochs and other runs do not run the target again.

The loss of a head reads only the target's tapped features and last hidden states. The loss of a draft model reads only
the last hidden states. They are equal in every epoch and for every head with the same taps. In bfloat16 they take
2 (F + D) bytes per token: 4.6 KB for SmolLM2 with three taps, and 33 KB for an 8B model.
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

from specjax.arrays.modes import jit
from specjax.errors import UsageError
from specjax.files.atomic import write_atomic
from specjax.files.homes import in_home
from specjax.files.sizes import GIB, gib
from specjax.files.untrusted import read_json
from specjax.numerics.global_arrays import gather
from specjax.parallel.hosts import check_same
from specjax.persistence.fingerprint import digest, digest_arrays, digest_model
from specjax.training.data.packing import PackedBatch, TrainingText, number_tokens, pack
from specjax.training.measure.acceptance_eval import place_batch
from specjax.training.objectives.unroll import TargetActivations, run_target_without_cache
from specjax.types import Array, Target

if TYPE_CHECKING:
    from specjax.training.objectives.trainables import TrainingObjective

ABOUT, INDEX, VALUES = "activations.json", "activations.jsonl", "activations.bfloat16"


class CachedActivations(NamedTuple):
    """The activations of every token of some texts."""

    values: np.ndarray  # bfloat16[1 + stored tokens, F + D], a memory map; row 0 belongs to padding
    # int64[1 + tokens of the texts], the row of each token, indexed by its number from `number_tokens`
    rows: np.ndarray
    feature_size: int  # F
    dtype: Any  # dtype of the target's outputs

    def lookup(self, token_numbers: Array) -> TargetActivations:
        """Return the activations of a packed batch whose tokens have these numbers, int32[B, T]."""
        values = jnp.asarray(self.values[self.rows[np.asarray(token_numbers)]]).astype(self.dtype)
        return TargetActivations(values[..., : self.feature_size], values[..., self.feature_size :], None)


class ActivationCache:
    """A folder of activations that several runs share. The target does not run again on texts that it holds.

    `activations.json` identifies the target and the taps. `activations.jsonl` lists the texts in the order of
    `activations.bfloat16`. Each text is added when it is computed, so an interrupted run continues from there. Runs on
    one machine wait for each other. All hosts must see the folder.
    """

    def __init__(
        self, folder: str | Path, gib: float, on_progress: Callable[[int, int], Any] = lambda done, total: None
    ):
        """Use a folder. Args: gib: its size limit. on_progress: callback (stored tokens, all tokens)."""
        self.folder, self.gib, self.on_progress = in_home(folder), gib, on_progress

    def check(self, target: Target | None, objective: TrainingObjective) -> dict[str, Any]:
        """Return the identity of the activations that an objective reads, as the folder stores it.

        Raises: UsageError for an objective that reads more of the target. It is also raised for a folder that cannot be
          created, or that holds activations of another target or other taps.
        """
        if target is None or objective.taps is None:
            raise UsageError(
                f"the loss of {objective.kind} is not a function of the target's activations alone, so they cannot be "
                "cached; leave the cache out"
            )
        identity = {"target": digest_model(target), "taps": list(objective.taps)}
        with self._explain_errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._compare(identity)
        return identity

    @contextlib.contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Convert errors of the file system to a UsageError."""
        try:
            yield
        except OSError as error:
            raise UsageError(
                f"{self.folder} cannot hold the activations of these texts ({error}); make room, or give another folder"
            ) from error

    def _compare(self, identity: dict[str, Any]) -> None:
        """Raise a UsageError if the folder holds activations with another identity."""
        path = self.folder / ABOUT
        if not path.exists():
            return
        try:
            stored = read_json(path)
            different = [name for name, value in identity.items() if stored.get(name) != value]
        except (ValueError, AttributeError):
            different = [ABOUT]
        if different:
            raise UsageError(
                f"{self.folder} holds activations with another {different[0]}; give another folder, or delete it"
            )

    def read(
        self, target: Target | None, objective: TrainingObjective, texts: Sequence[TrainingText], rows: int, length: int
    ) -> CachedActivations:
        """Return the activations of all texts up to `length` tokens, and compute those that the folder lacks.

        Args: rows, length: shape of the target's passes.

        Raises: UsageError in the cases of `check`, for texts that exceed the size limit, and for a full disk.
        """
        identity = self.check(target, objective)
        assert target is not None and objective.taps is not None
        cut = [text.cut(length) for text in texts]
        names = [_digest_text(text) for text in cut]
        compute = functools.partial(run_target_without_cache, taps=objective.taps)
        shapes: Any = [jax.ShapeDtypeStruct((rows, length), dtype) for dtype in (jnp.int32, jnp.int32, jnp.bool)]
        shape = jax.eval_shape(compute, target, PackedBatch(*shapes))
        feature_size, width = shape.features.shape[-1], shape.features.shape[-1] + shape.hidden.shape[-1]
        with self._explain_errors(), _lock(self.folder):
            if not jax.process_index():
                self._compare(identity)  # another run may have created it since `check`
                self._prepare(identity, width)
            check_same("prepared", "activation folders")  # the other hosts wait
            begins, end = self._read_index()
            new = {name: text for name, text in zip(names, cut, strict=True) if name not in begins and text.tokens}
            check_same((end, list(new)), f"activations in {self.folder}, which all hosts have to see,")
            if new:
                self._check_room(end, sum(len(text.tokens) for text in new.values()), width)
                jitted = jit(compute)
                run = lambda packed: gather(jitted(target, place_batch(target, packed)))
                self._append(run, new, end, (rows, length))
                begins, end = self._read_index()
            else:
                self.on_progress(end - 1, end - 1)
            values = np.memmap(self.folder / VALUES, jnp.bfloat16, "r", shape=(end, width))
        locations = _locate_tokens(texts, cut, [begins.get(name, 0) for name in names])  # empty texts have no rows: 0
        return CachedActivations(values, locations, feature_size, shape.hidden.dtype)

    def _prepare(self, identity: dict[str, Any], width: int) -> None:
        """Create the files, or remove the incomplete end of an interrupted run."""
        path, index, values = self.folder / ABOUT, self.folder / INDEX, self.folder / VALUES
        if not path.exists():
            foreign = [file.name for file in (index, values) if file.exists()]
            if foreign:
                raise UsageError(
                    f"{self.folder} has the file {foreign[0]} without {ABOUT}, so it may be of another program; give "
                    "another folder"
                )
            write_atomic(path, json.dumps(identity).encode())
        row_bytes = 2 * width
        rows = values.stat().st_size // row_bytes if values.exists() else 0
        if not rows:
            write_atomic(values, bytes(row_bytes))
            rows = 1
        complete, end = [], 1
        for line in index.read_text(encoding="utf-8").split("\n") if index.exists() else ():
            tokens = _parse_token_count(line)
            if tokens is None or end + tokens > rows:
                break
            complete.append(line + "\n")
            end += tokens
        write_atomic(index, "".join(complete).encode())
        os.truncate(values, row_bytes * end)

    def _read_index(self) -> tuple[dict[str, int], int]:
        """Return (first row of each stored text, first free row)."""
        entries = [json.loads(line) for line in (self.folder / INDEX).read_text(encoding="utf-8").splitlines()]
        ends = np.cumsum([1, *(entry["tokens"] for entry in entries)]).tolist()
        return {entry["text"]: begin for entry, begin in zip(entries, ends, strict=False)}, ends[-1]

    def _check_room(self, end: int, tokens: int, width: int) -> None:
        """Raise a UsageError if `tokens` more tokens exceed the size limit."""
        size = 2 * (end + tokens) * width
        if size > self.gib * GIB:
            stored = f", with the {end - 1} stored ones," if end > 1 else ""
            raise UsageError(
                f"the activations of {tokens} tokens{stored} take {gib(size)}, more than the limit of "
                f"{self.gib:g} GiB; raise it, or give fewer texts"
            )

    def _append(
        self, run: Callable[[PackedBatch], Any], new: dict[str, TrainingText], end: int, shape: tuple[int, int]
    ) -> None:
        """Compute the activations of the texts `new`, by name, and append them.

        Args: end: first free row. shape: rows and length of a pass.
        """
        texts = list(new.values())
        entries = iter([(name, len(text.tokens)) for name, text in new.items()])
        total = sum(len(text.tokens) for text in texts)
        done = 0
        for packed, numbers in zip(pack(texts, *shape), pack(number_tokens(texts), *shape), strict=True):
            activations = run(packed)
            number = np.ravel(numbers.tokens)
            order = np.argsort(number, kind="stable")  # sorts tokens by text; padding comes first
            order = order[np.count_nonzero(number == 0) :]
            written, done = done, done + len(order)
            if not jax.process_index():
                values = np.concatenate([activations.features, activations.hidden], -1).reshape(number.size, -1)[order]
                with (self.folder / VALUES).open("ab") as file:
                    file.write(values.astype(jnp.bfloat16).tobytes())
                with (self.folder / INDEX).open("a", encoding="utf-8") as index:
                    while written < done:
                        name, size = next(entries)
                        index.write(json.dumps({"text": name, "tokens": size}) + "\n")
                        written += size
            self.on_progress(end - 1 + done, end - 1 + total)
        check_same("read", "activations")  # the other hosts wait for the files of the first


def _digest_text(text: TrainingText) -> str:
    """Return the name of a text in the index."""
    tokens = tuple(map(int, text.tokens))
    return digest(tokens if text.inputs is None else (tokens, digest_arrays(text.inputs)))


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Keep other runs on this machine from writing to the folder."""
    try:
        import fcntl
    except ImportError:  # Windows has no such locks
        yield
        return
    with (folder / "lock").open("a") as file:  # the content of an existing file stays
        if not jax.process_index():
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _parse_token_count(line: str) -> int | None:
    """Return the token count of a line of the index, or None for an invalid line."""
    try:
        entry = json.loads(line)
        return entry["tokens"] if isinstance(entry["text"], str) and entry["tokens"] >= 0 else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _locate_tokens(texts: Sequence[TrainingText], cut: Sequence[TrainingText], begins: Sequence[int]) -> np.ndarray:
    """Return `CachedActivations.rows`, given the first row of each text."""
    rows = np.zeros(1 + sum(len(text.tokens) for text in texts), np.int64)
    at = 1
    for text, part, begin in zip(texts, cut, begins, strict=True):
        rows[at : at + len(part.tokens)] = begin + np.arange(len(part.tokens))
        at += len(text.tokens)
    return rows
