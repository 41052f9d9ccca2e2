"""Speculation with no training in three packages, each over its own plain decoding: whose is worth the most, per task?

    pip install llama-cpp-python torch
    python benchmarks/prompt_lookup_peers.py question.jsonl --gguf SmolLM2-135M-Instruct.Q4_1.gguf --limit 3

Greedy, batch 1, one process, all sides in turn on the same prompts (`--limit` per task of a Spec-Bench file), as many
threads each. specjax and `transformers` decode the same float32 weights, llama.cpp the quantised file itself. A rate is
tokens over seconds without the prompt's: the time of a call for one token is taken off. The ratio of a task is that of
its median prompt.
"""

from __future__ import annotations

import argparse
import json
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


def with_llama_cpp(file: Path, eos, longest: int) -> dict[str, Run]:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--longest", type=int, default=1408, help="longer prompts are cut, from the front")
    parser.add_argument("--out", type=Path, default=Path("prompt_lookup_peers.json"))
    args = parser.parse_args()
    target, tokenizer = specjax.load(args.gguf, dtype="float32")
    chosen, _ = select(args.prompts, args.limit)
    prompts = [tokenizer.chat(prompt.text)[-args.longest :] for prompt in chosen]
    packages = {
        "specjax": with_specjax(target, tokenizer.eos, args.longest),
        "transformers": with_transformers(target, tokenizer.eos),
        "llama.cpp": with_llama_cpp(args.gguf, tokenizer.eos, args.longest),
    }
    sides = {(package, name): run for package, runs in packages.items() for name, run in runs.items()}
    for run in sides.values():  # compiles and warms
        seconds_per_token(run, prompts[0], args.max_new_tokens)
    times: dict[tuple[str, str], list[float]] = {side: [] for side in sides}
    log = Console(stderr=True)
    for i, prompt in enumerate(prompts):
        for side, run in sides.items():
            times[side].append(seconds_per_token(run, prompt, args.max_new_tokens))
        log.print(f"{i + 1} of {len(prompts)}: {chosen[i].task}", style="dim")
    tasks = [prompt.task for prompt in chosen]
    rows = []
    for task in dict.fromkeys(tasks):
        here = [i for i, other in enumerate(tasks) if other == task]
        ratio = lambda package, name, here=here: statistics.median(
            times[package, "plain"][i] / times[package, name][i] for i in here
        )
        rows.append({"task": task, **{f"{p} {n}": ratio(p, n) for p, n in sides if n != "plain"}})
    rates = {" ".join(side): 1 / statistics.median(found) for side, found in times.items()}
    args.out.write_text(json.dumps({"ratios": rows, "tokens_per_second": rates}, indent=1))
    table = Table("task", *[name for name in rows[0] if name != "task"])
    for row in rows:
        table.add_row(row["task"], *(f"{x:.2f}" for name, x in row.items() if name != "task"))
    Console().print(table)
    Console().print("tokens/s, median prompt: " + ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items()))


if __name__ == "__main__":
    main()
