"""`specjax inspect`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from specjax.cli.options import common as o
from specjax.cli.options import vllm_sglang_flags as s
from specjax.errors import require

if TYPE_CHECKING:
    from specjax.cli.runs.session import Session

HELP = """Show the kind and format of a draft head, and its agreement with the target.

A head that is read wrongly drafts slowly, but the text stays right, because
every draft is verified. Only the agreement shows the error. It is measured for
four drafts in a row, because some errors show only in the later ones. If it is
low or falls steeply, the report names the most likely cause and the --head-set
that mends it.
"""


def inspect(
    head: Annotated[str, typer.Argument(help="The draft head: a hub id or a folder.", show_default=False)],
    target: o.TargetOption = None,
    token_map: s.MapOption = None,
    head_set: o.HeadSetOption = None,
    dtype: o.DtypeOption = "auto",
    quantize: o.QuantizeOption = None,
    keep_quantized: o.KeepQuantizedOption = None,
    as_json: o.JsonOption = False,
    no_cache: o.NoCacheOption = False,
) -> None:
    from specjax.cli.options.drafter_flags import find_head_kind
    from specjax.cli.options.groups import ModelOptions
    from specjax.cli.output.console import Console, print_json
    from specjax.cli.runs.session import describe_head, describe_length, open_session

    require(
        find_head_kind(head, "HEAD") is not None,
        f"HEAD {head} is not a draft head of a known kind, or there is no such folder",
    )
    models = ModelOptions(
        target, head, dtype, no_cache, head_set=head_set, quantize=quantize, keep_quantized=keep_quantized
    )
    quiet = Console(stderr=True, quiet=True)
    session = open_session(quiet, models, has_head=True, token_map=token_map, flag="HEAD")
    loaded, check = session.head, session.check
    assert loaded is not None and check is not None
    if as_json:
        print_json(_document(session))
        return
    out = Console()
    first, *more = describe_head(loaded, check) + describe_length(loaded, session.target)
    for line in (first, f"{loaded.tensors} tensors, {loaded.num_parameters:,} parameters", *more):
        out.print(line, soft_wrap=True)


def _document(session: Session) -> dict[str, Any]:
    """Return the head and its agreement as JSON."""
    head, check = session.head, session.check
    assert head is not None and check is not None
    return {
        "kind": head.kind, "dialect": head.dialect, "flags": dict(head.flags), "notes": [*head.notes, *head.warnings],
        "unused": list(head.unused), "tensors": head.tensors, "parameters": head.num_parameters,
        "trained_for": head.trained_for, "max_positions": head.max_positions, "target": session.target.model.name,
        "agreement": check.agreement, "agreement_by_depth": list(check.depths), "places": check.places,
        "reason": check.reason,
    }  # fmt: skip


inspect.__doc__ = HELP
