"""`specjax check-bits`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from specjax.cli.options import common as o
from specjax.errors import require

if TYPE_CHECKING:
    from specjax.analysis.check_bits import BitPromise

HELP = """Check whether the logits of a token depend on its pass, on this device.

Plain decoding is compared, bit by bit, with passes over several tokens, with
trees, batches, larger caches and prompts. If no bit differs, speculative text
is exactly that of plain decoding. The exit code is 1 if a bit differs.
"""

TEXT = (
    "The sky is blue because the molecules of the air scatter short waves of light far more than long ones. In the "
    "evening the sun is low, and most of the blue light is lost on the long way through the air. What is left is red "
    "and orange. "
)


def check_bits(
    target: o.TargetOption = None,
    length: Annotated[int, typer.Option("--length", help="Length of the text, in tokens.")] = 140,
    plain: Annotated[bool, typer.Option("--without", help="Check the model without --same-bits.")] = False,
    dtype: o.DtypeOption = "bfloat16",
    cache_dtype: o.CacheDtypeOption = None,
    quantize: o.QuantizeOption = None,
    keep_quantized: o.KeepQuantizedOption = None,
    as_json: o.JsonOption = False,
    no_cache: o.NoCacheOption = False,
) -> None:
    from specjax.analysis import check_bits
    from specjax.cli.options.groups import ModelOptions
    from specjax.cli.output.console import Console, print_json
    from specjax.cli.runs.environment import stage
    from specjax.cli.runs.session import open_session
    from specjax.numerics.same_bits import SameBitsError

    o.check_minimum("--length", length, 2 * max(check_bits.WIDTHS))
    require(plain or dtype != "float32", "--dtype float32 has no --same-bits; add --without to check it without")
    log = Console(stderr=True)
    models = ModelOptions(
        target, None, dtype, no_cache, cache_dtype, same_bits=not plain, quantize=quantize,
        keep_quantized=keep_quantized,
    )  # fmt: skip
    try:
        session = open_session(log, models)
    except SameBitsError as error:  # the flag that the error names by default is not a flag of this command
        fix = "add --without to check the model without it"
        raise SameBitsError(error.reason, "--same-bits", fix) from None
    limit = session.target.model.max_positions
    require(length <= limit, f"--length must be at most {limit}, the model's limit, not {length}")
    tokens = list(session.tokenizer.encode(TEXT * (1 + length // 20)))[:length]
    with stage(log, "comparing passes, for some minutes", "compared passes"):
        promises = check_bits.check_bits(
            session.target, tokens, progress=lambda name: log.print(f"  {name}", style="dim", highlight=False)
        )
    holds = not any(promise.differ for promise in promises)
    if as_json:
        print_json({
            "target": session.target.model.name, "dtype": session.dtype, "same_bits": session.same_bits,
            "cache_dtype": session.cache_dtype, "quantize": session.quantize,
            "holds": holds, "promises": [p._asdict() for p in promises],
        })  # fmt: skip
    else:
        _show(promises, holds)
    raise typer.Exit(0 if holds else 1)


def _show(promises: Sequence[BitPromise], holds: bool) -> None:
    """Print the table of all comparisons."""
    from rich.table import Table

    from specjax.cli.output.console import Console

    table = Table("compared with plain decoding", "tokens", "differ", "largest", "from")
    for p in promises:
        largest = f"{p.largest:.2g}" if p.differ else ""
        table.add_row(p.name, str(p.compared), str(p.differ) if p.differ else "none", largest, p.first or "")
    out = Console()
    out.print(table)
    verdict = "No bit differs: speculative text equals plain decoding." if holds else "Texts may differ at near-ties."
    out.print(verdict, highlight=False)


check_bits.__doc__ = HELP
