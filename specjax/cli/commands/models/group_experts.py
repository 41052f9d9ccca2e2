"""`specjax group-experts`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specjax.cli.options import common as o
from specjax.errors import require
from specjax.files.homes import in_home

HELP = """Cluster the experts of a mixture for the devices of a mesh.

specjax group-experts MODEL OUT --text TEXTFILE --devices 8 runs MODEL on a text
and writes which experts belong on the same device, and tables that predict the
device of a token (Speculative MoE). Use the file from Python:

groups = ExpertGroups.load(OUT)                  # specjax.parallel.expert_groups
target = specjax.shard(group_experts(target, groups), specjax.mesh(expert=8))

Texts do not change. Use text like that which the model will read and write.
"""


def group_experts(
    model: Annotated[str, typer.Argument(help=f"The mixture: {o.MODEL_HELP}.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="File to write.", show_default=False)],
    text: Annotated[Path, typer.Option("--text", help="Text file to run the model on.", show_default=False)],
    devices: Annotated[
        int, typer.Option("--devices", help='Size of the mesh axis "expert". It divides the number of experts.')
    ] = 8,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens of the text to read.")] = 20_000,
    seed: Annotated[int, typer.Option("--seed", help="Random seed of the clustering.")] = 0,
    as_json: o.JsonOption = False,
    no_cache: o.NoCacheOption = False,
) -> None:
    o.check_minimum("--devices", devices, 2)
    o.check_minimum("--max-tokens", max_tokens, 1)
    o.check_minimum("--seed", seed, 0)
    require(not out.is_dir(), f"OUT: {out} is a folder; name a file")
    from specjax.cli.output.console import Console, print_json
    from specjax.cli.output.files import read_text
    from specjax.cli.runs.environment import describe_command, stage, use_compilation_cache
    from specjax.models import loading
    from specjax.parallel.expert_groups import cluster_experts
    from specjax.parallel.expert_traces import mixture_config, trace_experts

    content = read_text(text, "--text")
    log = Console(stderr=True)
    use_compilation_cache(not no_cache)
    with stage(log, f"reading {model}", f"read {model}"):
        loaded = o.parse_flag("MODEL", loading.read_model, model)
    o.parse_flag("MODEL", mixture_config, loaded.target)
    tokens = loaded.tokenizer.encode(content)[:max_tokens]
    require(len(tokens) > 0, f"--text: {text} has no tokens; name a file with text")
    with stage(log, f"tracing {len(tokens):,} tokens", f"traced {len(tokens):,} tokens"):
        traces = trace_experts(loaded.target, [tokens])
    with stage(log, "clustering experts", "clustered experts"):
        groups = o.parse_flag("--devices", lambda count: cluster_experts(traces, count, seed=seed), devices)
    o.parse_flag("OUT", groups.save, in_home(out))
    if as_json:
        print_json({
            **describe_command(), "model": model, "file": str(out), "tokens": len(tokens), "devices": devices,
            "hit_rate": groups.hit_rate, "remote_devices": groups.remote,
        })  # fmt: skip
        return
    Console().print(
        f"{out}: {groups.hit_rate:.1%} of the choices of experts are on the predicted device "
        f"({1 / devices:.1%} by chance), and a row needs {groups.remote:.2f} other devices",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


group_experts.__doc__ = HELP
