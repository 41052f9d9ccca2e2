"""`specjax plan`."""

from __future__ import annotations

from typing import Annotated

import typer

from specjax.cli.options import common as o
from specjax.cli.options import planning as p
from specjax.errors import UsageError

HELP = """Propose the tree to draft, for a pair of models on TPUs that are not here.

Compiles a verify pass over 1, 2, 4, ... nodes and one pass of the draft
model (see `specjax compile`), and minimises seconds per token over all sizes
and depths: (depth x draft + verify(nodes)) / expected tokens of the best tree
(Sequoia, arXiv 2402.12374), once by each of the two clocks of `specjax
compile`. Without --draft drafting costs nothing.

--acceptance is the chance that the first, second, ... child of an accepted
node is the accepted one, joined by commas; or the JSON of
`specjax compare-verifiers` (ranks from its --drafts) or of `specjax bench`
(the first rank only: then a chain is proposed).
"""


def plan(
    target: p.TargetOption,
    topology: p.TopologyOption,
    acceptance: Annotated[
        str, typer.Option("--acceptance", help="Chances by rank, such as .6,.2,.1, or a JSON file.", show_default=False)
    ],
    draft: p.DraftOption = None,
    widths: Annotated[str, typer.Option("--widths", help="Verify passes to compile, in nodes.")] = "1,2,4,8,16,32,64",
    batch_size: o.BatchOption = 1,
    context: p.ContextOption = 1024,
    dtype: p.DtypeOption = "bfloat16",
    cache_dtype: o.CacheDtypeOption = None,
    data: p.DataOption = 1,
    model: p.ModelOption = None,
    layer: p.LayerOption = 1,
    sequence: p.SequenceOption = 1,
    as_json: o.JsonOption = False,
    no_cache: p.NoCacheOption = False,
) -> None:
    try:
        sizes = [int(n) for n in widths.split(",")]
    except ValueError:
        raise UsageError(f'--widths must be numbers joined by commas, such as 1,2,4,8, not "{widths}"') from None

    from specjax import planning
    from specjax.cli.output.console import Console, print_json
    from specjax.planning.reports.tables import show_plan

    log = Console(stderr=True)
    with p.progress(log) as notify:
        found = planning.plan(
            target, topology, acceptance=acceptance, widths=sizes, draft=draft, batch=batch_size, context=context,
            dtype=dtype, cache_dtype=cache_dtype, data=data, model=model, layer=layer,
            sequence=sequence, cache=not no_cache, on_step=notify,
        )  # fmt: skip
    if as_json:
        print_json(found.to_json())
    else:
        show_plan(found, Console())


plan.__doc__ = HELP
