"""Drafters of one target on HumanEval, models and heads: tokens per pass, speed over plain decoding.

    python benchmarks/drafters_humaneval.py HumanEval.jsonl.gz --target T.gguf --draft D.gguf --head HEAD

The target answers --limit problems greedily, once (kept in --answers); a pass over its answers says exactly what a
chain of each draft model or head would serve (`specjax.training.measure_acceptance`). Of --timed problems all sides are
decoded in turns, after a first time that compiles: plain seconds over a drafter's, the prompt's included, median of
--repeats and of problems. `auto` is timed too, alone and with each head.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import statistics
import time
from pathlib import Path

import jax
from shipped_head import padded

import specjax
from specjax.training import TrainingText, measure_acceptance
from specjax.training.objectives.trainables import build_objective


def answered(
    args: argparse.Namespace, target: specjax.Target, tokenizer, prompts: list[list[int]]
) -> list[TrainingText]:
    if args.answers and args.answers.exists():
        return [TrainingText(tuple(tokens), prompt) for tokens, prompt in json.loads(args.answers.read_text())][
            : args.limit
        ]
    texts = []
    for start in range(0, len(prompts), 8):
        part = prompts[start : start + 8]
        decoded = specjax.decode(target, None, part, key=0, max_new_tokens=args.max_new_tokens, eos=tokenizer.eos)
        pairs = zip(part, decoded.to_lists(), strict=True)
        texts += [TrainingText((*prompt, *answer), len(prompt)) for prompt, answer in pairs]
        print(f"answered {len(texts)} of {len(prompts)}", flush=True)
    if args.answers:
        args.answers.write_text(json.dumps(texts) + "\n")
    return texts


def _depths(pupil, max_depth_allowed: int) -> int:
    """Return the length of its chain."""
    return min(max_depth_allowed, build_objective(pupil).max_depth or max_depth_allowed)


def _drafters(args: argparse.Namespace, target: specjax.Target, drafts: dict, heads: dict) -> dict:
    """Return the drafters by their printed name."""
    sides = {name: specjax.drafters.two_model(draft, args.num_tokens) for name, draft in drafts.items()}
    if args.draft_stop:
        stop = specjax.trees.stops.parse(args.draft_stop)
        for name, draft in drafts.items():
            sides[f"{name}, {args.draft_stop}"] = specjax.drafters.two_model(draft, args.num_tokens, stop=stop)
    auto = functools.partial(specjax.drafters.auto, target.model.vocab_size, dtype=args.dtype)
    sides["auto"] = auto()
    for name, head in heads.items():
        sides[name] = specjax.make_drafter(head.head.kind, target, head, num_tokens=_depths(head, args.num_tokens))
        sides[f"auto with {name}"] = auto(head=head)
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems")
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", default=[], action="append", help="a model; may be given several times")
    parser.add_argument("--draft-stop", help="such as confidence:0.4: the draft models with it too")
    parser.add_argument("--head", default=[], action="append", help="of the target; may be given several times")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--limit", type=int, default=40, help="problems of which tokens per pass are counted")
    parser.add_argument("--timed", type=int, default=4, help="problems that are decoded by all")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--num-tokens", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--answers", type=Path, help="where the target's answers are kept")
    args = parser.parse_args()
    target, tokenizer = specjax.load(args.target, dtype=args.dtype)
    with gzip.open(args.problems, "rt") as lines:
        problems = [json.loads(line)["prompt"] for line in lines][: args.limit]
    prompts = [tokenizer.chat("Complete this Python function.\n```python\n" + text + "```") for text in problems]
    texts = answered(args, target, tokenizer, prompts)
    drafts = {name: specjax.load(name, dtype=args.dtype)[0] for name in args.draft}
    heads = {name: specjax.load_head(name, target) for name in args.head}
    length = max(len(text.tokens) for text in texts)
    for name, pupil in (drafts | heads).items():
        depths = _depths(pupil, args.num_tokens)
        measurement = measure_acceptance(target, pupil, texts, depths=depths, rows=4, length=length)
        print(
            f"{name}: {measurement.per_pass:.3f} tokens per pass of a chain of {depths}, first draft right "
            f"at {measurement.first:.1%}, {len(texts)} problems, {measurement.tokens} tokens",
            flush=True,
        )
    drafters = _drafters(args, target, drafts, heads)
    sides = {"plain": specjax.drafters.autoregressive(), **drafters}

    def run(name, prompt):
        start = time.perf_counter()
        result = specjax.decode(
            target,
            sides[name],
            padded(prompt),
            key=jax.random.key(0),
            max_new_tokens=args.max_new_tokens,
            eos=tokenizer.eos,
        )
        jax.block_until_ready(result.tokens)
        return result, time.perf_counter() - start

    ratios: dict[str, list[float]] = {name: [] for name in drafters}
    tokens, passes, equal = (dict.fromkeys(drafters, 0) for _ in range(3))
    for i, prompt in enumerate(prompts[: args.timed]):
        times: dict[str, list[float]] = {name: [] for name in sides}
        if i == 0:
            for name in sides:  # compile
                run(name, prompt)
        for _ in range(args.repeats):
            results = {}
            for name in sides:
                results[name], seconds = run(name, prompt)
                times[name].append(seconds)
        median = {name: statistics.median(of) for name, of in times.items()}
        for name in drafters:
            tokens[name] += int(results[name].lengths[0])
            passes[name] += int(results[name].stats.target_passes[0])
            equal[name] += results[name].to_lists() == results["plain"].to_lists()
            ratios[name].append(median["plain"] / median[name])
        print(f"problem {i}:", ", ".join(f"{seconds:.1f} s {name}" for name, seconds in median.items()), flush=True)
    for name in drafters if args.timed else ():
        print(
            json.dumps(
                {
                    "drafter": name,
                    "problems": args.timed,
                    "block_efficiency": tokens[name] / passes[name],
                    "median_speedup": statistics.median(ratios[name]),
                    "identical": equal[name],
                }
            )
        )


if __name__ == "__main__":
    main()
