"""`specjax check-bits`."""

from __future__ import annotations

from typing import Annotated

import typer

from specjax.cli.options import common as o

HELP = """Ask this device whether a token's logits depend on the pass that it is in.

Plain decoding is compared, bit by bit, with passes over several tokens, with
trees, batches, larger caches and prompts. Where nothing differs, speculative
text is that of plain decoding exactly. Ends with 1 if something differs.
"""

TEXT = (
    "The sky is blue because the molecules of the air scatter short waves of light far more than long ones. In the "
    "evening the sun is low, and most of the blue light is lost on the long way through the air. What is left is red "
    "and orange. "
)


def check_bits(
    target: o.TargetOption = None,
    length: Annotated[int, typer.Option("--length", help="Tokens of the text that is read.")] = 140,
    plain: Annotated[bool, typer.Option("--without", help="Ask the model as it is without --same-bits.")] = False,
    dtype: o.DtypeOption = "bfloat16",
    cache_dtype: o.CacheDtypeOption = None,
    as_json: o.JsonOption = False,
    no_cache: o.NoCacheOption = False,
) -> None:
    from specjax.analysis import check_bits
    from specjax.cli.output.console import Console, print_json
    from specjax.cli.runs.session import open_session, stage

    least = 2 * max(check_bits.WIDTHS)
    o.require(length >= least, f"--length must be at least {least}, not {length}")
    o.require(plain or dtype != "float32", "--dtype float32 has no same bits; add --without to look at it as it is")
    log = Console(stderr=True)
    session = open_session(log, o.Models(target, None, dtype, no_cache, cache_dtype, same_bits=not plain))
    most = session.target.model.max_positions
    o.require(length <= most, f"--length {length} is more than the {most} tokens that the model reads")
    tokens = list(session.tokenizer.encode(TEXT * (1 + length // 20)))[:length]
    with stage(log, "comparing passes, for some minutes", "compared passes"):
        promises = check_bits.check_bits(
            session.target, tokens, progress=lambda name: log.print(f"  {name}", style="dim", highlight=False)
        )
    differ = [promise for promise in promises if promise.differ]
    if as_json:
        print_json({
            "target": session.target.model.name, "dtype": session.dtype, "same_bits": session.same_bits,
            "cache_dtype": session.cache_dtype, "holds": not differ, "promises": [p._asdict() for p in promises],
        })  # fmt: skip
    else:
        _show(promises)
    raise typer.Exit(1 if differ else 0)


def _show(promises) -> None:
    from rich.table import Table

    from specjax.cli.output.console import Console

    table = Table("compared with plain decoding", "tokens", "differ", "largest", "from")
    for p in promises:
        largest = f"{p.largest:.2g}" if p.differ else ""
        table.add_row(p.name, str(p.compared), str(p.differ) if p.differ else "none", largest, p.first or "")
    out = Console()
    out.print(table)
    holds = not any(p.differ for p in promises)
    out.print(
        "No bit differs: speculative text is that of plain decoding." if holds else "Texts may part at near-ties.",
        highlight=False,
    )


check_bits.__doc__ = HELP
