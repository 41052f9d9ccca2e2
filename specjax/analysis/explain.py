"""The steps of a decoding run: drafted tokens, their target probabilities, accepted tokens, and costs."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.api import job_of, refuse, settings_of
from specjax.arrays.indexing import take_along
from specjax.arrays.modes import jit, with_standard_modes
from specjax.costs import Curve, dtype_of, evaluate, shares_of
from specjax.engine import run, value_checks
from specjax.engine.job import Keep, Parts
from specjax.errors import UsageError
from specjax.types import Array, DecodeState, Drafter, Info, PyTree, Scored, Target


class Round(NamedTuple):
    """A target pass over a draft tree of n nodes. The root is included, and parents come before their children."""

    tokens: np.ndarray  # int32[n]; node 0 is the last token of the text
    parents: np.ndarray  # int32[n]; -1 of node 0
    chances: np.ndarray  # float32[n], target probability of each node given its path; 1 for node 0
    accepted: np.ndarray  # bool[n], on the accepted path, node 0 included
    added: list[int]  # new tokens of the text: the accepted ones, then a bonus token unless the text ends before
    drafted: int  # number of accepted drafted tokens
    width: int  # tokens of the compiled pass that fits the tree
    cost: float  # cost of that pass, in passes over one token
    why: str | None  # the drafter's explanation of its draft (`Hooks.explain`)


@with_standard_modes
def explain(
    target: Target,
    drafter: Any,
    prompt: Any,
    *,
    key: Array | int,
    max_new_tokens: int,
    costs: Curve | None = None,
    inputs: PyTree = None,
    **settings: Any,
) -> list[Round]:
    """Return the steps of `decode(target, drafter, [prompt], ...)`. The passes are the same, but slower.

    Probabilities (`Round.chances`) are those that verification uses. At temperature 0 they come from the unmodified
    logits of the target.

    Args:
      target, drafter, key, max_new_tokens, inputs: as in `decode`, for one prompt.
      prompt: token ids.
      costs: cost of passes by their width (`specjax.costs`), without the cost of drafting. None: the default curve of
        this device.
      settings: settings of `decode` other than `logprobs`, `debug` and `samples_per_prompt`.

    Raises: UsageError as in `decode`, for a denoiser, and for a target that returns NaN or Inf.
    """
    refuse(settings, "explain", ("logprobs", "debug"))
    decode_settings = settings_of(**settings)
    job = job_of(target, drafter, [prompt], decode_settings, key=key, max_new_tokens=max_new_tokens, inputs=inputs)
    if not isinstance(job.parts, Parts):
        raise UsageError("explain needs an autoregressive target, but this is a diffusion model; use denoise")
    parts = dataclasses.replace(job.parts, keep=Keep(scored=True))
    state, rounds = run.start(dataclasses.replace(job, parts=parts)), []
    previous = _copy_drafter_state(parts.drafter, state)
    while not bool(state.done[0]):
        state, info, _ = run.step(parts, state)
        following = _copy_drafter_state(parts.drafter, state)
        why = None if parts.drafter.hooks.explain is None else parts.drafter.hooks.explain(previous, following)
        rounds.append(_round(parts, info, costs, why))
        previous = following
    if not bool(state.finite[0]):
        raise UsageError(value_checks.explain_failure(parts.target, parts.processors))
    return rounds


def _copy_drafter_state(drafter: Drafter, state: DecodeState) -> PyTree:
    """Return a copy of the drafter state, since a step overwrites it, or None if the drafter explains nothing."""
    return None if drafter.hooks.explain is None else jax.device_get(state.draft)


def _round(parts: Parts, info: Info, costs: Curve | None, why: str | None) -> Round:
    assert info.scored is not None
    tree, drafter = info.scored.tree, parts.drafter
    tokens, parents, valid, chances, added, count, accepted = jax.device_get(
        (tree.tokens[0], tree.parents[0], tree.valid[0], _chances(info.scored)[0], info.tokens[0], info.emitted[0],
         info.accepted[0])
    )  # fmt: skip
    number = np.cumsum(valid) - 1  # index of each valid node among the valid nodes
    parents = np.where(parents < 0, -1, number[np.maximum(parents, 0)])[valid]
    added = added[:count].tolist()
    path = _path(tokens[valid], parents, added[: int(accepted)])
    width = min(width for width in drafter.pass_widths(1, parts.target) if width >= valid.sum())
    cost = (
        float(evaluate(costs, (1, width), 1, dtype_of(parts.target), shares=shares_of(parts.target))[1])
        if width > 1
        else 1.0
    )
    return Round(tokens[valid], parents, chances[valid], path, added, int(accepted), width, cost, why)


@jit
def _chances(scored: Scored) -> Array:
    """Return float32[B, N], the target probability of each node given its path; 1 for the root."""
    tree, log_p = scored.tree, jax.nn.log_softmax(scored.logits, -1)
    log_p_at_parent = take_along(log_p, jnp.maximum(tree.parents, 0)[..., None], 1)
    chances = jnp.exp(take_along(log_p_at_parent, tree.tokens[..., None], 2)[..., 0])
    return jnp.where(tree.parents < 0, 1.0, chances)


def _path(tokens: np.ndarray, parents: np.ndarray, accepted: list[int]) -> np.ndarray:
    """Return bool[n], the first path with these tokens. Equal siblings are distinguished by the tokens after them."""
    ends = np.arange(len(tokens)) == 0  # bool[n], last nodes of paths with the tokens so far
    for token in accepted:
        ends = (parents >= 0) & ends[parents] & (tokens == token)
    on_path, node = np.zeros(len(tokens), bool), int(np.argmax(ends))
    while node >= 0:
        on_path[node], node = True, int(parents[node])
    return on_path
