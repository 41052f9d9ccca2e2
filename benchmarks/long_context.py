"""Speed and tokens per pass of drafters for long texts, by the length of the prompt.

    python benchmarks/long_context.py FILE [--lengths 2048 4096] [--methods sparse_cache:selection=snapkv] [--copy 64]

The prompt is the beginning of a text file, in tokens, and the model continues it. With --copy N the prompt ends with N
tokens from its middle, so that the model copies what follows them. Speed is that of the steps after the first one,
without the prompt. The draft model is the target itself.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import specjax
from specjax.bench import measure
from specjax.catalog.options import read_call
from specjax.drafters.making import make_drafter
from specjax.engine.prepare import Settings


def make_prompt(tokenizer, text: str, length: int, copied: int) -> list[int]:
    """Return the first tokens of a text and, with `copied`, as many tokens from its middle again."""
    tokens = list(tokenizer.encode(text[: 12 * length], special=False))[: length - copied]
    middle = len(tokens) // 2
    return tokens + tokens[middle : middle + copied]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a text")
    parser.add_argument("--target", help="a GGUF file or a folder; default: SmolLM2")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--methods", nargs="+", default=["sparse_cache:pays_from=0"], help="such as rapid:budget=1024")
    parser.add_argument("--copy", type=int, default=0, help="tokens of the prompt that are repeated at its end")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    target, tokenizer = specjax.load(options.target, dtype="float32")
    text, report = options.file.read_text(encoding="utf-8"), {}
    for length in options.lengths:
        prompt, plain = make_prompt(tokenizer, text, length, options.copy), None
        for spec in ("autoregressive", *options.methods):
            name = spec.partition(":")[0]
            drafter = make_drafter(name, target, target, **read_call(spec, specjax.METHODS[name].settable))
            keys = measure.row_keys(0, [0])
            task = measure.DecodeTask(target, drafter, [prompt], keys, Settings(), options.max_new_tokens)
            measure.warm_stream(task)
            run = measure.run_stream(task)
            assert run.first_token_seconds is not None
            plain = plain or run
            passes = int(run.stats.target_passes[0])
            entry = {
                "tokens_per_second": round((len(run.tokens[0]) - 1) / (run.seconds - run.first_token_seconds), 2),
                "tokens_per_pass": round(len(run.tokens[0]) / passes, 2),
                "first_token_seconds": round(run.first_token_seconds, 1),
                "identical": run.tokens == plain.tokens,
            }
            report[f"{length} {spec}"] = entry
            print(length, spec, entry, repr(tokenizer.decode(run.tokens[0])[:80]), flush=True)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
