"""Block efficiency of acceptance rules and trees at equal node budgets, on a real pair of models.

    python benchmarks/verifier_table.py HumanEval.jsonl.gz --target TARGET --draft DRAFT --budget 8 16 --temperature 1

Every cell decodes the same prompts with the same keys; tokens per target pass, the bonus token included, with the
standard error over prompts. A budget counts drafted nodes. Writes JSON and prints a Markdown table.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time

import jax

import specjax
from specjax import analysis, trees, verifiers


def cells(n: int):
    """(tree, rule) at a budget of `n` drafted nodes; None: the default exact rule."""
    half = n // 2
    yield f"{'x'.join('1' * min(n, 8))}", verifiers.standard
    yield f"{'x'.join('1' * min(n, 8))}", verifiers.block
    for rule in (verifiers.specinfer, verifiers.spectr, verifiers.multipath_block(2), verifiers.traversal):
        yield f"paths:2x{half}", rule
    yield f"beam:2x{half}", verifiers.recursive_rejection
    yield f"beam:2x{half}", verifiers.traversal
    wide = {8: "2x1x1x1", 16: "2x2x1x1", 32: "4x2x1x1", 64: "4x2x2x1x1"}[n]
    yield wide, verifiers.recursive_rejection
    yield wide, verifiers.traversal
    yield f"mixed:{wide}", verifiers.greedy_multi_draft
    yield f"top:{wide}", verifiers.sample_and_match
    yield f"dyspec:{n}", verifiers.recursive_rejection
    yield f"dyspec:{n}", verifiers.traversal
    yield f"eagle2:4x{max(2, half // 2)}x{n}", verifiers.sample_and_match


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts")
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--budget", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0])
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", default="verifier_table.json")
    args = parser.parse_args()

    # Stacked layers compile in seconds; only the number of passes is measured.
    target, tokenizer = specjax.load(args.target, dtype=args.dtype, stacked=True)
    draft, _ = specjax.load(args.draft, dtype=args.dtype, stacked=True)
    with gzip.open(args.prompts, "rt") as lines:
        problems = [json.loads(line)["prompt"] for line in lines][: args.limit]
    prompts = [tokenizer.chat("Complete this Python function.\n```python\n" + text + "```") for text in problems]
    results = []
    print("| nodes | temperature | tree | rule | tokens per pass |\n| --- | --- | --- | --- | --- |")
    for n in args.budget:
        for temperature in args.temperature:
            for tree, rule in cells(n):
                start = time.perf_counter()
                found = analysis.block_efficiency(
                    rule, trees.parse(tree), target, draft, prompts, key=jax.random.key(0),
                    max_new_tokens=args.max_new_tokens, temperature=temperature,
                )  # fmt: skip
                nodes = trees.parse(tree).num_nodes - 1
                results.append(
                    {"nodes": nodes, "temperature": temperature, "tree": tree, "rule": rule.name, "mean": found.mean,
                     "standard_error": found.standard_error, "seconds": time.perf_counter() - start}
                )  # fmt: skip
                error = f" ± {found.standard_error:.2f}" if found.standard_error is not None else ""
                print(f"| {nodes} | {temperature:g} | `{tree}` | {rule.name} | {found.mean:.2f}{error} |", flush=True)
                with open(args.out, "w") as file:
                    json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
