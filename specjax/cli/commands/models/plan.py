"""`specjax plan`."""

from __future__ import annotations

from typing import Annotated

import typer

from specjax.cli.options import common as o
from specjax.cli.options import planning as p
from specjax.cli.options.groups import with_groups
from specjax.errors import UsageError, require

HELP = """Propose tree and mesh for a pair of models on TPUs or GPUs, without one.

It compiles target passes over 1, 2, 4, ... nodes and one pass of the draft
model (see `specjax compile`). Then it minimises seconds per token over all
sizes and depths: (depth x draft + verify(nodes)) / expected tokens of the
best tree (Sequoia, arXiv 2402.12374), by each of the two estimates of
`specjax compile`. Without --draft, drafting costs nothing. On several devices
without --model, a plain step is compiled for 1, 2, 4, ... devices per copy of
the model, and the fastest by the schedule is used.

--acceptance has the probability that the first, second, ... child of an
accepted node is the accepted one, joined by commas. It can also be the JSON
of `specjax compare-verifiers` (ranks from its --drafts), or of `specjax
bench` (the first rank only, so a chain is proposed).

--fits compiles nothing. It estimates from shapes what fits on the chips, for
all built-in configs or for --target: the dtypes and the schemes of --quantize,
the longest prompt, and the largest tree whose pass costs at most 1.25 passes
over one token.
"""

WIDTHS = "1,2,4,8,16,32,64"


@with_groups
def plan(
    topology: p.TopologyOption,
    programs: p.ProgramOptions,
    target: p.OptionalTargetOption = None,
    acceptance: Annotated[
        str | None,
        typer.Option(
            "--acceptance",
            help="Acceptance probabilities by rank, such as .6,.2,.1, or a JSON file. Required without --fits.",
            show_default=False,
        ),
    ] = None,
    draft: p.DraftOption = None,
    fits: Annotated[
        bool, typer.Option("--fits", help="Estimate which models fit on the chips, and propose no tree.")
    ] = False,
    widths: Annotated[str, typer.Option("--widths", help="Sizes of the target passes to compile, in nodes.")] = WIDTHS,
    as_json: o.JsonOption = False,
) -> None:
    if fits:
        unused = {"--acceptance": acceptance, "--draft": draft, "--widths": None if widths == WIDTHS else widths}
        _show_fits(topology, programs, target, unused, as_json)
        return
    for flag, value in (("--target", target), ("--acceptance", acceptance)):
        require(value is not None, f"plan needs {flag}; give it, or --fits to see which models fit on the chips")
    assert target is not None and acceptance is not None
    try:
        sizes = [int(n) for n in widths.split(",")]
    except ValueError:
        raise UsageError(f'--widths must be numbers joined by commas, such as 1,2,4,8, not "{widths}"') from None

    from specjax import planning
    from specjax.cli.output.console import Console, print_json
    from specjax.planning.reports.tables import show_plan

    log = Console(stderr=True)
    with p.progress(log) as notify:
        result = planning.plan(
            target, topology, acceptance=acceptance, widths=sizes, draft=draft, on_step=notify, **programs.arguments
        )
    if as_json:
        print_json(result.to_json())
    else:
        show_plan(result, Console())


def _show_fits(
    topology: str, programs: p.ProgramOptions, target: str | None, unused: dict[str, str | None], as_json: bool
) -> None:
    """Print what fits on the chips. Raises: UsageError for a flag of `unused` that is set."""
    for flag, value in unused.items():
        require(value is None, f"--fits compiles no draft and has no {flag}; leave one of them out")

    from specjax import planning
    from specjax.cli.output.console import Console, print_json
    from specjax.planning.reports.fits_table import show_fits

    options = {name: value for name, value in programs.arguments.items() if name != "cache"}
    result = planning.what_fits(topology, target=target, **options)
    if as_json:
        print_json(result.to_json())
    else:
        show_fits(result, Console())


plan.__doc__ = HELP
