"""From decoded rows and clock times to the numbers that are reported. Pure, on numpy: no model, no clock, no printing.

Conventions, the same for every method and its baseline: `seconds` is the wall time of a call that compiles nothing,
reading the prompt included; a *target pass* is one forward pass of the target for one row; `block_efficiency` counts
the bonus token, `mean_accepted` does not.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from specjax.catalog.method import Guarantee
from specjax.types import Draws, Stats


class Run(NamedTuple):
    """One or several decoded batches with their clock."""

    tokens: list[list[int]]  # per row
    hit_eos: np.ndarray  # bool[B]
    stats: Stats  # numpy, [B] and [B, D]
    seconds: float
    first_token_seconds: float | None = None  # None: not measured
    resumed: int = 0  # tokens that an earlier process had decoded, in no part of the clock
    columns: np.ndarray | None = None  # int32[B], that a denoising loop computed


def merge(runs: Sequence[Run]) -> Run:
    """The rows of several runs as one run, with the sum of their seconds; the first token is the median."""
    first = [run.first_token_seconds for run in runs if run.first_token_seconds is not None]
    return Run(
        [row for run in runs for row in run.tokens],
        np.concatenate([run.hit_eos for run in runs]),
        jax.tree.map(lambda *fields: np.concatenate(fields), *(run.stats for run in runs)),
        sum(run.seconds for run in runs),
        statistics.median(first) if first else None,
        sum(run.resumed for run in runs),
        None if runs[0].columns is None else np.concatenate([run.columns for run in runs if run.columns is not None]),
    )


def dtypes(record: dict) -> str:
    """ "bfloat16", or "bfloat16, int8 cache": of what was run, from its record."""
    cache = record.get("cache_dtype")
    return record["dtype"] + (f", {cache} cache" if cache else "") + (", same bits" if record.get("same_bits") else "")


def tokens_per_second(run: Run) -> float:
    """All new tokens of all rows over the wall time."""
    return (sum(map(len, run.tokens)) - run.resumed) / run.seconds


def record(
    method: str,
    guarantee: Guarantee,
    run: Run,
    baseline: Run | None = None,
    *,
    identical: bool | None = None,
    refused: bool = False,
    compile_seconds: float | None = None,
    peak_memory_bytes: int | None = None,
) -> dict:
    """The JSON record of a run. `refused`: the texts should be equal and are not, so no speed-up is stated."""
    tokens, passes = sum(map(len, run.tokens)), int(run.stats.target_passes.sum())
    plain = tokens_per_second(baseline) if baseline else None
    return {
        "method": method,
        "guarantee": guarantee,
        "prompts": len(run.tokens),
        "tokens": tokens,
        "seconds": run.seconds,
        "tokens_per_second": tokens_per_second(run),
        "baseline_tokens_per_second": plain,
        "speedup": tokens_per_second(run) / plain if plain and not refused else None,
        "identical": identical,
        "block_efficiency": tokens / max(passes, 1),
        "mean_accepted": int(run.stats.accepted.sum()) / max(passes, 1),
        "acceptance_by_depth": acceptance_by_depth(run.stats),
        "drafted": int(run.stats.drafted.sum()),
        "accepted": int(run.stats.accepted.sum()),
        "target_passes": passes,
        "time_to_first_token": run.first_token_seconds,
        "compile_seconds": compile_seconds,
        "peak_memory_bytes": peak_memory_bytes,
    }


def denoising_record(
    method: str,
    guarantee: Guarantee,
    run: Run,
    baseline: Run,
    *,
    refused: bool = False,
    compile_seconds: float | None = None,
    peak_memory_bytes: int | None = None,
) -> dict:
    """The JSON record of a run of a diffusion model beside one column a pass. Tokens per pass is no speed: a pass costs
    by its columns, so these are counted too. `agreement`: of the longer text's columns, the share that are equal."""
    tokens, passes = sum(map(len, run.tokens)), int(run.stats.target_passes.sum())
    plain_tokens, plain_passes = sum(map(len, baseline.tokens)), int(baseline.stats.target_passes.sum())
    assert run.columns is not None and baseline.columns is not None
    pairs = list(zip(run.tokens, baseline.tokens, strict=True))
    equal = sum(a == b for ours, plain in pairs for a, b in zip(ours, plain, strict=False))
    return {
        "method": method,
        "guarantee": guarantee,
        "prompts": len(run.tokens),
        "tokens": tokens,
        "seconds": run.seconds,
        "tokens_per_second": tokens_per_second(run),
        "baseline_tokens_per_second": tokens_per_second(baseline),
        "speedup": None if refused else tokens_per_second(run) / tokens_per_second(baseline),
        "identical": all(ours == plain for ours, plain in pairs),
        "agreement": equal / max(sum(max(len(ours), len(plain)) for ours, plain in pairs), 1),
        "tokens_per_pass": tokens / max(passes, 1),
        "columns_per_token": int(run.columns.sum()) / max(tokens, 1),
        "baseline_tokens_per_pass": plain_tokens / max(plain_passes, 1),
        "baseline_columns_per_token": int(baseline.columns.sum()) / max(plain_tokens, 1),
        "target_passes": passes,
        "compile_seconds": compile_seconds,
        "peak_memory_bytes": peak_memory_bytes,
    }


def acceptance_by_depth(stats: Stats) -> list[float | None]:
    """Per depth from 1: of the rounds that drafted so deep, the fraction that accepted it; None where none drafted."""
    drafted, accepted = stats.drafted_by_depth.sum(0), stats.accepted_by_depth.sum(0)
    return [float(a / d) if d else None for a, d in zip(accepted, drafted, strict=True)]


def is_comparable(guarantee: Guarantee, draws: Draws, is_greedy: bool, is_coupled: bool = False) -> bool:
    """Whether equal keys must give the text of plain decoding: if greedy or coupled; when sampling, for point masses.

    Their verifier draws the target's token from (key, position). Sampled drafts keep the distribution, not the text.
    """
    if guarantee == "lossy" or is_greedy:
        return guarantee != "lossy"
    return guarantee == "distribution" and (is_coupled or draws == "point_mass")
