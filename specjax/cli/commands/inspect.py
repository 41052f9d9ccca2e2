"""`specjax inspect`."""

from __future__ import annotations

from typing import Annotated

import typer

from specjax.cli.options import common as o
from specjax.cli.options import vllm_sglang_flags as s

HELP = """Say what a learned head is, how it was read, and how often it agrees with its target.

A head that is misread gives the right text, only slower, for every draft is
verified: nothing but its agreement shows it. Below 20 % the likeliest reason is
named.
"""


def inspect(
    head: Annotated[str, typer.Argument(help="The head: a hub id or a folder.", show_default=False)],
    target: o.TargetOption = None,
    token_map: s.MapOption = None,
    dtype: o.DtypeOption = "auto",
    as_json: o.JsonOption = False,
    no_cache: o.NoCacheOption = False,
) -> None:
    from specjax.cli.options.drafter_flags import recognised
    from specjax.cli.output.console import Console, print_json
    from specjax.cli.runs.session import lines_of, open_session

    o.require(
        recognised(head, "HEAD") is not None,
        f"HEAD {head} is no learned head of a known kind, or there is no such folder",
    )
    quiet = Console(stderr=True, quiet=True)
    session = open_session(
        quiet, o.Models(target, head, dtype, no_cache), has_head=True, token_map=token_map, flag="HEAD"
    )
    loaded, check = session.head, session.check
    assert loaded is not None and check is not None
    if as_json:
        print_json({
            "kind": loaded.kind, "dialect": loaded.dialect, "flags": dict(loaded.flags), "notes": list(loaded.notes),
            "unused": list(loaded.unused), "tensors": loaded.tensors, "parameters": loaded.num_parameters,
            "trained_for": loaded.trained_for, "max_positions": loaded.max_positions,
            "target": session.target.model.name, "agreement": check.agreement, "places": check.places,
            "reason": check.reason,
        })  # fmt: skip
        return
    out = Console()
    first, *rest = lines_of(loaded, check)
    for line in (first, f"{loaded.tensors} tensors, {loaded.num_parameters:,} parameters", *rest):
        out.print(line, soft_wrap=True)


inspect.__doc__ = HELP
