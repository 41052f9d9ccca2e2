"""Speed of `auto` on a tiny mixture of experts, relative to plain decoding. A draft takes longer than a pass there.

    python benchmarks/auto_on_mixture.py --target tests/data/mixture
    python benchmarks/auto_on_mixture.py --target tests/data/mixture --units 2048

The methods decode the same prompt in turn, in one process, after the programs of all widths have run. The result is the
median ratio of the times of plain decoding and of the method in the same turn. Prompts are the first tokens of
generated stories. With `--units` the experts get more hidden units, whose weights are 0. Texts and drafts are then the
same, but a pass is bound by the weights of the experts that it reads, as in a mixture of usual size.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file, save_file
from toy_tasks.stories import story

import specjax
from specjax import costs
from specjax.drafters.combined.auto import DRAFTING, make_auto
from specjax.types import Drafter, Target

PROMPT_TOKENS = 40
PROMPTS = 5
WARM_UP = 2


def methods(target: Target) -> dict[str, Drafter | str]:
    """Return the methods by name; the first one is plain decoding."""
    return {
        "plain": "autoregressive",
        f"auto, whose drafts cost {costs.of_drafting(target):.2f} passes": make_auto(target, None),
        f"auto, draft_cost={DRAFTING}": make_auto(target, None, draft_cost=DRAFTING),
        "auto, measured costs": make_auto(target, None, costs=costs.measured(target)),
        "a chain of the longest match (prompt_lookup)": "prompt_lookup",
    }


def with_more_units(folder: str, units: int, copy: Path) -> str:
    """Write a copy of a model whose experts have `units` hidden units, the further ones with weights of 0."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": units}))
    tensors = load_file(copy / "model.safetensors")
    for name, tensor in tensors.items():
        if "experts" in name and name.endswith("_proj.weight"):  # the shared expert has the same size
            axis = 1 if "down_proj" in name else 0
            more = [(0, units - tensor.shape[axis] if place == axis else 0) for place in range(2)]
            tensors[name] = np.pad(tensor, more)
    save_file(tensors, copy / "model.safetensors")
    return str(copy)


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
    parser.add_argument("--units", type=int, help="hidden units of an expert; those beyond the model's are zeros")
    parser.add_argument("--new-tokens", type=int, default=512, help="tokens of each text")
    parser.add_argument("--repeats", type=int, default=40, help="measured texts of each method")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = with_more_units(args.target, args.units, Path(scratch) / "model") if args.units else args.target
        target, tokenizer = specjax.load(folder)
        jax.block_until_ready(target.params)
    rng = np.random.default_rng(12345)
    prompts = [tokenizer.encode(story(rng))[:PROMPT_TOKENS] for _ in range(PROMPTS)]
    for temperature in (0.0, 1.0):
        for name, ms, passes, ratio in measure(target, prompts, temperature, args.new_tokens, args.repeats):
            print(
                f"temperature {temperature}  {ms:7.1f} ms  {passes:6.1f} passes  ratio {ratio:.3f}  {name}", flush=True
            )


if __name__ == "__main__":
    main()
