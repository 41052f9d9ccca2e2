"""Ablations of training a head: one change at a time, on equal tokens and several seeds; and a scaling law.

    python benchmarks/head_ablations.py stories260K.bin --texts stories.txt --out docs/head_ablations.json
    python benchmarks/head_ablations.py stories260K.bin --texts stories.txt --plot docs/head_ablations.svg

Beginnings of texts are continued by the target itself, and every head is trained on the same of its answers, from the
target's own layers where these fit. Measured are tokens per pass that a greedy chain of three serves, bonus included,
and how often the first draft is right, on greedy answers to beginnings that were held out. A variant is the reference,
an EAGLE-3 head, but for what its name says. What is in --out already is not run again.

The budgets are of answers, read once; the law (`specjax.training.measure.scaling`) is fitted without the largest.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import specjax
from specjax.models.heads.kinds import KINDS
from specjax.training import TrainingText, measure_acceptance, new_head, recipe_of, train
from specjax.training.data.vocabulary import most_frequent_ids
from specjax.training.measure import scaling

HELD_OUT = 64
PROMPT, LENGTH, CHAIN = 12, 96, 3
BUDGETS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
GROUPS: dict[str, dict[str, dict[str, Any]]] = {
    "answers": {"greedy (reference)": {}, "drawn, temperature 1": {"data": "drawn"}, "the corpus": {"data": "corpus"}},
    "loss": {
        "soft_ce (reference)": {},
        **{name: {"recipe": {"losses": ((name, 1.0),)}} for name in ("ce", "rkl", "jsd", "tv", "lk_hybrid")},
    },
    "training-time test": {
        "7 (reference)": {}, "3": {"recipe": {"depths": 3}}, "1": {"recipe": {"depths": 1}}
    },
    "draft vocabulary": {
        "512, all (reference)": {}, "256": {"vocab": 256}, "128": {"vocab": 128},
        "512 by rank 32 of 64": {"shape": {"head_rank": 32}}, "512 by rank 16": {"shape": {"head_rank": 16}},
    },
    "head": {
        "EAGLE-3 (reference)": {},
        "EAGLE-3.1": {"flags": {"norm_taps": "each", "norm_output": True}},
        "P-EAGLE": {"kind": "p_eagle"}, "P-EAGLE, one layer": {"kind": "p_eagle", "shape": {"num_layers": 1}},
        "DFlash, one layer": {"kind": "dflash", "shape": {"num_layers": 1}},
        "DSpark, one layer": {"kind": "dspark", "shape": {"num_layers": 1}},
        "Hydra++": {"kind": "hydra"}, "Medusa": {"kind": "medusa"},
    },
    "start": {"the target's layers (reference)": {}, "random": {"random": True}},
    "optimiser": {
        "AdamW, 1e-3 (reference)": {},
        "AdamW, 3e-3": {"recipe": {"learning_rate": 3e-3}},
        "Muon, 1e-3": {"recipe": {"optimizer": "muon", "learning_rate": 1e-3}},
        "Muon, 1e-2": {"recipe": {"optimizer": "muon", "learning_rate": 1e-2}},
        "Muon, 1e-2, on ce": {"recipe": {"optimizer": "muon", "learning_rate": 1e-2, "losses": (("ce", 1.0),)}},
    },
}  # fmt: skip
"""What is changed -> name -> changes of the reference."""


def beginnings(file: Path, tokenizer: Any, count: int) -> list[list[int]]:
    """The first LENGTH tokens of as many texts of the file."""
    texts = file.read_text(encoding="utf-8", errors="ignore").replace("<|endoftext|>", "\n\n").split("\n\n")
    tokens = (tokenizer.encode(text.strip()) for text in texts if len(text) > 4 * LENGTH)
    texts = [one[:LENGTH] for one in tokens if len(one) >= LENGTH]
    if len(texts) < count + HELD_OUT:
        raise SystemExit(f"--texts: {file} has {len(texts)} texts long enough; give --answers {len(texts) - HELD_OUT}")
    return texts[: count + HELD_OUT]


def answered(target: specjax.Target, texts: list[list[int]], temperature: float) -> list[TrainingText]:
    """Return the target's continuations of the first PROMPT tokens of the texts."""
    texts = []
    for start in range(0, len(texts), 64):
        prompts = [one[:PROMPT] for one in texts[start : start + 64]]
        key = jax.random.fold_in(jax.random.key(0), start)
        options = {"temperature": temperature, "max_new_tokens": LENGTH - PROMPT}
        answers = specjax.decode(target, None, prompts, key=key, **options).to_lists()
        texts += [TrainingText((*prompt, *answer), PROMPT) for prompt, answer in zip(prompts, answers, strict=True)]
    return texts


