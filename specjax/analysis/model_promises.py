"""Whether a model does what `specjax.Model` promises, asked of it with a few random texts: for models of your own.

All decoding rests on these promises; a model that breaks one writes a text that is not its own, and nothing else says
so. Memories are compared by what is predicted from them, so that any will do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import buffers
from specjax.engine import forms
from specjax.engine.prefill import CHUNK, prefill
from specjax.errors import UsageError
from specjax.trees import operations
from specjax.types import Array, Model, PyTree

LENGTHS = 7, 1, 4  # of the texts, one per row
WIDTH = 6  # tokens of a pass
TREE = -1, 0, 0, 1, 1, 2  # two children of the root; below the first two more, below the second one
BRANCH = 0, 2, 5  # a path that leaves out siblings
PIECE = 3  # tokens that are pending when others come, or are committed before them
LONGEST = max(LENGTHS) + 2 * WIDTH
CAPACITIES = 2 * CHUNK, 3 * CHUNK
EXACT, ROUNDED = 1e-3, 0.05
"""The largest difference allowed, as a share of the largest logit: in float32, and in shorter dtypes."""

Pair = tuple[np.ndarray, np.ndarray]  # logits [B, T, V] that should be equal


class Promise(NamedTuple):
    """One of them, and how far the model is from it."""

    name: str
    kept: bool
    largest: float  # difference between two logits that should be equal
    where: str  # "row 1, token 2"


class ModelCheck(NamedTuple):
    """What `check_model` found; true if all is as it should be."""

    model: str
    promises: tuple[Promise, ...]  # those that were asked for, up to the first that is broken
    kept: bool  # all of them
    tolerance: float  # largest difference allowed
    sentence: str  # what is wrong, or that nothing is

    def __bool__(self) -> bool:
        return self.kept

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
        it where parameters are of a dtype shorter than float32.
      seed: of the texts.

    Raises: UsageError for a model that reads less than 19 tokens.
    """
    if model.max_positions < LONGEST:
        raise UsageError(f"max_positions of the model is {model.max_positions}, and the check has texts of {LONGEST}")
    ask = _Asking(model, params, inputs, seed)
    found: list[Promise] = []
    limit = 0.0 if tolerance is None else tolerance

    def check(kept: bool, sentence: str) -> ModelCheck:
        return ModelCheck(model.name, tuple(found), kept, limit, sentence)

    try:
        logits, _ = ask.look(ask.filled())
        if np.isnan(logits).any() or not np.isfinite(logits).any(-1).all():
            found.append(Promise("finite", False, np.inf, ""))
            return check(False, f"{model.name}: its logits are not numbers")
        limit = ask.tolerance(logits) if tolerance is None else tolerance
        for name, words, pairs in ask.promises(reference):
            largest, where = _largest_difference(pairs())
            found.append(Promise(name, largest <= limit, largest, where))
            if largest > limit:
                said = f"{words}: their logits differ by {largest:.2g} (allowed: {limit:.2g}) at {where}"
                notice = ask.notice_of_positions(limit, reference) if name in ABOUT_POSITIONS else ""
                return check(False, f"{model.name}: {said}{notice}")
    except UsageError as error:  # logits or a memory of another form
        found.append(Promise("form", False, np.inf, ""))
        return check(False, str(error))
    furthest = max(promise.largest for promise in found)
    said = f"keeps all {len(found)} promises; logits that should be equal differ by {furthest:.1g} at most"
    return check(True, f"{model.name} {said}")


ABOUT_POSITIONS = "reference", "steps", "prompt", "tree"


