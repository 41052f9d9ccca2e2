"""Speed of `auto` on a tiny mixture of experts, relative to plain decoding. A draft takes longer than a pass there.

    python benchmarks/auto_on_mixture.py --target tests/data/mixture

The methods decode the same prompt in turn, in one process, after the programs of all widths have run. The result is the
median ratio of the times of plain decoding and of the method in the same turn. Prompts are the first tokens of
generated stories.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import numpy as np
from toy_tasks.stories import story

import specjax
from specjax import costs
from specjax.drafters.combined.auto import make_auto
from specjax.types import Drafter, Target

PROMPT_TOKENS = 40
PROMPTS = 5
WARM_UP = 2


def methods(target: Target) -> dict[str, Drafter | str]:
    """Return the methods by name; the first one is plain decoding."""
    estimate = costs.of_drafting(target)
    return {
        "plain": "autoregressive",
        "auto": make_auto(target, None),
        f"auto, draft_cost={estimate:.1f}": make_auto(target, None, draft_cost=estimate),
        "auto, num_recycled=8": make_auto(target, None, num_recycled=8, widths=(1, 4, 8)),
        "a chain of the longest match (prompt_lookup)": "prompt_lookup",
    }


def measure(
    target: Target, prompts: list[list[int]], temperature: float, new_tokens: int, repeats: int
) -> list[tuple[str, float, float, float]]:
    """Return the name, the milliseconds, the passes and the ratio to plain decoding of each method."""
    drafters = methods(target)
    seconds: dict[str, list[float]] = {name: [] for name in drafters}
    passes: dict[str, list[int]] = {name: [] for name in drafters}
    for turn in range(-WARM_UP * len(prompts), repeats):
        for name, drafter in drafters.items():
            start = time.perf_counter()
            result = specjax.decode(
                target, drafter, [prompts[turn % len(prompts)]], key=turn + 1000, max_new_tokens=new_tokens,
                temperature=temperature,
            )  # fmt: skip
            jax.block_until_ready(result.tokens)
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
                passes[name].append(int(result.stats.target_passes[0]))
    plain = seconds["plain"]
    return [
        (
            name,
            1e3 * statistics.median(times),
            statistics.mean(passes[name]),
            statistics.median(first / second for first, second in zip(plain, times, strict=True)),
        )
        for name, times in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tests/data/mixture", help="folder of the model")
    parser.add_argument("--new-tokens", type=int, default=512, help="tokens of each text")
    parser.add_argument("--repeats", type=int, default=40, help="measured texts of each method")
    args = parser.parse_args()
    target, tokenizer = specjax.load(args.target)
    rng = np.random.default_rng(12345)
    prompts = [tokenizer.encode(story(rng))[:PROMPT_TOKENS] for _ in range(PROMPTS)]
    for temperature in (0.0, 1.0):
        for name, ms, passes, ratio in measure(target, prompts, temperature, args.new_tokens, args.repeats):
            print(
                f"temperature {temperature}  {ms:7.1f} ms  {passes:6.1f} passes  ratio {ratio:.3f}  {name}", flush=True
            )


if __name__ == "__main__":
    main()
