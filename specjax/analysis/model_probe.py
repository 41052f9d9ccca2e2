"""Probe of a model: random texts of different lengths, their caches, and passes over further tokens."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays import batch_axes
from specjax.arrays.modes import jit
from specjax.engine import contract_checks
from specjax.engine.prefill import CHUNK, prefill
from specjax.errors import UsageError
from specjax.types import Model, PyTree

LENGTHS = 7, 1, 4  # length of the text of each row
WIDTH = 6  # tokens of a pass
PIECE = 3  # tokens that are pending or committed before the others of a pass
LONGEST = max(LENGTHS) + 2 * WIDTH
CAPACITIES = 2 * CHUNK, 3 * CHUNK

Pair = tuple[np.ndarray, np.ndarray]  # logits [B, T, V] that should be equal


class Passes:
    """A model with three texts, continuations of them, and passes over the continuations."""

    def __init__(self, model: Model, params: PyTree, inputs: PyTree, seed: int):
        rng = np.random.default_rng(seed)
        vocab = model.vocab_size
        self.model, self.params, self.inputs = model, params, inputs
        self.lengths = np.array(LENGTHS, np.int32)
        self.text = rng.integers(0, vocab, (len(LENGTHS), LONGEST)).astype(np.int32)
        self.tokens = rng.integers(0, vocab, (len(LENGTHS), WIDTH)).astype(np.int32)
        self.others = ((self.tokens + 1 + rng.integers(0, vocab - 1, self.tokens.shape)) % vocab).astype(np.int32)

    def filled(self, text=None, count=None, rows=slice(None), capacity: int = CAPACITIES[0]) -> PyTree:
        """Return a cache of the first `count` tokens of each text."""
        text, count = self.text if text is None else text, self.lengths if count is None else count
        inputs = jax.tree.map(lambda x: jnp.asarray(x)[rows], self.inputs)
        plain = self.model._replace(
            rewind=None, axes=batch_axes.rows_first
        )  # unused by prefill; fixed so that programs are shared
        return _read(plain, self.params, inputs, text[rows], np.asarray(count)[rows], self.lengths[rows], capacity)

    def look(
        self, cache, tokens=None, start=None, mask=None, earlier=None, shift: int = 0
    ) -> tuple[np.ndarray, PyTree]:
        """Return (logits, pending) of a pass over a chain, or with `mask`, after texts of `start` tokens."""
        tokens, start = self.tokens if tokens is None else tokens, self.lengths if start is None else start
        count = tokens.shape[1]
        mask = np.tril(np.ones((count, count), bool)) if mask is None else mask
        mask = np.broadcast_to(mask, (len(tokens), *mask.shape[-2:]))
        positions = start[:, None] + mask.sum(2) - 1 + shift
        positions = positions.astype(np.int32)
        output, pending = _pass(self.model.forward, self.params, cache, tokens, positions, mask, earlier)
        contract_checks.check_output(self.model, output, *tokens.shape)
        return np.asarray(output.logits, np.float32), pending

    def whole(self, reference, text: np.ndarray) -> np.ndarray:
        """Return the logits of the reference for whole texts [B, T]."""
        logits = jit(reference)(self.params, jnp.asarray(text))
        expected, shape = [*text.shape, self.model.vocab_size], getattr(logits, "shape", None)
        if shape != tuple(expected):
            description = type(logits).__name__ if shape is None else list(shape)
            raise UsageError(
                f"reference must return logits {expected} for tokens {list(text.shape)}, not {description}"
            )
        return np.asarray(logits, np.float32)

    def is_short(self) -> bool:
        """Return True if parameters, or values computed from them, have a dtype shorter than float32."""

        def once(params):
            cache = self.model.start_cache(params, self.inputs, jnp.asarray(self.lengths), CAPACITIES[0])
            mask = jnp.broadcast_to(jnp.tril(jnp.ones((WIDTH, WIDTH), bool)), (len(LENGTHS), WIDTH, WIDTH))
            positions = self.lengths[:, None] + jnp.arange(WIDTH)
            return self.model.forward(params, jnp.asarray(self.tokens), cache, positions=positions, mask=mask)

        return re.search(r"\b(bf16|f16|f8_\w+|f4_\w+)\[", str(jax.make_jaxpr(once)(self.params))) is not None

    def committed(self, cache, pending, path, count) -> PyTree:
        following = _committed(self.model.commit, cache, pending, path, count)
        contract_checks.check_same(f"commit of the model {self.model.name}", cache, following)
        return following

    def joined(self, count, path=None, start=None) -> np.ndarray:
        """Append the first `count` [B] tokens of the continuation, or nodes of a path, to the first `start` tokens."""
        text, start = self.text.copy(), self.lengths if start is None else start
        for row, n in enumerate(np.broadcast_to(count, len(text))):
            text[row, start[row] : start[row] + n] = self.tokens[row, list(path or range(WIDTH))[:n]]
        return text

    def after(self, cache, count) -> Pair:
        """Return the predictions of a cache, and of a fresh cache of the text with `count` more tokens."""
        return self.same(cache, self.joined(count), self.lengths + count)

    def same(self, cache, text, length) -> Pair:
        """Return the predictions of a cache, and of a fresh cache of the first `length` tokens of a text."""
        ours, theirs = (self.look(one, self.others, length)[0] for one in (cache, self.filled(text, length)))
        return ours, theirs

    def one_by_one(self, shift: int = 0) -> tuple[np.ndarray, PyTree]:
        """Return the logits and the cache of passes over one token each."""
        cache, logits_by_pass = self.filled(), []
        for i in range(WIDTH):
            logits, pending = self.look(cache, self.tokens[:, i : i + 1], self.lengths + i, shift=shift)
            cache = self.committed(cache, pending, np.zeros((3, 1), np.int32), np.ones(3, np.int32))
            logits_by_pass.append(logits)
        return np.concatenate(logits_by_pass, 1), cache

    def rewound(self, cache: PyTree, length: np.ndarray) -> PyTree:
        return _rewound(self.model.rewind, cache, length)

    def both(self, prior: PyTree, new: PyTree) -> PyTree:
        """Join the pending arrays of PIECE tokens with those of the following tokens."""
        return _both(self.model.widen, self.model.insert, prior, new)

    def with_row(self, batch: PyTree, one: PyTree, row: int) -> PyTree:
        """Put a cache of one row into a batch.

        Raises: UsageError if `axes` of the model do not fit its cache.
        """
        shapes = lambda tree: [x.shape for x in jax.tree.leaves(tree)]
        try:
            mixed = batch_axes.put_row(batch, one, jnp.int32(row), self.model.axes(batch))
            fits = shapes(mixed) == shapes(batch)
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise UsageError(f"axes of the model {self.model.name} must give the batch axis of each array of its cache")
        return mixed


# Each program is compiled for the model functions that it calls, so models that share functions share programs.


@jit(static_argnums=(0, 6))
def _read(model: Model, params, inputs, text, count, prompts, capacity: int):
    text = jnp.pad(text, ((0, 0), (0, CHUNK - text.shape[1])))
    return prefill(model, params, model.start_cache(params, inputs, prompts, capacity), text, count)


@jit(static_argnums=0)
def _pass(forward, params, cache, tokens, positions, mask, earlier):
    options = {} if earlier is None else {"earlier": earlier}
    output, pending = forward(params, tokens, cache, positions=positions, mask=mask, **options)
    return output, pending


@jit(static_argnums=0)
def _committed(commit, cache, pending, path, count):
    return commit(cache, pending, path, count)


@jit(static_argnums=0)
def _rewound(rewind, cache, length):
    return rewind(cache, length)


@jit(static_argnums=(0, 1))
def _both(widen, insert, prior, new):
    return insert(widen(prior, WIDTH), new, PIECE)
