"""Speculation with no training in three packages, each over its own plain decoding: whose is worth the most, per task?

    pip install llama-cpp-python torch
    python benchmarks/prompt_lookup_peers.py question.jsonl --gguf SmolLM2-135M-Instruct.Q4_1.gguf --limit 3

Greedy, batch 1, a process per package, in which both sides of a ratio take turns on the same prompts (`--limit` per
task of a Spec-Bench file), as many threads each. specjax and `transformers` decode the same float32 weights, llama.cpp
the quantised file itself. A rate is tokens over seconds without the prompt's: the time of a call for one token is taken
off; of --repeats runs in turns the median counts. The ratio of a task is that of its median prompt.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from every_method import hf_model, select
from rich.console import Console
from rich.table import Table

import specjax

PACKAGES = "specjax", "transformers", "llama.cpp"
Run = Callable[[list[int], int], int]  # (prompt, max_new_tokens) -> tokens decoded


def with_specjax(target, eos, longest: int) -> dict[str, Run]:
    drafters = {
        "plain": specjax.drafters.autoregressive(),
        "auto": specjax.make_drafter("auto", target),
        "prompt_lookup": specjax.drafters.prompt_lookup(),
    }

    def run(drafter, prompt, count):
        tokens = np.zeros((1, longest), np.int32)  # one shape, so that nothing is compiled between two prompts
        tokens[0, : len(prompt)] = prompt
        options = {"key": jax.random.key(0), "max_new_tokens": count, "eos": eos}
        return int(specjax.decode(target, drafter, (tokens, np.array([len(prompt)])), **options).lengths[0])

    return {name: lambda *args, drafter=drafter: run(drafter, *args) for name, drafter in drafters.items()}


def with_transformers(target, eos) -> dict[str, Run]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = hf_model(target, LlamaConfig, LlamaForCausalLM, torch)

    def run(options, prompt, count):
        with torch.no_grad():
            found = model.generate(
                torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=list(eos), pad_token_id=0,
                **options,
            )  # fmt: skip
        return found.shape[1] - len(prompt)

    lookup = {"prompt_lookup_num_tokens": 10}
    return {"plain": lambda *args: run({}, *args), "prompt_lookup": lambda *args: run(lookup, *args)}


def with_llama_cpp(file: Path, eos, longest: int, repack: bool) -> dict[str, Run]:
    import llama_cpp
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def without_repacking():
        options = defaults()
        options.use_extra_bufts = False
        return options

    if not repack:  # the class has no such option
        llama_cpp.llama_cpp.llama_model_default_params = without_repacking

    def make(draft):
        return Llama(
            str(file), n_ctx=longest + 512, n_threads=os.cpu_count(), n_threads_batch=os.cpu_count(), draft_model=draft,
            logits_all=draft is not None, verbose=False,
        )  # fmt: skip

    def run(llama, prompt, count):
        llama.reset()
        decoded = 0
        for token in llama.generate(prompt, temp=0.0, reset=True):
            decoded += 1
            if decoded == count or token in eos:
                break
        return decoded

    # Its own README: 10 drafted tokens are good on GPU, 2 on machines without one.
    models = {"plain": make(None), "prompt_lookup": make(LlamaPromptLookupDecoding(num_pred_tokens=2))}
    return {name: lambda *args, llama=llama: run(llama, *args) for name, llama in models.items()}


def seconds_per_token(run: Run, prompt: list[int], count: int) -> float:
    times = []
    for new in (1, count):
        start = time.perf_counter()
        decoded = run(prompt, new)
        times.append(time.perf_counter() - start)
    return (times[1] - times[0]) / max(decoded - 1, 1)


def measure(package: str, args: argparse.Namespace) -> list[dict]:
    """Seconds per token of each side, for each prompt."""
    target, tokenizer = specjax.load(args.gguf, dtype="float32")
    chosen, _ = select(args.prompts, args.limit)
    prompts = [tokenizer.chat(prompt.text)[-args.longest :] for prompt in chosen]
    if package == "specjax":
        sides = with_specjax(target, tokenizer.eos, args.longest)
    elif package == "transformers":
        sides = with_transformers(target, tokenizer.eos)
    else:
        del target
        sides = with_llama_cpp(args.gguf, tokenizer.eos, args.longest, not args.no_repack)
    for run in sides.values():  # compiles and warms
        seconds_per_token(run, prompts[0], args.max_new_tokens)
    found = []
    for i, prompt in enumerate(prompts):
        turns = [
            {name: seconds_per_token(run, prompt, args.max_new_tokens) for name, run in sides.items()}
            for _ in range(args.repeats)
        ]
        times = {name: statistics.median(turn[name] for turn in turns) for name in sides}
        found.append({"task": chosen[i].task, "seconds": times})
        Console(stderr=True).print(f"{package}: {i + 1} of {len(prompts)}", style="dim")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--longest", type=int, default=1408, help="longer prompts are cut, from the front")
    parser.add_argument("--no-repack", action="store_true", help="llama.cpp: leave its weights as they are")
    parser.add_argument("--out", type=Path, default=Path("prompt_lookup_peers.json"))
    args = parser.parse_args()
    report = {}
    for package in PACKAGES:
        with multiprocessing.get_context("spawn").Pool(1) as process:
            report[package] = process.apply(measure, (package, args))
        args.out.write_text(json.dumps(report, indent=1))
    sides = [(package, name) for package in PACKAGES for name in report[package][0]["seconds"]]
    table = Table("task", *(f"{package} {name}" for package, name in sides if name != "plain"))
    for task in dict.fromkeys(entry["task"] for entry in report[PACKAGES[0]]):
        ratios = (
            statistics.median(
                entry["seconds"]["plain"] / entry["seconds"][name] for entry in report[package] if entry["task"] == task
            )
            for package, name in sides
            if name != "plain"
        )
        table.add_row(task, *(f"{ratio:.2f}" for ratio in ratios))
    Console().print(table)
    rates = (
        f"{package} {name} {1 / statistics.median(entry['seconds'][name] for entry in report[package]):.1f}"
        for package, name in sides
    )
    Console().print(f"tokens/s, median prompt: {', '.join(rates)}")


if __name__ == "__main__":
    main()
