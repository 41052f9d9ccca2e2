"""Speed of decoding on this accelerator, row by row, in less than five minutes and without attention.

    python benchmarks/device_passes.py --out device.json
    python benchmarks/device_passes.py --tiny --minutes 1  # toy shapes, to test the script on a CPU

The rows are steps of plain decoding of Llama 3 8B and SmolLM2 in bfloat16 with random weights: as `specjax.load` lays
the layers out, stacked, unstacked, with loops in command buffers (GPU), in batches, and behind 4,000 tokens. Others are
passes over several tokens, prefill, the error of float32 products, and kernels against their specification. On a GPU,
others are attention by the Mosaic kernel beside XLA's form, and `transformers`, eager and compiled, if torch has a GPU.
All figures are medians of `--repeats`.

Every program is compiled first, several at a time. A row that fails is printed with its error. After `--minutes` the
script prints what it has, names the rows that are missing, and ends. Exit code 1 if a kernel differs from its
specification or a row fails, 3 if time ran out.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory to torch

import jax
import jax.numpy as jnp
import numpy as np

from specjax import Target, costs, drafters
from specjax.costs.accelerators import current_chip
from specjax.costs.chips import CHIPS, GIB
from specjax.engine.job import Job
from specjax.engine.prepare import Settings, prepare
from specjax.engine.run import run
from specjax.files import libtpu
from specjax.models import abstract_params, make_model, storage_options
from specjax.pallas_kernels.gumbel_topk import gumbel_topk
from specjax.pallas_kernels.tree_attention import reference, tree_attention
from specjax.planning.inputs.model_configs import builtin_configs, num_params
from specjax.trees.operations import ancestor_mask

WIDTHS = (1, 8, 16, 32, 64)
STEPS = 64
PROMPT, LONG = 100, 4000
NO_DEVICE = 4
"""Exit code of the process of transformers where torch has no GPU."""
IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
GRAPHS = {"xla_gpu_enable_command_buffer": IN_GRAPHS}
"""Loops and branches run in CUDA graphs too."""


class Case(NamedTuple):
    """A decode whose step is timed."""

    config: str
    layout: str = "default"  # as `specjax.load` chooses it, "stacked" or "unstacked"
    batch: int = 1
    context: int = PROMPT
    graphs: bool = False

    @property
    def name(self) -> str:
        parts = [self.config]
        parts += [] if self.layout == "default" else [self.layout]
        parts += ["loops in command buffers"] if self.graphs else []
        parts += [f"batch {self.batch}"] if self.batch > 1 else []
        parts += [f"{self.context:,} tokens of context"] if self.context > PROMPT else []
        return ", ".join(parts)


class Row(NamedTuple):
    """A line of the table."""

    what: str
    value: str
    remark: str = ""


class Report:
    """The rows so far, on the screen and in a file."""

    def __init__(self, file: Path, expected: list[str]):
        self.file, self.rows, self.missing, self.failed = file, [], list(expected), []
        self.facts = describe_machine()
        print(json.dumps(self.facts), flush=True)
        print("| what | value | remark |\n| --- | --- | --- |", flush=True)

    def measure(self, name: str, rows: Callable[[], list[Row]]) -> None:
        """Run one measurement, and print its rows or its error."""
        try:
            new = rows()
        except Exception as error:  # the other rows are still wanted
            self.failed.append(name)
            new = [Row(name, "failed", " ".join(str(error).split())[:200] or type(error).__name__)]
        self.missing.remove(name)
        for row in new:
            print(f"| {row.what} | {row.value} | {row.remark} |", flush=True)
        self.rows += new
        self.write()

    def write(self) -> None:
        document = self.facts | {"rows": [row._asdict() for row in self.rows], "missing": self.missing}
        self.file.write_text(json.dumps(document, indent=1))

    def give_up(self) -> None:
        """End the process: the time is over."""
        for name in self.missing:
            print(f"| {name} | not run | the time was over |", flush=True)
        self.write()
        os._exit(3)


def describe_machine() -> dict[str, Any]:
    """Return the facts that explain the figures."""
    device, versions = jax.devices()[0], {}
    for name in ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "torch", "transformers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.date.today().isoformat(), "device": device.device_kind, "devices": jax.device_count(),
        "runtime": getattr(device.client, "platform_version", ""), "python": platform.python_version(),
        "cpus": os.cpu_count(), "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""), **versions,
    }  # fmt: skip


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """Return the median of `repeats` runs after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def config_of(case: Case, tiny: bool) -> Any:
    """Return the config of a case with its layout, or with few and small layers."""
    config = dataclasses.replace(
        builtin_configs()[case.config](), dtype="bfloat16", **storage_options(jax.default_backend())
    )
    if case.layout != "default":
        config = dataclasses.replace(config, stacked=case.layout == "stacked")
    if tiny:
        config = dataclasses.replace(
            config, num_layers=2, width=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_width=128, vocab_size=512
        )
    return config


