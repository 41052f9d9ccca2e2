"""Speculation in three packages, each over its own plain decoding, on Spec-Bench: whose is worth the most, per task?

    pip install llama-cpp-python torch
    python benchmarks/spec_bench_peers.py question.jsonl --gguf SmolLM2-135M-Instruct.Q4_1.gguf \\
        --head smollm2-135m-eagle3
    python benchmarks/spec_bench_peers.py question.jsonl --gguf qwen2.5-coder-1.5b-instruct-q4_k_m.gguf --limit 1 \\
        --draft qwen2.5-coder-0.5b-instruct-q4_k_m.gguf --dtype bfloat16 --packages specjax transformers

Greedy, batch 1, a process per package, in which both sides of a ratio take turns on the same prompts (the first
`--limit` of each task), as many threads each. specjax and `transformers` decode the same weights in --dtype, llama.cpp
the quantised file itself. Of --repeats runs in turns the median counts; the speed of a task is that of its tokens
together, over plain decoding's of them. A first call of each prompt counts the passes and compares the texts.

Printed: the speed without the prompt's time (that of a call for one token is taken off). In --out, for
`spec_bench_table.py`: with it, as Spec-Bench has it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table
from shipped_head import padded

import specjax
from specjax import controllers
from specjax.catalog.defaults import DRAFT_MODEL
from specjax.cli.commands.bench import first_per_task
from specjax.cli.options.prompts import read
from specjax.costs import of_draft
from specjax.models.loading.formats.writing import save_model

STOP = "confidence:0.4"
"""Where draft models end a draft too: the rule and number of transformers."""
Decoded = tuple[list[int], int]
Side = Callable[[list[int], int], Decoded]  # (prompt, max_new_tokens) -> the text's tokens, passes of the target


def with_specjax(args: argparse.Namespace, eos, target, draft) -> dict[str, Side]:
    head = specjax.load_head(args.head, target) if args.head else None
    build = lambda name, *draft, **options: (specjax.make_drafter(name, target, *draft, **options), None)
    sides = {
        "plain": (specjax.drafters.autoregressive(), None),
        "auto": build("auto"),
        "prompt_lookup": build("prompt_lookup"),
    }
    if head:
        sides |= {"auto, head": build("auto", head), "eagle3": build("eagle3", head)}
    if draft:
        stop = specjax.trees.stops.parse(STOP)
        goodput = controllers.goodput(dtype=args.dtype, draft_cost=of_draft(target, draft))
        sides["two_model"] = build("two_model", draft)
        sides[f"two_model, {STOP}"] = build("two_model", draft, num_tokens=DRAFT_MODEL.options["num_tokens"], stop=stop)
        sides["two_model, goodput"] = (
            build("two_model", draft, num_tokens=DRAFT_MODEL.options["num_tokens"])[0],
            goodput,
        )

    def run(drafter, controller, prompt, count):
        options = {"key": jax.random.key(0), "max_new_tokens": count, "eos": eos, "controller": controller}
        result = specjax.decode(target, drafter, padded(prompt), **options)
        return result.to_lists()[0], int(result.stats.target_passes.sum())

    return {name: lambda *arguments, build=build: run(*build, *arguments) for name, build in sides.items()}


def with_transformers(args: argparse.Namespace, eos, target, draft) -> dict[str, Side]:
    import torch
    from transformers import AutoModelForCausalLM

    def model_of(weights):
        with tempfile.TemporaryDirectory() as folder:
            save_model(folder, weights)
            return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype)).eval()

    model, passes = model_of(target), [0]
    model.register_forward_pre_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))

    def run(options, prompt, count):
        passes[0] = 0
        ids = torch.tensor([prompt])
        with torch.no_grad():
            results = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
                eos_token_id=list(eos), pad_token_id=0, **options,
            )  # fmt: skip
        return results[0, len(prompt) :].tolist(), passes[0]

    options = {"plain": {}, "prompt lookup": {"prompt_lookup_num_tokens": 10}}
    if draft:
        options["assisted"] = {"assistant_model": model_of(draft)}
    return {name: lambda *arguments, option=option: run(option, *arguments) for name, option in options.items()}


def with_llama_cpp(args: argparse.Namespace, eos, *_) -> dict[str, Side]:
    import llama_cpp
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def without_repacking():
        options = defaults()
        options.use_extra_bufts = False
        return options

    if args.no_repack:  # the class has no such option
        llama_cpp.llama_cpp.llama_model_default_params = without_repacking

    class Counting(Llama):
        passes = 0

        def eval(self, tokens):
            self.passes += 1
            return super().eval(tokens)

    def make(draft):
        return Counting(
            str(args.gguf), n_ctx=args.longest + 512, n_threads=os.cpu_count(), n_threads_batch=os.cpu_count(),
            draft_model=draft, logits_all=draft is not None, verbose=False,
        )  # fmt: skip

    def run(llama, prompt, count):
        llama.reset()
        llama.passes, text = 0, []
        for token in llama.generate(prompt, temp=0.0, reset=True):
            text.append(token)
            if len(text) == count or token in eos:
                break
        return text, llama.passes

    # Its own README: 10 drafted tokens are good on GPU, 2 on machines without one.
    models = {"plain": make(None), "prompt lookup": make(LlamaPromptLookupDecoding(num_pred_tokens=2))}
    return {name: lambda *arguments, llama=llama: run(llama, *arguments) for name, llama in models.items()}


PACKAGES = {"specjax": with_specjax, "transformers": with_transformers, "llama.cpp": with_llama_cpp}


def seconds(side: Side, prompt: list[int], count: int) -> float:
    start = time.perf_counter()
    side(prompt, count)
    return time.perf_counter() - start


def measure(package: str, args: argparse.Namespace) -> list[dict]:
    """Measure each prompt and side: tokens, passes, seconds with the prompt (`whole`) and without it (`decoding`)."""
    target, tokenizer = specjax.load(args.gguf, dtype=args.dtype)
    draft = specjax.load(args.draft, dtype=args.dtype)[0] if args.draft else None
    lines = first_per_task(read(args.prompts, "prompts")[0], 0, args.limit)
    sides = PACKAGES[package](args, tokenizer.eos, target, draft)
    sides = {name: side for name, side in sides.items() if name == "plain" or args.only in name}
    results: list[dict] = []
    for line in lines:
        prompt = list(tokenizer.chat(line.text))[-args.longest :]
        first = {name: side(prompt, args.max_new_tokens) for name, side in sides.items()}  # compiles, too
        for side in sides.values():
            side(prompt, 1)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _ in range(args.repeats):
            for name, side in sides.items():
                times[name].append((seconds(side, prompt, 1), seconds(side, prompt, args.max_new_tokens)))
        results.append({"task": line.task, "sides": {}})
        for name, (text, passes) in first.items():
            reading, total = (statistics.median(which) for which in zip(*times[name], strict=True))
            results[-1]["sides"][name] = {
                "tokens": len(text), "passes": passes, "whole": total, "decoding": total - reading,
                "identical": text == first["plain"][0],
            }  # fmt: skip
        Console(stderr=True).print(f"{package}: {len(results)} of {len(lines)}", style="dim")
    return results


def entry(results: list[dict], name: str, clock: str) -> dict:
    """Return one cell, in the form of `specjax bench --out`."""
    of, plain = ([one["sides"][which] for one in results] for which in (name, "plain"))
    total = lambda sides, key: sum(side[key] for side in sides)
    without = len(results) if clock == "decoding" else 0  # a prompt's first token comes with its reading
    rate = lambda sides: (total(sides, "tokens") - without) / total(sides, clock)
    return {
        "speedup": rate(of) / rate(plain),
        "tokens_per_second": rate(of),
        "block_efficiency": total(of, "tokens") / total(of, "passes"),
        "identical": all(side["identical"] for side in of),
        "refused": False,
    }


def document(package: str, results: list[dict], args: argparse.Namespace, clock: str = "whole") -> dict:
    """Return the part of a document of `specjax bench --out` that `spec_bench_table.py` reads."""
    names = list(results[0]["sides"])
    tasks: dict[str, list[dict]] = {}
    for one in results:
        tasks.setdefault(one["task"], []).append(one)
    return {
        "package": package, "target": args.gguf.name, "draft": args.draft and args.draft.name, "head": args.head,
        "dtype": args.dtype, "prompts": results,
        "tasks": {task: {name: entry(part, name, clock) for name in names} for task, part in tasks.items()},
        "overall": {name: entry(results, name, clock) for name in names},
    }  # fmt: skip


def show(documents: Iterable[dict]) -> None:
    documents = list(documents)
    sides = [(of, name) for of in documents for name in of["overall"] if name != "plain"]
    table = Table("without the prompt's time", *documents[0]["tasks"], "overall", "tokens per pass", "same text")
    for of, name in sides:
        cells = [*(of["tasks"][task][name] for task in of["tasks"]), of["overall"][name]]
        last = cells[-1]
        table.add_row(
            f"{of['package']} {name}", *(f"{cell['speedup']:.2f}" for cell in cells),
            f"{last['block_efficiency']:.2f}", "yes" if last["identical"] else "no",
        )  # fmt: skip
    Console(width=160).print(table)
    rates = (f"{of['package']} {of['overall']['plain']['tokens_per_second']:.1f}" for of in documents)
    Console().print(f"plain decoding, tokens/s: {', '.join(rates)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--draft", type=Path, help="a smaller model: two_model, and assisted decoding")
    parser.add_argument("--head", help="specjax: auto and eagle3 with it")
    parser.add_argument("--packages", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--only", default="", help="sides with this in their names, beside plain decoding")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--limit", type=int, default=2, help="prompts of each task")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--longest", type=int, default=1408, help="longer prompts are cut, from the front")
    parser.add_argument("--no-repack", action="store_true", help="llama.cpp: leave its weights as they are")
    parser.add_argument("--out", type=Path, default=Path("spec_bench_peers.json"))
    args = parser.parse_args()
    results: dict[str, list[dict]] = {}
    for package in args.packages:
        with multiprocessing.get_context("spawn").Pool(1) as process:
            results[package] = process.apply(measure, (package, args))
        args.out.write_text(json.dumps([document(name, part, args) for name, part in results.items()], indent=1))
    show(document(name, part, args, "decoding") for name, part in results.items())


if __name__ == "__main__":
    main()
