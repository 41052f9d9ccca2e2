"""Correct answers of a quantised model on GSM8K, beside those of the same model unquantised.

    python benchmarks/quantized_answers.py test.jsonl --target qwen2.5-coder-1.5b.gguf --schemes none int8 int4-weights

Each line of the file has a `question` and an `answer` that ends with "#### NUMBER". The texts are greedy. The last
number of a text counts as its answer, or the one in its last \\boxed{}. Differences of a few problems are noise: the
report has the number of problems that both sides answer correctly, and that only one of them does.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import specjax

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", type=Path, help="GSM8K's test.jsonl")
    parser.add_argument("--target", help="a GGUF file or a folder; default: SmolLM2")
    parser.add_argument("--schemes", nargs="+", default=["none", "int8", "int8-weights", "int4-weights"])
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    return parser.parse_args()


def final_number(text: str) -> float | None:
    """Return the number of the last \\boxed{} of a text, or its last number."""
    boxed = BOXED.findall(text)
    numbers = NUMBER.findall(boxed[-1] if boxed else "") or NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def correct_answers(options: argparse.Namespace, scheme: str, problems: list[dict[str, str]]) -> list[bool]:
    """Return for each problem whether the model with this scheme ends with the right number."""
    quantize = None if scheme == "none" else scheme
    target, tokenizer = specjax.load(options.target, dtype="float32", quantize=quantize, keep_quantized=False)
    correct = []
    for start in range(0, len(problems), options.batch):
        part = problems[start : start + options.batch]
        prompts = [tokenizer.chat(problem["question"]) for problem in part]
        result = specjax.decode(
            target, "autoregressive", prompts, key=0, max_new_tokens=options.max_new_tokens, eos=tokenizer.eos
        )
        for problem, tokens in zip(part, result.to_lists(), strict=True):
            correct.append(final_number(tokenizer.decode(tokens)) == final_number(problem["answer"]))
        print(f"{scheme}: {sum(correct)} of {len(correct)}", flush=True)
    return correct


def main() -> None:
    options = parse()
    problems = [json.loads(line) for line in options.problems.read_text().splitlines()[: options.limit]]
    results = {scheme: correct_answers(options, scheme, problems) for scheme in options.schemes}
    first = results[options.schemes[0]]
    report = {
        scheme: {
            "correct": sum(correct),
            "both": sum(a and b for a, b in zip(first, correct, strict=True)),
            f"only {options.schemes[0]}": sum(a and not b for a, b in zip(first, correct, strict=True)),
            "only this": sum(b and not a for a, b in zip(first, correct, strict=True)),
        }
        for scheme, correct in results.items()
    }
    print(json.dumps({"problems": len(problems), "schemes": report}, indent=1))


if __name__ == "__main__":
    main()
