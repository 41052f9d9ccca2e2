"""Accuracy of a needle retrieval task against the prompt tokens that SpecPC and SpecKV keep.

    python benchmarks/prompt_compression.py [--target SOURCE] [--draft SOURCE] [--out docs/prompt_compression.png]

A prompt is filler text of about `--length` tokens with a number for each of `--keys` words, in the form of RULER's
needles (arXiv 2404.06654). The question is about one of them. An answer is right if the greedy text has its number. The
baseline `ends` keeps the first four tokens and the last ones. SpecKV keeps cached keys and values of the complete
prompt, and the other methods shorten it. The report also counts the prompts that still have the number. With
--speculate it counts the texts of speculative decoding that are identical to plain decoding of the compressed prompt.
Results are added to the file --json after each run, so several short calls can fill one table.
"""

from __future__ import annotations

import argparse
import functools
import json
import operator
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import specjax
from specjax.compression import speckv, specpc
from specjax.files.plotting import hide_top_right_spines, new_figure, to_png

FILLER = """The grass is green in spring. A train leaves the station every hour. Bread needs flour, water and time.
Many birds fly south before winter. The library opens at nine. Rain fell on the hills for a week. The river is wide near
the coast. A good map shows every path. The market sells apples and pears. Old houses have thick walls. The road turns
left after the bridge. Children play in the park after school. The ship carries grain and timber. Snow covers the peaks
until June. The baker starts work before dawn. A lamp stands on the desk.""".replace("\n", " ").split(". ")
WORDS = ("river", "garden", "castle", "violin", "lantern", "harbour", "meadow", "engine", "pepper", "saddle", "marble",
    "orchard", "candle", "falcon", "temple", "basket")  # fmt: skip


class Needle(NamedTuple):
    """A prompt with a needle, and the number that is asked for."""

    text: str
    answer: str


def make_needle(rng: np.random.Generator, count_tokens: Callable[[str], int], length: int, keys: int) -> Needle:
    """Return a prompt of about `length` tokens with the numbers of `keys` words at random places."""
    sentences = [f"{sentence.strip('.')}." for sentence in FILLER]
    size = sum(map(count_tokens, sentences)) / len(sentences)
    text = [sentences[i] for i in rng.integers(0, len(sentences), int(length / size))]
    words = rng.choice(WORDS, keys, replace=False).tolist()
    numbers = [str(number) for number in rng.integers(10_000, 99_999, keys)]
    for word, number in zip(words, numbers, strict=True):
        text.insert(int(rng.integers(0, len(text))), f"The magic number for {word} is {number}.")
    question = f"What is the magic number for {words[0]} in this text?"
    return Needle(f"{' '.join(text)}\n\n{question} Answer with the number.", numbers[0])


def keep_ends(prompt: list[int], budget: int) -> list[int]:
    """Return the first four tokens and the last ones."""
    return prompt if len(prompt) <= budget else prompt[:4] + prompt[4 - budget :]


