"""HEX: a vote over the answers of texts that were decoded with different block sizes.

Lee, Moon, Zhai, Chithanar, Sahu, Kar, Lee, Chakraborty, Bedi: Test-Time Scaling in Diffusion LLMs via Hidden
Semi-Autoregressive Experts (2025), arXiv 2510.05040.

Rule: decode each prompt with every block size and several seeds. Extract the answer of each text, drop texts without an
answer, and choose the answer with the most votes. Ties go to the answer of the smallest block size, then to the lowest
seed.
Guarantee: lossy (more computation for better answers); one size and one seed give the text of that procedure.
Deviations: block sizes are data, so all texts are one batch of one compiled program, with a window of the largest size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from specjax.diffusion.loop import Denoised
from specjax.diffusion.prepare import prepare
from specjax.diffusion.rules.quota import quota
from specjax.diffusion.types import Canvas, Denoiser, Procedure, Proposal, Schedule, View
from specjax.engine.prepare import Settings
from specjax.engine.run import run
from specjax.errors import UsageError
from specjax.numerics import sampling
from specjax.types import Array, PyTree


class Expert(NamedTuple):
    """A generated text of a prompt, with its block size and seed."""

    block: int
    seed: int
    tokens: list[int]
    answer: Hashable | None


class HexVote(NamedTuple):
    """Result of the vote over all texts of a prompt."""

    answer: Hashable | None  # None: no text has an answer
    votes: dict[Hashable, int]
    experts: list[Expert]


def hex_vote(
    denoiser: Denoiser,
    prompts: Sequence[Sequence[int]],
    *,
    answer: Callable[[list[int]], Hashable | None],
    key: Array | int,
    max_new_tokens: int,
    blocks: Sequence[int] = (8, 16, 32, 64, 128),
    seeds: int = 5,
    **settings: Any,
) -> list[HexVote]:
    """Return the vote for each prompt. A text depends only on its prompt, its row's key, its block size and its seed.

    Args:
      answer: returns the answer in a text without its prompt, or None if it has no answer.
      key: random key or seed of the prompts, as for `denoise`.
      blocks: block sizes. Each pass decides one column. seeds: texts for each block size.
      settings: settings of all rows, as for `denoise`. At temperature 0 the seeds of a size give equal texts.

    Raises: UsageError for a block-causal model, for sizes or seeds below 1, and for the reasons of `denoise`.
    """
    sizes = sorted(set(blocks))
    if denoiser.is_causal:
        raise UsageError(
            "hex_vote varies block sizes, and a block-causal model has a fixed one; use a model with full attention"
        )
    if not sizes or sizes[0] < 1 or seeds < 1:
        raise UsageError(f"hex_vote needs block sizes and seeds of at least 1, not {sizes} and {seeds}")
    experts = [(size, seed) for size in sizes for seed in range(seeds)]
    keys = sampling.row_keys(key, len(prompts))
    size, seed = (jnp.tile(jnp.array(part, jnp.int32), len(prompts)) for part in zip(*experts, strict=True))
    row_keys = sampling.fold_in(sampling.fold_in(jnp.repeat(keys, len(experts)), size), seed)
    procedure = Procedure(blocks_of(sizes[-1], size), quota())
    rows = [row for row in prompts for _ in experts]
    job = prepare(denoiser, procedure, rows, Settings(**settings), key=row_keys, max_new_tokens=max_new_tokens)
    result: Denoised = run(job)
    texts = iter(result.to_lists())
    return [count_votes([Expert(*expert, text := next(texts), answer(text)) for expert in experts]) for _ in prompts]


def count_votes(experts: list[Expert]) -> HexVote:
    """Count the votes of experts, which must be sorted by block size and seed."""
    votes: dict[Hashable, int] = {}
    for expert in experts:
        if expert.answer is not None:
            votes[expert.answer] = votes.get(expert.answer, 0) + 1
    return HexVote(max(votes, key=lambda candidate: votes[candidate], default=None), votes, experts)


def blocks_of(width: int, sizes: Array) -> Schedule:
    """Return a schedule of blocks from left to right that decides one column per pass.

    sizes: int32[B], the block size of each row, at most `width`.
    """
    return Schedule(width, _place, _bound, _init, sizes)


def _init(sizes: Array, canvas: Canvas, width: int) -> Array:
    return sizes


def _place(sizes: Array, canvas: Canvas) -> tuple[Array, PyTree]:
    return canvas.origin + (canvas.first_open - canvas.origin) // sizes * sizes, sizes


def _bound(sizes: Array, canvas: Canvas, proposal: Proposal, view: View) -> tuple[Array, Array, PyTree]:
    return view.start + sizes, jnp.ones_like(sizes), sizes
