"""A process that compiles programs for GPUs: JSON requests on its standard input, JSON reports on its output."""

import dataclasses
import functools
import json
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models import LlamaConfig, storage_options
from specjax.pallas_kernels.tree_attention import tree_attention
from specjax.planning import plan
from specjax.planning.compiler import compile_programs
from specjax.planning.inputs.model_configs import load_config
from specjax.planning.inputs.topologies import describe_devices, parse_topology
from specjax.planning.workload import make_workload


def config_of(source: dict[str, Any]) -> Any:
    """A built-in config by "name" with changes, or the fields of a new one."""
    changes = dict(source)
    name = changes.pop("name", None)
    if name is None:
        return LlamaConfig(**{"dtype": "bfloat16", "name": "new", **storage_options("gpu"), **changes})
    return dataclasses.replace(load_config(name, "bfloat16", platform="gpu"), **changes)


def attention(topology: str, nodes: int, heads: int, kv_heads: int, dim: int, slots: int) -> dict[str, Any]:
    """The custom calls of a program with the attention kernel, and its temporary bytes."""
    (device, *_) = describe_devices(parse_topology(topology))
    placed = jax.sharding.SingleDeviceSharding(device)
    shape = lambda dtype, *sizes: jax.ShapeDtypeStruct(sizes, dtype, sharding=placed)
    keys = [shape(jnp.bfloat16, 1, kv_heads, count, dim) for count in (nodes, nodes, slots, slots)]
    tree = shape(jnp.int32, 1), shape(jnp.int32, 1, nodes), shape(jnp.bool_, 1, nodes, nodes)
    run = jax.jit(functools.partial(tree_attention, scale=0.1, implementation="mosaic_gpu"))
    compiled = run.lower(shape(jnp.bfloat16, 1, nodes, heads, dim), *keys, *tree).compile({"xla_gpu_autotune_level": 0})
    calls = re.findall(r'custom_call_target="([^"]*)"', compiled.as_text())
    return {"calls": calls, "temporaries": compiled.memory_analysis().temp_size_in_bytes}


def answer(request: dict[str, Any]) -> Any:
    options = request["options"]
    if request["kind"] == "attention":
        return attention(request["topology"], **options)
    if "draft" in options:
        options["draft"] = config_of(options["draft"])
    if request["kind"] == "plan":
        return plan(config_of(request["target"]), request["topology"], cache=False, **options).to_json()
    work = make_workload(config_of(request["target"]), request["topology"], **options)
    reports = compile_programs(work, cache=False, notify=lambda name: None, only=tuple(request["only"]))
    return {report.name: dataclasses.asdict(report) for report in reports}


if __name__ == "__main__":
    json.dump([answer(request) for request in json.load(sys.stdin)], sys.stdout)
