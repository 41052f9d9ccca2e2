"""Cost of drafting relative to a step of an 8B target, for every drafter that runs no model.

    python benchmarks/draft_overhead.py --target llama3_8b --topology v5e:2x4 --out docs/draft_overhead.png
    python benchmarks/draft_overhead.py --target llama3_8b --here

By the TPU compiler: `propose`, in a loop as in a decode, and `update` of a drafter are compiled for the slice and set
against a plain step of the target on it, both by the compiler's schedule. Every chip drafts all rows; of the target's
logits, which `update` reads, it holds its part of the vocabulary, as in a step. A loop whose length depends on the
text is taken to run as often as the draft is deep. Estimates, not measurements; needs the extra tpu-compile, no TPU.

With --here: measured on this machine, each call with what it takes to dispatch it, on a text that repeats itself, which
makes the drafts deep. An 8B target fits few machines in float32, so its plain step is that of 2 layers and, for each of
the others, half of what 4 layers take longer.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from specjax import costs, drafters, parallel
from specjax.costs import roofline
from specjax.models import init_params, make_model
from specjax.models.layout import Layout
from specjax.numerics.global_arrays import with_shardings
from specjax.planning import hlo
from specjax.planning.compiler import compile_programs
from specjax.planning.inputs.model_configs import builtin_configs
from specjax.planning.inputs.topologies import describe_devices
from specjax.planning.workload import Workload, make_workload
from specjax.types import Context, Drafter, Output, Sampling, Target, Verdict


def model_free(vocab_size: int, platform: str | None) -> dict[str, Drafter]:
    """Return the drafters by name, with budgets for cheap wide passes; `auto` uses those of `platform`."""
    return {
        "prompt_lookup": drafters.prompt_lookup(),
        "suffix": drafters.suffix(),
        "input_guided": drafters.input_guided(),
        "token_recycling": drafters.token_recycling(vocab_size),
        "jacobi": drafters.jacobi(vocab_size),
        "lookahead": drafters.lookahead(),
        "aded": drafters.aded(),
        "stand": drafters.stand(vocab_size),
        "choice": drafters.choice(drafters.prompt_lookup(), drafters.token_recycling(vocab_size)),
        "auto": drafters.auto(vocab_size, platform=platform),
    }


class Overhead(NamedTuple):
    name: str
    nodes: int
    propose: float  # seconds
    update: float
    state_bytes: int  # of a row; on a chip as the loop holds it, with the padding of the layouts there


def learn(drafter: Drafter, params, state, context: Context, tree, verdict: Verdict, output: Output):
    """The state after `observe` and `update`."""
    return drafter.update(params, state, drafter.observe(params, state, context, tree, verdict, output), verdict)


ROUNDS = 1000
CALLS, RUNS, PERIOD = 200, 5, 97


def overhead(name: str, drafter: Drafter, work: Workload) -> Overhead:
    """Return the estimated costs of one step."""
    mesh = work.mesh(describe_devices(work.topology))
    layout = Layout(mesh, ("data", *parallel.largest_over(work.target, mesh)))
    rows, length = work.batch, work.context
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, "int32", sharding=layout.sharding(dims))
    placed = lambda tree: with_shardings(tree, jax.tree.map(lambda x: layout.sharding(x.shape), tree))
    context = Context(shape(rows, length), shape(rows), Sampling())
    keys = placed(jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows)))
    state = placed(jax.eval_shape(drafter.init, drafter.params, context))
    tree, drafted = placed(jax.eval_shape(drafter.propose, drafter.params, keys, state, context, shape(rows)))

    def rounds(keys, state, tree, context, limit, verdict, output):
        """Each on a longer text, lest the compiler draft once for all."""

        def one(i, carry):
            longer = context._replace(length=context.length + i)
            tree, drafted = drafter.propose(drafter.params, keys, carry[1], longer, limit)
            return tree, learn(drafter, drafter.params, drafted, longer, tree, verdict, output)

        return jax.lax.fori_loop(0, ROUNDS, one, (tree, state))

    n = drafter.num_nodes
    verdict = Verdict(shape(rows, n), shape(rows), shape(rows))
    dims = rows, n, work.target.vocab_size
    output = Output(jax.ShapeDtypeStruct(dims, "float32", sharding=layout.sharding(dims, "data", None, "vocab")), None)

    def seconds(function, arguments, donated: int):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            program = jax.jit(function, donate_argnums=donated).lower(*arguments).compile()  # the state stays in place
        totals = hlo.totals(hlo.parse(program.as_text()), lambda loop: float(drafter.max_depth))
        return roofline.estimate(work.topology.chip, totals, 0.0).schedule, program.memory_analysis()

    both, memory = seconds(rounds, (keys, state, tree, context, shape(rows), verdict, output), 1)
    update, _ = seconds(functools.partial(learn, drafter), (drafter.params, drafted, context, tree, verdict, output), 1)
    return Overhead(name, n, both / ROUNDS - update, update, memory.temp_size_in_bytes // rows)


def step_here(config: Any, rows: int, length: int) -> float:
    """Seconds of a plain step in float32, over a cache of `length` tokens."""

    def seconds(layers: int) -> float:
        cut = dataclasses.replace(config, num_layers=layers, dtype="float32")
        shapes = jax.eval_shape(lambda key: init_params(cut, key), jax.random.key(0))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return costs.timed(Target(make_model(cut), zeros), (1,), rows, length, repeats=RUNS)[0]

    if config.num_layers <= 4:
        return seconds(config.num_layers)
    two, four = seconds(2), seconds(4)
    return two + (config.num_layers - 2) * (four - two) / 2


def overhead_here(name: str, drafter: Drafter, vocab_size: int, rows: int, length: int) -> Overhead:
    """Return the measured costs of one step: medians of RUNS runs of CALLS calls each."""
    rng = np.random.default_rng(0)
    text = np.resize(rng.integers(vocab_size, size=(rows, PERIOD)).T, (length, rows)).T
    context = Context(jnp.asarray(text, jnp.int32), jnp.full((rows,), length - CALLS, jnp.int32), Sampling())
    keys, limit = jax.random.split(jax.random.key(0), rows), jnp.full((rows,), drafter.max_depth, jnp.int32)
    state = jax.jit(drafter.init)(drafter.params, context)
    propose = jax.jit(drafter.propose, donate_argnums=2)
    update = jax.jit(functools.partial(learn, drafter), donate_argnums=1)
    n = drafter.num_nodes
    logits = jnp.asarray(rng.normal(size=(rows, n, vocab_size)), jnp.float32)
    path = jnp.full((rows, n), -1, jnp.int32).at[:, 0].set(0)
    seconds = np.zeros((RUNS + 1, 2))
    for run in range(RUNS + 1):  # the first compiles
        for i in range(CALLS):
            current = context._replace(length=context.length + i)
            verdict = Verdict(path, jnp.ones((rows,), jnp.int32), current.tokens[:, length - CALLS + i])
            jax.block_until_ready((current, verdict, state))
            start = time.perf_counter()
            tree, state = jax.block_until_ready(propose(drafter.params, keys, state, current, limit))
            proposed = time.perf_counter()
            state = jax.block_until_ready(update(drafter.params, state, current, tree, verdict, Output(logits, None)))
            seconds[run] += proposed - start, time.perf_counter() - proposed
    median = np.median(seconds[1:], axis=0) / CALLS
    return Overhead(name, n, *median.tolist(), sum(leaf.nbytes for leaf in jax.tree.leaves(state)) // rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llama3_8b")
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--here", action="store_true", help="measure on this machine; the target is a built-in one")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--only", nargs="*", help="names of drafters")
    parser.add_argument("--out", type=Path, help="a plot; the figures go beside it as .json")
    args = parser.parse_args()
    log = Console(stderr=True)
    if args.here:
        config = builtin_configs()[args.target]()
        step, where = step_here(config, args.rows, args.context), f"{jax.default_backend()}, measured"
    else:
        work = make_workload(args.target, args.topology, method="autoregressive", batch=args.rows, context=args.context)
        plain = compile_programs(work, True, lambda what: None, only=("step",))[0]
        if not plain.compiles:
            log.print(f"the plain step does not compile: {plain.reason}")
            raise SystemExit(1)
        config, step, where = work.target, plain.seconds["schedule"], f"{args.topology}, compiler's schedule"
    overheads = []
    for name, drafter in model_free(config.vocab_size, None if args.here else "tpu").items():
        if not args.only or name in args.only:
            sizes = config.vocab_size, args.rows, args.context
            overheads.append(overhead_here(name, drafter, *sizes) if args.here else overhead(name, drafter, work))
            log.print(f"{name}: {1e6 * overheads[-1].propose:.0f} + {1e6 * overheads[-1].update:.0f} us", style="dim")
    table = Table(title=f"{args.target} on {where}, {args.rows} rows: plain step {1e3 * step:.2f} ms")
    for column in ("drafter", "nodes", "propose us", "update us", "of a step", "MB per row"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for row in overheads:
        share = (row.propose + row.update) / step
        microseconds = [f"{1e6 * x:.0f}" for x in (row.propose, row.update)]
        table.add_row(row.name, str(row.nodes), *microseconds, f"{share:.2%}", f"{row.state_bytes / 1e6:.1f}")
    Console().print(table)
    if args.out is not None:
        settings = vars(args) | {"out": args.out.name, "plain_step": step, "where": where}
        rows = [row._asdict() for row in overheads]
        args.out.with_suffix(".json").write_text(json.dumps({"settings": settings, "rows": rows}))
        plot(overheads, step, where, args)


def plot(overheads: list[Overhead], step: float, where: str, args: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    names = [row.name for row in overheads]
    proposing = [100 * row.propose / step for row in overheads]
    axes.barh(names, proposing, label="propose")
    axes.barh(names, [100 * row.update / step for row in overheads], left=proposing, label="update")
    axes.axvline(5, color="grey", linestyle=":", label="5 %")
    axes.invert_yaxis()
    axes.set_xlabel(f"% of a plain step of {args.target} ({1e3 * step:.2f} ms) on {where}")
    axes.legend()
    figure.savefig(args.out, dpi=120)


if __name__ == "__main__":
    main()
