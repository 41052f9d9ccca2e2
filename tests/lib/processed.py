"""Processors on tiny vocabularies, and what plain decoding makes of logits after each path of a tree."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax import processors
from specjax.processors.automaton import Automaton, automaton
from specjax.trees import operations
from specjax.types import Processor, TokenTree

EOS = 0


class Letters:
    """Token 0 ends a text, 1 is a control token, the others are these pieces."""

    eos = (EOS,)
    pieces = ("a", "b", "ab", "c", "1", "2", '"', "{", "}", ":", " ", "é")

    def spellings(self):
        return [b"</s>", None, *(piece.encode() for piece in self.pieces)]

    def decode(self, ids):
        return "".join(self.pieces[i - 2] for i in ids if i > 1)


def accepts(automaton: Automaton, tokens) -> bool:
    """Return whether a text of these tokens may end."""
    state = 0
    for token in tokens:
        number = automaton.classes[token] if token < len(automaton.classes) else -1
        state = -1 if number < 0 else int(automaton.following[state, number])
        if state < 0:
            return False
    return bool(automaton.accepting[state])


@functools.cache
def counting(vocab: int) -> Automaton:
    """Texts of an even number of even tokens, no odd token twice in a row, that end by EOS."""
    evens, odds = range(2, vocab, 2), range(1, vocab, 2)
    transitions = {}
    for parity in (0, 1):
        for last in (0, *odds):  # 0: no odd one
            successors = {token: 100 * (1 - parity) for token in evens}
            transitions[100 * parity + last] = successors | {odd: 100 * parity + odd for odd in odds if odd != last}
    return automaton(0, transitions, {0, *odds}, [EOS])


@functools.cache
def some(vocab: int) -> dict[str, Processor]:
    """Return one processor of each kind."""
    return {
        "repetition": processors.repetition(1.7),
        "presence": processors.presence(0.9),
        "frequency": processors.frequency(0.6),
        "bias": processors.bias({1: 1.5, 2: -2.0, vocab - 1: -np.inf}),
        "constraint": processors.constraint(counting(vocab)),
        "min_length": processors.min_length(2, [1, vocab - 1]),
        "by_place": processors.by_place([range(3), [vocab - 1], range(2, vocab)], [0, 1, 2, 0]),
        "image_phases": processors.image_phases([4, 5], 3, 1, 2),
        "forced": processors.forced({1: vocab - 1, 3: 0}),
        "bad_words": processors.bad_words([[5], *([a, b, (a + b) % vocab] for a, b in np.ndindex(vocab, vocab))]),
        "timestamps": processors.timestamps(vocab // 2, EOS),
    }


def by_row(vocab: int, rows: tuple[int, ...] = (0, 1, 2)) -> tuple[Processor, ...]:
    """Return one processor of each kind, set differently for three rows, in this order; the last of them is free."""
    pick = lambda values: [values[row] for row in rows]
    return (
        processors.repetition(np.array(pick([1.7, 1.2, 1.0]))),
        processors.presence(np.array(pick([0.9, 0.0, -0.5]))),
        processors.frequency(np.array(pick([0.6, -0.2, 0.0]))),
        processors.bias(pick([{1: 1.5, 2: -2.0}, {vocab - 1: -np.inf}, {}])),
        processors.constraint(counting(vocab), follow=pick([0, 0, None])),
        processors.bad_words(pick([[[3, 4], [2, 2, 6]], [], [[5], [1, 2, 1]]])),
    )


def begun(processor: Processor, tokens: np.ndarray, length: np.ndarray, vocab: int):
    """The state after prompts int32[B, L] of these lengths."""
    settings = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(length), *x.shape[1:])), processor.settings)
    return processor.init(processor.params, settings, jnp.asarray(tokens), jnp.asarray(length), vocab)


@functools.partial(jax.jit, static_argnames=("ignore",))
def in_a_tree(processor: Processor, state, tree: TokenTree, logits, ignore: bool = False):
    """The logits [B, N, V] of its nodes; `ignore`: by a processor that does not know what is above a node."""
    above = operations.ancestor_mask(tree.parents, tree.valid)
    if ignore:
        above = above & jnp.eye(above.shape[1], dtype=bool)
    return processor.process(processor.params, state, tree, above, logits)


@jax.jit
def _plain(processor: Processor, state, path, count, logits):
    """Return the processed logits of one row after `count` tokens of `path` int32[T], one by one, by trees of one
    node."""

    def token(i, state):
        return processor.update(processor.params, state, path[None, i, None], (i < count)[None].astype(jnp.int32))

    state = jax.lax.fori_loop(0, path.shape[0], token, state)
    alone = TokenTree(path[None, :1], jnp.full((1, 1), -1), jnp.ones((1, 1), bool))
    return processor.process(processor.params, state, alone, jnp.ones((1, 1, 1), bool), logits[None, None])[0, 0]


def one_by_one(processor: Processor, state, tree: TokenTree, logits) -> np.ndarray:
    """Compute what `in_a_tree` computes, by plain decoding along the path to each node; nan for nodes that are not
    valid."""
    batch, n, _ = logits.shape
    out = np.full(logits.shape, np.nan, np.float32)
    parents, tokens = np.asarray(tree.parents), np.asarray(tree.tokens)
    for row in range(batch):
        row_state = jax.tree.map(lambda x, row=row: x[row : row + 1], state)
        for node in range(n):
            if not tree.valid[row, node]:
                continue
            path, at = [], node
            while at > 0:
                path, at = [tokens[row, at], *path], parents[row, at]
            padded = np.array([*path, *[0] * (n - len(path))], np.int32)
            out[row, node] = _plain(processor, row_state, padded, np.int32(len(path)), logits[row, node])
    return out


def random_tree(rng: np.random.Generator, batch: int, n: int, vocab: int) -> TokenTree:
    """Any shape; a node is valid if its parent is and it is lucky. Invalid ones have tokens that are none."""
    parents = np.stack([[-1, *(rng.integers(max(0, i - 3), i) for i in range(1, n))] for _ in range(batch)])
    valid = np.ones((batch, n), bool)
    for i in range(1, n):
        valid[:, i] = valid[np.arange(batch), parents[:, i]] & (rng.random(batch) < 0.9)
    tokens = np.where(valid, rng.integers(0, vocab, (batch, n)), rng.choice([-1, vocab + 3], (batch, n)))
    return TokenTree(*(jnp.asarray(x) for x in (tokens.astype(np.int32), parents.astype(np.int32), valid)))
