"""Long prompts in `serve`: the pace of running rows beside them, and chats whose history was read before.

    python benchmarks/serving_prompts.py                      # SmolLM2, 3,000 tokens of history, 8 rows
    python benchmarks/serving_prompts.py --target random --history 0 --clock cpu

1. Rows that decode, without and with long prompts, of which one arrives each second: the mean time between two tokens
   of a row, and the longest. Phases without and with prompts take turns in one running batch, and each phase with
   prompts is compared with both of its neighbours.
2. A second turn of a chat: seconds until its first token, with the stored chunks of the first turn and without a store.

Ratios count. All programs are compiled by a first run in the same process. Exit code 1 if a text differs. `--clock cpu`
takes the CPU time of the process, also for the pace, where other processes share the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

import specjax
from specjax.models import LlamaConfig, init_params, make_model
from specjax.serving.pace import MAX_SLOWDOWN, Pace
from specjax.serving.prefixes import PREFIX_GIB


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: SmolLM2; random: a small model with random weights")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--history", type=int, default=3000, help="tokens of the first turn; 0: none")
    parser.add_argument("--long", type=int, default=4000, help="tokens of the prompts that are read beside the rows")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of a row in each phase")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
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


def random_target() -> specjax.Target:
    """Return a small model with random weights. The pace of reading depends on times only."""
    config = LlamaConfig(
        vocab_size=1024, width=256, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, mlp_width=768,
        max_positions=16384, name="random",
    )  # fmt: skip
    return specjax.Target(make_model(config), init_params(config, jax.random.key(0)))


class Pauses:
    """Rows that decode, in phases without and with long prompts, one after the other in one running batch."""

    def __init__(self, target: specjax.Target, options: argparse.Namespace):
        """Start the rows, and compile all programs."""
        self.options, self.vocab = options, target.model.vocab_size
        self.clock = time.process_time if options.clock == "cpu" else time.perf_counter
        # for each phase its turns, and turns in which the rows start, the programs compile and prompts end
        length = (2 * options.repeats + 3) * options.new_tokens + 60 * options.rows
        limits = {"slots": options.rows + 1, "longest_prompt": options.long, "max_new_tokens": length, "prefix_gib": 0}
        self.scheduler = specjax.serve(target, "autoregressive", **limits).setup.scheduler()
        self.scheduler._pace = Pace(MAX_SLOWDOWN, self.clock)
        self.random, self.count = np.random.default_rng(1), 0
        for _ in range(options.rows):
            self.admit(8)
        while self.scheduler.batch.is_reading:
            self.turns(1, ())
        self.phase(reads=True)

    def admit(self, length: int, count: int | None = None) -> None:
        self.scheduler.admit(specjax.Request(self.random.integers(1, self.vocab, length).tolist(), self.count, count))
        self.count += 1

    def turns(self, count: int, arrivals: Sequence[float]) -> list[float]:
        """Return the seconds of turns, in which prompts arrive at these times of the wall clock."""
        seconds, waiting = [], list(arrivals)
        for _ in range(count):
            start = self.clock()
            while waiting and waiting[0] <= time.perf_counter() and self.scheduler.batch.has_room:
                waiting.pop(0)
                self.admit(self.options.long, 1)
            for _ in self.scheduler.turn():
                pass
            seconds.append(self.clock() - start)
        return seconds

    def phase(self, *, reads: bool) -> list[float]:
        """Return the seconds of the turns of a phase. With `reads`, a long prompt arrives each second."""
        start = time.perf_counter()
        times = self.turns(self.options.new_tokens, [start + n for n in range(1000)] if reads else ())
        for number in range(self.options.rows, self.count):
            self.scheduler.cancel(number)
        self.turns(3, ())  # the step in flight
        return times


def pauses(target: specjax.Target, options: argparse.Namespace) -> dict[str, float]:
    """Return how much longer the turns of running rows are with long prompts than without."""
    run, ratios, longest = Pauses(target, options), [], 0.0
    means = [statistics.mean(run.phase(reads=False))]
    for _ in range(options.repeats):
        beside = run.phase(reads=True)
        means.append(statistics.mean(run.phase(reads=False)))
        # Steps get longer with the texts of the rows, so each phase is compared with both of its neighbours.
        ratios.append(statistics.mean(beside) / statistics.mean(means[-2:]))
        longest = max(longest, *beside)
    return {
        "mean ms, alone": 1e3 * statistics.median(means), "ratio": statistics.median(ratios), "ratios": ratios,
        "longest ms, beside": 1e3 * longest,
    }  # fmt: skip


def main() -> int:
    options = parse()
    is_random = options.target == "random"
    target = random_target() if is_random else specjax.load(options.target, dtype=options.dtype)[0]
    report: dict[str, Any] = {"between tokens": pauses(target, options)}
    same = True
    if options.history:
        stored, texts = first_token(target, options, PREFIX_GIB)
        read, expected = first_token(target, options, 0.0)
        same = texts == expected
        report |= {
            "identical": same,
            "second turn": {
                "seconds, stored": statistics.median(stored),
                "seconds, read": statistics.median(read),
                "ratio": statistics.median(stored) / statistics.median(read),
            },
        }
    print(json.dumps(report, indent=1))
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