class _Asking:
    """A model, three texts, tokens that may follow them, and passes over these."""

    def __init__(self, model: Model, params: PyTree, inputs: PyTree, seed: int):
        rng = np.random.default_rng(seed)
        vocab = model.vocab_size
        self.model, self.params, self.inputs = model, params, inputs
        self.lengths = np.array(LENGTHS, np.int32)
        self.text = rng.integers(0, vocab, (len(LENGTHS), LONGEST)).astype(np.int32)
        self.tokens = rng.integers(0, vocab, (len(LENGTHS), WIDTH)).astype(np.int32)
        self.others = ((self.tokens + 1 + rng.integers(0, vocab - 1, self.tokens.shape)) % vocab).astype(np.int32)

    def tolerance(self, logits: np.ndarray) -> float:
        """For a model with such logits."""
        short = any(
            jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32 for x in jax.tree.leaves(self.params)
        )
        return (ROUNDED if short else EXACT) * float(np.abs(logits[np.isfinite(logits)]).max())

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

    # The memory of texts, and passes.

    def filled(self, text=None, count=None, rows=slice(None), capacity: int = CAPACITIES[0]) -> PyTree:
        """The memory of the first `count` tokens of each text."""
        text, count = self.text if text is None else text, self.lengths if count is None else count
        inputs = jax.tree.map(lambda x: jnp.asarray(x)[rows], self.inputs)
        plain = self.model._replace(rewind=None, axes=buffers.rows_first)  # which reading has nothing to do with
        return _read(plain, self.params, inputs, text[rows], np.asarray(count)[rows], self.lengths[rows], capacity)

    def look(
        self, cache, tokens=None, start=None, mask=None, earlier=None, shift: int = 0
    ) -> tuple[np.ndarray, PyTree]:
        """(logits, what is pending) of a pass behind texts of `start` tokens: over a chain, or with `mask`."""
        tokens, start = self.tokens if tokens is None else tokens, self.lengths if start is None else start
        count = tokens.shape[1]
        mask = np.tril(np.ones((count, count), bool)) if mask is None else mask
        mask = np.broadcast_to(mask, (len(tokens), *mask.shape[-2:]))
        positions = start[:, None] + mask.sum(2) - 1 + shift
        positions = positions.astype(np.int32)
        output, pending = _pass(self.model.forward, self.params, cache, tokens, positions, mask, earlier)
        forms.check_output(self.model, output, *tokens.shape)
        return np.asarray(output.logits, np.float32), pending

    def committed(self, cache, pending, path, count) -> PyTree:
        after = _committed(self.model.commit, cache, pending, path, count)
        forms.check_same(f"commit of the model {self.model.name}", cache, after)
        return after

    def joined(self, count, path=None, start=None) -> np.ndarray:
        """The texts of `start` tokens with the first `count` [B] tokens that may follow, or nodes of a path, behind."""
        text, start = self.text.copy(), self.lengths if start is None else start
        for row, n in enumerate(np.broadcast_to(count, len(text))):
            text[row, start[row] : start[row] + n] = self.tokens[row, list(path or range(WIDTH))[:n]]
        return text

    def after(self, cache, count) -> Pair:
        """What a memory predicts, and what that of the text with `count` tokens behind it does."""
        return self.same(cache, self.joined(count), self.lengths + count)

    def same(self, cache, text, length) -> Pair:
        """What a memory predicts, and what that of the first `length` tokens of a text does."""
        ours, theirs = (self.look(one, self.others, length)[0] for one in (cache, self.filled(text, length)))
        return ours, theirs

    # What should be equal.

    def as_reference(self, reference) -> list[Pair]:
        whole = np.asarray(jax.jit(reference)(self.params, jnp.asarray(self.joined(WIDTH))), np.float32)
        place = self.lengths[:, None] + np.arange(WIDTH)
        return [(self.look(self.filled())[0], np.take_along_axis(whole, place[:, :, None], 1))]

    def causal(self) -> list[Pair]:
        cache, changed = self.filled(), self.tokens.copy()
        changed[:, PIECE:] = self.others[:, PIECE:]
        return [(self.look(cache, changed)[0][:, :PIECE], self.look(cache)[0][:, :PIECE])]

    def one_by_one(self, shift: int = 0) -> tuple[np.ndarray, PyTree]:
        cache, found = self.filled(), []
        for i in range(WIDTH):
            logits, pending = self.look(cache, self.tokens[:, i : i + 1], self.lengths + i, shift=shift)
            cache = self.committed(cache, pending, np.zeros((3, 1), np.int32), np.ones(3, np.int32))
            found.append(logits)
        return np.concatenate(found, 1), cache

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
        kept = np.array([5, 1, 0], np.int32)
        short = _rewound(self.model.rewind, self.filled(), kept)
        again = self.filled(count=kept)
        goes_on = self.committed(short, self.look(short, start=kept)[1], *_all_of(WIDTH))
        return [
            (self.look(short, start=kept)[0], self.look(again, start=kept)[0]),
            self.same(goes_on, self.joined(WIDTH, start=kept), kept + WIDTH),
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
        first, before = self.look(cache, self.tokens[:, :PIECE], mask=above[:PIECE, :PIECE])
        second, new = self.look(cache, self.tokens[:, PIECE:], mask=above[PIECE:], earlier=before)
        both = _both(self.model.widen, self.model.insert, before, new)
        nodes = np.broadcast_to(np.resize(np.array([*path, *[-1] * WIDTH]), WIDTH).astype(np.int32), (3, WIDTH))
        count = np.full(3, len(path), np.int32)
        committed = self.committed(cache, both, nodes, count)
        text = self.joined(count, path)
        return [(np.concatenate([first, second], 1), at_once), self.same(committed, text, self.lengths + count)]

    def capacity(self) -> list[Pair]:
        small, large = (self.look(self.filled(capacity=capacity))[0] for capacity in CAPACITIES)
        return [(small, large)]

    def moved(self) -> list[Pair]:
        own, others = self.filled(), self.filled(np.ascontiguousarray(self.text[:, ::-1]))
        alone = self.filled(rows=slice(1, 2))
        mixed = self.with_row(others, alone, 1)
        wanted = [self.look(cache)[0] for cache in (others, own, others)]
        return [(self.look(mixed)[0], np.stack([logits[row] for row, logits in enumerate(wanted)]))]

    def with_row(self, batch: PyTree, one: PyTree, row: int) -> PyTree:
        """Raises: UsageError if `axes` are those of other arrays."""
        shapes = lambda tree: [x.shape for x in jax.tree.leaves(tree)]
        try:
            mixed = buffers.put_row(batch, one, jnp.int32(row), self.model.axes(batch))
            fits = shapes(mixed) == shapes(batch)
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise UsageError(
                f"axes of the model {self.model.name} must say where the rows are in each array of its memory"
            )
        return mixed

    def notice_of_positions(self, limit: float, reference) -> str:
        """Where the mistake is one of positions: what they would have to be, or that they are not read."""
        off = {-1: "one too high", 1: "one too low"}
        plain, _ = self.look(self.filled())
        for shift, words in off.items():
            steps = self.one_by_one(shift)[0]
            if (
                _largest_difference([(plain, steps)])[0]
                <= limit
                < _largest_difference([(plain, self.one_by_one()[0])])[0]
            ):
                return f"; a pass over one token counts positions {words}"
            if reference is not None:
                empty, none = self.filled(count=0 * self.lengths), 0 * self.lengths
                whole = np.asarray(jax.jit(reference)(self.params, jnp.asarray(self.tokens)), np.float32)
                told = [self.look(empty, start=none, shift=by)[0] for by in (0, shift)]
                near = [_largest_difference([(logits, whole)])[0] <= limit for logits in told]
                if near == [False, True]:
                    return f"; it counts positions {words}"
        moved, _ = self.look(self.filled(), shift=1)
        return "; it takes no notice of `positions`" if _largest_difference([(plain, moved)])[0] == 0 else ""


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


# Compiled for the functions of a model that they call: models that share some share these programs.


@functools.partial(jax.jit, static_argnums=(0, 6))
def _read(model: Model, params, inputs, text, count, prompts, capacity: int):
    text = jnp.pad(text, ((0, 0), (0, CHUNK - text.shape[1])))
    return prefill(model, params, model.opened(params, inputs, prompts, capacity), text, count)


@functools.partial(jax.jit, static_argnums=0)
def _pass(forward, params, cache, tokens, positions, mask, earlier):
    more = {} if earlier is None else {"earlier": earlier}
    output, pending = forward(params, tokens, cache, positions=positions, mask=mask, **more)
    return output, pending


@functools.partial(jax.jit, static_argnums=0)
def _committed(commit, cache, pending, path, count):
    return commit(cache, pending, path, count)


@functools.partial(jax.jit, static_argnums=0)
def _rewound(rewind, cache, length):
    return rewind(cache, length)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _both(widen, insert, before, new):
    return insert(widen(before, WIDTH), new, PIECE)
