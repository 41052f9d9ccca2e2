"""Measured speedup of deciding several columns per pass, and of fusing the clean pass of a block, on this machine.

    python benchmarks/denoising_speed.py --block 4 --new-tokens 48 --repeats 5

A block-diffusion model of SmolLM2's shape: its weights, read as SDAR's are. They were not trained for it, so the text
means nothing, and what a threshold makes of their confidence says nothing of a model that was: what is measured is the
time, beside the passes that it took. One column a pass, SDAR's dynamic rule at several thresholds, and all columns at
once, each with the clean pass of a block fused with the first pass over the next and apart. Every turn runs all ways
one after another; said are medians over the turns, and ratios within a turn. Fused and apart must write the same text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import jax
import numpy as np

import specjax
from specjax.diffusion import Denoiser, Procedure, methods

MASK = 0  # of SmolLM2 <|endoftext|>, which no prompt has
ONE = "one a pass"


def ways(denoiser: Denoiser, taus: list[float]) -> dict[str, tuple[Procedure, Procedure]]:
    """Return the options of each procedure by name: (fused, separate)."""
    both = lambda **settings: tuple(methods.sdar(denoiser, fuse=fuse, **settings) for fuse in (True, False))
    results = {ONE: both(remasking="static")}
    results |= {f"dynamic, tau {tau}": both(tau=tau) for tau in taus}
    return results | {"a block a pass": both(remasking="static", steps=1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as of specjax.load; default: SmolLM2-135M")
    parser.add_argument("--block", type=int, default=4)
    parser.add_argument("--tau", type=float, nargs="+", default=[0.85, 0.3])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    target, _ = specjax.load(args.model)
    denoiser = Denoiser(target.model, target.params, MASK, "block_causal", args.block)
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, target.model.vocab_size, (args.rows, args.prompt)).tolist()
    tried = {(name, fused): way for name, pair in ways(denoiser, args.tau).items()
             for fused, way in zip((True, False), pair, strict=True)}  # fmt: skip
    seconds: dict[Any, list[float]] = {key: [] for key in tried}
    results: dict[Any, Any] = {}
    for turn in range(args.repeats + 1):
        for key, way in tried.items():
            start = time.perf_counter()
            result = specjax.denoise(denoiser, way, prompts, key=0, max_new_tokens=args.new_tokens)
            jax.block_until_ready(result.tokens)
            if turn:  # the first compiles
                seconds[key].append(time.perf_counter() - start)
            results[key] = result
    rows = []
    for name in dict.fromkeys(name for name, _ in tried):
        fused, apart = results[name, True], results[name, False]
        assert fused.to_lists() == apart.to_lists(), f"{name}: fused and apart write different texts"
        passes = [int(result.stats.target_passes.sum()) for result in (fused, apart)]
        ratio = lambda over, under: statistics.median(a / b for a, b in zip(seconds[over], seconds[under], strict=True))
        rows.append({
            "way": name,
            "tokens_per_pass": float(fused.lengths.sum()) / passes[0],
            "passes": passes,
            "seconds": [statistics.median(seconds[name, fuse]) for fuse in (True, False)],
            "apart_over_fused": ratio((name, False), (name, True)),
            "one_a_pass_over_this": ratio((ONE, True), (name, True)),
        })  # fmt: skip
    print(json.dumps({"arguments": vars(args), "rows": rows}))
    print("| way | tokens per pass | passes, fused and apart | s | apart: times as long | speed over one a pass |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(f"| {row['way']} | {row['tokens_per_pass']:.2f} | {row['passes'][0]}, {row['passes'][1]} | "
              f"{row['seconds'][0]:.2f}, {row['seconds'][1]:.2f} | {row['apart_over_fused']:.2f} | "
              f"{row['one_a_pass_over_this']:.2f} |")  # fmt: skip


if __name__ == "__main__":
    main()
