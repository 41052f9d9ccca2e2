"""Drafts that copy from the source of an encoder-decoder: tokens per pass, speed and texts.

    python benchmarks/aggressive_decoding.py flan-t5-small-seqkd-int8 --summaries spec_bench/question.jsonl --limit 8
    python benchmarks/aggressive_decoding.py MODEL --corrections held_out.txt --prefix "Correct the grammar: "
    python benchmarks/aggressive_decoding.py build/corrector/corrector --corrections build/corrector/held_out.txt \\
        --blocks build/corrector/blocks

Sources are read one by one, greedily. Every text is compared with that of plain decoding. Corrections are sentences
with the errors of `toy_tasks.corrections`. `--blocks` is a model of `tiny_corrector.py`, which drafts blocks of masks.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tiny_corrector import BLOCK, MASK
from toy_tasks.corrections import with_errors

import specjax
from specjax import drafters
from specjax.models import sources
from specjax.types import Drafter

METHODS = "autoregressive", "input_guided", "prompt_lookup", "suffix", "auto"
WIDEST = 64  # tokens of a text that the block drafter reads


class Figures(NamedTuple):
    """The texts of a method, and what they took."""

    texts: list[list[int]]
    passes: int
    seconds: float

    @property
    def tokens_per_pass(self) -> float:
        return sum(map(len, self.texts)) / self.passes


def block_drafter(blocks: specjax.Target, source: Any) -> Drafter:
    """Return the drafter of a model that fills masks, with the encoded source among its parameters."""
    memory = jax.jit(blocks.model.init_cache, static_argnums=(2, 3))(blocks.params, source, 1, 1)
    return drafters.nar_block(_fill_of(blocks.model), (blocks.params, memory), mask_token=MASK, num_tokens=BLOCK)


@functools.cache
def _fill_of(model: Any) -> Callable[..., jax.Array]:
    """Return the function of `nar_block` for a decoder, whose masks see the text and earlier masks."""

    def fill(params, tokens, is_text, positions):
        weights, memory = params
        part = tokens[:, :WIDEST]
        place = jnp.broadcast_to(jnp.arange(part.shape[1]), part.shape)
        mask = place[:, None] <= place[..., None]
        hidden = model.forward(weights, part, memory, positions=place, mask=mask)[0].hidden
        rows = jnp.minimum(positions, part.shape[1] - 1)
        return model.unembed(weights, jnp.take_along_axis(hidden, rows[..., None], 1))

    return fill


def run(
    target: specjax.Target, makes: Mapping[str, Callable[[Any], Any]], rows: Sequence[Sequence[int]], eos: Any,
    count: int, repeats: int,
) -> dict[str, Figures]:  # fmt: skip
    """Decode each source alone. The methods take turns, so that all share the slow times of a machine.

    The seconds are the sum of the medians. The first turn, which compiles, is not timed.
    """
    start, size = [list(target.model.config.text_start)], max(map(len, rows))
    totals = {name: Figures([], 0, 0.0) for name in makes}
    for row in rows:
        source = sources([row], length=-(-size // 32) * 32)
        methods = {name: make(source) for name, make in makes.items()}
        times: dict[str, list[float]] = {name: [] for name in makes}
        results = {}
        for turn in range(repeats + 1):
            for name, drafter in methods.items():
                began = time.perf_counter()
                result = specjax.decode(target, drafter, start, key=0, inputs=source, max_new_tokens=count, eos=eos)
                results[name] = result.to_lists()[0], int(result.stats.target_passes[0])
                if turn:
                    times[name].append(time.perf_counter() - began)
        for name, (new, passes) in results.items():
            texts, total, seconds = totals[name]
            totals[name] = Figures([*texts, new], total + passes, seconds + statistics.median(times[name]))
    return totals


def report_corrections(tokenizer: Any, texts: list[list[int]], pairs: Sequence[Any]) -> None:
    """Print how many sentences are right, and some of them."""
    answers = [tokenizer.decode(text[:-1] if text[-1:] == list(tokenizer.eos) else text).strip() for text in texts]
    right = sum(text == pair.right for text, pair in zip(answers, pairs, strict=True))
    same = sum(text == pair.wrong for text, pair in zip(answers, pairs, strict=True))
    print(f"{right} of {len(pairs)} sentences are right, and {same} are copies with their errors")
    for text, pair in list(zip(answers, pairs, strict=True))[:4]:
        print(f"  {pair.wrong!r} -> {text!r}")


def main() -> None:
    """Print a row for each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--summaries", type=Path)
    parser.add_argument("--corrections", type=Path)
    parser.add_argument("--prefix", default="")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--longest", type=int, default=480, help="tokens of a source")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each source, of which the median time counts")
    parser.add_argument("--blocks", help="a model that fills masks")
    args = parser.parse_args()
    target, tokenizer = specjax.load(args.model)
    pairs = []
    if args.corrections is not None:
        rng = np.random.default_rng(7)
        lines = args.corrections.read_text().splitlines()[: args.limit]
        pairs = [with_errors(line, rng, 0.15) for line in lines]
        texts = [args.prefix + pair.wrong for pair in pairs]
    else:
        questions = map(json.loads, args.summaries.read_text().splitlines())
        texts = [q["turns"][0] for q in questions if q["category"] == "summarization"][: args.limit]
    end = list(tokenizer.eos)
    rows = [[*[i for i in tokenizer.encode(text) if i not in end][: args.longest - 1], *end[:1]] for text in texts]
    makes: dict[str, Callable[[Any], Any]] = {name: lambda source, name=name: name for name in METHODS}
    if args.blocks:
        blocks, _ = specjax.load(args.blocks)
        makes["nar_block"] = lambda source: block_drafter(blocks, source)
    print("| method | tokens per pass | speed | texts |\n| --- | --- | --- | --- |")
    totals = run(target, makes, rows, end, args.max_new_tokens, args.repeats)
    plain = totals["autoregressive"]
    for name, figures in totals.items():
        same = sum(ours == theirs for ours, theirs in zip(figures.texts, plain.texts, strict=True))
        print(
            f"| `{name}` | {figures.tokens_per_pass:.2f} | {plain.seconds / figures.seconds:.2f} "
            f"| {same} of {len(rows)} equal |"
        )
    print(f"{sum(map(len, plain.texts))} tokens, plain decoding {plain.seconds:.2f} s")
    if pairs:
        report_corrections(tokenizer, plain.texts, pairs)
    else:
        print(*(tokenizer.decode(text) for text in plain.texts[:4]), sep="\n")


if __name__ == "__main__":
    main()
