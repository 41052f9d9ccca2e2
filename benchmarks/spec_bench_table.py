"""Spec-Bench's leaderboard for specjax: speed-ups by task, tokens per pass, of what `specjax bench` measured.

    specjax bench question.jsonl --limit 1 --max-new-tokens 64 --method auto --method prompt_lookup --out free.json
    specjax bench question.jsonl --limit 1 --max-new-tokens 64 --draft smollm2-135m-eagle3 --method auto --out head.json
    python benchmarks/spec_bench_table.py free.json head.json --out docs/spec_bench.md
    python benchmarks/spec_bench_table.py peers.json --out docs/spec_bench.md --table peers  # of spec_bench_peers.py

Xia et al.: Unlocking Efficiency in Large Language Model Inference: A Comprehensive Survey of Speculative Decoding
(2024), arXiv 2401.07851. Rows are in falling order of the overall ratio; each ratio has both of its sides in one run.
The table takes the place of the one that is in the page, between two marks; what stands around it stays. --table names
one of several.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from specjax.catalog import METHODS

TASKS = {
    "mt_bench": "Multi-turn conversation", "translation": "Translation", "summarization": "Summarization",
    "qa": "Question answering", "math_reasoning": "Mathematical reasoning", "rag": "Retrieval-augmented generation",
}  # fmt: skip
END = "<!-- end of the table -->"


def drafted_by(document: dict, name: str) -> list[str]:
    used = (("head", "head" if document["head"] else None), ("draft", document["draft"]))
    return [what for part, what in used if what and METHODS[name].uses(part)]


def rows(document: dict) -> list[tuple[float, str]]:
    """(overall ratio, line of the table) of each method of a run."""
    entries = []
    package = document.get("package")
    for name, overall in document["overall"].items():
        if name == "plain":
            continue
        ratio = lambda entry: "differs" if entry["refused"] else f"{entry['speedup']:.2f}x"
        cells = [ratio(document["tasks"][task][name]) if task in document["tasks"] else "-" for task in TASKS]
        same = {True: "yes", False: "near-tie", None: "-"}[overall["identical"]]
        who = f"{package} {name}" if package else ", ".join([name, *drafted_by(document, name)])
        cells += [f"{overall['block_efficiency']:.2f}", ratio(overall), same]
        entries.append((0.0 if overall["refused"] else overall["speedup"], f"| {who} | {' | '.join(cells)} |"))
    return entries


def table(documents: list[dict]) -> str:
    """Markdown."""
    head = ["Method", *TASKS.values(), "#tokens per pass", "Overall", "Same text"]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    entries = sorted((row for document in documents for row in rows(document)), reverse=True)
    return "\n".join([*lines, *(line for _, line in entries)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", help="the first mark is <!-- table NAME -->")
    args = parser.parse_args()
    begin = f"<!-- table {args.table} -->" if args.table else "<!-- table -->"
    page = args.out.read_text(encoding="utf-8") if args.out.exists() else f"{begin}\n{END}\n"
    head, mark, tail = page.partition(begin)
    if not mark:
        parser.error(f"{args.out} has no {begin}")
    _, _, remainder = tail.partition(END)
    read = (json.loads(path.read_text(encoding="utf-8")) for path in args.runs)
    table_text = table([document for run in read for document in (run if isinstance(run, list) else [run])])
    args.out.write_text(f"{head}{begin}\n\n{table_text}\n\n{END}{remainder}", encoding="utf-8")


if __name__ == "__main__":
    main()
