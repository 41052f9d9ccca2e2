"""Check the promises of `specjax.Model` for your own model, on a few random texts.

All decoding relies on these promises. A model that breaks one silently writes a different text. Caches are compared by
their predictions, so any kind of cache is supported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from specjax.analysis.model_probe import CAPACITIES, LENGTHS, LONGEST, PIECE, WIDTH, Pair, Passes
from specjax.arrays.modes import with_standard_modes
from specjax.errors import UsageError
from specjax.trees import operations
from specjax.types import Array, Model, PyTree

TREE = -1, 0, 0, 1, 1, 2  # two children of the root; below the first two more, below the second one
BRANCH = 0, 2, 5  # a path that leaves out siblings
EXACT, ROUNDED = 1e-3, 0.05
"""The largest difference allowed, as a share of the largest logit: in float32, and in shorter dtypes."""


class Promise(NamedTuple):
    """A promise of the model contract, and the deviation of the model from it."""

    name: str
    holds: bool
    largest: float  # largest difference between two logits that should be equal
    where: str  # "row 1, token 2"


class ModelCheck(NamedTuple):
    """The result of `check_model`; true if all promises hold."""

    model: str
    promises: tuple[Promise, ...]  # the checked promises, up to the first broken one
    passed: bool  # all promises hold
    tolerance: float  # largest difference allowed
    sentence: str  # the result in one sentence

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return self.sentence


@with_standard_modes
def check_model(
    model: Model,
    params: PyTree,
    *,
    inputs: PyTree = None,
    reference: Callable[[PyTree, Array], Array] | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> ModelCheck:
    """Check the promises of a model on random texts, and stop at the first broken one.

    Args:
      inputs: conditioning inputs of 3 rows, for models that read inputs.
      reference: `reference(params, tokens[B, T]) -> logits[B, T, V]` of whole texts, such as the forward pass of
        training. Without a reference, a mistake that is the same in every pass is not detected.
      tolerance: largest difference allowed between logits that should be equal. Default: 0.001 of the largest logit,
        or 0.05 of it if the model computes in a dtype shorter than float32.
      seed: random seed of the texts.

    Raises: UsageError if `model` is not a `Model`, or reads fewer than 19 tokens.
    """
    if not isinstance(model, Model):
        raise UsageError(
            f"model must be a specjax.Model, not {type(model).__name__}; for a target call check_model(target.model, "
            "target.params)"
        )
    if model.max_positions < LONGEST:
        raise UsageError(
            f"max_positions of the model is {model.max_positions}, but the check needs texts of {LONGEST} tokens"
        )
    probe = _ModelProbe(model, params, inputs, seed)
    checked: list[Promise] = []
    limit = 0.0 if tolerance is None else tolerance

    def report(passed: bool, sentence: str) -> ModelCheck:
        return ModelCheck(model.name, tuple(checked), passed, limit, sentence)

    try:
        logits, _ = probe.look(probe.filled())
        if np.isnan(logits).any() or not np.isfinite(logits).any(-1).all():
            checked.append(Promise("finite", False, np.inf, ""))
            return report(False, f"{model.name}: its logits are NaN or infinite")
        limit = probe.tolerance(logits) if tolerance is None else tolerance
        for name, words, pairs in probe.promises(reference):
            largest, where = _largest_difference(pairs())
            checked.append(Promise(name, largest <= limit, largest, where))
            if largest > limit:
                detail = f"{words}: their logits differ by {largest:.2g} (allowed: {limit:.2g}) at {where}"
                hint = probe.explain_positions(limit, reference) if name in ABOUT_POSITIONS else ""
                return report(False, f"{model.name}: {detail}{hint}")
    except UsageError as error:  # logits or a cache of another form
        checked.append(Promise("form", False, np.inf, ""))
        return report(False, str(error))
    furthest = max(promise.largest for promise in checked)
    summary = f"keeps all {len(checked)} promises; logits that should be equal differ by {furthest:.1g} at most"
    return report(True, f"{model.name} {summary}")


ABOUT_POSITIONS = "reference", "steps", "prompt", "tree"


class _ModelProbe(Passes):
    """Pairs of outputs that should be equal."""

    def tolerance(self, logits: np.ndarray) -> float:
        """Return the tolerance for a model with such logits."""
        return (ROUNDED if self.is_short() else EXACT) * float(np.abs(logits[np.isfinite(logits)]).max())

    def promises(self, reference) -> Iterator[tuple[str, str, Callable[[], list[Pair]]]]:
        """Yield (name, message if broken, logits that should be equal), the most basic promise first."""
        if reference is not None:
            yield "reference", "a pass gives other logits than `reference`", lambda: self.as_reference(reference)
        yield "causal", "the logits of a token depend on later tokens", self.causal
        yield (
            "steps",
            f"a pass over {WIDTH} tokens gives other logits than {WIDTH} passes over one token each",
            self.steps,
        )
        yield (
            "prompt",
            "reading a prompt in one pass leaves another cache than reading its tokens one by one",
            self.prompt,
        )
        yield "rows", "a row of a batch gives other logits than the row alone", self.rows
        yield "commit", "drafted tokens that were not committed still influence the cache", self.commit
        if self.model.rewind is not None:
            yield "rewind", "tokens that were removed by a rewind still influence the cache", self.rewind
        if self.model.capabilities.trees:
            yield "siblings", "a node of a tree sees nodes that are not its ancestors", self.siblings
            yield "tree", "a node of a tree gives other logits than its path alone", self.tree
            yield "branch", "committing a branch of a tree leaves another cache than reading the same text", self.branch
        yield "pending", "pending tokens are read differently from tokens of the same pass", self.pending
        yield "capacity", "a cache of another capacity gives other logits", self.capacity
        yield "axes", "a row that is put into another batch by `axes` gives other logits", self.moved

    def as_reference(self, reference) -> list[Pair]:
        reference_logits = self.whole(reference, self.joined(WIDTH))
        place = self.lengths[:, None] + np.arange(WIDTH)
        return [(self.look(self.filled())[0], np.take_along_axis(reference_logits, place[:, :, None], 1))]

    def causal(self) -> list[Pair]:
        cache, changed = self.filled(), self.tokens.copy()
        changed[:, PIECE:] = self.others[:, PIECE:]
        return [(self.look(cache, changed)[0][:, :PIECE], self.look(cache)[0][:, :PIECE])]

    def steps(self) -> list[Pair]:
        return [(self.look(self.filled())[0], self.one_by_one()[0])]

    def prompt(self) -> list[Pair]:
        return [self.after(self.one_by_one()[1], WIDTH)]

    def rows(self) -> list[Pair]:
        together, _ = self.look(self.filled())
        alone = [
            self.look(self.filled(rows=slice(b, b + 1)), self.tokens[b : b + 1], self.lengths[b : b + 1])[0]
            for b in range(len(LENGTHS))
        ]
        return [(together, np.concatenate(alone))]

    def commit(self) -> list[Pair]:
        cache, count = self.filled(), np.array([PIECE, 1, 0], np.int32)
        path = np.where(np.arange(WIDTH) < count[:, None], np.arange(WIDTH), -1).astype(np.int32)
        return [self.after(self.committed(cache, self.look(cache)[1], path, count), count)]

    def rewind(self) -> list[Pair]:
        lengths = np.array([5, 1, 0], np.int32)
        short = self.rewound(self.filled(), lengths)
        fresh = self.filled(count=lengths)
        continued = self.committed(short, self.look(short, start=lengths)[1], *_whole_path(WIDTH))
        return [
            (self.look(short, start=lengths)[0], self.look(fresh, start=lengths)[0]),
            self.same(continued, self.joined(WIDTH, start=lengths), lengths + WIDTH),
        ]

    def siblings(self) -> list[Pair]:
        cache, mask = self.filled(), _ancestors()
        pairs = []
        for node in (1, 2):
            changed = self.tokens.copy()
            changed[:, mask[:, node]] = self.others[:, mask[:, node]]
            ours, theirs = (self.look(cache, tokens, mask=mask)[0] for tokens in (changed, self.tokens))
            pairs.append((np.where(mask[:, node, None], theirs, ours), theirs))
        return pairs

    def tree(self) -> list[Pair]:
        cache, mask = self.filled(), _ancestors()
        nodes, _ = self.look(cache, mask=mask)
        pairs = []
        for last in (3, 4, 5):
            path = np.flatnonzero(mask[last])
            alone, _ = self.look(cache, np.concatenate([self.tokens[:, path], self.others[:, PIECE:]], 1))
            expected = nodes.copy()
            expected[:, path] = alone[:, : len(path)]
            pairs.append((nodes, expected))
        return pairs

    def branch(self) -> list[Pair]:
        cache, count = self.filled(), np.array([3, 2, 3], np.int32)
        path = np.broadcast_to(np.array([*BRANCH, -1, -1, -1], np.int32), (3, WIDTH))
        committed = self.committed(cache, self.look(cache, mask=_ancestors())[1], path, count)
        return [self.same(committed, self.joined(count, BRANCH), self.lengths + count)]

    def pending(self) -> list[Pair]:
        """Read the second half of a tree or chain while the first is pending; then commit a path through both."""
        trees = self.model.capabilities.trees
        mask = _ancestors() if trees else np.tril(np.ones((WIDTH, WIDTH), bool))
        path = BRANCH if trees else range(PIECE + 1)
        cache = self.filled()
        at_once, _ = self.look(cache, mask=mask)
        first, previous = self.look(cache, self.tokens[:, :PIECE], mask=mask[:PIECE, :PIECE])
        second, new = self.look(cache, self.tokens[:, PIECE:], mask=mask[PIECE:], earlier=previous)
        both = self.both(previous, new)
        nodes = np.broadcast_to(np.resize(np.array([*path, *[-1] * WIDTH]), WIDTH).astype(np.int32), (3, WIDTH))
        count = np.full(3, len(path), np.int32)
        committed = self.committed(cache, both, nodes, count)
        text = self.joined(count, path)
        return [(np.concatenate([first, second], 1), at_once), self.same(committed, text, self.lengths + count)]

    def capacity(self) -> list[Pair]:
        small, large = (self.look(self.filled(capacity=capacity))[0] for capacity in CAPACITIES)
        return [(small, large)]

    def moved(self) -> list[Pair]:
        batch, reversed_batch = self.filled(), self.filled(np.ascontiguousarray(self.text[:, ::-1]))
        alone = self.filled(rows=slice(1, 2))
        mixed = self.with_row(reversed_batch, alone, 1)
        expected = [self.look(cache)[0][row] for row, cache in enumerate((reversed_batch, batch, reversed_batch))]
        return [(self.look(mixed)[0], np.stack(expected))]

    def explain_positions(self, limit: float, reference) -> str:
        """Describe a mistake in the use of positions, or return an empty string."""
        equal = lambda *pair: _largest_difference([pair])[0] <= limit
        plain, _ = self.look(self.filled())
        steps, _ = self.one_by_one()
        none = 0 * self.lengths
        for shift, words in ((-1, "one too high"), (1, "one too low")):
            if not equal(plain, steps) and equal(plain, self.one_by_one(shift)[0]):
                return f"; a pass over one token counts positions {words}"
            if reference is not None:
                reference_logits = self.whole(reference, self.tokens)
                shifted = [self.look(self.filled(count=none), start=none, shift=by)[0] for by in (0, shift)]
                if [equal(logits, reference_logits) for logits in shifted] == [False, True]:
                    return f"; the model counts positions {words}"
        moved, _ = self.look(self.filled(), shift=1)
        return "; the model ignores `positions`" if np.array_equal(plain, moved) else ""


def _ancestors() -> np.ndarray:
    """Return bool[WIDTH, WIDTH], the ancestor mask of TREE. Every node is its own ancestor."""
    return operations.ancestor_mask(np.array([TREE]))[0]


def _whole_path(width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the path of all nodes of a chain, and its length, for every row."""
    rows = len(LENGTHS)
    return np.broadcast_to(np.arange(width, dtype=np.int32), (rows, width)), np.full(rows, width, np.int32)


def _largest_difference(pairs: list[Pair]) -> tuple[float, str]:
    """Return the largest difference and its place. It is inf where only one of the two is a number."""
    largest, where = 0.0, ""
    for ours, theirs in pairs:
        with np.errstate(invalid="ignore"):
            difference = np.where(ours == theirs, 0.0, np.abs(ours - theirs))
        difference = np.nan_to_num(difference, nan=np.inf).max(-1)  # [B, T]
        if not where or difference.max() > largest:
            row, token = np.unravel_index(np.argmax(difference), difference.shape)
            largest, where = float(difference.max()), f"row {row}, token {token}"
    return largest, where
