"""Requests of many lengths: `serve`, whose rows are taken anew as they become free, beside `decode` of whole batches.

    python benchmarks/serving.py question.jsonl --requests 24 --slots 4

The same requests, in the same order, each with a limit drawn at random from 16, 32, ... --max-new-tokens; greedy, and
without eos, so that both decode the same number of tokens. Batches of `decode` wait for their longest row. Medians of
--repeats runs in turns, prompts included, compiled before. Exit code 1 if a text differs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import jax
import numpy as np

import specjax
from specjax.cli.options import prompts as prompt_files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--method", action="append", help="default: autoregressive and auto")
    args = parser.parse_args()
    target, tokenizer = specjax.load(dtype="float32")
    texts = [tokenizer.chat(prompt.text) for prompt in prompt_files.read(args.prompts, "prompts")[0]]
    texts = [text for text in texts if len(text) <= 256]
    rows = [texts[i] for i in np.linspace(0, len(texts) - 1, args.requests).astype(int)]
    limits = (16 * np.random.default_rng(0).integers(1, args.max_new_tokens // 16 + 1, args.requests)).tolist()
    requests = [specjax.Request(row, jax.random.key(n), limits[n]) for n, row in enumerate(rows)]

    def served(drafter) -> list[list[int]]:
        tokens: list[list[int]] = [[] for _ in requests]
        limits = {"slots": args.slots, "longest_prompt": 256, "max_new_tokens": args.max_new_tokens}
        for news in specjax.serve(target, drafter, requests, **limits):
            tokens[news.request] += news.tokens
        return tokens

    def in_batches(drafter) -> list[list[int]]:
        tokens = []
        for first in range(0, len(rows), args.slots):
            group = range(first, min(first + args.slots, len(rows)))
            padded, lengths = np.zeros((len(group), 256), np.int32), [len(rows[n]) for n in group]
            for place, n in zip(padded, group, strict=True):
                place[: len(rows[n])] = rows[n]
            longest = max(limits[n] for n in group)
            batch = padded, np.array(lengths)
            result = specjax.decode(target, drafter, batch, key=jax.random.key(0), max_new_tokens=longest)
            tokens += [text[: limits[n]] for text, n in zip(result.to_lists(), group, strict=True)]
        return tokens

    report, same = {}, True
    for method in args.method or ["autoregressive", "auto"]:
        drafter = specjax.make_drafter(method, target)
        seconds: dict[str, list[float]] = {"serve": [], "decode": []}
        for repeat in range(args.repeats + 1):
            outputs = {}
            for name, run in (("serve", served), ("decode", in_batches)):
                start = time.perf_counter()
                outputs[name] = run(drafter)
                if repeat:  # the first compiles
                    seconds[name].append(time.perf_counter() - start)
            same &= outputs["serve"] == outputs["decode"]
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        report[method] = {"tokens": sum(limits), "seconds": medians, "ratio": medians["decode"] / medians["serve"]}
    print(json.dumps({"slots": args.slots, "requests": args.requests, "identical": same, "methods": report}, indent=1))
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
