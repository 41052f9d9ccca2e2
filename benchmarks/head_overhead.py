"""Time of drafting with a learned head relative to a plain step of its target, measured on this machine.

    python benchmarks/head_overhead.py --target smollm2_135m --head eagle3:draft_vocab_size=8192 --num-draft-tokens 4

Random weights of both: the time does not depend on them. In one process and in turns, behind `--context` tokens of
text: a step of plain decoding, and what a round of the head adds to it, which is to read the pairs of two accepted
tokens and to draft a chain. Medians, and the least of all beside them, since other work on the machine can only add.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from specjax import costs
from specjax.drafters import autoregressive
from specjax.drafters.heads.head_drafter import tree_drafter
from specjax.engine import run as engine
from specjax.engine.job import Job, Parts
from specjax.engine.prepare import Settings, prepare
from specjax.models import init_params, make_model
from specjax.models.heads.kinds import init_head
from specjax.planning.workload import make_workload
from specjax.trees import chain
from specjax.types import Context, DecodeState, Drafter, Target

ACCEPTED = 2


def in_turns(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each, one after another, behind a turn that compiles."""
    seconds_by_run: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            if turn:
                seconds_by_run[name].append(time.perf_counter() - start)
    return seconds_by_run


def job_of(target: Target, drafter: Drafter, args: argparse.Namespace) -> Job:
    prompts = [[(7 * i + row) % 1000 for i in range(args.context)] for row in range(args.rows)]
    new = (1 + ACCEPTED) * (args.repeats + 2)
    return prepare(target, drafter, prompts, Settings(), key=jax.random.key(0), max_new_tokens=new)


def plain(target: Target, args: argparse.Namespace) -> Callable[[], Any]:
    """Step after step."""
    job = job_of(target, autoregressive(), args)
    state = [engine.start(job)]

    def run() -> DecodeState:
        state[0], _, _ = engine.step(job.parts, state[0])
        return state[0]

    return run


@functools.partial(jax.jit, donate_argnums=1)
def _draft(parts: Parts, draft_state, tokens, length, cache, limit):
    context = Context(tokens, length, cache=cache, target=parts.target)
    tree, draft_state = parts.drafter.propose(parts.drafter.params, None, draft_state, context, limit)
    return tree, draft_state._replace(new=draft_state.new._replace(count=jnp.full_like(length, ACCEPTED)))


def drafting(target: Target, drafter: Drafter, args: argparse.Namespace) -> Callable[[], Any]:
    """Round after round, each with as many new pairs; the memory is written in place, as in the loop."""
    job = job_of(target, drafter, args)
    state = engine.start(job)
    draft_state = [state.draft]
    limit = jnp.full_like(state.length, drafter.max_depth)

    def run():
        tree, draft_state[0] = _draft(job.parts, draft_state[0], state.tokens, state.length, state.cache, limit)
        return tree, draft_state[0]

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2_135m")
    parser.add_argument("--head", default="eagle3:draft_vocab_size=8192")
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[4])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=41)
    args = parser.parse_args()
    work = make_workload(args.target, "v5e:1x1", head=args.head, dtype=args.dtype)  # for its configs
    params = jax.jit(functools.partial(init_params, work.target))(jax.random.key(0))
    target, head = Target(make_model(work.target), params), init_head(work.method, work.head, jax.random.key(1))
    runs = {"plain step": plain(target, args)}
    for tokens in args.num_draft_tokens:
        runs[f"a chain of {tokens}"] = drafting(target, tree_drafter(head, chain(tokens)), args)
    seconds_by_run = in_turns(runs, args.repeats)
    table = Table(title=f"{args.target} in {args.dtype}, {args.rows} rows, {jax.default_backend()}; {args.head}")
    for column in ("", "median ms", "of a step", "least ms", "of a step", "by its weights"):
        table.add_column(column, justify="right" if column else "left")
    middle, shortest = (statistics.median(seconds_by_run["plain step"]), min(seconds_by_run["plain step"]))
    for name, seconds in seconds_by_run.items():
        tokens = int(name.split()[-1]) if name != "plain step" else 0
        rule = f"{costs.of_head(target, head, tokens):.3f}" if tokens else ""
        ours = statistics.median(seconds), min(seconds)
        table.add_row(name, f"{1e3 * ours[0]:.2f}", f"{ours[0] / middle:.3f}", f"{1e3 * ours[1]:.2f}",
                      f"{ours[1] / shortest:.3f}", rule)  # fmt: skip
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
