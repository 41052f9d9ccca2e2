"""Tokens per pass of heads by task, and the acceptance of the first draft, predicted without drafting.

    python benchmarks/head_by_task.py question.jsonl HEAD HEAD ... --limit 12 --answers answers.json
    python benchmarks/head_by_task.py question.jsonl HEAD --tree ddtree:8 --tree ddtree:32 --answers answers.json

The target answers Spec-Bench's prompts once (--answers stores that). A pass over its answers predicts exactly the
acceptance of a head (`specjax.training.measure_acceptance`). Many prompts are then counted in the time that
`shipped_head.py` takes for a few. Prints a table; the mean is over chat, maths, qa and summarization.

A tree has no such prediction, so --tree decodes the prompts with it, in one batch. Trees that choose their own size
decode one prompt at a time, because the size depends on the rows. A head that refuses the tree has no row. The column
"equal" has the number of texts that equal those of plain decoding, which is all of them in float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from shipped_head import padded, prompts_by_task

import specjax
from specjax.models.loading.heads.shipped import NAMES
from specjax.training import TrainingText, measure_acceptance

COUNTED = ("mt_bench", "math_reasoning", "qa", "summarization")


def answered(args: argparse.Namespace, target: specjax.Target, tokenizer) -> dict[str, list[TrainingText]]:
    """Return the answers by task."""
    if args.answers and args.answers.exists():
        stored = json.loads(args.answers.read_text())
        return {
            task: [TrainingText(tuple(tokens), prompt) for tokens, prompt, *_ in texts]
            for task, texts in stored.items()
        }
    by_task = {}
    for task, prompts in prompts_by_task(args.questions, args.limit, tokenizer, args.longest).items():
        if prompts:
            result = specjax.decode(target, None, prompts, key=0, max_new_tokens=args.max_new_tokens, eos=tokenizer.eos)
            pairs = zip(prompts, result.to_lists(), strict=True)
            by_task[task] = [TrainingText((*prompt, *answer), len(prompt)) for prompt, answer in pairs]
    if args.answers:
        args.answers.write_text(json.dumps(by_task) + "\n")
    return by_task


def decoded(target: specjax.Target, drafter, texts: list[TrainingText], eos, rows: int) -> list[tuple[int, int, bool]]:
    """Decode the prompts of the texts, `rows` at a time, to the lengths of their answers.

    Returns: for each prompt the tokens, the passes, and whether the text equals the answer.
    """
    count = max(text.response_length for text in texts)
    figures = []
    for start in range(0, len(texts), rows):
        some = texts[start : start + rows]
        prompts = [list(text.tokens[: text.prompt_length]) for text in some]
        inputs = padded(prompts[0]) if rows == 1 else prompts  # few shapes, so that few programs are compiled
        result = specjax.decode(target, drafter, inputs, key=0, max_new_tokens=count, eos=eos)
        for text, answer, passes in zip(some, result.to_lists(), result.stats.target_passes, strict=True):
            is_equal = tuple(answer) == tuple(text.tokens[text.prompt_length :])
            figures.append((len(answer), int(passes), is_equal))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", help="Spec-Bench's question.jsonl")
    parser.add_argument("heads", nargs="*", default=list(NAMES))
    parser.add_argument("--target", help="default: the demo model")
    parser.add_argument("--limit", type=int, default=12, help="prompts of each task")
    parser.add_argument("--longest", type=int, default=400, help="tokens of a prompt")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--num-draft-tokens", type=int, default=3)
    parser.add_argument("--tree", action="append", default=[], help="such as ddtree:16: decode with it too")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--answers", type=Path, help="where the target's answers are kept")
    args = parser.parse_args()
    target, tokenizer = specjax.load(args.target, dtype=args.dtype)
    texts = answered(args, target, tokenizer)
    print("| head |", " | ".join(f"{task} ({len(some)})" for task, some in texts.items()), "| mean of four | equal |")
    print("| --- |" + " --- |" * (len(texts) + 2))
    shape = {"rows": 4, "length": args.longest + args.max_new_tokens}
    for name in args.heads:
        head = specjax.load_head(name, target)
        by_task = {
            task: measure_acceptance(target, head, some, depths=args.num_draft_tokens, **shape)
            for task, some in texts.items()
        }
        of = [by_task[task] for task in COUNTED if task in by_task]
        cells = [f"{one.per_pass:.2f}, {one.first:.0%}" for one in by_task.values()]
        mean = statistics.mean(one.per_pass for one in of), statistics.mean(one.first for one in of)
        print(f"| {name} |", " | ".join(cells), f"| {mean[0]:.3f}, {mean[1]:.1%} | |", flush=True)
        for spec in args.tree:
            try:
                drafter = specjax.make_drafter(head.head.kind, target, head, tree=specjax.trees.parse(spec))
            except specjax.UsageError:
                continue
            rows = 1 if spec.endswith(":auto") else sum(map(len, texts.values()))
            everything = [text for some in texts.values() for text in some]
            figures = iter(decoded(target, drafter, everything, tokenizer.eos, rows))
            rates, equal = {}, 0
            for task, some in texts.items():
                tokens, passes, equals = map(sum, zip(*(next(figures) for _ in some), strict=True))
                rates[task], equal = tokens / passes, equal + equals
            mean_rate = statistics.mean(rates[task] for task in COUNTED if task in rates)
            print(
                f"| {name}, {spec} |",
                " | ".join(f"{rate:.2f}" for rate in rates.values()),
                f"| {mean_rate:.3f} | {equal} of {len(everything)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