class Bench:
    """A target, what it answered, and how heads are trained on it."""

    def __init__(self, args: argparse.Namespace):
        self.target, tokenizer = specjax.load(args.model, dtype="float32")
        texts = beginnings(args.texts, tokenizer, args.answers)
        to_learn, apart = texts[:-HELD_OUT], texts[-HELD_OUT:]
        self.data = {
            "greedy": answered(self.target, to_learn, 0.0),
            "drawn": answered(self.target, to_learn, 1.0),
            "corpus": [TrainingText(tuple(one), PROMPT) for one in to_learn],
        }
        self.held_out = answered(self.target, apart, 0.0)
        self.epochs, self.rows = args.epochs, args.rows

    def run(self, changes: dict[str, Any], seed: int, share: float = 1.0, epochs: int | None = None) -> dict:
        kind = changes.get("kind", "eagle3")
        shapes = changes.get("shape", {}) | ({"draft_vocab_size": changes["vocab"]} if "vocab" in changes else {})
        config = KINDS[kind].of_target(self.target.model.config, **shapes)
        config = dataclasses.replace(config, **changes.get("flags", {}))
        texts = self.data[changes.get("data", "greedy")]
        texts = texts[: round(share * len(texts))]
        vocab = self.target.model.vocab_size
        ids = most_frequent_ids(texts, changes["vocab"], vocab) if "vocab" in changes else None
        key = jax.random.key(seed)
        head = new_head(kind, config, self.target, key, ids=ids, random=changes.get("random", False))
        started = time.perf_counter()
        head = train(
            self.target, head, texts, recipe=recipe_of(kind, **{"optimizer": "adamw"} | changes.get("recipe", {})),
            epochs=epochs or self.epochs, rows=self.rows, length=LENGTH, seed=seed,
        )  # fmt: skip
        depths = min(CHAIN, head.head.max_depth or CHAIN)
        outcomes = measure_acceptance(self.target, head, self.held_out, depths=depths, rows=self.rows, length=LENGTH)
        tokens = sum(len(text.tokens) - PROMPT for text in texts)
        return {
            "per_pass": outcomes.per_pass, "first": outcomes.first, "tokens": tokens,
            "parameters": sum(x.size for x in jax.tree.leaves(head.params)), "seconds": time.perf_counter() - started,
        }  # fmt: skip


def measure(args: argparse.Namespace) -> None:
    settings = {name: getattr(args, name) for name in ("answers", "epochs", "rows")}
    report = json.loads(args.out.read_text()) if args.out.exists() else {"settings": settings, "runs": {}}
    if report["settings"] != settings:
        raise SystemExit(f"--out: {args.out} was made with other settings, {report['settings']}; give another file")
    jobs = []
    for seed in range(args.seeds):
        jobs += [(group, name, changes, seed, 1.0) for group, of in GROUPS.items() for name, changes in of.items()]
        jobs += [("budgets", f"{share:g}", {}, seed, share) for share in BUDGETS]
    bench = None
    for group, name, changes, seed, share in jobs:
        same = group != "budgets" and not changes  # the reference stands in every group
        cell = f"reference, seed {seed}" if same else f"{group}: {name}, seed {seed}"
        if cell in report["runs"]:
            continue
        bench = bench or Bench(args)
        outcomes = bench.run(changes, seed, share, epochs=1 if group == "budgets" else None)
        report["runs"][cell] = outcomes
        args.out.write_text(json.dumps(report, indent=1) + "\n")
        print(
            f"{cell}: {outcomes['per_pass']:.3f} per pass, first {outcomes['first']:.3f}, {outcomes['seconds']:.0f} s",
            flush=True,
        )


