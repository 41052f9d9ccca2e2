"""ParallelBench's grid on models that know the right distribution: operations on lists of 3 to 6 names.

Kang et al.: ParallelBench: Understanding the Trade-offs of Parallel Decoding in Diffusion LLMs (2025), arXiv
2510.04767, with single tokens for names.

Answers to a question are alike in probability, and a denoiser gives each column its exact distribution given the
columns that are decided. So what is lost is lost by deciding several columns at once, and not by a model that knows too
little: one column a pass is always right, all at once as often as `together` says, by the shape of the answers alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from specjax.analysis.parallel_bench import MASK, NAMES, NOTHING, VOCABULARY
from specjax.diffusion.types import Denoiser
from specjax.types import Model, Output

SIZES = (3, 4, 5, 6)
WORD = NAMES - 1  # what is inserted, or takes a name's place; no list has it
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
"""All right answers by the length of the list; of the last four the place is free."""


def together(answers: Answers) -> float:
    """Chance that independent draws from the columns' own distributions are one of the answers."""
    table = np.array(answers)
    share = np.array([[np.mean(column == name) for name in range(NAMES)] for column in table.T])
    return float(sum(np.prod(share[np.arange(len(answer)), answer]) for answer in table))


def exact(answers: Answers, rows: int = 0, columns: int = 0) -> Denoiser:
    """The denoiser of the one question [NOTHING] whose answers these are.

    rows, columns: of its table at least, so that questions share their programs.
    """
    table = np.array(answers, np.int32)
    more = max(rows - len(table), 0), max(columns - table.shape[1], 0)
    table = np.pad(table, ((0, 0), (1, more[1])), constant_values=NOTHING)
    table = np.pad(table, ((0, more[0]), (0, 0)), constant_values=-1)
    return Denoiser(_model(), jnp.asarray(table), MASK)


@functools.cache
def _model() -> Model:
    """params: int32[A, 1 + n], the question and its answer, then NOTHING; rows of -1 are none."""

    def forward(params, tokens, cache, *, positions, mask, taps=(), earlier=None):
        size = tokens.shape[1]
        table = jnp.pad(params, ((0, 0), (0, max(size - params.shape[1], 0))), constant_values=NOTHING)[:, :size]
        fits = (tokens[:, None] == MASK) | (tokens[:, None] == table)  # bool[B, A, N]
        left = jnp.all(fits, 2) & (params[:, 0] >= 0)  # bool[B, A]: answers that what is decided leaves
        names = table[:, :, None] == jnp.arange(VOCABULARY)  # bool[A, N, V]
        counts = jnp.einsum("ba,anv->bnv", left.astype(jnp.float32), names.astype(jnp.float32))
        # where nothing is left any name may follow: the answer is wrong already
        share = jnp.where(jnp.any(left, 1)[:, None, None], counts, jnp.arange(VOCABULARY) < NAMES)
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
