"""Adaptive depth on SmolLM2: the loss of quality against the share of layers that run.

    python benchmarks/adaptive_depth.py PROMPTS.jsonl [--prompts 6] [--new 48] [--out docs/adaptive_depth]

The whole model answers, greedily. Each thinned one then reads the answers: the part of the weights of the layers that
it ran, how often it names the same token, and the perplexity that it gives the answers. What it drafts in chains of 4
is verified by the whole model: tokens per pass. Written: OUT.json and OUT.png.
"""

import argparse
import json
import pathlib

import jax
import numpy as np

import specjax
from specjax import adaptive, drafters
from specjax.adaptive.parsing import parse_depth

SPECS = [
    *(f"calm:{level}" for level in (0.999, 0.95, 0.8)),
    *(f"calm:{level},confidence=saturation" for level in (0.98, 0.96)),
    *(f"skip_decode:max_layers={high},min_layers={low}" for high, low in ((30, 28), (30, 24), (30, 16))),
    *(f"ffn_skip:{level}" for level in (0.99, 0.97, 0.95)),
    *(f"unified:{speedup}" for speedup in (1.04, 1.1, 1.25)),
]


def answers(target, tokenizer, prompts, new):
    """Prompts and greedy answers as one array, the lengths of the prompts, and which entries of a reading count."""
    options = {"key": jax.random.key(0), "max_new_tokens": new, "eos": tokenizer.eos}
    result = specjax.decode(target, drafters.autoregressive(), prompts, **options)
    reference = [prompt + answer for prompt, answer in zip(prompts, result.to_lists(), strict=True)]
    tokens = np.zeros((len(reference), max(map(len, reference))), np.int32)
    for row, text in zip(tokens, reference, strict=True):
        row[: len(text)] = text
    start = np.array([len(prompt) for prompt in prompts])
    count = np.array([len(text) for text in reference]) - start
    # The first token of an answer is of the pass over the prompt's last, which runs everything.
    counts = (np.arange(tokens.shape[1]) < count[:, None]) & (np.arange(tokens.shape[1]) > 0)
    return tokens, start, counts


def measure(target, spec, tokens, start, counts, prompts, new, eos):
    depth = parse_depth(spec, new)
    model = adaptive.skip_layers(target, depth)
    reading = adaptive.read(model, tokens, start)
    share = adaptive.share_run(reading.ran, counts, target.model.config)
    share *= model.model.capabilities.num_layers / target.model.capabilities.num_layers
    places = np.minimum(start[:, None] + np.arange(tokens.shape[1]), tokens.shape[1] - 1)
    same = np.asarray(reading.likeliest) == np.take_along_axis(tokens, places, 1)
    loss = -np.asarray(reading.logprobs)[counts].mean()
    drafter = drafters.thinned(target, depth, num_tokens=4)
    drafted = specjax.decode(target, drafter, prompts, key=jax.random.key(0), max_new_tokens=new, eos=eos)
    stats = drafted.stats
    per_pass = np.mean(1 + np.asarray(stats.accepted) / np.maximum(stats.target_passes, 1))
    return {
        "method": spec,
        "share_of_layers_run": float(share),
        "same_token": float(same[counts].mean()),
        "perplexity": float(np.exp(loss)),
        "tokens_per_pass": float(per_pass),
    }


def main():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("file", type=pathlib.Path)
    flags.add_argument("--prompts", type=int, default=6)
    flags.add_argument("--new", type=int, default=48)
    flags.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/adaptive_depth"))
    args = flags.parse_args()
    target, tokenizer = specjax.load(stacked=True)  # small programs: what is counted here does not depend on it
    lines = [json.loads(line) for line in args.file.read_text(encoding="utf-8").splitlines() if line.strip()]
    step = max(1, len(lines) // args.prompts)
    prompts = [tokenizer.chat(line.get("prompt") or line["turns"][0])[-300:] for line in lines[::step]][: args.prompts]
    tokens, start, counts = answers(target, tokenizer, prompts, args.new)
    reference = adaptive.read(target, tokens, start)
    rows = [{
        "method": "whole", "share_of_layers_run": 1.0, "same_token": 1.0,
        "perplexity": float(np.exp(-np.asarray(reference.logprobs)[counts].mean())), "tokens_per_pass": 5.0,
    }]  # fmt: skip
    for spec in SPECS:
        rows.append(measure(target, spec, tokens, start, counts, prompts, args.new, tokenizer.eos))
        print(json.dumps(rows[-1]), flush=True)
        jax.clear_caches()
    document = {"target": target.model.name, "prompts": len(prompts), "tokens": int(counts.sum()), "rows": rows}
    args.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    draw(document, args.out.with_suffix(".png"))


def draw(document, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    kinds = {}
    for row in document["rows"][1:]:
        name = row["method"].partition(":")[0] + (" (saturation)" if "saturation" in row["method"] else "")
        kinds.setdefault(name, []).append(row)
    for name, rows in kinds.items():
        rows = sorted(rows, key=lambda row: row["share_of_layers_run"])
        shares = [100 * row["share_of_layers_run"] for row in rows]
        left.plot(shares, [row["perplexity"] for row in rows], "o-", label=name)
        right.plot(shares, [row["tokens_per_pass"] for row in rows], "o-", label=name)
    left.axhline(document["rows"][0]["perplexity"], color="grey", linestyle=":", label="whole model")
    left.set(xlabel="layers run, % of their weights", ylabel="perplexity of the whole model's answers", yscale="log")
    right.set(xlabel="layers run, % of their weights", ylabel="tokens per pass, drafting 4", ylim=(1, 5))
    left.legend(fontsize=8)
    figure.suptitle(f"{document['target']}: what leaving layers out costs, {document['tokens']} tokens")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
