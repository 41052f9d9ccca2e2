"""Decoding of SmolLM2 with int8 weights on CPU, against float32, bfloat16 and `transformers` in float32.

    python benchmarks/quantized_speed.py [--repeats 5]

One process, all sides in turn, medians of runs of 96 tokens. The prompt asks for a text that repeats parts of itself,
so `auto` has drafts. "same_bits" is int8 in bfloat16 with `same_bits`, whose cost the last ratio states.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import jax
import torch
from every_method import hf_model
from transformers import LlamaConfig, LlamaForCausalLM

import specjax
from specjax.models.storage import num_bytes

NEW = 96
PROMPT = (
    "Fix the spelling and print the whole text: The quick brwon fox jumps over the lazy dog. It then runs into the "
    "forrest, where it meets a wise old owl. The owl asks the fox why it is in such a hury."
)
MODELS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8, float32": {"dtype": "float32", "quantize": "int8"},
    "int8, bfloat16": {"dtype": "bfloat16", "quantize": "int8"},
    "int8, same_bits": {"dtype": "bfloat16", "quantize": "int8", "same_bits": True},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    loaded = {name: specjax.load(**options) for name, options in MODELS.items()}
    tokenizer = loaded["float32"][1]
    prompt = tokenizer.chat(PROMPT)
    baseline = hf_model(loaded["float32"][0], LlamaConfig, LlamaForCausalLM, torch)
    texts: dict[str, list[int]] = {}

    def ours(name: str, method: str):
        result = specjax.decode(loaded[name][0], method, [prompt], key=jax.random.key(0), max_new_tokens=NEW)
        texts[f"{name}, {method}"] = result.to_lists()[0]

    def theirs():
        with torch.no_grad():
            baseline.generate(
                torch.tensor([prompt]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0,
                eos_token_id=None,
            )  # fmt: skip

    sides = {f"{name}, {method}": (ours, name, method) for name in MODELS for method in ("autoregressive", "auto")}
    runs = {"transformers": (theirs,), **sides}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for name, (run, *args) in runs.items():  # compile and warm
        run(*args)
        print(name, flush=True)
    for _ in range(repeats):
        for name, (run, *args) in runs.items():
            start = time.perf_counter()
            run(*args)
            times[name].append(time.perf_counter() - start)
    rates = {name: NEW / statistics.median(values) for name, values in times.items()}
    ratio = lambda one, other: rates[one] / rates[other]
    print(
        json.dumps(
            {
                "megabytes": {name: num_bytes(target.params) / 1e6 for name, (target, _) in loaded.items()},
                "tokens_per_second": rates,
                "int8 / float32, plain": ratio("int8, float32, autoregressive", "float32, autoregressive"),
                "int8 / float32, auto": ratio("int8, float32, auto", "float32, auto"),
                "int8 / transformers, plain": ratio("int8, float32, autoregressive", "transformers"),
                "int8 / int8 with same_bits": ratio(
                    "int8, bfloat16, autoregressive", "int8, same_bits, autoregressive"
                ),
                "identical": {name: texts[f"{name}, auto"] == texts[f"{name}, autoregressive"] for name in MODELS},
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
