"""Check the promises of `specjax.Model` for your own model, on a few random texts.

All decoding relies on these promises. A model that breaks one silently writes a different text. Caches are compared by
their predictions, so any kind of cache is supported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from specjax.analysis.model_probe import CAPACITIES, LENGTHS, LONGEST, PIECE, WIDTH, Pair, Passes
from specjax.errors import UsageError
from specjax.trees import operations
from specjax.types import Array, Model, PyTree

TREE = -1, 0, 0, 1, 1, 2  # two children of the root; below the first two more, below the second one
BRANCH = 0, 2, 5  # a path that leaves out siblings
EXACT, ROUNDED = 1e-3, 0.05
"""The largest difference allowed, as a share of the largest logit: in float32, and in shorter dtypes."""


class Promise(NamedTuple):
    """A promise, and the model's deviation from it."""

    name: str
    is_kept: bool
    largest: float  # difference between two logits that should be equal
    where: str  # "row 1, token 2"


class ModelCheck(NamedTuple):
    """The result of `check_model`; true if all promises hold."""

    model: str
    promises: tuple[Promise, ...]  # those that were asked for, up to the first that is broken
    is_kept: bool  # all of them
    tolerance: float  # largest difference allowed
    sentence: str  # what is wrong, or that nothing is

    def __bool__(self) -> bool:
        return self.is_kept

    def __str__(self) -> str:
        return self.sentence


