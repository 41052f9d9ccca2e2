"""Goodput (SmartSpec) under load: a server that drafts beside one that does not, at 1 to 32 concurrent requests.

    python benchmarks/serving_load.py --out docs/serving_load.png                # SmolLM2 and prompt_lookup
    python benchmarks/serving_load.py --method prompt_lookup --concurrency 1 4 --new-tokens 32

Both servers have as many rows as there are concurrent requests. They serve the same requests in turns, in one process,
and --repeats pairs of runs give one ratio each. The costs of wide passes are measured for each number of rows, as with
`specjax serve --costs measured`. Greedy, prompts included, compiled before. Exit code 1 if a text differs.

`ratio` compares the CPU time of the process, which other processes change little, and `wall` the time on the clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import specjax
from specjax import controllers, costs
from specjax.files.plotting import hide_top_right_spines, new_figure, to_png
from specjax.serving.loop import Scheduler

TASKS = (
    "Translate into German: The weather is nice today, and the children play in the park.",
    "Summarise in one sentence: The committee met on Monday. It discussed the budget for the next year, and it decided "
    "to raise the budget for schools by five percent.",
    "Write a Python function that returns the sum of a list of numbers.",
    "Repeat this list in alphabetical order: pear, apple, fig, cherry, banana.",
    "Tom has 12 apples. He gives 5 to Ann and buys 7 more. How many apples does he have?",
    "Correct the errors: He go to school every days and he like to plays football with friend.",
    "Who wrote Romeo and Juliet, and what is it about?",
    "Give me three tips for sleeping better.",
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: SmolLM2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--method", default="prompt_lookup", help="a drafter of chains that needs no model")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a plot; the figures go beside it as .json")
    return parser.parse_args()


def serve(
    scheduler: Scheduler, requests: list[specjax.Request], first: int
) -> tuple[tuple[float, float], dict[int, list[int]]]:
    """Return the seconds (CPU, clock) of the requests, all of which run at the same time, and their texts.

    first: number of requests that the scheduler had before.
    """
    texts: dict[int, list[int]] = {}
    start = time.process_time(), time.perf_counter()
    for request in requests:
        scheduler.admit(request)
    while not scheduler.batch.is_idle:
        for served in scheduler.turn():
            texts.setdefault(served.request - first, []).extend(served.tokens)
    return (time.process_time() - start[0], time.perf_counter() - start[1]), texts


def measure(target: specjax.Target, prompts: list[list[int]], rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the ratios of tokens per second, with drafts over without, at one number of concurrent requests."""
    limits = {
        "slots": rows, "longest_prompt": max(map(len, prompts)), "max_new_tokens": options.new_tokens, "prefix_gib": 0
    }  # fmt: skip
    goodput = controllers.goodput(costs=costs.measured(target, batch=rows), dtype=options.dtype)
    drafter = specjax.make_drafter(options.method, target)
    servers = {
        "plain": specjax.serve(target, "autoregressive", **limits).setup.scheduler(),
        "drafts": specjax.serve(target, drafter, controller=goodput, **limits).setup.scheduler(),
    }
    requests = [specjax.Request(prompts[n % len(prompts)], n) for n in range(rows)]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
    same, count = True, 0
    for repeat in range(options.repeats + 1):
        texts = {}
        order = list(servers) if repeat % 2 else list(servers)[::-1]
        for name in order:
            seconds, texts[name] = serve(servers[name], requests, repeat * rows)
            if repeat:  # the first compiles
                times[name].append(seconds)
        same &= texts["plain"] == texts["drafts"]
        count = sum(map(len, texts["plain"].values()))
    pairs = list(zip(times["plain"], times["drafts"], strict=True))
    ratios = [plain[0] / drafts[0] for plain, drafts in pairs]
    return {
        "rows": rows, "tokens": count, "ratio": statistics.median(ratios), "ratios": ratios,
        "wall": statistics.median(plain[1] / drafts[1] for plain, drafts in pairs), "identical": same,
    }  # fmt: skip


def plot(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    figure = new_figure(6, 3.4)
    axes = figure.add_subplot()
    rows = sorted(rows, key=lambda row: row["rows"])
    counts = [row["rows"] for row in rows]
    axes.axhline(1, color="0.7", linewidth=1)
    for row in rows:
        axes.plot([row["rows"]] * len(row["ratios"]), row["ratios"], ".", color="0.6")
    axes.plot(counts, [row["ratio"] for row in rows], "o-", color="tab:green")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, map(str, counts))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("concurrent requests")
    axes.set_ylabel("tokens per CPU second,\nin those without drafts")
    hide_top_right_spines(axes)
    options.out.write_bytes(to_png(figure))


def main() -> int:
    options = parse()
    target, tokenizer = specjax.load(options.target, dtype=options.dtype)
    prompts = [list(tokenizer.chat(text)) for text in TASKS]
    rows = []
    for count in options.concurrency:
        rows.append(measure(target, prompts, count, options))
        print(json.dumps(rows[-1]), flush=True)
        if options.out is not None:
            settings = {name: value for name, value in vars(options).items() if name != "out"}
            options.out.with_suffix(".json").write_text(json.dumps({"settings": settings, "rows": rows}, indent=1))
            plot(rows, options)
    return 0 if all(row["identical"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