@functools.partial(jax.jit, static_argnums=(0, 1))
def random_array(shape: tuple[int, ...], dtype) -> jax.Array:
    """Return random weights; zeros would take less power, and so less time."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.zeros(shape, dtype)
    return 0.02 * jax.random.normal(jax.random.key(0), shape, dtype)


def random_params(config: Any) -> Any:
    """Return random parameters. Equal shapes share a program."""
    return jax.tree.map(lambda leaf: random_array(leaf.shape, leaf.dtype), abstract_params(config))


def job_of(case: Case, target: Target, steps: int) -> Job:
    """Return the job of a case. The target's parameters may be shapes."""
    prompts = [[1 + place % 199 for place in range(case.context)]] * case.batch
    return prepare(target, drafters.autoregressive(), prompts, Settings(), key=0, max_new_tokens=2 * steps)


class Programs:
    """The compiled loops of all cases, which are compiled at the same time."""

    def __init__(self, cases: list[Case], tiny: bool):
        self.steps = 8 if tiny else STEPS
        self.pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
        self.compiled: dict[Case, Future] = {}
        for case in cases:  # threads that traced at the same time would each make a model
            config = config_of(case, tiny)
            try:
                lowered = run.lower(job_of(case, Target(make_model(config), abstract_params(config)), self.steps))
                self.compiled[case] = self.pool.submit(self._compile, lowered, case.graphs)
            except Exception as error:  # its row prints it
                self.compiled[case] = Future()
                self.compiled[case].set_exception(error)

    @staticmethod
    def _compile(lowered: Any, graphs: bool) -> tuple[Any, float]:
        """Return the compiled loop of a case, and the seconds that it took."""
        start = time.perf_counter()
        return lowered.compile(GRAPHS if graphs else None), time.perf_counter() - start

    def wait(self) -> None:
        """Wait for all of them, so that tuning on the device does not disturb a measurement."""
        for future in self.compiled.values():
            future.exception()


def step_rows(case: Case, target: Target, programs: Programs, repeats: int) -> list[Row]:
    """Time a step of plain decoding, and the prompt. The steps are the difference between two lengths of text."""
    (program, compiling), steps = programs.compiled[case].result(), programs.steps
    job = job_of(case, target, steps)
    ends = [dataclasses.replace(job, stop=job.lengths + count) for count in (steps, 2 * steps)]
    few, many = (seconds(lambda job=job: program(job), repeats) for job in ends)
    step = (many - few) / steps
    if step <= 0:
        return [Row(f"{case.name}: a step", "below the noise", "two lengths of text took the same time")]
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(target.params))
    chip = CHIPS.get(current_chip())
    remarks = [f"{case.batch / step:,.0f} tokens/s", f"compiled in {compiling:.0f} s beside others"]
    if chip is not None:
        remarks.append(f"{weights / chip.hbm_bandwidth / step:.0%} of the memory roof")
    rows = [Row(f"{case.name}: a step", f"{1e3 * step:.2f} ms", "; ".join(remarks))]
    if case.context > PROMPT:
        prompt = few - steps * step
        flops = 2 * num_params(target.model.config) * case.context * case.batch
        share = f"{flops / prompt / chip.peak_flops:.0%} of the peak" if chip is not None else ""
        rows.append(Row(f"{case.name}: prefill", f"{1e3 * prompt:.0f} ms", share))
    return rows


