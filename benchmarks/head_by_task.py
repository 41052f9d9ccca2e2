"""What heads serve by task: tokens per pass of a greedy chain and how often its first draft is right, without drafting.

    python benchmarks/head_by_task.py question.jsonl HEAD HEAD ... --limit 12 --answers answers.json

The target answers Spec-Bench's prompts once (--answers keeps that), and a pass over its answers says exactly what a
head would serve (`specjax.training.measure_acceptance`), so that many prompts are counted in the time of a few that are
timed (`shipped_head.py`). Prints a table; the mean is over chat, maths, qa and summarization.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from shipped_head import prompts_by_task

import specjax
from specjax.models.loading.heads.shipped import NAMES
from specjax.training import TrainingText, measure_acceptance

COUNTED = ("mt_bench", "math_reasoning", "qa", "summarization")


def answered(given: argparse.Namespace, target: specjax.Target, tokenizer) -> dict[str, list[TrainingText]]:
    """By task."""
    if given.answers and given.answers.exists():
        kept = json.loads(given.answers.read_text())
        return {task: [TrainingText(tuple(tokens), prompt) for tokens, prompt in texts] for task, texts in kept.items()}
    found = {}
    for task, prompts in prompts_by_task(given.questions, given.limit, tokenizer, given.longest).items():
        if prompts:
            result = specjax.decode(
                target, None, prompts, key=0, max_new_tokens=given.max_new_tokens, eos=tokenizer.eos
            )
            pairs = zip(prompts, result.to_lists(), strict=True)
            found[task] = [TrainingText((*prompt, *answer), len(prompt)) for prompt, answer in pairs]
    if given.answers:
        given.answers.write_text(json.dumps(found) + "\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", help="Spec-Bench's question.jsonl")
    parser.add_argument("heads", nargs="*", default=list(NAMES))
    parser.add_argument("--target", help="default: the demo model")
    parser.add_argument("--limit", type=int, default=12, help="prompts of each task")
    parser.add_argument("--longest", type=int, default=400, help="tokens of a prompt")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--num-draft-tokens", type=int, default=3)
    parser.add_argument("--answers", type=Path, help="where the target's answers are kept")
    given = parser.parse_args()
    target, tokenizer = specjax.load(given.target)
    texts = answered(given, target, tokenizer)
    print("| head |", " | ".join(f"{task} ({len(some)})" for task, some in texts.items()), "| mean of four |")
    print("| --- |" + " --- |" * (len(texts) + 1))
    shape = {"rows": 4, "length": given.longest + given.max_new_tokens}
    for name in given.heads:
        head = specjax.load_head(name, target)
        found = {
            task: measure_acceptance(target, head, some, depths=given.num_draft_tokens, **shape)
            for task, some in texts.items()
        }
        of = [found[task] for task in COUNTED if task in found]
        cells = [f"{one.per_pass:.2f}, {one.first:.0%}" for one in found.values()]
        mean = statistics.mean(one.per_pass for one in of), statistics.mean(one.first for one in of)
        print(f"| {name} |", " | ".join(cells), f"| {mean[0]:.3f}, {mean[1]:.1%} |", flush=True)


if __name__ == "__main__":
    main()
