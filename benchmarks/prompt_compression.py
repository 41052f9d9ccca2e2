"""Accuracy of a needle retrieval task against the prompt tokens that SpecPC and SpecKV keep.

    python benchmarks/prompt_compression.py [--target SOURCE] [--draft SOURCE] [--out docs/prompt_compression.png]

A prompt is filler text of about `--length` tokens with a number for each of `--keys` words, in the form of RULER's
needles (arXiv 2404.06654). The question is about one of them. An answer is right if the greedy text has its number. The
baseline `ends` keeps the first four tokens and the last ones. SpecKV keeps cached keys and values of the complete
prompt, and the other methods shorten it. The report also counts the prompts that still have the number.
"""

from __future__ import annotations

import argparse
import json
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


def measure(options: argparse.Namespace) -> dict[str, Any]:
    target, tokenizer = specjax.load(options.target, dtype="float32")
    draft = target if options.draft is None else specjax.load(options.draft, dtype="float32")[0]
    rng = np.random.default_rng(options.seed)
    count = lambda text: len(tokenizer.encode(text, special=False))
    report: dict[str, Any] = {"target": target.model.name, "draft": draft.model.name, "needles": options.needles}
    for keys in options.keys:
        needles = [make_needle(rng, count, options.length, keys) for _ in range(options.needles)]
        complete = [list(tokenizer.chat(needle.text)) for needle in needles]
        runs = {"complete": (target, complete)}
        for budget in options.budgets:
            small = speckv(target, draft, options.max_new_tokens, budget, lookahead=options.lookahead)
            runs[f"speckv {budget}"] = small, complete
            runs[f"specpc {budget}"] = target, specpc(draft, complete, budget, kernel=options.kernel)
            runs[f"ends {budget}"] = target, [keep_ends(prompt, budget) for prompt in complete]
        report[f"{keys} keys"] = {"tokens": float(np.mean([len(prompt) for prompt in complete]))}
        for name, (reader, rows) in runs.items():
            start = time.perf_counter()
            result = specjax.decode(
                reader, "autoregressive", rows, key=0, max_new_tokens=options.max_new_tokens, eos=tokenizer.eos
            )
            texts = [tokenizer.decode(row) for row in result.to_lists()]
            right = [needle.answer in text for needle, text in zip(needles, texts, strict=True)]
            present = [needle.answer in tokenizer.decode(row) for needle, row in zip(needles, rows, strict=True)]
            entry = {"right": sum(right), "present": sum(present), "seconds": round(time.perf_counter() - start, 1)}
            report[f"{keys} keys"][name] = entry
            print(keys, name, entry, repr(texts[0]), flush=True)
    return report


def draw(report: dict[str, Any], options: argparse.Namespace) -> None:
    figure = new_figure(4 * len(options.keys), 3)
    for column, keys in enumerate(options.keys):
        axes = figure.add_subplot(1, len(options.keys), column + 1)
        results = report[f"{keys} keys"]
        for name, style in (("speckv", "^-"), ("specpc", "o-"), ("ends", "s--")):
            shares = [results[f"{name} {budget}"]["right"] / report["needles"] for budget in options.budgets]
            axes.plot(options.budgets, shares, style, label=name)
        share = results["complete"]["right"] / report["needles"]
        axes.axhline(share, color="gray", linewidth=1, label=f"complete, {results['tokens']:.0f} tokens")
        title = "one needle" if keys == 1 else f"{keys} needles"
        axes.set(xlabel="tokens kept", ylabel="right answers", title=title, ylim=(-0.03, 1.03))
        axes.set_xscale("log", base=2)
        axes.set_xticks(options.budgets, labels=map(str, options.budgets))
        hide_top_right_spines(axes)
        axes.legend(frameon=False, fontsize=8)
    options.out.write_bytes(to_png(figure))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a GGUF file or a folder; default: SmolLM2")
    parser.add_argument("--draft", help="the model that selects tokens; default: the target")
    parser.add_argument("--keys", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument(
        "--kernel", type=int, help="tokens over which specpc takes the maximum of scores; default: its own"
    )
    parser.add_argument("--lookahead", type=int, help="tokens that the draft writes for speckv; default: its own")
    parser.add_argument("--length", type=int, default=900, help="tokens of the text around the needles")
    parser.add_argument("--needles", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="draw the accuracies into this PNG file")
    options = parser.parse_args()
    report = measure(options)
    print(json.dumps(report, indent=1))
    if options.out is not None:
        draw(report, options)


if __name__ == "__main__":
    main()