def pass_rows(name: str, target: Target, programs: Programs, repeats: int) -> list[Row]:
    """Time passes over several tokens behind 512 cached ones (`specjax.costs.measured`)."""
    list(programs.pool.map(lambda width: costs.timed(target, (width,), repeats=1), WIDTHS))  # compiles them at once
    times = costs.timed(target, WIDTHS, repeats=3 * repeats)
    rule = costs.estimated(WIDTHS, 1, "bfloat16", logits=costs.logits_of(target))
    costs_text = ", ".join(f"{x / times[0]:.2f}" for x in times[1:])
    rule_text = ", ".join(f"{x:.2f}" for x in rule[1:])
    what = f"{name}: a pass over {', '.join(map(str, WIDTHS[1:]))} tokens"
    remark = f"{1e3 * times[0]:.2f} ms over one; the rule of thumb: {rule_text}"
    return [Row(what, f"{costs_text} passes over one", remark)]


def bandwidth_rows(size: int, repeats: int) -> list[Row]:
    """Time a copy in place, read and written."""
    x = jnp.zeros((size // 4,), jnp.float32)
    add_one = jax.jit(lambda x: x + 1, donate_argnums=0)

    def copy():
        nonlocal x
        x = add_one(x)
        return x

    rate, chip = 2 * x.nbytes / seconds(copy, repeats), CHIPS.get(current_chip())
    share = f"{rate / chip.hbm_bandwidth:.0%} of {chip.name}'s published bandwidth" if chip else ""
    return [Row("copies in memory", f"{rate / 1e9:,.0f} GB/s", share)]


def precision_rows() -> list[Row]:
    """Measure the error of float32 products against float64."""
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(1024, 1024)).astype(np.float32) for _ in range(2))
    exact = a.astype(np.float64) @ b.astype(np.float64)

    def error(precision: str | None) -> float:
        difference = np.asarray(jnp.matmul(a, b, precision=precision)) - exact
        return float(np.linalg.norm(difference) / np.linalg.norm(exact))

    what = "float32 products: relative error"
    return [Row(what, f"{error(None):.1e}", f"{error('highest'):.1e} with precision highest")]


