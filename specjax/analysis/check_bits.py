"""Check whether a token's logits depend, to the bit, on the pass of the token, for a model on this device.

Plain decoding says what the logits of a text are. Then the same tokens are read in other company: several in a pass, as
nodes of a tree, beside keys that are pending still, in a batch, with a larger cache, or as a prompt. If no bit differs,
speculative decoding with this model gives the text of plain decoding exactly, in any dtype and without near-ties.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.engine.prefill import CHUNK, prefill
from specjax.errors import UsageError
from specjax.trees import operations
from specjax.types import Array, Target

WIDTHS = 2, 3, 5, 8, 16
CAPACITIES = 1024, 8192
BATCHES = 3, 16


class BitPromise(NamedTuple):
    """The statement that logits are equal in one kind of pass."""

    name: str
    compared: int  # tokens whose logits were compared
    differ: int  # of these, with any bit unlike
    largest: float  # difference between two logits
    first: str | None  # where the first differing token parts: the layer; None if none differs, or it cannot be told


class PassOutput(NamedTuple):
    """The output of a pass for some tokens."""

    logits: np.ndarray  # float32[n, V]
    stream: np.ndarray  # float32[layers, n, D], after each layer; no layers where the model has no taps


def check_bits(
    target: Target,
    tokens: Sequence[int],
    *,
    widths: Sequence[int] = WIDTHS,
    batches: Sequence[int] = BATCHES,
    capacities: Sequence[int] = CAPACITIES,
    progress: Callable[[str], None] = lambda name: None,
) -> list[BitPromise]:
    """Compare the logits of the last max(widths) tokens of a text with those of plain decoding.

    Args:
      tokens: a text of at least 2 max(widths) tokens; its length decides at which places of the cache the passes lie.
      progress: is told what is looked at next.

    Raises: UsageError for a text that is too short, or longer than the model reads.
    """
    if not widths or min(widths) < 2:
        raise UsageError(f"widths must be numbers of tokens of at least 2, not {list(widths)}")
    new = max(widths)
    if len(tokens) < 2 * new:
        raise UsageError(f"the text has {len(tokens)} tokens; with a width of {new} it takes at least {2 * new}")
    if len(tokens) > target.model.max_positions:
        raise UsageError(f"the text has {len(tokens)} tokens, but the model reads {target.model.max_positions}")
    ask = _BitProbe(target, np.asarray(tokens, np.int32), len(tokens) - new)
    progress("plain decoding")
    plain = ask.one_by_one()
    promises = []
    for name, passes in ask.company(widths, batches, capacities):
        progress(name)
        promises.append(_compare(name, plain, passes()))
    return promises


class _BitProbe:
    """A text, its first tokens committed, and passes over the others."""

    def __init__(self, target: Target, text: np.ndarray, start: int):
        self.target, self.text, self.start = target, text, start
        self.num_layers = target.model.capabilities.num_layers if target.model.capabilities.taps else 0
        self.smallest = -(-(len(text) + CHUNK + 1) // CHUNK) * CHUNK

    def company(self, widths, batches, capacities) -> Iterator[tuple[str, Callable[[], dict[int, PassOutput]]]]:
        maximum = max(widths)
        for width in widths:
            yield f"{width} tokens in a pass", functools.partial(self.chains, width)
        if self.target.model.capabilities.trees:
            yield f"a tree around {maximum // 2} tokens", functools.partial(self.tree, maximum // 2)
            yield "a tree that grows by levels", functools.partial(self.by_levels, maximum // 2)
        for rows in batches:
            yield f"in a batch of {rows}", functools.partial(self.chains, min(4, maximum), rows=rows)
        for capacity in capacities:
            if capacity >= self.smallest:
                yield f"a cache of {capacity} slots", functools.partial(self.chains, min(4, maximum), capacity=capacity)
        yield "read as a prompt", self.as_prompt

    def begun(self, rows: int = 1, capacity: int | None = None):
        """A cache of the first tokens; further rows hold other texts of other lengths."""
        texts, lengths = jnp.asarray(self.texts(rows)), jnp.asarray(self.lengths(rows), jnp.int32)
        return _begin(self.target, texts, lengths, capacity or self.smallest)

    def texts(self, rows: int) -> np.ndarray:
        return np.stack([np.roll(self.text, 7 * row) for row in range(rows)])

    def lengths(self, rows: int) -> np.ndarray:
        return np.array([max(1, self.start - 11 * row) for row in range(rows)])

    def see(self, cache, tokens, positions, mask, earlier=None) -> tuple[PassOutput, object]:
        """Return the output of the first row of a pass."""
        logits, stream, pending = _pass(self.target, cache, tokens, positions, mask, earlier, self.num_layers)
        return PassOutput(np.asarray(logits[0]), np.asarray(stream[:, 0])), pending

    def one_by_one(self) -> dict[int, PassOutput]:
        cache = self.begun()
        visible: dict[int, PassOutput] = {}
        for at in range(self.start, len(self.text)):
            visible[at], pending = self.see(
                cache, self.text[None, at : at + 1], np.array([[at]]), np.ones((1, 1, 1), bool)
            )
            cache = _commit(self.target, cache, pending, 1, 1)
        return visible

    def chains(self, width: int, rows: int = 1, capacity: int | None = None) -> dict[int, PassOutput]:
        """`width` tokens in a pass, which is committed before the next one."""
        cache = self.begun(rows, capacity)
        visible: dict[int, PassOutput] = {}
        mask = np.broadcast_to(np.tril(np.ones((width, width), bool)), (rows, width, width))
        for at in range(self.start, len(self.text) - width + 1, width):
            tokens = self.texts(rows)[:, at : at + width]  # of other rows some tokens of their text
            positions = (self.lengths(rows) + at - self.start)[:, None] + np.arange(width)
            result, pending = self.see(cache, tokens, positions, mask)
            visible |= _apart(result, range(at, at + width))
            cache = _commit(self.target, cache, pending, rows, width)
        return visible

    def tree(self, depth: int) -> dict[int, PassOutput]:
        """The text as a path of a tree, each of its nodes between two siblings, of which one has a child."""
        path, parents, tokens = [0], [-1], [int(self.text[self.start])]
        for at in range(self.start + 1, self.start + depth):
            above = path[-1]
            for token in (self._other(at), int(self.text[at]), self._other(at + 1)):
                parents.append(above)
                tokens.append(token)
            path.append(len(parents) - 2)
            parents.append(len(parents) - 1)  # a child of the sibling behind
            tokens.append(self._other(at + 2))
        tree = np.array([parents])
        positions, mask = self.start + operations.depths(tree), operations.ancestor_mask(tree)
        result, _ = self.see(self.begun(), np.array([tokens]), positions, mask)
        return _apart(PassOutput(result.logits[path], result.stream[:, path]), range(self.start, self.start + depth))

    def by_levels(self, depth: int) -> dict[int, PassOutput]:
        """Two nodes a level, the text's and a sibling, beside the pending keys of the levels above."""
        cache, model = self.begun(), self.target.model
        visible: dict[int, PassOutput] = {}
        parents = [-1, -1, *(2 * (i // 2) - 2 for i in range(2, 2 * depth))]
        mask = operations.ancestor_mask(np.array([parents]))[0]
        earlier = None
        for level in range(depth):
            at, current = self.start + level, slice(2 * level, 2 * level + 2)
            tokens, positions = np.array([[self.text[at], self._other(at)]]), np.array([[at, at]])
            above: list[np.ndarray] = (
                [] if earlier is None else [mask[current, : 2 * level], np.zeros((2, 2 * (depth - level)), bool)]
            )
            seen_by = np.concatenate([*above, mask[current, current]], 1)[None]
            result, pending = self.see(cache, tokens, positions, seen_by, earlier)
            visible |= _apart(PassOutput(result.logits[:1], result.stream[:, :1]), [at])
            earlier = model.insert(model.widen(pending, 2 * depth) if earlier is None else earlier, pending, 2 * level)
        return visible

    def as_prompt(self) -> dict[int, PassOutput]:
        """The whole text over an empty cache, in the chunks that `decode` reads: the last one is filled up."""
        size = len(self.text)
        cache = _begin(self.target, jnp.asarray(self.text[None]), jnp.zeros((1,), jnp.int32), self.smallest)
        visible: dict[int, PassOutput] = {}
        mask = np.tril(np.ones((1, CHUNK, CHUNK), bool))
        for first in range(0, size, CHUNK):
            places = first + np.arange(CHUNK)
            result, pending = self.see(cache, self.text[np.minimum(places, size - 1)][None], places[None], mask)
            visible |= {at: one for at, one in _apart(result, places.tolist()).items() if self.start <= at < size}
            if first + CHUNK < size:
                cache = _commit(self.target, cache, pending, 1, CHUNK)
        return visible

    def _other(self, at: int) -> int:
        """A token that stands elsewhere in the text."""
        return int(self.text[(at * 13 + 5) % self.start])


def _compare(name: str, plain: dict[int, PassOutput], observed: dict[int, PassOutput]) -> BitPromise:
    differ, largest, first = 0, 0.0, None
    for at, current in sorted(observed.items()):
        present = plain[at]
        if np.array_equal(current.logits, present.logits):
            continue
        differ += 1
        largest = max(largest, float(np.max(np.abs(current.logits - present.logits))))
        first = first or _where(present.stream, current.stream)
    return BitPromise(name, len(observed), differ, largest, first)


def _where(plain: np.ndarray, stream: np.ndarray) -> str | None:
    """The layer after which two streams [layers, 1, D] part."""
    if not len(plain):
        return None
    unlike = np.flatnonzero(np.any(plain != stream, (1, 2)))
    if not unlike.size:
        return "the final norm or the head"
    return "the embedding" if unlike[0] == 0 else f"layer {unlike[0]} of {len(plain) - 1}"


def _apart(observed: PassOutput, places: Sequence[int]) -> dict[int, PassOutput]:
    return {at: PassOutput(observed.logits[i : i + 1], observed.stream[:, i : i + 1]) for i, at in enumerate(places)}


@functools.partial(jax.jit, static_argnums=3)
def _begin(target: Target, tokens: Array, lengths: Array, capacity: int):
    model, params = target.model, target.params
    return prefill(model, params, model.init_cache(params, None, len(tokens), capacity), tokens, lengths)


@functools.partial(jax.jit, static_argnums=6)
def _pass(target: Target, cache, tokens, positions, mask, earlier, num_layers: int):
    wanted = {} if earlier is None else {"earlier": earlier}
    if num_layers:
        wanted["taps"] = tuple(range(num_layers + 1))
    output, pending = target.model.forward(target.params, tokens, cache, positions=positions, mask=mask, **wanted)
    batch, width, _ = output.logits.shape
    stream = jnp.stack(output.taps) if output.taps else jnp.zeros((0, batch, width, 1))
    return output.logits.astype(jnp.float32), stream.astype(jnp.float32), pending


@functools.partial(jax.jit, static_argnums=(3, 4))
def _commit(target: Target, cache, pending, rows: int, width: int):
    path = jnp.broadcast_to(jnp.arange(width), (rows, width))
    return target.model.commit(cache, pending, path, jnp.full((rows,), width))
