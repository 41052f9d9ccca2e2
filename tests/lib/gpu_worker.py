"""A process that compiles programs for GPUs: JSON requests on its standard input, JSON reports on its output."""

import dataclasses
import json
import sys
from typing import Any

from specjax.models import LlamaConfig, storage_options
from specjax.planning import plan
from specjax.planning.compiler import compile_programs
from specjax.planning.inputs.model_configs import load_config
from specjax.planning.workload import make_workload


def config_of(source: dict[str, Any]) -> Any:
    """A built-in config by "name" with changes, or the fields of a new one."""
    changes = dict(source)
    name = changes.pop("name", None)
    if name is None:
        return LlamaConfig(**{"dtype": "bfloat16", "name": "new", **storage_options("gpu"), **changes})
    return dataclasses.replace(load_config(name, "bfloat16", platform="gpu"), **changes)


def answer(request: dict[str, Any]) -> Any:
    options = request["options"]
    if "draft" in options:
        options["draft"] = config_of(options["draft"])
    if request["kind"] == "plan":
        return plan(config_of(request["target"]), request["topology"], cache=False, **options).to_json()
    work = make_workload(config_of(request["target"]), request["topology"], **options)
    reports = compile_programs(work, cache=False, notify=lambda name: None, only=tuple(request["only"]))
    return {report.name: dataclasses.asdict(report) for report in reports}


if __name__ == "__main__":
    json.dump([answer(request) for request in json.load(sys.stdin)], sys.stdout)
