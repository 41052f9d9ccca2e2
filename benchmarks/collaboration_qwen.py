"""Texts of two models on real problems: who wrote them, what they cost, and whether they are right.

    python benchmarks/collaboration_qwen.py test.jsonl --target LARGE.gguf --draft SMALL.gguf --out gsm8k.json
    python benchmarks/collaboration_qwen.py HumanEval.jsonl.gz --task humaneval --target LARGE --draft SMALL
    python benchmarks/collaboration_qwen.py test.jsonl --draft SMALL.gguf --methods one_sample first_finish rpc
    python benchmarks/collaboration_qwen.py test.jsonl --task samples --draft SMALL.gguf --out samples.json
    python benchmarks/collaboration_qwen.py --table gsm8k.json  # of what has been run

Greedy, but for the methods of several samples, which are of the small model. What is in --out already is not run again:
a run that was killed goes on behind its last batch, and one of more --problems behind the others. Programs are compiled
before they are timed; beside the wall's clock there is the processor time of the process, which says more on a machine
that is shared. GSM8K is judged by the last number of the answer. HumanEval's tests run what a model wrote, in a process
with limits of time and memory and no other walls: give it a machine that has nothing to lose.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import binomtest

import specjax
from specjax.bench import measure
from specjax.collaborate import TextResult, after_sentences, after_strings, judge_prompt, methods

BEFORE = {  # of each problem; without solved ones answers run to 300 tokens, or are a number alone
    "gsm8k": [
        ("system", "Answer in a few short lines of arithmetic, without an introduction."),
        ("user", "A baker makes 24 rolls and half as many buns. She sells 30 pieces. How many are left?"),
        (
            "assistant",
            "She makes 24 / 2 = 12 buns.\nThat is 24 + 12 = 36 pieces.\n36 - 30 = 6 are left.\nThe answer is 6.",
        ),
        ("user", "Tom reads 15 pages a day, and 5 more on Sunday. How many does he read in two weeks?"),
        ("assistant", "In a week he reads 15 * 7 + 5 = 110 pages.\nIn two weeks 110 * 2 = 220.\nThe answer is 220."),
    ],
    "humaneval": [("system", "Complete the Python function. Answer with its code alone.")],
}
PAIR = ["large", "small", "spec_reason", "entropy_adaptive", "fs_gen", "foreal"]
SAMPLED = ["one_sample", "first_finish", "rpc"]
LIMITS = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


# --- what is right ----------------------------------------------------------------------------------------------------


def last_number(text: str) -> float | None:
    """The answer to a problem of GSM8K: the last number in the text."""
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def code_of(text: str) -> str:
    """The first fenced block of an answer, closed or not; all of an answer without any."""
    _, fence, block = text.partition("```")
    return block.partition("\n")[2].partition("```")[0] if fence else text


def passes_tests(problem: dict, text: str, seconds: float = 10.0) -> bool:
    """Return True if the function in an answer passes the tests of a problem of HumanEval."""
    parts = (
        LIMITS,
        problem["prompt"],
        code_of(text),
        problem["test"],
        f"check({problem['entry_point']})\nprint('passed')",
    )
    program = "\n".join([*parts, ""])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-I", "-c", program]
        try:
            run = subprocess.run(
                command, cwd=folder, env={}, capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            return False
    return run.returncode == 0 and run.stdout.endswith(b"passed\n")  # a text that leaves early passed nothing


def is_right(task: str, problem: dict, text: str) -> bool:
    if task == "humaneval":
        return passes_tests(problem, text)
    return last_number(text) == last_number(problem["answer"].rpartition("####")[2])


# --- the methods ------------------------------------------------------------------------------------------------------


def make(
    name: str, task: str, small: specjax.Target, large: specjax.Target | None, tokenizer, samples: int
) -> Callable[..., Any]:
    """A method as a function of prompts and the settings of `decode`."""
    lines = lambda: after_strings(["\n"], tokenizer, small.model.vocab_size)
    score = lambda tokens: last_number(tokenizer.decode(tokens)) or 0.0
    if name in ("small", "one_sample"):
        heat = 0.0 if name == "small" else 0.7
        return lambda rows, **options: specjax.decode(small, "autoregressive", rows, temperature=heat, **options)
    if name == "large":
        return lambda rows, **options: specjax.decode(large, "autoregressive", rows, **options)
    if name in ("first_finish", "rpc"):
        if name == "rpc" and task != "gsm8k":
            raise SystemExit("--methods: rpc votes for answers, which programs are not; leave it to gsm8k")
        more = {"answer": score} if name == "rpc" else {}
        method = getattr(methods, name)
        return lambda rows, **options: method(small, rows, samples=samples, temperature=0.7, **more, **options)
    settings: dict[str, Any] = {
        "spec_reason": lambda: {
            "segmenter": lines(), **judge_prompt(tokenizer)._asdict(), "max_step_tokens": 64,
        },
        "entropy_adaptive": dict,
        "fs_gen": lambda: {"form": "large", "gate": "threshold"},
        "oracle": lambda: {"form": "large", "gate": "oracle"},
        "contrastive": lambda: {"form": "contrastive"},
        "foreal": lambda: {"segmenter": after_sentences(tokenizer, small.model.vocab_size)},
    }[name]()  # fmt: skip
    method = getattr(methods, "fs_gen" if name in ("oracle", "contrastive") else name)
    return lambda rows, **options: method(small, large, rows, **settings, **options)


def by_large(name: str, result: Any) -> list[int]:
    """Tokens of each row that the large model wrote."""
    if isinstance(result, TextResult) and result.passes.shape[1] > 1:
        return np.sum(np.asarray(result.authors) == 1, 1).tolist()
    return (np.asarray(result.lengths) * (name == "large")).tolist()


def passes_of(name: str, result: Any) -> list[list[int]]:
    """[small, large] passes of each row behind its prompt."""
    if isinstance(result, TextResult):
        passes = np.asarray(result.passes)
        return np.pad(passes, ((0, 0), (0, 2 - passes.shape[1]))).tolist()
    passes = np.asarray(result.stats.target_passes)[:, None] * (np.arange(2) == (name == "large"))
    return passes.tolist()


# --- a run ------------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def prompts_of(task: str, problems: list[dict], tokenizer, count: int, max_length: int) -> list[tuple[dict, list[int]]]:
    """The first problems whose prompts have at most `max_length` tokens."""
    word = "question" if task == "gsm8k" else "prompt"
    problem_prompts = []
    for problem in problems:
        messages = [*BEFORE[task], ("user", problem[word])]
        ids = list(tokenizer.chat([{"role": role, "content": content} for role, content in messages]))
        if len(ids) <= max_length:
            problem_prompts.append((problem, ids))
    return problem_prompts[:count]


def run_method(
    name: str, call: Callable[..., Any], prompts: list, entry: dict, batch: int, width: int, new: int, tokenizer,
    task: str, save: Callable[[], None],
) -> None:  # fmt: skip
    """Add to `entry` the batches that it lacks; prompts are of at most `width` tokens, texts of at most `new`."""

    def packed(rows: list[list[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
        return np.stack([np.pad(row, (0, width - len(row))) for row in rows]), np.array([len(row) for row in rows])

    def decoded(rows: list[list[int]], width: int, new: int, start: int) -> Any:
        keys = measure.row_keys(0, range(start, start + batch))
        return jax.block_until_ready(call(packed(rows, width), key=keys, max_new_tokens=new, eos=tokenizer.eos))

    if len(entry["right"]) < len(prompts):  # compiled by texts of one token, in buffers of the same size
        decoded([[1]] * batch, width + new - 1, 1, 0)
    for start in range(len(entry["right"]), len(prompts), batch):
        rows = prompts[start : start + batch]
        filled = [ids for _, ids in rows] + [rows[-1][1]] * (batch - len(rows))
        clock, work = time.perf_counter(), time.process_time()
        result = decoded(filled, width, new, start)
        texts = [tokenizer.decode(ids) for ids in result.to_lists()[: len(rows)]]
        entry["seconds"].append(time.perf_counter() - clock)
        entry["processor"].append(time.process_time() - work)
        entry["tokens"] += np.asarray(result.lengths).tolist()[: len(rows)]
        entry["large"] += by_large(name, result)[: len(rows)]
        entry["passes"] += passes_of(name, result)[: len(rows)]
        entry["texts"] += texts
        entry["right"] += [is_right(task, problem, text) for (problem, _), text in zip(rows, texts, strict=True)]
        print(f"{name}: {sum(entry['right'])} of {len(entry['right'])}, {entry['seconds'][-1]:.0f} s", flush=True)
        save()


EMPTY = ("seconds", "processor", "tokens", "large", "passes", "texts", "right")


def one_prefill(small: specjax.Target, rows: list[list[int]], samples: int, new: int) -> dict[str, Any]:
    """`samples` texts of a prompt read once, and of as many prompts: seconds, and bytes that the program allocates."""
    numbers: dict[str, Any] = {"samples": samples, "prompt": len(rows[0]), "new": new, "rows": len(rows)}
    for name, n, prompt_rows in (
        ("one prefill", samples, rows),
        ("separate", 1, [row for row in rows for _ in range(samples)]),
    ):

        def program(target, prompts, key, n=n):
            done = specjax.decode(
                target, "autoregressive", prompts, key=key, max_new_tokens=new, temperature=0.7, samples_per_prompt=n
            )
            return done.tokens

        prompts = jnp.array(prompt_rows, jnp.int32), jnp.array([len(row) for row in prompt_rows], jnp.int32)
        compiled = jax.jit(program).lower(small, prompts, jax.random.key(0)).compile()
        clock, work = time.perf_counter(), time.process_time()
        jax.block_until_ready(compiled(small, prompts, jax.random.key(0)))
        numbers[name] = {
            "seconds": time.perf_counter() - clock,
            "processor": time.process_time() - work,
            "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        }
        print(name, numbers[name], flush=True)
    return numbers


# --- the table --------------------------------------------------------------------------------------------------------


def speed(entry: dict, other: dict, clock: str) -> str:
    """Return the speed relative to another method, over the batches that both have run."""
    both = min(len(entry[clock]), len(other[clock]))
    return f"{sum(other[clock][:both]) / sum(entry[clock][:both]):.2f}" if both else "-"


def line(name: str, entry: dict, alone: dict | None) -> str:
    right, count, tokens = sum(entry["right"]), len(entry["right"]), sum(entry["tokens"])
    low, high = binomtest(right, count).proportion_ci(method="wilson")
    cells = [f"`{name}`", f"{right} of {count}", f"{100 * low:.0f} to {100 * high:.0f} %", f"{tokens / count:.0f}"]
    cells += [f"{100 * sum(entry['large']) / tokens:.0f} %", f"{sum(p[1] for p in entry['passes']) / tokens:.2f}"]
    cells += [speed(entry, alone, clock) if alone else "-" for clock in ("seconds", "processor")]
    return "| " + " | ".join(cells) + " |"


def table(report: dict[str, Any]) -> str:
    """Markdown: speeds are against the large model alone, of samples against one sample of the small."""
    head = [
        "method", "right", "95 % (Wilson)", "tokens", "by the large model", "its passes per token", "speed",
        "speed, processor",
    ]  # fmt: skip
    of = {name: entry for name, entry in report["methods"].items() if entry["right"]}
    lines = [line(name, of[name], of.get("one_sample" if name in SAMPLED else "large")) for name in of]
    return "\n".join(["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1), *lines])


def run(args: argparse.Namespace, report: dict[str, Any]) -> None:
    small, tokenizer = specjax.load(args.draft, dtype=args.dtype, stacked=True)
    save = lambda: args.out.write_text(json.dumps(report, indent=1))
    if args.task == "samples":
        ids = [i for problem in read(args.file)[:8] for i in tokenizer.encode(problem["question"], special=False)]
        report["samples"] = one_prefill(small, [ids[: args.max_prompt]], args.samples, args.max_new_tokens)
        return save()
    problem_prompts = prompts_of(args.task, read(args.file), tokenizer, args.problems, args.max_prompt)
    settings = {
        "task": args.task, "batch": args.batch, "max_new_tokens": args.max_new_tokens, "max_prompt": args.max_prompt,
        "dtype": args.dtype, "samples": args.samples, "jax": jax.__version__,
    }  # fmt: skip
    if report.setdefault("settings", settings) != settings:
        raise SystemExit(f"--out: {args.out} was made with other settings, {report['settings']}; give another file")
    pair = [name for name in args.methods if name not in (*SAMPLED, "small")]
    large = specjax.load(args.target, dtype=args.dtype, stacked=True)[0] if pair else None
    for name in args.methods:
        entry = report.setdefault("methods", {}).setdefault(name, {key: [] for key in EMPTY})
        call = make(name, args.task, small, large, tokenizer, args.samples)
        sizes = args.batch, args.max_prompt, args.max_new_tokens
        run_method(name, call, problem_prompts, entry, *sizes, tokenizer, args.task, save)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="of problems")
    parser.add_argument("--task", choices=("gsm8k", "humaneval", "samples"), default="gsm8k")
    parser.add_argument("--target", help="the large model")
    parser.add_argument("--draft", help="the small model, of the same tokenizer")
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--methods", nargs="+", default=PAIR, choices=[*PAIR, "oracle", "contrastive", *SAMPLED])
    parser.add_argument("--batch", type=int, default=8, help="rows that are decoded together")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--max-prompt", type=int, default=256, help="problems with longer prompts are left out")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, default=Path("collaboration.json"))
    parser.add_argument("--table", type=Path, help="only print the table of this file")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())))
        return
    report = json.loads(args.out.read_text()) if args.out.exists() else {}
    run(args, report)
    print(json.dumps(report["samples"], indent=1) if args.task == "samples" else table(report))


if __name__ == "__main__":
    main()
