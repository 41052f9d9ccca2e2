"""Time of a prefill on this CPU by the number of tokens per pass.

    python benchmarks/prefill_chunks.py --length 2048 --chunks 64 128 256 512 1024 --repeats 5

All sizes are compiled first. Then they run in turns, so that other work on the machine changes all of them alike. A
table has the median and the least time, and the temporaries of each program. The loop is that of a decode: chunks of
one size, then a rest in chunks of at most 128 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.engine import prefill
from specjax.engine.step import buffer_size

TEXT = "A prompt is read in chunks. The model computes the keys and values of all tokens of a chunk in one pass. "


def compiled(target: specjax.Target, tokens: jax.Array, size: int):
    """Return the compiled prefill of all but the last token, with chunks of `size` tokens."""
    model, narrow = target.model, min(size, prefill.CHUNK)

    def run(params, tokens, count):
        cache = model.init_cache(params, None, len(tokens), tokens.shape[1])
        read = prefill.chunk_reader(model, params, tokens, count, lambda state, *chunk: state)
        return prefill.in_chunks(read, (cache, ()), jnp.max(count), size, narrow)[0]

    return jax.jit(run).lower(target.params, tokens, jnp.zeros(len(tokens), jnp.int32)).compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: the demo model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    target, tokenizer = specjax.load(args.target, dtype=args.dtype)
    text = tokenizer.encode(TEXT)
    tokens = np.zeros((args.batch_size, buffer_size(args.length, 128, 16)), np.int32)
    tokens[:, : args.length] = np.resize(text, args.length)
    count = jnp.full(args.batch_size, args.length - 1, jnp.int32)
    programs = {size: compiled(target, jnp.asarray(tokens), size) for size in args.chunks}
    seconds: dict[int, list[float]] = {size: [] for size in programs}
    for _ in range(args.repeats):
        for size, program in programs.items():
            begin = time.perf_counter()
            jax.block_until_ready(program(target.params, tokens, count))
            seconds[size].append(time.perf_counter() - begin)
    print(f"{args.batch_size} x {args.length} tokens, {args.dtype}, {args.repeats} turns")
    print("| chunk | median, s | least, s | temporaries, MB |\n| --- | --- | --- | --- |")
    for size, times in seconds.items():
        temporaries = programs[size].memory_analysis().temp_size_in_bytes / 1e6
        print(f"| {size} | {statistics.median(times):.2f} | {min(times):.2f} | {temporaries:.0f} |", flush=True)


if __name__ == "__main__":
    main()
