"""Two-model drafting on HumanEval: block efficiency and speed against plain decoding of the target, in one process.

python benchmarks/two_model_humaneval.py HumanEval.jsonl.gz --target T.gguf --draft D.gguf --limit 4 --num-tokens 4
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import time

import jax
import numpy as np

import specjax


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems")
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--num-tokens", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()
    target, tokenizer = specjax.load(args.target)
    draft, _ = specjax.load(args.draft)
    with gzip.open(args.problems, "rt") as lines:
        problems = [json.loads(line)["prompt"] for line in lines][: args.limit]
    prompts = [tokenizer.chat("Complete this Python function.\n```python\n" + text + "```") for text in problems]
    width = max(map(len, prompts))
    drafters = {
        "plain": specjax.drafters.autoregressive(),
        "two_model": specjax.drafters.two_model(draft, args.num_tokens),
    }

    def run(name, prompt):
        tokens = np.zeros((1, width), np.int32)
        tokens[0, : len(prompt)] = prompt
        start = time.perf_counter()
        result = specjax.decode(
            target,
            drafters[name],
            (tokens, np.array([len(prompt)], np.int32)),
            key=jax.random.key(0),
            max_new_tokens=args.max_new_tokens,
            eos=tokenizer.eos,
        )
        jax.block_until_ready(result.tokens)
        return result, time.perf_counter() - start

    for name in drafters:
        run(name, prompts[0])  # compile
    ratios, tokens, passes, equal = [], 0, 0, 0
    for i, prompt in enumerate(prompts):
        plain, plain_seconds = run("plain", prompt)
        ours, seconds = run("two_model", prompt)
        tokens += int(ours.lengths[0])
        passes += int(ours.stats.target_passes[0])
        equal += ours.to_lists() == plain.to_lists()
        ratios.append(plain_seconds / seconds)
        print(
            f"problem {i}: {plain_seconds:.1f} s plain, {seconds:.1f} s two_model, {tokens / passes:.2f} per pass",
            flush=True,
        )
    print(
        json.dumps(
            {
                "problems": len(prompts),
                "block_efficiency": tokens / passes,
                "median_speedup": statistics.median(ratios),
                "identical": equal,
            }
        )
    )


if __name__ == "__main__":
    main()
