"""Memory, perplexity and accuracy of a needle retrieval task with compressed caches.

    python benchmarks/cache_compression.py [--target SOURCE] [--out docs/cache_compression.png]

The caches are those of `load(cache_dtype=...)`. Bits per number are the bytes of the slots of a long cache, divided by
its keys and values. Perplexity is that of `specjax.analysis.perplexity` on pages of this documentation, or on `--text`.
Needles are those of `prompt_compression.py`: an answer is right if the greedy text has the number.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from prompt_compression import make_needle

import specjax
from specjax.analysis.perplexity import perplexity
from specjax.files.plotting import hide_top_right_spines, new_figure, to_png
from specjax.models import make_model
from specjax.types import Target

DOCS = Path(__file__).parents[1] / "docs"
PAGES = "concepts.md", "exact.md", "drafting.md", "choose.md", "serving.md"


def with_cache(target: Target, name: str) -> Target:
    """Return the target with a cache of this dtype."""
    cache_dtype = None if name == "plain" else name
    return dataclasses.replace(
        target, model=make_model(dataclasses.replace(target.model.config, cache_dtype=cache_dtype))
    )


def cache_bytes(target: Target, capacity: int) -> int:
    """Return the bytes of the cache of one row, which is not allocated."""
    cache = jax.eval_shape(lambda params: target.model.init_cache(params, None, 1, capacity), target.params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((cache.k, cache.v)))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    plain, tokenizer = specjax.load(options.target, dtype=options.dtype)
    config = plain.model.config
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    pages = [options.text] if options.text else [DOCS / page for page in PAGES]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    ids = list(tokenizer.encode(text, special=False))[: options.tokens]
    rng = np.random.default_rng(options.seed)
    count = lambda text: len(tokenizer.encode(text, special=False))
    needles = [make_needle(rng, count, options.length, 1) for _ in range(options.needles)]
    prompts = [list(tokenizer.chat(needle.text)) for needle in needles]
    mean = float(np.mean([len(prompt) for prompt in prompts])) if prompts else 0.0
    report: dict[str, Any] = {
        "target": plain.model.name, "dtype": options.dtype, "text_tokens": len(ids), "window": options.window,
        "needles": len(needles), "needle_tokens": mean, "caches": {},
    }  # fmt: skip
    for name in options.caches:
        target, start = with_cache(plain, name), time.perf_counter()
        short, long = (cache_bytes(target, capacity) for capacity in (options.slots, 2 * options.slots))
        entry: dict[str, Any] = {
            "bits_per_number": 8 * (long - short) / (options.slots * per_token),
            f"mib_at_{options.slots}": short / 2**20,
            "perplexity": perplexity(target, ids, window=options.window)[0] if ids else None,
        }
        if prompts:
            result = specjax.decode(
                target, "autoregressive", prompts, key=0, max_new_tokens=options.max_new_tokens, eos=tokenizer.eos
            )
            texts = [tokenizer.decode(row) for row in result.to_lists()]
            entry["right"] = sum(needle.answer in text for needle, text in zip(needles, texts, strict=True))
        entry["seconds"] = round(time.perf_counter() - start, 1)
        report["caches"][name] = entry
        print(name, entry, flush=True)
    return report


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw perplexity and the share of right answers against the bits per number."""
    figure = new_figure(8, 3)
    labels = {"perplexity": "perplexity", "right": f"right answers of {report['needles']}"}
    for column, (field, label) in enumerate(labels.items()):
        axes = figure.add_subplot(1, 2, column + 1)
        for name, entry in report["caches"].items():
            axes.plot(entry["bits_per_number"], entry[field], "o")
            axes.annotate(
                name, (entry["bits_per_number"], entry[field]), (4, 4), textcoords="offset points", fontsize=8
            )
        axes.set(xlabel="bits per key or value", ylabel=label, ylim=(0, None) if field == "right" else None)
        axes.set_xscale("log", base=2)
        axes.margins(x=0.2, y=0.15)
        hide_top_right_spines(axes)
    path.write_bytes(to_png(figure))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a GGUF file or a folder; default: SmolLM2")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--caches", nargs="+", default=["plain", "int8", "gear:4", "gear:2"])
    parser.add_argument("--slots", type=int, default=8192, help="capacity for which the memory is reported")
    parser.add_argument("--text", type=Path, help="a text for the perplexity; default: pages of the documentation")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the text")
    parser.add_argument("--window", type=int, default=1024, help="tokens of the text that are read together")
    parser.add_argument("--length", type=int, default=600, help="tokens of the text around a needle")
    parser.add_argument("--needles", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the report into this file")
    parser.add_argument("--out", type=Path, help="draw the results into this PNG file")
    options = parser.parse_args()
    report = measure(options)
    print(json.dumps(report, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.out is not None:
        draw(report, options.out)


if __name__ == "__main__":
    main()
