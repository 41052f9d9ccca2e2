"""Forms of the experts of one layer on a TPU or a GPU, by the schedule of its compiler.

    python benchmarks/expert_forms.py
    python benchmarks/expert_forms.py --chip h200:1
    python benchmarks/expert_forms.py --target gpt_oss_20b --rows 2048 --forms blocks,grouped --json
    python benchmarks/expert_forms.py --chip h200:1 --quantize int8-weights,mxfp4 --forms pairs,dense,loop,blocks

Each program is the router and the experts of one mixture of `--target`, in bfloat16, for one device. With `--quantize`
the experts have a scheme of `specjax.load`, or the form of MXFP4 in memory: int8 with a scale for 32 inputs. The forms
are those of `models/experts/running.py`, and `jax.lax.ragged_dot`. The form "grouped" is the megablox kernel `gmm` over
sorted pairs of a row and an expert, and `ragged_dot` has the same pairs. Both multiply bfloat16 alone. The figures are
estimates, not measurements. Needs the extra tpu-compile or gpu-compile, no TPU or GPU.

The number of turns of "loop" and "blocks" depends on the data, so the schedule does not contain it. The cycles of a
turn are multiplied by the expected number of distinct experts or of blocks, for rows that choose independently. The
compiler counts no cycles for Pallas kernels. The column "kernels" is a roofline of them: the bytes of the chosen
experts, of the rows and of the results at the published bandwidth, or the products of all tiles at the peak. It is a
lower bound, and a schedule is not.

The schedule of a GPU consists of the bytes that the program moves, its kernels and the conditions that the host reads
(docs/gpu.md). The bytes of the form "pairs" are those of every pair, because two rows with the same expert may both
read it from memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import math
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from specjax.costs import roofline
from specjax.costs.experts import expected_blocks
from specjax.files.sizes import gib
from specjax.models.experts import blocks, running
from specjax.models.experts.feed import MixtureFeed, clamped_product
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.products.grouped import tile_outputs, tile_rows
from specjax.models.storage import SCHEMES, num_bytes, scheme_format
from specjax.numerics.quantized_array import WeightFormat
from specjax.planning import hlo
from specjax.planning.inputs.topologies import describe_devices, parse_topology
from specjax.planning.programs import compile_for, device_kind

FORMS = *get_args(running.Form), "ragged_dot"
WITH_KERNELS = "grouped", "ragged_dot"
MXFP4 = WeightFormat(5, "int8", 32)
EXPERTS = "expert_gate", "expert_up", "expert_down"


class Layer(NamedTuple):
    """The sizes of a mixture and of a program with it."""

    width: int
    sizes: MixtureSizes
    rows: int
    form: WeightFormat | None = None  # of the experts; None: bfloat16

    @property
    def pairs(self) -> int:
        return self.rows * self.sizes.routing.num_chosen

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of the projections gate, up and down."""
        return (self.width, self.sizes.width), (self.width, self.sizes.width), (self.sizes.width, self.width)

    def expert_bytes(self) -> int:
        shape = lambda fan_in, fan_out: jax.ShapeDtypeStruct((fan_out, fan_in), jnp.bfloat16)
        return num_bytes([with_format(shape(*product), self.form) for product in self.products])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", nargs="*", default=["qwen3_30b_a3b", "gpt_oss_20b"])
    parser.add_argument("--chip", default="v5e:1x1")
    parser.add_argument("--rows", default="1,8,64,2048")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument(
        "--block-rows", default=str(blocks.BLOCK_ROWS_TPU), help="sizes of the blocks of the form blocks"
    )
    parser.add_argument("--quantize", default="none", help=f"none, mxfp4 or {', '.join(SCHEMES)}")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    numbers_of = lambda text: [int(part) for part in text.split(",")]
    log, results = Console(stderr=True), []
    for target in args.target:
        config = importlib.import_module(f"specjax.configs.{target}").get_config()
        for scheme, rows in itertools.product(args.quantize.split(","), numbers_of(args.rows)):
            layer = Layer(config.width, config.experts, rows, format_of(scheme, args.chip))
            name = target if scheme == "none" else f"{target} {scheme}"
            for form in args.forms.split(","):
                for size in numbers_of(args.block_rows) if form == "blocks" else [0]:
                    result = {"target": name, "rows": rows, "form": f"{form} {size}" if size else form}
                    results.append(result | measure(args.chip, layer, form, size))
                    log.print(json.dumps(results[-1]), style="dim", soft_wrap=True)
    if args.json:
        print(json.dumps({"settings": vars(args), "results": results}))
    else:
        show(results, args.chip)


