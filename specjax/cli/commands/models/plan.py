"""`specjax plan`."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from specjax.cli.options import common as o
from specjax.cli.options import planning as p
from specjax.cli.options.groups import with_groups
from specjax.errors import require

HELP = """Choose draft, tree and mesh for a model on TPUs or GPUs, without one.

It compiles target passes over 1, 2, 4, ... nodes and one pass of each --draft
(see `specjax compile`). For plain decoding, the drafters that need no model,
and each --draft, --head and --method, it then minimises seconds per token over
all sizes and depths: (draft(depth) + verify(nodes)) / expected tokens of the
best tree (Sequoia, arXiv 2402.12374). One table has the drafts by expected
tokens per second. A lookup costs nothing, and a head costs the time to read its
weights. On several devices without --model, a plain step is compiled for 1, 2,
4, ... devices per copy of the model, and the fastest by the schedule is used.

--acceptance has the probability that the first, second, ... child of an
accepted node is the accepted one, joined by commas. It can also be the JSON
of `specjax compare-verifiers` (ranks from its --drafts), or of `specjax
bench` (the first rank only, so a chain is proposed). It applies to each --draft,
--head and --method, or to NAME with NAME=.6,.2. Without any of them it is that
of the target's own module (native), or of a draft without cost. Drafts without --acceptance use a typical
one, which the output names with its source.

--fits compiles nothing. It estimates from shapes what fits on the chips, for
all built-in configs or for --target: the dtypes and the schemes of --quantize,
the longest prompt, and the largest tree whose pass costs at most 1.25 passes
over one token. It counts the model's own multi-token-prediction module, which
drafts by default; --draft native lists the models that have one, and --method
autoregressive leaves the modules out.

--stages compiles nothing either. It estimates the attention part and the
feed-forward part of a pass over --widths nodes, and the fastest division of the
chips into devices for each (Step-3, arXiv 2507.19427): transfers,
--micro-batches, and the ratio to devices that do both. Use a large --batch-size.

--memory finds what fits in so many bytes per device (SpecMemo, arXiv
2506.01986): for --batch-size rows and its doubles, the fastest draft, its
smallest tree within 4 % of the fastest one, and the longest prompt. Only the
programs of the fastest draft are compiled, and their bytes are shown. Without
--model, all devices share the weights.
"""

WIDTHS = "1,2,4,8,16,32,64"


@with_groups
def plan(
    topology: p.TopologyOption,
    programs: p.ProgramOptions,
    target: p.OptionalTargetOption = None,
    acceptance: Annotated[
        list[str] | None,
        typer.Option(
            "--acceptance",
            help="Acceptance by rank, such as .6,.2,.1, or a JSON file; NAME=.6,.2 for one draft. Default: typical.",
            show_default=False,
        ),
    ] = None,
    draft: p.DraftsOption = None,
    head: p.HeadsOption = None,
    method: p.DraftersOption = None,
    fits: Annotated[
        bool, typer.Option("--fits", help="Estimate which models fit on the chips, and propose no tree.")
    ] = False,
    stages: Annotated[
        bool,
        typer.Option("--stages", help="Estimate attention and feed-forward layers on separate devices."),
    ] = False,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            "--micro-batches",
            help="Parts of the batch that --stages has in different stages at a time. Default: fastest up to 8.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", help="Bytes per device that a decode may use, such as 12GiB or 800MiB.", show_default=False
        ),
    ] = None,
    widths: Annotated[str, typer.Option("--widths", help="Sizes of the target passes, in nodes.")] = WIDTHS,
    as_json: o.JsonOption = False,
) -> None:
    require(stages or micro_batches is None, "--micro-batches applies only to --stages; leave it out, or add --stages")
    require(
        fits + stages + (memory is not None) <= 1,
        "--fits, --stages and --memory are different reports; leave all but one out",
    )
    if fits:
        unused = {
            "--acceptance": acceptance, "--head": head,
            "--widths": None if widths == WIDTHS else widths,
        }  # fmt: skip
        _show_fits(topology, programs, target, {"draft": draft, "method": method}, unused, as_json)
        return
    require(target is not None, "plan needs --target; give it, or --fits to see which models fit on the chips")
    assert target is not None
    sizes = p.parse_widths(widths)
    if stages:
        unused = {"--acceptance": acceptance, "--draft": draft, "--head": head, "--method": method}
        _show_stages(target, topology, programs, sizes, micro_batches, unused, as_json)
        return

    from specjax import planning
    from specjax.cli.output.console import Console, print_json
    from specjax.planning.budget.table import show_memory_plan
    from specjax.planning.reports.tables import show_plan

    drafts = {"draft": draft or (), "head": head or (), "method": method or ()}
    log, show = Console(stderr=True), show_plan if memory is None else show_memory_plan
    with p.progress(log) as notify:
        options: dict[str, Any] = {
            "acceptance": _by_draft(acceptance or []), "widths": sizes, "on_step": notify, **drafts,
            **programs.arguments,
        }  # fmt: skip
        result: Any
        if memory is None:
            result = planning.plan(target, topology, **options)
        else:
            result = planning.plan_within_memory(target, topology, p.parse_bytes(memory, "--memory"), **options)
    if as_json:
        print_json(result.to_json())
    else:
        show(result, Console())


def _by_draft(texts: list[str]) -> str | dict[str, str] | None:
    """Return one acceptance for all drafts, or acceptances by the name of a draft. Raises: UsageError for both."""
    named = [text.rpartition("=") for text in texts if "=" in text and not os.path.exists(text)]
    require(
        len(texts) <= 1 or len(named) == len(texts),
        "--acceptance is given several times; write NAME=.6,.2 with the name of a draft in each",
    )
    if len(named) == len(texts):
        return {name: rates for name, _, rates in named} or None
    return texts[0]


def _show_fits(
    topology: str,
    programs: p.ProgramOptions,
    target: str | None,
    repeated: dict[str, list[str] | None],
    unused: dict[str, Any],
    as_json: bool,
) -> None:
    """Print what fits on the chips. Raises: UsageError for a flag of `unused` that is set, or a repeated flag."""
    for flag, value in unused.items():
        require(value is None, f"--fits compiles no draft and has no {flag}; leave one of them out")
    for name, values in repeated.items():
        require(len(values or ()) <= 1, f"--fits has at most one --{name}; leave the others out")
    choices: dict[str, Any] = {name: values[0] if values else None for name, values in repeated.items()}

    from specjax import planning
    from specjax.cli.output.console import Console, print_json
    from specjax.planning.reports.fits_table import show_fits

    options = {name: value for name, value in programs.arguments.items() if name != "cache"}
    result = planning.what_fits(topology, target=target, **choices, **options)
    if as_json:
        print_json(result.to_json())
    else:
        show_fits(result, Console())


def _show_stages(
    target: str,
    topology: str,
    programs: p.ProgramOptions,
    widths: list[int],
    micro_batches: int | None,
    unused: dict[str, Any],
    as_json: bool,
) -> None:
    """Print the plan of stages. Raises: UsageError for a flag of `unused` that is set, or an axis of a mesh."""
    p.check_stages(programs, unused)

    from specjax import planning
    from specjax.cli.output.console import Console, print_json
    from specjax.planning.stages.table import show_stages

    options = p.without_mesh(programs)
    result = planning.plan_stages(target, topology, widths=widths, micro_batches=micro_batches, **options)
    if as_json:
        print_json(result.to_json())
    else:
        show_stages(result, Console())


plan.__doc__ = HELP
