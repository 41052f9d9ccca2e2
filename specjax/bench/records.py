"""Records of runs: the reported numbers, computed from decoded rows and clock times with numpy.

Every method and its baseline follow the same conventions. `seconds` is the wall time of a call without compilation,
prefill included. A *target pass* is one forward pass of the target for one row. `block_efficiency` counts the bonus
token, and `mean_accepted` does not.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from specjax.catalog.method import Guarantee
from specjax.types import Draws, Stats


class MeasuredRun(NamedTuple):
    """A decoded batch, or several, with their times."""

    tokens: list[list[int]]  # per row
    hit_eos: np.ndarray  # bool[B]
    stats: Stats  # numpy, [B] and [B, D]
    seconds: float
    first_token_seconds: float | None = None  # None: not measured
    resumed: int = 0  # tokens that an earlier process decoded; `seconds` excludes them
    columns: np.ndarray | None = None  # int32[B], columns of the rows' canvases in all passes of a denoising loop
    computed: np.ndarray | None = None  # int32[B], columns that the loop computed, padding included
    compile_seconds: float = 0.0  # of a method with a loop of its own; `seconds` excludes them

    @property
    def call_seconds(self) -> float:
        """Return the time of the call with its compilation."""
        return self.seconds + self.compile_seconds


def merge(runs: Sequence[MeasuredRun]) -> MeasuredRun:
    """Join the rows of several runs. Seconds are added; the time to the first token is the median."""
    first = [run.first_token_seconds for run in runs if run.first_token_seconds is not None]
    return MeasuredRun(
        [row for run in runs for row in run.tokens],
        np.concatenate([run.hit_eos for run in runs]),
        jax.tree.map(lambda *fields: np.concatenate(fields), *(run.stats for run in runs)),
        sum(run.seconds for run in runs),
        statistics.median(first) if first else None,
        sum(run.resumed for run in runs),
        _joined([run.columns for run in runs]),
        _joined([run.computed for run in runs]),
        sum(run.compile_seconds for run in runs),
    )


def _joined(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Return the rows of all arrays, or None if these were not measured."""
    present = [array for array in arrays if array is not None]
    return np.concatenate(present) if present else None


def dtypes(record: dict) -> str:
    """Return the dtypes of a record in words, such as "bfloat16" or "bfloat16, int8 cache"."""
    cache = record.get("cache_dtype")
    return record["dtype"] + (f", {cache} cache" if cache else "") + (", same bits" if record.get("same_bits") else "")


def tokens_per_second(run: MeasuredRun) -> float:
    """Return the new tokens of all rows, divided by the wall time."""
    return (sum(map(len, run.tokens)) - run.resumed) / run.seconds


def record(
    method: str,
    guarantee: Guarantee,
    run: MeasuredRun,
    baseline: MeasuredRun | None = None,
    *,
    identical: bool | None = None,
    refused: bool = False,
    compile_seconds: float | None = None,
    peak_memory_bytes: int | None = None,
) -> dict:
    """Return the JSON record of a run. refused: texts differ that must be equal, so the speedup is left out."""
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
    run: MeasuredRun,
    baseline: MeasuredRun,
    *,
    identical: bool | None = None,
    refused: bool = False,
    compile_seconds: float | None = None,
    peak_memory_bytes: int | None = None,
) -> dict:
    """Return the JSON record of a diffusion run and its baseline of one column per pass.

    The cost of a pass depends on its columns, so the record has tokens per pass and columns per token. `agreement` is
    the share of columns that equal the baseline's, relative to the longer text.

    identical: True if the text is the one that the method guarantees. None: it guarantees none, and the record has the
    equality with the baseline.
    """
    tokens, passes = sum(map(len, run.tokens)), int(run.stats.target_passes.sum())
    plain_tokens, plain_passes = sum(map(len, baseline.tokens)), int(baseline.stats.target_passes.sum())
    assert run.columns is not None and baseline.columns is not None
    assert run.computed is not None and baseline.computed is not None
    pairs = list(zip(run.tokens, baseline.tokens, strict=True))
    equal = sum(a == b for text, plain in pairs for a, b in zip(text, plain, strict=False))
    return {
        "method": method,
        "guarantee": guarantee,
        "prompts": len(run.tokens),
        "tokens": tokens,
        "seconds": run.seconds,
        "tokens_per_second": tokens_per_second(run),
        "baseline_tokens_per_second": tokens_per_second(baseline),
        "speedup": None if refused else tokens_per_second(run) / tokens_per_second(baseline),
        "identical": all(text == plain for text, plain in pairs) if identical is None else identical,
        "agreement": equal / max(sum(max(len(text), len(plain)) for text, plain in pairs), 1),
        "tokens_per_pass": tokens / max(passes, 1),
        "columns_per_token": int(run.columns.sum()) / max(tokens, 1),
        "computed_per_token": int(run.computed.sum()) / max(tokens, 1),
        "baseline_tokens_per_pass": plain_tokens / max(plain_passes, 1),
        "baseline_columns_per_token": int(baseline.columns.sum()) / max(plain_tokens, 1),
        "baseline_computed_per_token": int(baseline.computed.sum()) / max(plain_tokens, 1),
        "target_passes": passes,
        "compile_seconds": compile_seconds,
        "peak_memory_bytes": peak_memory_bytes,
    }


def acceptance_by_depth(stats: Stats) -> list[float | None]:
    """Return the acceptance rate per depth, from 1: accepted over drafted steps; None for a depth without drafts."""
    drafted, accepted = stats.drafted_by_depth.sum(0), stats.accepted_by_depth.sum(0)
    return [float(a / d) if d else None for a, d in zip(accepted, drafted, strict=True)]


def is_comparable(guarantee: Guarantee, draws: Draws, is_greedy: bool, is_coupled: bool = False) -> bool:
    """Return True if equal keys must give the text of plain decoding.

    Greedy and coupled texts must be equal. Sampled texts must be equal for point-mass drafts: their verifier draws the
    target's token from (key, position). Sampled drafts keep the distribution, not the text.
    """
    if guarantee == "lossy" or is_greedy:
        return guarantee != "lossy"
    return guarantee == "distribution" and (is_coupled or draws == "point_mass")
