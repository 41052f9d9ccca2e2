"""Check whether a token's logits depend, to the bit, on the pass of the token, for a model on this device.

Plain decoding gives the reference logits of a text. The same tokens are then read in other kinds of passes: several
tokens per pass, as nodes of a tree, beside pending keys, in a batch, with a larger cache, or as a prompt. If no bit
differs, speculative decoding with this model returns exactly the text of plain decoding, in any dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.arrays.modes import jit, with_standard_modes
from specjax.engine.prefill import CHUNK, count_chunks, prefill, wide_chunk
from specjax.errors import UsageError
from specjax.trees import operations
from specjax.types import Array, Target

WIDTHS = 2, 3, 5, 8, 16
CAPACITIES = 1024, 8192
BATCHES = 3, 16
COMPARED = 64
"""Tokens whose logits are compared, or half of a shorter text. Some differences occur in few of them."""


class BitPromise(NamedTuple):
    """The result of comparing one kind of pass with plain decoding."""

    name: str
    compared: int  # tokens whose logits were compared
    differ: int  # tokens with at least one differing bit
    largest: float  # largest difference between two logits
    first: str | None  # the first layer that differs; None if no token differs, or if the model has no taps


class PassOutput(NamedTuple):
    """The output of a pass for some tokens."""

    logits: np.ndarray  # float32[n, V]
    stream: np.ndarray  # float32[layers, n, D], after each layer; 0 layers for models without taps


@with_standard_modes
def check_bits(
    target: Target,
    tokens: Sequence[int],
    *,
    widths: Sequence[int] = WIDTHS,
    batches: Sequence[int] = BATCHES,
    capacities: Sequence[int] = CAPACITIES,
    progress: Callable[[str], None] = lambda name: None,
) -> list[BitPromise]:
    """Compare the logits of the last tokens of a text with those of plain decoding.

    The number of tokens is COMPARED, or half of the text if it is shorter. It is at least max(widths).

    Args:
      tokens: a text of at least 2 max(widths) tokens. Its length determines the cache slots of the passes.
      progress: called with the name of each kind of pass before it runs.

    Raises: UsageError if the text is too short, or longer than `max_positions` of the model.
    """
    if not widths or min(widths) < 2:
        raise UsageError(f"widths must be numbers of tokens of at least 2, not {list(widths)}")
    widest = max(widths)
    if len(tokens) < 2 * widest:
        raise UsageError(f"the text has {len(tokens)} tokens; a width of {widest} needs at least {2 * widest}")
    if len(tokens) > target.model.max_positions:
        raise UsageError(f"the text has {len(tokens)} tokens, but the model reads at most {target.model.max_positions}")
    probe = _BitProbe(target, np.asarray(tokens, np.int32), len(tokens) - max(widest, min(len(tokens) // 2, COMPARED)))
    progress("plain decoding")
    plain = probe.one_by_one()
    promises = []
    for name, passes in probe.kinds_of_passes(widths, batches, capacities):
        progress(name)
        promises.append(_compare(name, plain, passes()))
    return promises


class _BitProbe:
    """Passes over the last tokens of a text whose first `start` tokens are committed."""

    def __init__(self, target: Target, text: np.ndarray, start: int):
        self.target, self.text, self.start = target, text, start
        self.num_layers = target.model.capabilities.num_layers if target.model.capabilities.taps else 0
        self.smallest = -(-(len(text) + CHUNK + 1) // CHUNK) * CHUNK

    def kinds_of_passes(self, widths, batches, capacities) -> Iterator[tuple[str, Callable[[], dict[int, PassOutput]]]]:
        max_width = max(widths)
        for width in widths:
            yield f"{width} tokens in a pass", functools.partial(self.chains, width)
        if self.target.model.capabilities.trees:
            depth = max_width // 2
            yield f"a tree around {depth} tokens", functools.partial(self.at_places, self.tree, depth)
            yield "a tree that grows by levels", functools.partial(self.at_places, self.by_levels, depth)
        for rows in batches:
            yield f"in a batch of {rows}", functools.partial(self.chains, min(4, max_width), rows=rows)
        for capacity in capacities:
            if capacity >= self.smallest:
                yield (
                    f"a cache of {capacity} slots",
                    functools.partial(self.chains, min(4, max_width), capacity=capacity),
                )
        yield "read as a prompt", self.as_prompt

    def filled_cache(self, rows: int = 1, capacity: int | None = None, start: int | None = None):
        """Return a cache of the first `start` tokens. Further rows contain other texts of other lengths."""
        lengths = self.lengths(rows) if start is None else np.array([start])
        texts = jnp.asarray(self.texts(rows))
        return _begin(self.target, texts, jnp.asarray(lengths, jnp.int32), capacity or self.smallest)

    def at_places(self, run: Callable[[int, int], dict[int, PassOutput]], depth: int) -> dict[int, PassOutput]:
        """Run `run(start, depth)` at every place of the compared tokens from which `depth` tokens follow."""
        outputs: dict[int, PassOutput] = {}
        for start in range(self.start, len(self.text) - depth + 1, depth):
            outputs |= run(start, depth)
        return outputs

    def texts(self, rows: int) -> np.ndarray:
        return np.stack([np.roll(self.text, 7 * row) for row in range(rows)])

    def lengths(self, rows: int) -> np.ndarray:
        return np.array([max(1, self.start - 11 * row) for row in range(rows)])

    def run_pass(self, cache, tokens, positions, mask, earlier=None) -> tuple[PassOutput, object]:
        """Return the output of the first row of a pass."""
        logits, stream, pending = _pass(self.target, cache, tokens, positions, mask, earlier, self.num_layers)
        return PassOutput(np.asarray(logits[0]), np.asarray(stream[:, 0])), pending

    def one_by_one(self) -> dict[int, PassOutput]:
        cache = self.filled_cache()
        outputs: dict[int, PassOutput] = {}
        for at in range(self.start, len(self.text)):
            outputs[at], pending = self.run_pass(
                cache, self.text[None, at : at + 1], np.array([[at]]), np.ones((1, 1, 1), bool)
            )
            cache = _commit(self.target, cache, pending, 1, 1)
        return outputs

    def chains(self, width: int, rows: int = 1, capacity: int | None = None) -> dict[int, PassOutput]:
        """Run passes over `width` tokens. Each is committed before the next one."""
        cache = self.filled_cache(rows, capacity)
        outputs: dict[int, PassOutput] = {}
        mask = np.broadcast_to(np.tril(np.ones((width, width), bool)), (rows, width, width))
        for at in range(self.start, len(self.text) - width + 1, width):
            tokens = self.texts(rows)[:, at : at + width]
            positions = (self.lengths(rows) + at - self.start)[:, None] + np.arange(width)
            result, pending = self.run_pass(cache, tokens, positions, mask)
            outputs |= _split(result, range(at, at + width))
            cache = _commit(self.target, cache, pending, rows, width)
        return outputs

    def tree(self, start: int, depth: int) -> dict[int, PassOutput]:
        """Run one pass over a tree. The text is a path; each node has two siblings, one of them with a child."""
        path, parents, tokens = [0], [-1], [int(self.text[start])]
        for at in range(start + 1, start + depth):
            above = path[-1]
            for token in (self._other(at), int(self.text[at]), self._other(at + 1)):
                parents.append(above)
                tokens.append(token)
            path.append(len(parents) - 2)
            parents.append(len(parents) - 1)  # a child of the last sibling
            tokens.append(self._other(at + 2))
        tree = np.array([parents])
        positions, mask = start + operations.depths(tree), operations.ancestor_mask(tree)
        result, _ = self.run_pass(self.filled_cache(start=start), np.array([tokens]), positions, mask)
        return _split(PassOutput(result.logits[path], result.stream[:, path]), range(start, start + depth))

    def by_levels(self, start: int, depth: int) -> dict[int, PassOutput]:
        """Run a pass per level over a token of the text and a sibling, beside pending keys of earlier levels."""
        cache, model = self.filled_cache(start=start), self.target.model
        outputs: dict[int, PassOutput] = {}
        parents = [-1, -1, *(2 * (i // 2) - 2 for i in range(2, 2 * depth))]
        mask = operations.ancestor_mask(np.array([parents]))[0]
        earlier = None
        for level in range(depth):
            at, nodes = start + level, slice(2 * level, 2 * level + 2)
            tokens, positions = np.array([[self.text[at], self._other(at)]]), np.array([[at, at]])
            above: list[np.ndarray] = (
                [] if earlier is None else [mask[nodes, : 2 * level], np.zeros((2, 2 * (depth - level)), bool)]
            )
            visible = np.concatenate([*above, mask[nodes, nodes]], 1)[None]
            result, pending = self.run_pass(cache, tokens, positions, visible, earlier)
            outputs |= _split(PassOutput(result.logits[:1], result.stream[:, :1]), [at])
            earlier = model.insert(model.widen(pending, 2 * depth) if earlier is None else earlier, pending, 2 * level)
        return outputs

    def as_prompt(self) -> dict[int, PassOutput]:
        """Read the whole text into an empty cache, in the chunks of `decode`. The last chunk is padded."""
        size = len(self.text)
        cache = _begin(self.target, jnp.asarray(self.text[None]), jnp.zeros((1,), jnp.int32), self.smallest)
        outputs: dict[int, PassOutput] = {}
        wide = wide_chunk(1, slots=self.smallest)
        num_wide, num_narrow = count_chunks(size, wide)
        first = 0
        for chunk in [wide] * num_wide + [CHUNK] * num_narrow:
            places, mask = first + np.arange(chunk), np.tril(np.ones((1, chunk, chunk), bool))
            result, pending = self.run_pass(cache, self.text[np.minimum(places, size - 1)][None], places[None], mask)
            outputs |= {at: one for at, one in _split(result, places.tolist()).items() if self.start <= at < size}
            first += chunk
            if first < size:
                cache = _commit(self.target, cache, pending, 1, chunk)
        return outputs

    def _other(self, at: int) -> int:
        """Return a token from another place of the text."""
        return int(self.text[(at * 13 + 5) % self.start])


def _compare(name: str, plain: dict[int, PassOutput], observed: dict[int, PassOutput]) -> BitPromise:
    differ, largest, first = 0, 0.0, None
    for at, output in sorted(observed.items()):
        reference = plain[at]
        if np.array_equal(output.logits, reference.logits):
            continue
        differ += 1
        largest = max(largest, float(np.max(np.abs(output.logits - reference.logits))))
        first = first or _where(reference.stream, output.stream)
    return BitPromise(name, len(observed), differ, largest, first)


def _where(plain: np.ndarray, stream: np.ndarray) -> str | None:
    """Return the name of the first layer whose outputs [layers, 1, D] differ, or None without layers."""
    if not len(plain):
        return None
    different = np.flatnonzero(np.any(plain != stream, (1, 2)))
    if not different.size:
        return "the final norm or the head"
    return "the embedding" if different[0] == 0 else f"layer {different[0]} of {len(plain) - 1}"


def _split(observed: PassOutput, places: Sequence[int]) -> dict[int, PassOutput]:
    """Return the output of each token by its place."""
    return {at: PassOutput(observed.logits[i : i + 1], observed.stream[:, i : i + 1]) for i, at in enumerate(places)}


@jit(static_argnums=3)
def _begin(target: Target, tokens: Array, lengths: Array, capacity: int):
    model, params = target.model, target.params
    return prefill(model, params, model.init_cache(params, None, len(tokens), capacity), tokens, lengths)


@jit(static_argnums=6)
def _pass(target: Target, cache, tokens, positions, mask, earlier, num_layers: int):
    options = {} if earlier is None else {"earlier": earlier}
    if num_layers:
        options["taps"] = tuple(range(num_layers + 1))
    output, pending = target.model.forward(target.params, tokens, cache, positions=positions, mask=mask, **options)
    batch, width, _ = output.logits.shape
    stream = jnp.stack(output.taps) if output.taps else jnp.zeros((0, batch, width, 1))
    return output.logits.astype(jnp.float32), stream.astype(jnp.float32), pending


@jit(static_argnums=(3, 4))
def _commit(target: Target, cache, pending, rows: int, width: int):
    path = jnp.broadcast_to(jnp.arange(width), (rows, width))
    return target.model.commit(cache, pending, path, jnp.full((rows,), width))
