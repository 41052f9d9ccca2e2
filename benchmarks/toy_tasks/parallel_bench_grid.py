"""ParallelBench's list operations of 3 to 6 names, answered by a denoiser with exact distributions.

Kang et al.: ParallelBench: Understanding the Trade-offs of Parallel Decoding in Diffusion LLMs (2025), arXiv
2510.04767, with single tokens for names.

All correct answers to a question are equally likely. The denoiser returns each column's exact distribution given the
decided columns. Therefore all errors come from deciding several columns at once, and none from the model. Deciding one
column per pass is always correct. Deciding all at once is correct with the probability that `together` returns.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from toy_tasks.parallel_bench import MASK, NAMES, NOTHING, VOCABULARY

from specjax.diffusion.types import Denoiser
from specjax.types import Model, Output

SIZES = (3, 4, 5, 6)
WORD = NAMES - 1  # the inserted or replacing name; no list contains it
Answers = Sequence[tuple[int, ...]]


def _names(size: int) -> tuple[int, ...]:
    return tuple(range(size))


GRID: dict[str, Callable[[int], Answers]] = {
    "copy": lambda n: [_names(n)],
    "reverse": lambda n: [_names(n)[::-1]],
    "shuffle": lambda n: [order for order in itertools.permutations(_names(n)) if order != _names(n)],
    "insert": lambda n: [(*_names(n)[:place], WORD, *_names(n)[place:]) for place in range(n + 1)],
    "remove": lambda n: [(*_names(n)[:place], *_names(n)[place + 1 :]) for place in range(n)],
    "replace": lambda n: [(*_names(n)[:place], WORD, *_names(n)[place + 1 :]) for place in range(n)],
}
"""All correct answers by the length of the list."""


def together(answers: Answers) -> float:
    """Return the probability that independent draws from the marginals of the columns give one of the answers."""
    table = np.array(answers)
    share = np.array([[np.mean(column == name) for name in range(NAMES)] for column in table.T])
    return float(sum(np.prod(share[np.arange(len(answer)), answer]) for answer in table))


def exact(answers: Answers, rows: int = 0, columns: int = 0) -> Denoiser:
    """Return a denoiser with the exact conditional distributions for the question [NOTHING] and these answers.

    Args:
      rows, columns: minimum size of the table of answers. Questions with tables of one size share compiled programs.
    """
    table = np.array(answers, np.int32)
    padding = max(rows - len(table), 0), max(columns - table.shape[1], 0)
    table = np.pad(table, ((0, 0), (1, padding[1])), constant_values=NOTHING)
    table = np.pad(table, ((0, padding[0]), (0, 0)), constant_values=-1)
    return Denoiser(_model(), jnp.asarray(table), MASK)


@functools.cache
def _model() -> Model:
    """Return the model. Its params are int32[A, 1 + n]: question and answer, then NOTHING; rows of -1 are padding."""

    def forward(params, tokens, cache, *, positions, mask, taps=(), earlier=None):
        size = tokens.shape[1]
        table = jnp.pad(params, ((0, 0), (0, max(size - params.shape[1], 0))), constant_values=NOTHING)[:, :size]
        fits = (tokens[:, None] == MASK) | (tokens[:, None] == table)  # bool[B, A, N]
        compatible = jnp.all(fits, 2) & (params[:, 0] >= 0)  # bool[B, A], with the decided columns
        names = table[:, :, None] == jnp.arange(VOCABULARY)  # bool[A, N, V]
        counts = jnp.einsum("ba,anv->bnv", compatible.astype(jnp.float32), names.astype(jnp.float32))
        # Without a compatible answer the text is wrong already, and all names are equally likely.
        share = jnp.where(jnp.any(compatible, 1)[:, None, None], counts, jnp.arange(VOCABULARY) < NAMES)
        logits = jnp.where(share > 0, jnp.log(jnp.maximum(share, 1e-9)), -1e9)
        return Output(logits, logits), jnp.zeros((*tokens.shape, 0))

    return Model(
        init_cache=lambda params, inputs, batch, capacity: jnp.zeros((batch, 0)),
        forward=forward,
        commit=lambda cache, pending, path, num_nodes: cache,
        vocab_size=VOCABULARY,
        max_positions=1 << 20,
        name="parallel_bench",
        unembed=lambda params, hidden: hidden,
    )