def results(report: dict, group: str, name: str, is_reference: bool) -> list[dict]:
    """A variant's runs, one a seed."""
    start = "reference, seed " if is_reference else f"{group}: {name}, seed "
    return [outcomes for cell, outcomes in report["runs"].items() if cell.startswith(start)]


def spread(values: list[float], digits: int = 2) -> str:
    """Mean, and the least and largest."""
    return f"{np.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def tables(report: dict) -> str:
    """Markdown: all variants, then the budgets."""
    lines = ["| | | tokens per pass | first draft right |", "| --- | --- | --- | --- |"]
    for group, variants in GROUPS.items():
        for name, changes in variants.items():
            outcomes = results(report, group, name, not changes)
            if outcomes:
                per_pass, first = (
                    spread([x["per_pass"] for x in outcomes]),
                    spread([100 * x["first"] for x in outcomes], 0),
                )
                lines.append(f"| {group} | {name} | {per_pass} | {first} % |")
    budgets, mean = law_of(report)
    if len(budgets) == len(BUDGETS):
        law = scaling.fit(budgets[:-1], mean[:-1])
        lines += [
            "",
            "| answer tokens, read once | tokens per pass | the law of the first four |",
            "| --- | --- | --- |",
        ]
        lines += [f"| {x:,} | {y:.3f} | {law(x):.3f} |" for x, y in zip(budgets, mean, strict=True)]
    return "\n".join(lines)


def law_of(report: dict) -> tuple[list[int], list[float]]:
    """Tokens of each budget, and what it serves on average."""
    runs = [results(report, "budgets", f"{share:g}", False) for share in BUDGETS]
    runs = [outcomes for outcomes in runs if outcomes]
    return [outcomes[0]["tokens"] for outcomes in runs], [
        float(np.mean([x["per_pass"] for x in outcomes])) for outcomes in runs
    ]


def plot(report: dict, file: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "specjax"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(14, 6.5), layout="constrained")
    reference = np.mean([x["per_pass"] for x in results(report, "", "", True)])
    for axis, (group, variants) in zip(axes.flat, GROUPS.items(), strict=False):
        for i, (name, changes) in enumerate(variants.items()):
            outcomes = [x["per_pass"] for x in results(report, group, name, not changes)]
            if not outcomes:
                continue
            axis.barh(i, np.mean(outcomes) - 1, left=1, color="C0" if changes else "0.6", height=0.6)
            axis.plot(outcomes, [i] * len(outcomes), "k.", ms=4)
        axis.axvline(reference, color="0.4", lw=0.8, ls=":")
        axis.set(
            title=group, yticks=range(len(variants)), yticklabels=variants, xlabel="tokens per pass", xlim=(1, None)
        )
        axis.invert_yaxis()
    budgets, mean = law_of(report)
    law, axis = scaling.fit(budgets[:-1], mean[:-1]), axes.flat[-1]
    grid = np.geomspace(budgets[0], 2 * budgets[-1], 50)
    axis.semilogx(grid, law(grid), "-", color="C1", label="law of the first four")
    axis.semilogx(budgets, mean, "ko", label="measured")
    room = (1, 1 + 1.3 * (max(mean) - 1))  # for the legend
    axis.set(title="budget, read once", xlabel="answer tokens", ylabel="tokens per pass", ylim=room)
    axis.legend(loc="upper left", fontsize="small")
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("model", help="as of specjax.load")
    flags.add_argument("--texts", type=Path, required=True, help="texts that an empty line or <|endoftext|> parts")
    flags.add_argument("--answers", type=int, default=2048)
    flags.add_argument("--epochs", type=int, default=2)
    flags.add_argument("--rows", type=int, default=16)
    flags.add_argument("--seeds", type=int, default=3)
    flags.add_argument("--out", type=Path, default=Path("head_ablations.json"))
    flags.add_argument("--plot", type=Path, help="only draw what is in --out, to this file")
    args = flags.parse_args()
    if args.plot is None:
        measure(args)
    report = json.loads(args.out.read_text())
    if args.plot is not None:
        plot(report, args.plot)
    print(tables(report))


if __name__ == "__main__":
    main()
