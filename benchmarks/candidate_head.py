"""Time and tokens per pass of the shipped EAGLE-3 head with candidates from a low-rank output layer.

    python benchmarks/candidate_head.py --settings 16:144 64:72 64:144

A setting is candidates:rank. All levels run in turns in one process: a level is one pass of the head below one node,
with the choice of its likeliest token, in a loop of --levels levels. Tokens per pass are those of chains of three,
greedy, on a few fixed prompts. Medians, and the least time beside them.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp

import specjax
from specjax.arrays.modes import jit
from specjax.models.heads.candidates import with_candidates
from specjax.models.heads.contract import DraftedNodes, DraftHead, FeaturePairs
from specjax.types import Array, Context, Target

PROMPTS = (
    "Explain how rain forms.", "Write a short poem about a dog.", "What is 17 times 23? Show your steps.",
    "List three uses of copper.", "Summarize: The cat sat on the mat because it was warm.", "Who wrote Hamlet?",
)  # fmt: skip


@jit(static_argnames=("head", "room"))
def draft_levels(head, params, target: Target, features: Array, tokens: Array, levels: Array, room: int) -> Array:
    """Return the last logits float32[1, 1, V] of a chain of `levels` <= `room` greedy levels behind a text."""
    context = Context(tokens, jnp.full((1,), tokens.shape[1]), target=target)
    memory = head.init_memory(params, context, 1, tokens.shape[1] + room + 1)
    pairs = FeaturePairs(features[:, :-1], tokens[:, 1:], jnp.full((1,), tokens.shape[1] - 1))
    scratch, logits = head.start(params, head.read(params, memory, pairs, context), context, room + 1)
    places = jnp.arange(room + 1)

    def level(depth: Array, carry):
        scratch, logits = carry
        token = jnp.argmax(logits, -1).astype(jnp.int32)
        ancestors = ((places < depth) & (places > 0))[None, None]
        one = lambda value: jnp.reshape(value, (1, 1)).astype(jnp.int32)
        drafted = DraftedNodes(token, one(depth), depth, one(depth - 1), ancestors)
        return head.follow(params, scratch, drafted, context)

    return jax.lax.fori_loop(1, levels + 1, level, (scratch, logits[:, None]))[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="*", default=["16:144", "64:144", "64:72"])
    parser.add_argument("--levels", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    target, tokenizer = specjax.load(None, dtype=args.dtype)
    full = specjax.load_head("smollm2-135m-eagle3", target)
    heads: dict[str, DraftHead] = {"full": full}
    for setting in args.settings:
        heads[setting] = with_candidates(full, *map(int, setting.split(":")))
    tokens = jnp.asarray([list(tokenizer.encode(" ".join(PROMPTS)))[:48]])
    features = jnp.zeros((1, tokens.shape[1], 3 * target.model.config.width), target.model.config.dtype)
    run = {
        (name, levels): functools.partial(
            draft_levels, head.head, head.params, target, features, tokens, jnp.int32(levels), 1 + args.levels
        )
        for name, head in heads.items()
        for levels in (1, 1 + args.levels)
    }
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in run}
    for turn in range(args.repeats + 1):
        for key, draft in run.items():
            start = time.perf_counter()
            jax.block_until_ready(draft())
            if turn:
                seconds[key].append(time.perf_counter() - start)
    prompts = [list(tokenizer.encode(prompt)) for prompt in PROMPTS]
    print("| candidates:rank | level, ms (least) | tokens per pass |\n| --- | --- | --- |", flush=True)
    for name, head in heads.items():
        of_level = [
            1e3 * (choose(seconds[name, 1 + args.levels]) - choose(seconds[name, 1])) / args.levels
            for choose in (statistics.median, min)
        ]
        drafter = specjax.make_drafter("eagle3", target, head, num_tokens=3)
        result = specjax.decode(target, drafter, prompts, key=0, max_new_tokens=args.max_new_tokens)
        passes = float(jnp.sum(result.stats.target_passes))
        per_pass = len(prompts) * args.max_new_tokens / passes
        print(f"| {name} | {of_level[0]:.3f} ({of_level[1]:.3f}) | {per_pass:.2f} |", flush=True)


if __name__ == "__main__":
    main()
