"""Acceptance of EasySpec's approximate passes by group size, on a real pair of models, with greedy decoding.

    python benchmarks/easyspec_table.py question.jsonl --target TARGET --draft DRAFT --num-tokens 4 --limit 4

The target writes each prompt's text once, by plain decoding. Greedy drafts are accepted where they agree with that
text, so each group size then runs with the draft model alone, against a target that recites it. The differences in
percent are from group 1, sequential drafting. The speed is another matter: it takes a mesh.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import specjax
from specjax import trees
from specjax.cli.options import prompts as reader
from specjax.drafters import autoregressive, easyspec
from specjax.types import Model, Output, Target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--num-tokens", type=int, nargs="+", default=[4], help="lengths of the chain")
    parser.add_argument("--tree", nargs="+", default=[], help="and trees, such as 4x2x1")
    parser.add_argument("--group", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--limit", type=int, default=4, help="prompts, from all over the file")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path, help="also write the figures to this file, as they come")
    args = parser.parse_args()

    # Stacked layers compile in seconds, and of the target only the text is of interest.
    target, tokenizer = specjax.load(args.target, dtype=args.dtype, stacked=True)
    draft, _ = specjax.load(args.draft, dtype=args.dtype, stacked=True)
    entries, bad = reader.read(args.prompts, "prompts")
    for line in bad:
        print(reader.describe(line, args.prompts))
    selected = entries[:: max(1, len(entries) // args.limit)][: args.limit]
    rows = [list(tokenizer.chat(entry.text)) for entry in selected]
    options = {"key": jax.random.key(0), "max_new_tokens": args.max_new_tokens, "eos": tokenizer.eos}
    start = time.perf_counter()
    texts = specjax.decode(target, autoregressive(), rows, **options).to_lists()
    print(f"target: {sum(map(len, texts))} tokens in {time.perf_counter() - start:.0f} s", flush=True)
    del target

    shapes = {f"chain of {n}": {"num_tokens": n} for n in args.num_tokens}
    shapes |= {f"tree {spec}": {"tree": trees.parse(spec)} for spec in args.tree}
    results = []
    for shape, settings in shapes.items():
        for group in args.group:
            start = time.perf_counter()
            drafter = easyspec(draft, group=group, **settings)
            result = specjax.decode(recited(rows, texts, draft.model.vocab_size), drafter, rows, **options)
            assert result.to_lists() == texts
            stats = jax.device_get(result.stats)
            results.append(
                {
                    "shape": shape,
                    "group": group,
                    "tokens": sum(map(len, texts)),
                    "passes": int(stats.target_passes.sum()),
                    "block_efficiency": sum(map(len, texts)) / int(stats.target_passes.sum()),
                    "first_draft": int(stats.accepted_by_depth[:, 0].sum()) / int(stats.drafted_by_depth[:, 0].sum()),
                    "acceptance": int(stats.accepted.sum()) / int(stats.drafted_by_depth.sum()),
                }
            )
            print(f"{results[-1]}, {time.perf_counter() - start:.0f} s", flush=True)
            if args.json:
                document = {"prompts": len(rows), "dtype": args.dtype, "results": results}
                args.json.write_text(json.dumps(document, indent=1))
    show(results)


def recited(prompts: list[list[int]], texts: list[list[int]], vocab: int) -> Target:
    """A greedy target that writes `texts` after `prompts`, whatever it reads."""
    script = np.zeros((len(prompts), max(map(len, prompts)) + max(map(len, texts)) + 1), np.int32)
    for row, prompt, text in zip(script, prompts, texts, strict=True):
        row[: len(prompt) + len(text)] = prompt + text

    def forward(params, tokens, cache, *, positions, mask, taps=()):
        following = jnp.take_along_axis(params, jnp.minimum(positions + 1, params.shape[1] - 1), 1)
        return Output(jax.nn.one_hot(following, vocab), jnp.zeros((*tokens.shape, 1))), ()

    model = Model(
        init_cache=lambda params, inputs, batch, capacity: (),
        forward=forward,
        commit=lambda cache, pending, path, num_nodes: cache,
        vocab_size=vocab,
        max_positions=1 << 20,
        name="recited",
    )
    return Target(model, jnp.asarray(script))


def show(results: list[dict]) -> None:
    """The table: per shape, each group against the first."""
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("draft", no_wrap=True)
    for heading in ("group", "tokens/pass", "less", "accepted", "less", "first token"):
        table.add_column(heading, justify="right")
    for entry in results:
        first = next(other for other in results if other["shape"] == entry["shape"])
        less = lambda name, entry=entry, first=first: f"{100 * (entry[name] / first[name] - 1):+.1f} %"
        table.add_row(
            entry["shape"] if entry is first else "",
            str(entry["group"]),
            f"{entry['block_efficiency']:.3f}",
            "" if entry is first else less("block_efficiency"),
            f"{entry['acceptance']:.3f}",
            "" if entry is first else less("acceptance"),
            f"{entry['first_draft']:.3f}",
        )
        if entry is [other for other in results if other["shape"] == entry["shape"]][-1]:
            table.add_section()
    Console().print(table)


if __name__ == "__main__":
    main()