def check_model(
    model: Model,
    params: PyTree,
    *,
    inputs: PyTree = None,
    reference: Callable[[PyTree, Array], Array] | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> ModelCheck:
    """Ask a model for its promises, and stop at the first that it breaks.

    Args:
      inputs: what its texts are conditioned on, for 3 rows, of a model that reads some.
      reference: `reference(params, tokens[B, T]) -> logits[B, T, V]` of whole texts, such as the forward pass that it
        was trained with. Without one, nothing is known of a mistake that is the same in every pass.
      tolerance: how far two logits may be apart that should be equal. Default: 0.001 of the largest logit, and 0.05 of
        it where something in the model is of a dtype shorter than float32.
      seed: of the texts.

    Raises: UsageError for what is no `Model`, and one that reads less than 19 tokens.
    """
    if not isinstance(model, Model):
        raise UsageError(
            f"model must be a specjax.Model, not {type(model).__name__}; of a target: check_model(target.model, "
            "target.params)"
        )
    if model.max_positions < LONGEST:
        raise UsageError(f"max_positions of the model is {model.max_positions}, and the check has texts of {LONGEST}")
    ask = _ModelProbe(model, params, inputs, seed)
    result: list[Promise] = []
    limit = 0.0 if tolerance is None else tolerance

    def check(is_kept: bool, sentence: str) -> ModelCheck:
        return ModelCheck(model.name, tuple(result), is_kept, limit, sentence)

    try:
        logits, _ = ask.look(ask.filled())
        if np.isnan(logits).any() or not np.isfinite(logits).any(-1).all():
            result.append(Promise("finite", False, np.inf, ""))
            return check(False, f"{model.name}: its logits are not numbers")
        limit = ask.tolerance(logits) if tolerance is None else tolerance
        for name, words, pairs in ask.promises(reference):
            largest, where = _largest_difference(pairs())
            result.append(Promise(name, largest <= limit, largest, where))
            if largest > limit:
                output = f"{words}: their logits differ by {largest:.2g} (allowed: {limit:.2g}) at {where}"
                notice = ask.notice_of_positions(limit, reference) if name in ABOUT_POSITIONS else ""
                return check(False, f"{model.name}: {output}{notice}")
    except UsageError as error:  # logits or a memory of another form
        result.append(Promise("form", False, np.inf, ""))
        return check(False, str(error))
    furthest = max(promise.largest for promise in result)
    output = f"keeps all {len(result)} promises; logits that should be equal differ by {furthest:.1g} at most"
    return check(True, f"{model.name} {output}")


ABOUT_POSITIONS = "reference", "steps", "prompt", "tree"


class _ModelProbe(Passes):
    """Pairs of outputs that should be equal."""

    def tolerance(self, logits: np.ndarray) -> float:
        """Return the tolerance for a model with such logits."""
        return (ROUNDED if self.is_short() else EXACT) * float(np.abs(logits[np.isfinite(logits)]).max())

    def promises(self, reference) -> Iterator[tuple[str, str, Callable[[], list[Pair]]]]:
        """(name, what is said where it is broken, the logits that should be equal), the plainest first."""
        if reference is not None:
            yield "reference", "a pass has other logits than `reference`", lambda: self.as_reference(reference)
        yield "causal", "a token has other logits if those behind it are others", self.causal
        yield "steps", f"a pass over {WIDTH} tokens has other logits than {WIDTH} passes over one", self.steps
        yield "prompt", "a prompt read at once leaves another memory than the same tokens read one by one", self.prompt
        yield "rows", "a row of a batch has other logits than the row alone", self.rows
        yield "commit", "what was drafted and not committed is not forgotten", self.commit
        if self.model.rewind is not None:
            yield "rewind", "what a rewind takes back is not forgotten", self.rewind
        if self.model.capabilities.trees:
            yield "siblings", "a node of a tree sees nodes that are not above it", self.siblings
            yield "tree", "a node of a tree has other logits than its path alone", self.tree
            yield "branch", "a branch of a tree leaves another memory than the same text", self.branch
        yield "pending", "tokens that are pending are read otherwise than in one pass", self.pending
        yield "capacity", "a cache of another capacity gives other logits", self.capacity
        yield "axes", "a row put into another batch, by `axes`, is another text there", self.moved

    def as_reference(self, reference) -> list[Pair]:
        complete = self.whole(reference, self.joined(WIDTH))
        place = self.lengths[:, None] + np.arange(WIDTH)
        return [(self.look(self.filled())[0], np.take_along_axis(complete, place[:, :, None], 1))]

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
        retained = np.array([5, 1, 0], np.int32)
        short = self.rewound(self.filled(), retained)
        again = self.filled(count=retained)
        goes_on = self.committed(short, self.look(short, start=retained)[1], *_all_of(WIDTH))
        return [
            (self.look(short, start=retained)[0], self.look(again, start=retained)[0]),
            self.same(goes_on, self.joined(WIDTH, start=retained), retained + WIDTH),
        ]

    def siblings(self) -> list[Pair]:
        cache, above = self.filled(), _above()
        pairs = []
        for node in (1, 2):
            changed = self.tokens.copy()
            changed[:, above[:, node]] = self.others[:, above[:, node]]
            ours, theirs = (self.look(cache, tokens, mask=above)[0] for tokens in (changed, self.tokens))
            pairs.append((np.where(above[:, node, None], theirs, ours), theirs))
        return pairs

    def tree(self) -> list[Pair]:
        cache, above = self.filled(), _above()
        nodes, _ = self.look(cache, mask=above)
        pairs = []
        for last in (3, 4, 5):
            path = np.flatnonzero(above[last])
            alone, _ = self.look(cache, np.concatenate([self.tokens[:, path], self.others[:, PIECE:]], 1))
            wanted = nodes.copy()
            wanted[:, path] = alone[:, : len(path)]
            pairs.append((nodes, wanted))
        return pairs

    def branch(self) -> list[Pair]:
        cache, count = self.filled(), np.array([3, 2, 3], np.int32)
        path = np.broadcast_to(np.array([*BRANCH, -1, -1, -1], np.int32), (3, WIDTH))
        committed = self.committed(cache, self.look(cache, mask=_above())[1], path, count)
        return [self.same(committed, self.joined(count, BRANCH), self.lengths + count)]

    def pending(self) -> list[Pair]:
        """The second half of a tree, or of a chain, while the first one is pending; then a path through both."""
        trees = self.model.capabilities.trees
        above = _above() if trees else np.tril(np.ones((WIDTH, WIDTH), bool))
        path = BRANCH if trees else range(PIECE + 1)
        cache = self.filled()
        at_once, _ = self.look(cache, mask=above)
        first, previous = self.look(cache, self.tokens[:, :PIECE], mask=above[:PIECE, :PIECE])
        second, new = self.look(cache, self.tokens[:, PIECE:], mask=above[PIECE:], earlier=previous)
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
        row_value, remaining = self.filled(), self.filled(np.ascontiguousarray(self.text[:, ::-1]))
        alone = self.filled(rows=slice(1, 2))
        mixed = self.with_row(remaining, alone, 1)
        wanted = [self.look(cache)[0] for cache in (remaining, row_value, remaining)]
        return [(self.look(mixed)[0], np.stack([logits[row] for row, logits in enumerate(wanted)]))]

    def notice_of_positions(self, limit: float, reference) -> str:
        """Describe a mistake in positions: wrong ones, or positions that are not read."""
        equal = lambda *pair: _largest_difference([pair])[0] <= limit
        plain, _ = self.look(self.filled())
        steps, _ = self.one_by_one()
        none = 0 * self.lengths
        for shift, words in ((-1, "one too high"), (1, "one too low")):
            if not equal(plain, steps) and equal(plain, self.one_by_one(shift)[0]):
                return f"; a pass over one token counts positions {words}"
            if reference is not None:
                complete = self.whole(reference, self.tokens)
                statement = [self.look(self.filled(count=none), start=none, shift=by)[0] for by in (0, shift)]
                if [equal(logits, complete) for logits in statement] == [False, True]:
                    return f"; it counts positions {words}"
        moved, _ = self.look(self.filled(), shift=1)
        return "; it takes no notice of `positions`" if np.array_equal(plain, moved) else ""


def _above() -> np.ndarray:
    """bool[WIDTH, WIDTH]: which nodes of TREE are above each, itself included."""
    return operations.ancestor_mask(np.array([TREE]))[0]


def _all_of(width: int) -> tuple[np.ndarray, np.ndarray]:
    rows = len(LENGTHS)
    return np.broadcast_to(np.arange(width, dtype=np.int32), (rows, width)), np.full(rows, width, np.int32)


def _largest_difference(pairs: list[Pair]) -> tuple[float, str]:
    """And where it is; inf where only one is a number."""
    largest, where = 0.0, ""
    for ours, theirs in pairs:
        with np.errstate(invalid="ignore"):
            apart = np.where(ours == theirs, 0.0, np.abs(ours - theirs))
        apart = np.nan_to_num(apart, nan=np.inf).max(-1)  # [B, T]
        if not where or apart.max() > largest:
            row, token = np.unravel_index(np.argmax(apart), apart.shape)
            largest, where = float(apart.max()), f"row {row}, token {token}"
    return largest, where