def measure(options: argparse.Namespace, report: list[dict[str, Any]]) -> None:
    """Measure what `report` lacks, and add it."""
    target, tokenizer = specjax.load(options.target, dtype=options.dtype, stacked=options.stacked)
    draft = target
    if options.draft is not None:
        draft = specjax.load(options.draft, dtype=options.dtype, stacked=options.stacked)[0]
    count = lambda text: len(tokenizer.encode(text, special=False))
    for keys in options.keys:
        rng = np.random.default_rng(options.seed)
        needles = [make_needle(rng, count, options.length, keys) for _ in range(options.needles)]
        complete = [list(tokenizer.chat(needle.text)) for needle in needles]
        task = {
            "target": target.model.name, "draft": draft.model.name, "keys": keys, "needles": len(needles),
            "tokens": round(float(np.mean([len(prompt) for prompt in complete])), 1), "seed": options.seed,
        }  # fmt: skip
        for run in runs_of(options):
            if any(task | run == {name: entry.get(name) for name in (*task, *run)} for entry in report):
                continue
            start, reader, rows = time.perf_counter(), target, complete
            if run["method"] == "speckv":
                reader = speckv(target, draft, options.max_new_tokens, run["budget"], lookahead=run["lookahead"])
            elif run["method"] == "specpc":
                rows = specpc(draft, complete, run["budget"], kernel=options.kernel)
            elif run["method"] == "ends":
                rows = [keep_ends(prompt, run["budget"]) for prompt in complete]
            decode = functools.partial(
                specjax.decode, reader, prompts=rows, key=0, max_new_tokens=options.max_new_tokens, eos=tokenizer.eos
            )
            new = decode("autoregressive").to_lists()
            texts = [tokenizer.decode(row) for row in new]
            right = [needle.answer in text for needle, text in zip(needles, texts, strict=True)]
            present = [needle.answer in tokenizer.decode(row) for needle, row in zip(needles, rows, strict=True)]
            entry = task | run | {"right": sum(right), "present": sum(present)}
            if options.speculate:
                result = decode(specjax.drafters.two_model(draft, options.speculate))
                entry["identical"] = sum(map(operator.eq, result.to_lists(), new))
                entry["tokens_per_pass"] = round(float(np.mean(np.asarray(result.block_efficiency))), 2)
            entry["seconds"] = round(time.perf_counter() - start, 1)
            report.append(entry)
            print(entry, repr(texts[0]), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def runs_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the runs in the order of --methods, and then of --budgets."""
    run = lambda method, budget, lookahead=None: {"method": method, "budget": budget, "lookahead": lookahead}
    lookaheads = options.lookahead or [min(options.max_new_tokens, 128)]
    result = [run("complete", None)]
    for budget in options.budgets:
        result += [run("speckv", budget, lookahead) for lookahead in lookaheads]
        result += [run("specpc", budget), run("ends", budget)]
    return [entry for method in options.methods for entry in result if entry["method"] == method]


def draw(report: list[dict[str, Any]], path: Path) -> None:
    """Draw the share of right answers against the tokens that stay, with a panel for each pair of models and task."""
    panels: dict[tuple[str, str, int, float], list[dict[str, Any]]] = {}
    for entry in report:
        panels.setdefault((entry["target"], entry["draft"], entry["keys"], entry["tokens"]), []).append(entry)
    figure = new_figure(3.4 * len(panels), 3.2)
    for column, ((target, draft, keys, tokens), entries) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), column + 1)
        share = lambda entry: entry["right"] / entry["needles"]
        for method, style in (("speckv", "^-"), ("specpc", "o-"), ("ends", "s--")):
            of_method = [entry for entry in entries if entry["method"] == method]
            longest = max((entry["lookahead"] or 0 for entry in of_method), default=0)
            for lookahead in sorted({entry["lookahead"] or 0 for entry in of_method}):
                line = sorted((e["budget"], share(e)) for e in of_method if (e["lookahead"] or 0) == lookahead)
                label = f"{method}, lookahead {lookahead}" if lookahead else method
                axes.plot(*zip(*line, strict=True), style if lookahead == longest else "v:", label=label)
        for entry in entries:
            if entry["method"] == "complete":
                axes.axhline(share(entry), color="gray", linewidth=1, label=f"complete, {tokens:.0f} tokens")
        models = target if draft == target else f"{target}\nwith {draft}"
        title = f"{models}\n{'one needle' if keys == 1 else f'{keys} needles'}"
        axes.set(xlabel="tokens kept", ylabel="right answers", ylim=(-0.03, 1.03))
        axes.set_title(title, fontsize=8)
        budgets = sorted({entry["budget"] for entry in entries if entry["budget"]})
        axes.set_xscale("log", base=2)
        axes.set_xticks(budgets, labels=map(str, budgets))
        hide_top_right_spines(axes)
        axes.legend(frameon=False, fontsize=7)
    path.write_bytes(to_png(figure))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a GGUF file or a folder; default: SmolLM2")
    parser.add_argument("--draft", help="the model that selects tokens; default: the target")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--stacked", action="store_true", help="scan the layers, which compiles faster")
    parser.add_argument("--methods", nargs="+", default=["complete", "speckv", "specpc", "ends"])
    parser.add_argument("--keys", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument(
        "--kernel", type=int, help="tokens over which specpc takes the maximum of scores; default: its own"
    )
    parser.add_argument(
        "--lookahead", type=int, nargs="+", help="tokens that the draft writes for speckv; default: all"
    )
    parser.add_argument("--speculate", type=int, help="also decode with chains of N tokens of the draft model")
    parser.add_argument("--length", type=int, default=900, help="tokens of the text around the needles")
    parser.add_argument("--needles", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="a file of results; its runs are not measured again")
    parser.add_argument("--out", type=Path, help="draw all results into this PNG file")
    options = parser.parse_args()
    report: list[dict[str, Any]] = []
    if options.json is not None and options.json.exists():
        report = json.loads(options.json.read_text(encoding="utf-8"))
    measure(options, report)
    if options.out is not None:
        draw(report, options.out)


if __name__ == "__main__":
    main()
