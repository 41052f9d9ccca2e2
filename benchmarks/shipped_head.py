"""Speedup of the shipped head for the demo model, by task: plain, `auto`, `auto` with the head, the head alone.

    python benchmarks/shipped_head.py question.jsonl --limit 2 --max-new-tokens 96

All four in turns, each `--repeats` times; the prompt's time is taken off, by a run of one token. Texts are compared in
float32: all are exact. Prints a table, and with --json PATH writes the figures.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from pathlib import Path

import jax
import numpy as np

import specjax
from specjax.costs.curves import measured
from specjax.models.loading.heads.shipped import NAMES

TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
CHAT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


def prompts_by_task(path: str, limit: int, tokenizer, longest: int, tasks=TASKS) -> dict[str, list[list[int]]]:
    by_task: dict[str, list[list[int]]] = {task: [] for task in TASKS if task in tasks}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        task = "mt_bench" if entry["category"] in CHAT else entry["category"]
        if task in by_task and len(by_task[task]) < limit:
            ids = list(tokenizer.chat(entry["turns"][0]))
            by_task[task] += [ids] if len(ids) <= longest else []
    return by_task


def padded(ids: list[int], multiple: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """A prompt of one of few shapes, so that hardly anything is compiled between two."""
    tokens = np.zeros((1, -(-len(ids) // multiple) * multiple), np.int32)
    tokens[0, : len(ids)] = ids
    return tokens, np.array([len(ids)])


def seconds(run, size: int) -> tuple[float, object]:
    begin = time.perf_counter()
    result = jax.block_until_ready(run(size))
    return time.perf_counter() - begin, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", help="Spec-Bench's question.jsonl")
    parser.add_argument("--target", help="default: the demo model")
    parser.add_argument("--head", default=NAMES[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--limit", type=int, default=2, help="prompts of each task")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tree", action="append", default=[], help="such as eagle2:3x3x7: the head alone by it too")
    parser.add_argument("--costs", action="store_true", help="measure what wide passes cost; else by rule of thumb")
    parser.add_argument("--json", help="where the figures go")
    args = parser.parse_args()
    target, tokenizer = specjax.load(args.target, dtype=args.dtype)
    head, vocab = specjax.load_head(args.head, target), target.model.vocab_size
    costs = measured(target) if args.costs else None
    auto = functools.partial(specjax.drafters.auto, vocab, costs=costs, dtype=args.dtype)
    if costs:
        print("costs:", ", ".join(f"{width}: {cost:.2f}" for width, cost in zip(*costs, strict=True)))
    drafters = {
        "plain": specjax.make_drafter("autoregressive", target),
        "auto": auto(),
        "auto with the head": auto(head=head),
        "the head alone": specjax.make_drafter(head.head.kind, target, head, num_tokens=3),
    }
    for spec in args.tree:
        tree = specjax.trees.parse(spec)
        drafters[f"the head alone, {spec}"] = specjax.make_drafter(head.head.kind, target, head, tree=tree)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    selected = prompts_by_task(args.questions, args.limit, tokenizer, args.longest, args.tasks)
    for task, prompts in selected.items():
        if not prompts:
            print(f"{task}: its first prompts have more than {args.longest} tokens; left out", flush=True)
            continue
        taken: dict[str, list[float]] = {name: [] for name in drafters}
        passes, tokens, texts = dict.fromkeys(drafters, 0), dict.fromkeys(drafters, 0), {}
        for ids in prompts:
            run = lambda name, size, ids=ids: specjax.decode(
                target, drafters[name], padded(ids), key=0, max_new_tokens=size, temperature=args.temperature,
                eos=tokenizer.eos,
            )  # fmt: skip
            times: dict[str, list[float]] = {name: [] for name in drafters}
            for repeat in range(-1, args.repeats):  # the first compiles
                for name in drafters:
                    reading, _ = seconds(functools.partial(run, name), 1)
                    total, result = seconds(functools.partial(run, name), args.max_new_tokens)
                    if repeat >= 0:
                        times[name].append(total - reading)
                        continue
                    texts[name] = result.to_lists()[0]
                    passes[name] += int(np.sum(result.stats.target_passes))
                    tokens[name] += len(texts[name])
            # In bfloat16 passes of several tokens round otherwise, so near-ties may flip.
            exact = args.temperature == 0 and args.dtype == "float32"
            assert not exact or len({tuple(text) for text in texts.values()}) == 1, texts
            for name in drafters:
                taken[name].append(statistics.median(times[name]))
        a_token = {name: sum(taken[name]) / tokens[name] for name in drafters}  # texts may differ in length
        figures[task] = {
            name: {"per_pass": tokens[name] / passes[name], "speed": a_token["plain"] / a_token[name]}
            for name in drafters
        }
        print(
            task,
            *(f"{name} {of['speed']:.2f} ({of['per_pass']:.2f})" for name, of in figures[task].items()),
            sep="; ",
            flush=True,
        )
    names = list(drafters)[1:]
    print("\n| | " + " | ".join(figures) + " | mean |\n|" + " --- |" * (len(figures) + 2))
    for what, title in (("speed", "speed over plain decoding"), ("per_pass", "tokens per pass")):
        for name in names:
            row = [figures[task][name][what] for task in figures]
            print(f"| {name}: {title} | " + " | ".join(f"{x:.2f}" for x in [*row, statistics.mean(row)]) + " |")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