def format_of(scheme: str, chip: str) -> WeightFormat | None:
    """Return the format of a scheme in memory, or None for "none"."""
    if scheme in ("none", "mxfp4"):
        return MXFP4 if scheme == "mxfp4" else None
    return scheme_format(scheme, parse_topology(chip).chip.platform)


def with_format(shape: Any, form: WeightFormat | None) -> Any:
    """Return the shape of a matrix [..., O, I] in a format. A group is the greatest that divides the inputs."""
    if form is None:
        return shape
    group = None if form.group is None else math.gcd(form.group, shape.shape[-1])
    return dataclasses.replace(form, group=group).shapes(shape.shape, "bfloat16")


def measure(chip: str, layer: Layer, form: str, block_rows: int) -> dict[str, Any]:
    """Return the estimates of one form, or the reason why it does not compile."""
    topology = parse_topology(chip)
    mesh = Mesh(np.array(describe_devices(topology)[:1]), ("model",))
    place = NamedSharding(mesh, PartitionSpec())
    abstract = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
    act = jax.nn.silu
    feed = nnx.eval_shape(lambda: MixtureFeed(layer.width, layer.sizes, act, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    definition, state = nnx.split(feed)
    for name in EXPERTS:
        weight = state[name]["weight"]
        state[name]["weight"] = weight.replace(with_format(weight.get_value(), layer.form))

    def apply(state: Any, x: jax.Array) -> jax.Array:
        feed = nnx.merge(definition, state)
        choice = feed.router(x)
        matrices = tuple(part.arrays() for part in (feed.expert_gate, feed.expert_up, feed.expert_down))
        if form == "ragged_dot":
            return sorted_pairs(layer, x, choice, matrices).astype(x.dtype)
        y = running.run_experts(x, choice, matrices, layer.sizes.num_experts, feed._expert, form=form)
        return y.astype(x.dtype)

    x = abstract(jax.ShapeDtypeStruct((layer.rows, layer.width), jnp.bfloat16))
    setting = f"BLOCK_ROWS_{topology.chip.platform.upper()}"
    default = getattr(blocks, setting)
    setattr(blocks, setting, block_rows or default)
    try:
        with device_kind(mesh):
            lowered = jax.jit(apply).lower(jax.tree.map(abstract, state), x)
        compiled = compile_for(mesh, lowered)
    except Exception as error:  # a form that does not fit is a result
        return {"reason": " ".join(str(error).split())[:200]}
    finally:
        setattr(blocks, setting, default)
    size = min(block_rows, layer.rows)
    turns = (
        layer.sizes.expected_experts(layer.rows)
        if form == "loop"
        else expected_blocks(layer.sizes, layer.rows, size)
        if size
        else 1.0
    )
    module = hlo.parse(compiled.as_text())
    totals = hlo.totals(module, lambda loop: turns)
    if form == "pairs":
        totals = dataclasses.replace(totals, hbm_bytes=max(totals.hbm_bytes, layer.pairs * layer.expert_bytes()))
    kernels = kernel_seconds(layer, topology.chip, totals.kernels.calls) if form in WITH_KERNELS else 0.0
    memory = compiled.memory_analysis()
    on_gpu = topology.chip.launches is not None
    schedule = roofline.estimate(topology.chip, totals, 0).schedule if on_gpu else totals.cycles / topology.chip.clock
    return {
        "reason": "",
        "turns": turns,
        "cycles": totals.cycles,
        "schedule_ms": 1e3 * schedule,
        "kernels_ms": 1e3 * kernels,
        "ms": 1e3 * (schedule + kernels),
        "bytes": totals.hbm_bytes - totals.kernels.bytes + (kernel_bytes(layer) if totals.kernels.calls else 0.0),
        "flops": totals.flops,
        "temporary_bytes": memory.temp_size_in_bytes,
        "kernel_calls": totals.kernels.calls,
        "launches": totals.instructions if on_gpu else 0.0,
        "host_reads": totals.condition_reads if on_gpu else 0.0,
        "unknown_loops": len(hlo.dynamic_loops(module)),
        "copies_of_experts": copies_of_experts(module, layer),
    }


def sorted_pairs(layer: Layer, x: jax.Array, choice: Any, matrices: Any) -> jax.Array:
    """Return the weighted sum float32[R, D] from products over the pairs of a row and an expert, sorted by expert."""
    count, sizes = layer.sizes.num_experts, layer.sizes
    flat = choice.experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    groups = jnp.zeros(count, jnp.int32).at[flat].add(1)
    experts = flat[order]

    def project(x: jax.Array, weight: jax.Array, bias: jax.Array | None, dtype: Any) -> jax.Array:
        y = ragged_product(x, weight, groups, dtype)
        return y if bias is None else y + bias[experts]

    sorted_rows = x[order // sizes.routing.num_chosen]
    gate, up = (project(sorted_rows, *part, x.dtype) for part in matrices[:2])
    hidden = jax.nn.silu(gate) * up if sizes.limit is None else clamped_product(gate, up, sizes.limit)
    y = project(hidden.astype(x.dtype), *matrices[2], jnp.float32) * choice.weights.reshape(-1)[order][:, None]
    of_pair = jnp.argsort(order).reshape(choice.experts.shape)
    total = jnp.zeros(x.shape, jnp.float32)
    for place in range(sizes.routing.num_chosen):
        total = total + y[of_pair[:, place]]
    return total


def ragged_product(x: jax.Array, weight: jax.Array, groups: jax.Array, dtype: Any) -> jax.Array:
    """Multiply sorted rows [P, I] by the experts' matrices [E, O, I]."""
    dimensions = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    precision = jax.lax.Precision.DEFAULT
    return jax.lax.ragged_dot_general(x, weight, groups, dimensions, precision, preferred_element_type=dtype)


def kernel_bytes(layer: Layer) -> float:
    """Return the bytes of the kernels: chosen experts once, rows once per tile of outputs, and results."""
    rows = sum(
        layer.pairs * (2 * fan_in * -(-fan_out // tile_outputs(fan_in, fan_out)) + (2 + 2 * (place == 2)) * fan_out)
        for place, (fan_in, fan_out) in enumerate(layer.products)
    )
    return layer.sizes.expected_experts(layer.rows) * layer.expert_bytes() + rows


def kernel_seconds(layer: Layer, chip: Any, calls: float) -> float:
    """Return the roofline of the kernels. Each visited tile of rows is multiplied as a whole."""
    if not calls:
        return 0.0
    size = tile_rows(layer.pairs)
    tiles = -(-layer.pairs // size) + layer.sizes.expected_experts(layer.rows) - 1
    flops = tiles * size * layer.expert_bytes()  # two operations per number of two bytes
    return max(kernel_bytes(layer) / chip.hbm_bandwidth, flops / chip.peak_flops)


def copies_of_experts(module: hlo.Module, layer: Layer) -> int:
    """Return the number of instructions whose result has the size of one matrix of all experts, beyond arguments."""
    count = layer.sizes.num_experts
    shapes = {tuple(sorted((count, fan_in, fan_out))) for fan_in, fan_out in layer.products}
    large = lambda instruction: any(tuple(sorted(array.dims)) in shapes for array in instruction.arrays)
    views = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "copy-done", "opt-barrier", "conditional"}
    return sum(large(i) and i.opcode not in views for _, i, _ in hlo.walk(module))


def show(results: list[dict[str, Any]], chip: str) -> None:
    table = Table(title=f"Experts of one layer on {chip}, estimates of the compiler")
    for name in (
        "target",
        "rows",
        "form",
        "turns",
        "schedule",
        "kernels",
        "sum",
        "HBM traffic",
        "temporaries",
        "copies",
        "launches",
        "host reads",
    ):
        table.add_column(name, justify="left" if name in ("target", "form") else "right")
    for row in results:
        cells = [row["target"], str(row["rows"]), row["form"]]
        if row["reason"]:
            table.add_row(*cells, "", row["reason"][:60])
            continue
        times = (f"{row[name]:.3f} ms" for name in ("schedule_ms", "kernels_ms", "ms"))
        counts = (f"{row[name]:.0f}" for name in ("launches", "host_reads"))
        sizes = (gib(row[name]) for name in ("bytes", "temporary_bytes"))
        table.add_row(*cells, f"{row['turns']:.1f}", *times, *sizes, str(row["copies_of_experts"]), *counts)
    Console().print(table)


if __name__ == "__main__":
    main()
