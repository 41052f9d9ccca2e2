"""The steps of a run: drafted tokens, their target probabilities, accepted tokens, and costs."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.api import job_of, refuse, settings_of
from specjax.arrays.indexing import take_along
from specjax.costs import Curve, dtype_of, evaluate
from specjax.engine import run, value_checks
from specjax.engine.job import Keep, Parts
from specjax.errors import UsageError
from specjax.types import Array, DecodeState, Drafter, Info, PyTree, Scored, Target


class Round(NamedTuple):
    """A target pass over a drafted tree of n nodes, root included, parents before their children."""

    tokens: np.ndarray  # int32[n]; node 0 is the last token of the text
    parents: np.ndarray  # int32[n]; -1 of node 0
    chances: np.ndarray  # float32[n], of each node in the target's distribution behind its parent; 1 of node 0
    accepted: np.ndarray  # bool[n], on the accepted path; node 0 is
    added: list[int]  # to the text: the accepted tokens, then one of the target's own unless the text ends before
    drafted: int  # how many of these were drafted
    width: int  # tokens of the pass that holds the tree
    cost: float  # of that pass, in passes over one token
    why: str | None  # what the drafter says of its draft, if it says anything


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
    """The rounds of `decode(target, drafter, [prompt], ...)`, one by one: the same passes, but times mean nothing.

    Args:
      target, drafter, key, max_new_tokens, inputs: as for `decode`, of one text.
      prompt: the ids of that text.
      costs: of passes by their width (`specjax.costs`); None: the rule of thumb for this device. What drafting itself
        costs is not in it.
      settings: those of `decode` but `logprobs`, `debug` and `samples_per_prompt`.

    Chances are those that drafts were judged by; at temperature 0 those of the target's unchanged logits.
    Raises: UsageError as `decode`, for a denoiser, and for a target that gives NaN or Inf.
    """
    refuse(settings, "explain", ("logprobs", "debug"))
    provided = settings_of(**settings)
    job = job_of(target, drafter, [prompt], provided, key=key, max_new_tokens=max_new_tokens, inputs=inputs)
    if not isinstance(job.parts, Parts):
        raise UsageError("explain tells of drafts, which a diffusion model does not make; decode it with denoise")
    parts = dataclasses.replace(job.parts, keep=Keep(scored=True))
    state, rounds = run.start(dataclasses.replace(job, parts=parts)), []
    previous = _memory(parts.drafter, state)
    while not bool(state.done[0]):
        state, info, _ = run.step(parts, state)
        following = _memory(parts.drafter, state)
        why = None if parts.drafter.hooks.explain is None else parts.drafter.hooks.explain(previous, following)
        rounds.append(_round(parts, info, costs, why))
        previous = following
    if not bool(state.finite[0]):
        raise UsageError(value_checks.explain_failure(parts.target, parts.processors))
    return rounds


def _memory(drafter: Drafter, state: DecodeState) -> PyTree:
    """Return a copy of the state that explains the draft. The next step overwrites the original."""
    return None if drafter.hooks.explain is None else jax.device_get(state.draft)


def _round(parts: Parts, info: Info, costs: Curve | None, why: str | None) -> Round:
    assert info.scored is not None
    tree, drafter = info.scored.tree, parts.drafter
    tokens, parents, valid, chances, added, count, accepted = jax.device_get(
        (tree.tokens[0], tree.parents[0], tree.valid[0], _chances(info.scored)[0], info.tokens[0], info.emitted[0],
         info.accepted[0])
    )  # fmt: skip
    number = np.cumsum(valid) - 1  # of each valid node among these
    parents = np.where(parents < 0, -1, number[np.maximum(parents, 0)])[valid]
    added = added[:count].tolist()
    path = _path(tokens[valid], parents, added[: int(accepted)])
    width = min(width for width in {*drafter.traits.widths, drafter.num_nodes} if width >= valid.sum())
    cost = float(evaluate(costs, (1, width), 1, dtype_of(parts.target))[1]) if width > 1 else 1.0
    return Round(tokens[valid], parents, chances[valid], path, added, int(accepted), width, cost, why)


@jax.jit
def _chances(scored: Scored) -> Array:
    """float32[B, N], of each node behind its parent; 1 of the root."""
    tree, log_p = scored.tree, jax.nn.log_softmax(scored.logits, -1)
    above = take_along(log_p, jnp.maximum(tree.parents, 0)[..., None], 1)
    chances = jnp.exp(take_along(above, tree.tokens[..., None], 2)[..., 0])
    return jnp.where(tree.parents < 0, 1.0, chances)


def _path(tokens: np.ndarray, parents: np.ndarray, accepted: list[int]) -> np.ndarray:
    """bool[n]: the nodes of the first path with these tokens. Of equal siblings it may be any that has what follows."""
    ends = np.arange(len(tokens)) == 0  # of the paths with the tokens so far
    for token in accepted:
        ends = (parents >= 0) & ends[parents] & (tokens == token)
    on, node = np.zeros(len(tokens), bool), int(np.argmax(ends))
    while node >= 0:
        on[node], node = True, int(parents[node])
    return on
