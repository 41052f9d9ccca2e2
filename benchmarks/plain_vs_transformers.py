"""Plain decoding of SmolLM2, float32, batch 1, against `transformers` with the same weights and the memory roof.

    python benchmarks/plain_vs_transformers.py

One process, both sides in turn, medians of three runs of 128 tokens. The roof is the bandwidth of a large matrix-vector
product, measured in the same run, over the parameter bytes.
"""

from __future__ import annotations

import json
import statistics
import time

import jax
import jax.numpy as jnp
import torch
from every_method import hf_model
from transformers import LlamaConfig, LlamaForCausalLM

import specjax

NEW = 128


def seconds(fn) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def main() -> None:
    target, tokenizer = specjax.load(dtype="float32")
    prompt = tokenizer.chat("Write a long story about a river and the people who live along it.")
    model = hf_model(target, LlamaConfig, LlamaForCausalLM, torch)
    drafter = specjax.drafters.autoregressive()
    texts = {}

    def ours():
        result = specjax.decode(target, drafter, [prompt], key=jax.random.key(0), max_new_tokens=NEW)
        texts["specjax"] = result.to_lists()[0]

    def theirs():
        with torch.no_grad():
            out = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        texts["transformers"] = out[0, len(prompt) :].tolist()

    matrix, vector = jnp.ones((1 << 17, 1 << 10)), jnp.ones((1 << 10,))
    product = jax.jit(jnp.matmul)

    def read():
        product(matrix, vector).block_until_ready()

    for fn in (ours, theirs, read):  # compile and warm
        fn()
    times: dict[str, list[float]] = {"ours": [], "theirs": [], "read": []}
    for _ in range(3):
        for name, fn in (("ours", ours), ("theirs", theirs), ("read", read), ("read", read)):
            times[name].append(seconds(fn))
    ours_rate, theirs_rate = (NEW / statistics.median(times[name]) for name in ("ours", "theirs"))
    bandwidth = matrix.nbytes / statistics.median(times["read"])
    roof = bandwidth / sum(x.nbytes for x in jax.tree.leaves(target.params))
    print(
        json.dumps(
            {
                "specjax_tokens_per_second": ours_rate,
                "transformers_tokens_per_second": theirs_rate,
                "ratio": ours_rate / theirs_rate,
                "bandwidth_gb_per_second": bandwidth / 1e9,
                "fraction_of_roof": ours_rate / roof,
                "identical": texts["specjax"] == texts["transformers"],
                "torch_threads": torch.get_num_threads(),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
