"""Speed and tokens per pass of drafters for long texts, by the length of the prompt.

    python benchmarks/long_context.py FILE [--lengths 2048 4096] [--methods sparse_cache:selection=snapkv] [--copy 64]

The prompt is the beginning of a text file, in tokens, and the model continues it. With --copy N the prompt ends with N
tokens from its middle, so that the model copies what follows them. The target reads each prompt once. Every method
starts from that cache, so methods that read the prompt together with the target are refused. Speed is that of the
steps after the first one. Runs alternate, and the speed is the best of --repeats. The draft model is the target itself
by default. With --eta the last method also runs with the lossy rule of RAPID: its text is greedy, and may differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.api import job_of
from specjax.bench import measure
from specjax.catalog.options import read_call
from specjax.drafters.making import make_drafter
from specjax.engine.job import Job
from specjax.engine.prepare import Settings
from specjax.engine.run import start, step
from specjax.types import Context, DecodeState


def make_prompt(tokenizer, text: str, length: int, copied: int) -> list[int]:
    """Return the first tokens of a text and, with `copied`, as many tokens from its middle again."""
    tokens = list(tokenizer.encode(text[: 12 * length], special=False))[: length - copied]
    middle = len(tokens) // 2
    return tokens + tokens[middle : middle + copied]


def begin(job: Job, plain: DecodeState) -> DecodeState:
    """Return the state of a job before its first step, with the cache of another job for the same prompts."""
    drafter, parts = job.parts.drafter, job.parts
    assert drafter.hooks.prefill is None, "a drafter that reads the prompt with the target needs its own prefill"
    state = jax.tree.map(jnp.copy, plain)
    context = Context(state.tokens, state.length, parts.sampling, target=parts.target)
    return state._replace(draft=jax.jit(drafter.init)(drafter.params, context))


def run(job: Job, plain: DecodeState) -> tuple[list[int], list[float]]:
    """Return the new tokens, and the clock after each step."""
    state, tokens, clock, is_done = begin(job, plain), [], [], False
    jax.block_until_ready(state)
    while not is_done:
        state, info, done = step(job.parts, state)
        tokens += np.asarray(info.tokens)[0, : int(info.emitted[0])].tolist()
        clock.append(time.perf_counter())
        is_done = bool(done)
    return tokens, clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a text")
    parser.add_argument("--target", help="a GGUF file or a folder; default: SmolLM2")
    parser.add_argument("--draft", help="the draft model; default: the target")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--methods", nargs="+", default=["sparse_cache:pays_from=0"], help="such as rapid:budget=1024")
    parser.add_argument("--copy", type=int, default=0, help="tokens of the prompt that are repeated at its end")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2, help="timed runs; 0: one run, which also compiles")
    parser.add_argument("--eta", type=float, help="also run the last method, rapid, with its lossy rule")
    parser.add_argument("--json", type=Path, help="write the report into this file")
    options = parser.parse_args()
    target, tokenizer = specjax.load(options.target, dtype="float32")
    draft = target if options.draft is None else specjax.load(options.draft, dtype="float32")[0]
    text, report = options.file.read_text(encoding="utf-8"), {}
    for length in options.lengths:
        prompts = measure.pack([make_prompt(tokenizer, text, length, options.copy)])
        jobs: dict[str, Job] = {}
        for spec in ("autoregressive", *options.methods):
            name = spec.partition(":")[0]
            drafter = make_drafter(name, target, draft, **read_call(spec, specjax.METHODS[name].settable))
            keys = measure.row_keys(0, [0])
            new_job = functools.partial(
                job_of, target, drafter, prompts, key=keys, max_new_tokens=options.max_new_tokens
            )
            jobs[spec] = new_job(Settings())
            if spec == options.methods[-1] and options.eta is not None:
                # Without sampling, the rule needs a temperature above 0: it compares distributions of target and draft.
                relaxed = specjax.verifiers.rapid(options.eta, sample=False)
                jobs[f"{spec} (lossy, eta={options.eta:g})"] = new_job(Settings(temperature=1.0, verifier=relaxed))
        largest = max(jobs.values(), key=lambda job: job.tokens.shape[1])
        clock = time.perf_counter()
        plain = jax.block_until_ready(start(with_buffer(jobs["autoregressive"], largest.tokens.shape[1])))
        print(length, "prompt read in", round(time.perf_counter() - clock, 1), "s", flush=True)
        runs: dict[str, Any] = {spec: [] for spec in jobs}
        expected: list[int] = []
        for repeat in range(options.repeats + 1):
            for spec, job in jobs.items():
                tokens, clock = run(job, plain)
                rate = (len(tokens) - 1) / (clock[-1] - clock[0])
                expected = expected or tokens  # the first text is that of plain decoding
                per_pass = f"{len(tokens) / len(clock):.2f} tokens per pass, identical: {tokens == expected}"
                print(length, spec, f"{rate:.2f} tokens/s, {per_pass}", flush=True)
                if repeat or not options.repeats:  # the first run compiles
                    runs[spec].append((rate, tokens, len(clock)))
        baseline = max(rate for rate, _, _ in runs["autoregressive"])
        for spec, results in runs.items():
            rate, tokens, steps = max(results)
            entry = {
                "tokens_per_second": round(rate, 2),
                "ratio": round(rate / baseline, 2),
                "tokens_per_pass": round(len(tokens) / steps, 2),
                "passes": steps,
                "identical": tokens == runs["autoregressive"][0][1],
            }
            report[f"{length} {spec}"] = entry
            print(length, spec, entry, repr(tokenizer.decode(tokens)[:80]), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


def with_buffer(job: Job, size: int) -> Job:
    """Return the job with a token buffer of `size` slots."""
    return dataclasses.replace(job, tokens=jnp.pad(job.tokens, ((0, 0), (0, size - job.tokens.shape[1]))))


if __name__ == "__main__":
    main()
