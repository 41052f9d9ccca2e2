"""From bytes, FLOPs, cycles and collectives to seconds, and from acceptance rates to speed-ups. Plain formulas.

Two estimates of a program's time, from two sides, both printed; neither is a measurement.

- *Roofline*: max(bytes that must move / HBM bandwidth, FLOPs / peak) + collectives. A lower bound: every weight is
  read once per pass and the cached tokens once, at the published figures, and nothing waits. Where the compiled program
  moves less, because it keeps a small model's weights on the chip between two passes, that counts.
- *Schedule*: the compiler's own cycles (`specjax.planning.hlo`) over the clock, + Pallas kernels by their authors'
  estimates, + collectives. It is more than real chips take for programs of many small fusions, and it is what the
  compiler optimises; differences between two programs of one kind are worth more than its absolute value.

Collectives have no cycles in the text: wire bytes over both directions of one ring, and the latency of half the ring
per collective, which is what decides at few tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from specjax.engine.prefill import CHUNK
from specjax.planning import hlo
from specjax.planning.chips import HOP_SECONDS, Chip
from specjax.planning.programs import Abstract, Job, shard_bytes
from specjax.trees.best_shapes import Paths

ACCEPTANCE_RATES = (0.3, 0.5, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Seconds:
    """Both estimates of one program, and what the first consists of."""

    memory: float
    compute: float
    collectives: float
    roofline: float
    schedule: float


def estimate(chip: Chip, totals: hlo.Totals, must_bytes: float) -> Seconds:
    """Seconds of one run. `must_bytes`: what a device has to move at least, from `step_bytes` and the like."""
    memory = min(must_bytes, totals.hbm_bytes) / chip.hbm_bandwidth
    compute = totals.flops / chip.peak_flops
    collectives = sum(collective_seconds(chip, entry) for entry in totals.collectives)
    kernels = max(totals.kernels.flops / chip.peak_flops, totals.kernels.bytes / chip.hbm_bandwidth)
    return Seconds(
        memory, compute, collectives, max(memory, compute) + collectives,
        totals.cycles / chip.clock + kernels + collectives,
    )  # fmt: skip


def collective_seconds(chip: Chip, entry: hlo.Collective) -> float:
    """All runs of a kind: a ring that uses both directions of its links."""
    if entry.group < 2:
        return 0.0
    return entry.wire_bytes / (2 * chip.link_bandwidth) + entry.count * (entry.group // 2) * HOP_SECONDS


# --- bytes that must move ---------------------------------------------------------------------------------------------


def pass_bytes(config: Any, params: Any, cache: Any, context: float, *, head: bool = True) -> float:
    """Bytes that one pass moves on a device: its weights, and keys and values of `context` cached tokens.

    An embedding that is not the head too is only looked up; prompts are read without the head. Windowed layers read
    their window.
    """
    weights = shard_bytes(params)
    weights -= 0 if config.tied and head else shard_bytes(params["embed"])
    weights -= 0 if config.tied or head else shard_bytes(params["head"])
    slots = jax.tree.leaves(cache.k)[0].shape[-2]
    per_token = (shard_bytes(cache.k) + shard_bytes(cache.v)) / slots
    return weights + per_token * _mean_context(config, context)


def _mean_context(config: Any, context: float) -> float:
    """Cached tokens that a layer reads, in the mean over layers."""
    window = getattr(config, "window", None)
    if window is None:
        return context
    full = getattr(config, "is_global", (False,) * config.num_layers)
    return sum(context if is_full else min(context, window) for is_full in full) / len(full)


def must_bytes(job: Job, args: Abstract, state: Any, draft_passes: int, rounds: float) -> dict[str, float]:
    """Per program, the bytes that a device has to move: `draft_passes` of the draft model and one of the target."""
    target = args.inputs.target.params
    draft = None if job.draft is None else args.inputs.drafter.params
    draft_cache = None if draft is None else _find_cache(state.draft)

    def step(context: float) -> float:
        total = pass_bytes(job.target, target, state.cache, context)
        if draft is not None and draft_cache is not None:
            total += draft_passes * pass_bytes(job.draft, draft, draft_cache, context)
        return total

    chunks = max(1, math.ceil((job.context - 1) / CHUNK))
    prefill = chunks * pass_bytes(job.target, target, state.cache, job.context / 2, head=False)
    if draft is not None and draft_cache is not None:
        prefill += chunks * pass_bytes(job.draft, draft, draft_cache, job.context / 2, head=False)
    middle = job.context + job.max_new_tokens / 2
    return {"prefill": prefill, "step": step(job.context), "loop": prefill + rounds * step(middle)}


def _find_cache(state: Any) -> Any:
    from specjax.models import cache as kv

    found = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kv.KVCache))
    return next((part for part in found if isinstance(part, kv.KVCache)), None)


# --- what a draft is worth --------------------------------------------------------------------------------------------


def expected_tokens(paths: Paths, acceptance: Sequence[float]) -> float:
    """Tokens per target pass of a static tree: 1 + the sum over its nodes of the product of a[rank] along their path.

    acceptance: a[r], the chance that the r-th child of an accepted node is the accepted one. For a chain of k tokens
    that is the sum of a[0] ** j over j = 0 ... k.
    """
    a = list(acceptance)
    chance = lambda path: math.prod(a[rank] if rank < len(a) else 0.0 for rank in path)
    return 1.0 + sum(chance(path) for path in paths)


def rank_acceptance(rate: float, ranks: int = 16) -> tuple[float, ...]:
    """a[r] = rate * (1 - rate) ** r: each sibling is accepted with chance `rate` once those before it are refused.

    An assumption, for tables by one number; siblings of real drafts are worth less. Measure where it matters.
    """
    return tuple(rate * (1 - rate) ** r for r in range(ranks))


def speedup(tokens: float, plain_seconds: float, step_seconds: float) -> float:
    """Over plain decoding: tokens per pass, over how many plain steps the method's step costs (drafting included)."""
    return tokens * plain_seconds / step_seconds


def draft_shape(job: Job, num_nodes: int, max_depth: int) -> Callable[[float], float]:
    """(acceptance rate) -> expected tokens per pass of the job's draft.

    Exact for chains, branching specs, independent paths and static trees. Trees that grow where the drafter is sure
    count as the best static tree of their size and depth (Sequoia's programme), which they beat or miss a little.
    """
    paths = _static_paths(job, num_nodes, max_depth)
    if paths is not None:
        return lambda rate: expected_tokens(paths, rank_acceptance(rate))
    from specjax.trees import sequoia

    return lambda rate: sequoia(rank_acceptance(rate, min(16, num_nodes - 1)), num_nodes, max_depth)[0]


def _static_paths(job: Job, num_nodes: int, max_depth: int) -> Paths | None:
    if job.tree:
        from specjax import trees

        return trees.paths_of(job.tree)
    if num_nodes == max_depth + 1:
        return tuple((0,) * depth for depth in range(1, max_depth + 1))
    if job.method == "token_recycling":
        from specjax.drafters.tables.token_recycling import best_paths

        return tuple(best_paths(num_nodes - 1))
    return None


def draft_passes(job: Job, max_depth: int) -> int:
    """Passes of the draft model per round: one per level of its tree, at most, for methods with such a model."""
    from specjax import trees
    from specjax.catalog import methods

    if "draft" not in methods.METHODS[job.method].needs:
        return 0
    return trees.parse(job.tree).levels if job.tree else max_depth
