"""Long prompts in `serve`: the pace of running rows beside them, and chats whose history was read before.

    python benchmarks/serving_prompts.py                      # SmolLM2, 3,000 tokens of history, 8 rows
    python benchmarks/serving_prompts.py --history 500 --long 300 --new-tokens 40

1. A second turn of a chat: seconds until its first token, with the stored chunks of the first turn and without a store.
2. Rows that decode, without and with long prompts that are admitted one after the other: the mean time between two
   tokens of a row, and the longest.

Ratios count. All programs are compiled by a first run in the same process. Exit code 1 if a text differs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator

import numpy as np

import specjax
from specjax.serving.prefixes import PREFIX_GIB


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: SmolLM2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--history", type=int, default=3000, help="tokens of the first turn")
    parser.add_argument("--long", type=int, default=1000, help="tokens of the prompts that are read beside the rows")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def first_token(target: specjax.Target, options: argparse.Namespace, gib: float) -> tuple[list[float], list[list[int]]]:
    """Return the seconds until the first tokens of second turns, and their texts."""
    random = np.random.default_rng(0)
    ids = lambda count: random.integers(1, target.model.vocab_size, count).tolist()
    seconds, texts, begin = [], [], 0.0

    def requests() -> Iterator[specjax.Request]:
        nonlocal begin
        for number in range(options.repeats + 1):  # the first one compiles
            history = ids(options.history)
            yield specjax.Request(history, number)
            begin = time.perf_counter()
            yield specjax.Request([*history, *ids(40)], number)

    limits = {"slots": 1, "longest_prompt": options.history + 40, "max_new_tokens": 8}
    updates = specjax.serve(target, "autoregressive", requests(), prefix_gib=gib, **limits)
    for update in updates:
        if update.request % 2 and len(texts) <= update.request // 2:
            seconds.append(time.perf_counter() - begin)
            texts.append([])
        if update.request % 2:
            texts[-1] += update.tokens
    return seconds[1:], texts


def pauses(target: specjax.Target, options: argparse.Namespace, *, reads: bool) -> list[float]:
    """Return the seconds between the updates of all rows, while long prompts are read or without them."""
    random = np.random.default_rng(1)
    ids = lambda count: random.integers(1, target.model.vocab_size, count).tolist()
    times: dict[int, list[float]] = {}

    def requests() -> Iterator[specjax.Request | None]:
        for number in range(options.rows):
            yield specjax.Request(ids(8), number)
        while reads and not all(len(times.get(n, ())) >= options.new_tokens for n in range(options.rows)):
            yield specjax.Request(ids(options.long), 0, 1)
            yield None

    limits = {"slots": options.rows + 1, "longest_prompt": options.long, "max_new_tokens": options.new_tokens}
    for update in specjax.serve(target, "autoregressive", requests(), prefix_gib=0, **limits):
        times.setdefault(update.request, []).append(time.perf_counter())
    rows = [np.diff(times[number][4:]) for number in range(options.rows)]
    return np.concatenate(rows).tolist()


def main() -> int:
    options = parse()
    target, _ = specjax.load(options.target, dtype=options.dtype)
    stored, texts = first_token(target, options, PREFIX_GIB)
    read, expected = first_token(target, options, 0.0)
    for reads in (False, True):  # compile
        pauses(target, argparse.Namespace(**{**vars(options), "new_tokens": 8}), reads=reads)
    alone, beside = pauses(target, options, reads=False), pauses(target, options, reads=True)
    report = {
        "identical": texts == expected,
        "second turn": {
            "seconds, stored": statistics.median(stored),
            "seconds, read": statistics.median(read),
            "ratio": statistics.median(stored) / statistics.median(read),
        },
        "between tokens": {
            "mean ms, alone": 1e3 * statistics.mean(alone),
            "mean ms, beside": 1e3 * statistics.mean(beside),
            "ratio": statistics.mean(beside) / statistics.mean(alone),
            "longest ms, beside": 1e3 * max(beside),
        },
    }
    print(json.dumps(report, indent=1))
    return 0 if texts == expected else 1


if __name__ == "__main__":
    raise SystemExit(main())