def attention_error(dtype, nodes: int, dim: int, slots: int, implementation: str | None = None) -> float:
    """Return the largest difference from the specification in float32 on CPU, for a tree behind two ragged rows."""
    rng = np.random.default_rng(nodes)
    parents = [-1, *(int(rng.integers(i)) for i in range(1, nodes))]
    among = np.asarray(ancestor_mask(jnp.asarray([parents])))[0]
    length = np.array([slots - 100, slots // 3], np.int32)
    positions = (length[:, None] + among.sum(1) - 1).astype(np.int32)
    values = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    keys_and_values = [values(2, 2, tokens, dim) for tokens in (nodes, nodes, slots, slots)]  # the new ones, the cached
    mask = jnp.broadcast_to(among, (2, nodes, nodes))
    arrays = values(2, nodes, 8, dim), *keys_and_values, jnp.asarray(length), jnp.asarray(positions), mask
    with jax.default_matmul_precision("highest"):
        attend = functools.partial(tree_attention, scale=dim**-0.5, implementation=implementation)
        output = jax.jit(attend)(*arrays)
    with jax.default_device(jax.devices("cpu")[0]):
        exact = [jnp.asarray(np.asarray(x)) for x in arrays]
        exact = [x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in exact]
        wanted = reference.tree_attention(*exact, scale=dim**-0.5)
    return float(np.abs(np.asarray(output, np.float32) - np.asarray(wanted)).max())


def kernel_rows(tiny: bool) -> list[Row]:
    """Compare the kernels that this backend runs with their specifications. Raises: AssertionError if they differ."""
    shapes = [(nodes, dim) for nodes in ((1, 33) if tiny else (1, 64)) for dim in ((64,) if tiny else (64, 128))]
    error = {
        dtype.dtype.name: max(attention_error(dtype, nodes, dim, 1024) for nodes, dim in shapes)
        for dtype in (jnp.float32, jnp.bfloat16)
    }
    logits = np.random.default_rng(0).normal(size=(8, 4096 if tiny else 128_256)).astype(np.float32) * 3
    draw = lambda: np.asarray(gumbel_topk(jax.random.split(jax.random.key(1), 8), jnp.asarray(logits), 64)[0])
    drawn = draw()
    with jax.default_device(jax.devices("cpu")[0]):
        differ = int((drawn != draw()).sum())
    assert error["float32"] < 2e-5 and error["bfloat16"] < 0.03 and not differ, f"{error}, {differ} draws differ"
    remark = f"attention within {error['float32']:.1e} (float32), {error['bfloat16']:.1e} (bfloat16); all draws"
    return [Row("kernels against their specifications", "equal", remark)]


ATTENTION = "attention by XLA and by the Mosaic kernel"


def mosaic_rows(repeats: int) -> list[Row]:
    """Time the attention of Llama 3 8B's layers by the Mosaic kernel beside XLA's form, and measure the kernel's error.

    Each layer has a cache of its own, so that no cache is read from the chip's own memory.
    """
    rows, layers, dim, used, slots = [], 16, 128, LONG, LONG + 256
    values = functools.partial(random_array, dtype=jnp.bfloat16)
    caches = [(values((1, 8, slots, dim)) + layer, values((1, 8, slots, dim))) for layer in range(layers)]
    for nodes in (1, 64):
        q, k = values((1, nodes, 32, dim)), values((1, 8, nodes, dim))
        length, mask = jnp.full((1,), used), jnp.ones((1, nodes, nodes), bool)
        positions = used + jnp.arange(nodes)[None]

        def attend(q, caches, implementation, k=k, length=length, positions=positions, mask=mask):
            for keys, cached in caches:
                more = dict(scale=dim**-0.5, implementation=implementation)
                q = tree_attention(q, k, k, keys, cached, length, positions, mask, **more)
            return q

        run = jax.jit(attend, static_argnums=2)
        times = {
            name: seconds(lambda name=name, q=q, run=run: run(q, caches, name), 3 * repeats) / layers
            for name in (None, "mosaic_gpu")
        }
        error = attention_error(jnp.bfloat16, nodes, dim, 1024, "mosaic_gpu")
        what = f"attention of a layer of Llama 3 8B, {nodes} nodes behind {used:,} tokens"
        text = f"XLA {1e6 * times[None]:.1f} us, Mosaic {1e6 * times['mosaic_gpu']:.1f} us"
        rows.append(Row(what, text, f"the kernel is within {error:.1e} of its specification"))
    return rows


def transformers_rows(config: str, tiny: bool, mode: str, limit: float) -> list[Row]:
    """Time a step of `transformers` in a process of its own, which ends after `limit` seconds."""
    arguments = [sys.executable, __file__, "--transformers", mode, "--config", config, *(["--tiny"] if tiny else [])]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=max(limit, 1.0))
    if done.returncode == NO_DEVICE:
        return [Row(f"{config} in transformers, {mode}", "not run", "torch has no GPU here")]
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no output")
    step = float(done.stdout.split()[-1])
    return [Row(f"{config} in transformers, {mode}: a step", f"{1e3 * step:.2f} ms", f"{1 / step:,.0f} tokens/s")]


def transformers_step(name: str, tiny: bool, mode: str) -> float:
    """Return the seconds of a step of `generate` of transformers with random weights.

    Raises: SystemExit with NO_DEVICE if torch has no GPU.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if not torch.cuda.is_available() and not tiny:
        raise SystemExit(NO_DEVICE)
    place, c = "cuda" if torch.cuda.is_available() else "cpu", config_of(Case(name), tiny)
    fields = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.width, intermediate_size=c.mlp_width, num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim,
        max_position_embeddings=8192, tie_word_embeddings=c.tied,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(place), torch.no_grad():
        model, prompt = LlamaForCausalLM(fields).eval(), torch.ones((1, PROMPT), dtype=torch.long)
    options = {"cache_implementation": "static"} if mode == "compiled" else {}

    def generate(count: int) -> float:
        start = time.perf_counter()
        with torch.no_grad():
            model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0,
                           eos_token_id=None, **options)  # fmt: skip
        if place == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    steps = 8 if tiny else STEPS
    few, many = (statistics.median([generate(count) for _ in range(4)][1:]) for count in (steps, 2 * steps))
    return (many - few) / steps


def cases_for(large: str, small: str, long: int = LONG) -> dict[tuple[str, str], list[Case]]:
    """Return the cases by config and layout, so that each set of weights is made once."""
    graphs = jax.default_backend() == "gpu"
    unstacked = not storage_options(jax.default_backend())["stacked"]
    other = "stacked" if unstacked else "unstacked"
    both = lambda name: [Case(name, graphs=True)] if graphs else []
    more = [Case(large, batch=batch) for batch in (8, 32, 64)] + [Case(large, context=long, batch=b) for b in (1, 8)]
    return {
        (large, "default"): [Case(large), *more, *both(large)],
        (small, "default"): [Case(small), *both(small)],
        (small, other): [Case(small, other)],
        (large, other): [Case(large, other)],
    }


def measure_model(report: Report, programs: Programs, name: str, layout: str, group: list[Case], args) -> None:
    """Measure all cases of a model with one layout."""
    config = config_of(group[0], args.tiny)
    target = Target(make_model(config), random_params(config))
    for case in group:
        report.measure(case.name, functools.partial(step_rows, case, target, programs, args.repeats))
    if layout == "default":
        report.measure(f"passes of {name}", functools.partial(pass_rows, name, target, programs, args.repeats))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="the large model; default: llama3_8b, or llama3_1b below 40 GiB of memory")
    parser.add_argument("--tiny", action="store_true", help="toy shapes, to test the script")
    parser.add_argument("--minutes", type=float, default=4.75, help="after which it ends")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("device.json"))
    parser.add_argument("--transformers", choices=("eager", "compiled"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    libtpu.prepare_environment()  # where it is installed without a TPU, it would search for one
    if args.transformers:
        print(transformers_step(args.config, args.tiny, args.transformers))
        return 0
    begin = time.perf_counter()
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    large, small = args.config or ("llama3_8b" if memory > 40 * GIB or args.tiny else "llama3_1b"), "smollm2_135m"
    if large not in builtin_configs() or large == small:
        models = ", ".join(name for name in builtin_configs() if name != small)
        parser.error(f"--config must be a larger model than {small}, which is measured anyway: {models}; not {large}")
    groups = cases_for(large, small, 300 if args.tiny else LONG)
    cases = [case for group in groups.values() for case in group]
    modes = [(name, mode) for name in (large, small) for mode in ("compiled", "eager")]
    has_torch = jax.default_backend() == "gpu" or args.tiny
    has_torch = has_torch and all(map(importlib.util.find_spec, ("torch", "transformers")))
    names = [
        "kernels",
        *([ATTENTION] if jax.default_backend() == "gpu" else []),
        "float32",
        "bandwidth",
        *(case.name for case in cases),
    ]
    names += [f"passes of {name}" for name in (large, small)]
    names += [f"{name} in transformers, {mode}" for name, mode in modes if has_torch]
    report = Report(args.out, names)
    watch = threading.Timer(60 * args.minutes, report.give_up)
    watch.daemon = True
    watch.start()
    programs = Programs(cases, args.tiny)
    report.measure("kernels", lambda: kernel_rows(args.tiny))
    report.measure("float32", precision_rows)
    programs.wait()
    if ATTENTION in names:
        report.measure(ATTENTION, lambda: mosaic_rows(args.repeats))
    report.measure("bandwidth", lambda: bandwidth_rows(1 << 20 if args.tiny else 1 << 30, args.repeats))
    for (name, layout), group in groups.items():
        measure_model(report, programs, name, layout, group, args)
    for name, mode in modes if has_torch else ():
        left = 60 * args.minutes - (time.perf_counter() - begin) - 5
        rows = functools.partial(transformers_rows, name, args.tiny, mode, left)
        report.measure(f"{name} in transformers, {mode}", rows)
    watch.cancel()
    print(f"all rows took {time.perf_counter() - begin:.0f} s")
    return int(bool(report.failed))


if __name__ == "__main__":
    sys.exit(main())
