"""Passes on this accelerator: kernels against their specification, tokens per second against the memory roof.

    python benchmarks/device_passes.py --out device.json

In one run: the copy bandwidth; every kernel path as this backend takes it, against the specification on CPU; a model of
the shape of `--config` (default llama3_8b) in bfloat16 with random weights: a pass over 1, 8, 16, 32 and 64 tokens, and
a step of plain decoding as a share of the roof, the bytes of its parameters over the bandwidth; SmolLM2 likewise, and
`transformers` (torch) on the same device with the same weights, where torch sees one. Medians of `--repeats`. Exit code
1 if a kernel differs from its specification. Without an accelerator: --config smollm2_135m --dtype float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax import costs
from specjax.models import init_params, make_model
from specjax.pallas_kernels.gumbel_topk import gumbel_topk
from specjax.pallas_kernels.tree_attention import reference, tree_attention
from specjax.planning.inputs.model_configs import builtin_configs
from specjax.trees.operations import ancestor_mask

WIDTHS = (1, 8, 16, 32, 64)
STEPS = 64


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """Median of `repeats` runs behind one that compiles."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def bandwidth(size: int, repeats: int) -> float:
    """Bytes per second of a copy, read and written; in place, for on CPU fresh memory takes longer than the copy."""
    x = jnp.zeros((size // 4,), jnp.float32)
    add_one = jax.jit(lambda x: x + 1, donate_argnums=0)

    def copy():
        nonlocal x
        x = add_one(x)
        return x

    return 2 * x.nbytes / seconds(copy, repeats)


def attention_error(dtype, nodes: int, dim: int, slots: int) -> float:
    """Largest difference from the specification in float32 on CPU, of a random tree behind two ragged rows."""
    rng = np.random.default_rng(nodes)
    parents = [-1, *(int(rng.integers(i)) for i in range(1, nodes))]
    among = np.asarray(ancestor_mask(jnp.asarray([parents])))[0]
    length = np.array([slots - 100, slots // 3], np.int32)
    positions = (length[:, None] + among.sum(1) - 1).astype(np.int32)
    values = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    keys_and_values = [values(2, 2, tokens, dim) for tokens in (nodes, nodes, slots, slots)]  # the new ones, the cached
    mask = jnp.broadcast_to(among, (2, nodes, nodes))
    arrays = values(2, nodes, 8, dim), *keys_and_values, jnp.asarray(length), jnp.asarray(positions), mask
    output = jax.jit(lambda *arrays: tree_attention(*arrays, scale=dim**-0.5))(*arrays)
    with jax.default_device(jax.devices("cpu")[0]):
        exact = [jnp.asarray(np.asarray(x)) for x in arrays]
        exact = [x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in exact]
        wanted = reference.tree_attention(*exact, scale=dim**-0.5)
    return float(np.abs(np.asarray(output, np.float32) - np.asarray(wanted)).max())


def draws_differ(vocab: int, k: int) -> int:
    """Return the number of 8 x k draws without replacement that differ from those of the CPU."""
    logits = np.random.default_rng(0).normal(size=(8, vocab)).astype(np.float32) * 3
    draw = lambda: np.asarray(gumbel_topk(jax.random.split(jax.random.key(1), 8), jnp.asarray(logits), k)[0])
    drawn = draw()
    with jax.default_device(jax.devices("cpu")[0]):
        return int((drawn != draw()).sum())


def correctness() -> dict[str, Any]:
    jax.config.update("jax_default_matmul_precision", "highest")
    errors = {
        f"{np.dtype(dtype).name}, {nodes} nodes, heads of {dim}": attention_error(dtype, nodes, dim, 1024)
        for dtype in (jnp.float32, jnp.bfloat16) for nodes in (1, 33, 64, 128) for dim in (64, 128, 256)
    }  # fmt: skip
    jax.config.update("jax_default_matmul_precision", None)
    good = all(error < (0.03 if name.startswith("bfloat16") else 2e-5) for name, error in errors.items())
    differ = draws_differ(128_256, 64)
    return {"tree_attention_errors": errors, "draws_that_differ": differ, "good": good and not differ}


def per_token(generate: Callable[[int], Any], repeats: int) -> float:
    """Seconds per token of `generate(count)`, the prompt's taken off: STEPS more tokens make the difference."""
    few, many = (seconds(lambda n=n: generate(n), repeats) for n in (STEPS, 2 * STEPS))
    return (many - few) / STEPS


def of_model(target: specjax.Target, copied: float, repeats: int) -> dict[str, Any]:
    """A step of plain decoding and passes over several tokens, behind 512 cached ones."""
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(target.params))
    prompt, drafter, key = list(range(1, 100)), specjax.drafters.autoregressive(), jax.random.key(0)
    decode = lambda count: specjax.decode(target, drafter, [prompt], key=key, max_new_tokens=count).tokens
    step = per_token(decode, repeats)
    passes = costs.timed(target, WIDTHS, repeats=repeats)
    return {
        "model": target.model.name, "parameter_bytes": weights, "step_seconds": step, "tokens_per_second": 1 / step,
        "share_of_roof": weights / copied / step,
        "pass_seconds": dict(zip(map(str, WIDTHS), passes, strict=True)),
        "cost_of_pass": {str(width): x / passes[0] for width, x in zip(WIDTHS, passes, strict=True)},
    }  # fmt: skip


def transformers_rate(target: specjax.Target, tokenizer, repeats: int) -> float | None:
    """Tokens per second of eager `generate` on torch's device of the same kind; None where there is none."""
    try:
        import torch
        from every_method import hf_model
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return None
    place = "cpu" if jax.default_backend() == "cpu" else "cuda" if torch.cuda.is_available() else None
    if place is None:
        return None
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[target.model.config.dtype]
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), target.params)
    model = hf_model(specjax.Target(target.model, params), LlamaConfig, LlamaForCausalLM, torch).to(place, dtype)
    prompt = torch.tensor([tokenizer.chat("Tell me a long story about a river.")], device=place)

    def generate(n):
        with torch.no_grad():
            model.generate(
                prompt, max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0, eos_token_id=None
            )
        if place == "cuda":
            torch.cuda.synchronize()

    return 1 / per_token(generate, repeats)


def table(report: dict[str, Any]) -> str:
    """Markdown."""
    copied = f"copies at {report['copy_bandwidth'] / 1e9:.0f} GB/s"
    head = f"{report['device']}, {report['date']}, jax {report['jax']}: {copied}"
    lines = [head, "", "| model | step, ms | share of roof | " + " | ".join(f"{w} tokens" for w in WIDTHS[1:]) + " |"]
    lines.append("| --- |" + " --- |" * (len(WIDTHS) + 1))
    for one in report["models"]:
        cells = [f"{one['cost_of_pass'][str(width)]:.2f}" for width in WIDTHS[1:]]
        lines.append(
            f"| {one['model']} | {1e3 * one['step_seconds']:.2f} | {one['share_of_roof']:.2f} | {' | '.join(cells)} |"
        )
    if report.get("transformers_tokens_per_second"):
        ours = report["models"][-1]["tokens_per_second"]
        theirs = report["transformers_tokens_per_second"]
        lines.append(f"\n{ours:.0f} tokens/s against {theirs:.0f} of transformers: {ours / theirs:.1f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama3_8b", choices=builtin_configs(), help="a shape, random weights")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--target", help="the model with real weights; default: SmolLM2-135M-Instruct")
    parser.add_argument("--copy-bytes", type=int, default=2 << 30, help="of the array that is copied")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("device.json"))
    args = parser.parse_args()
    stacked = jax.default_backend() != "cpu"
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(), "device": jax.devices()[0].device_kind, "jax": jax.__version__,
        "copy_bandwidth": bandwidth(args.copy_bytes, args.repeats), "kernels": correctness(), "models": [],
    }  # fmt: skip

    def add(target):
        report["models"].append(of_model(target, report["copy_bandwidth"], args.repeats))
        args.out.write_text(json.dumps(report, indent=1))

    shape = dataclasses.replace(builtin_configs()[args.config](), dtype=args.dtype, stacked=stacked)
    add(specjax.Target(make_model(shape), init_params(shape, jax.random.key(0))))
    target, tokenizer = specjax.load(args.target, dtype=args.dtype)
    add(target)
    if args.target is None:
        flat = specjax.load(dtype=args.dtype, stacked=False)[0] if stacked else target
        report["transformers_tokens_per_second"] = transformers_rate(flat, tokenizer, args.repeats)
        args.out.write_text(json.dumps(report, indent=1))
    print(table(report))
    print(json.dumps(report["kernels"], indent=1))
    return int(not report["kernels"]["good"])


if __name__ == "__main__":
    sys.exit(main())
