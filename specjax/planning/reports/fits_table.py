"""The table of what fits on chips."""

from __future__ import annotations

from specjax.files.sizes import gib, gib_cell
from specjax.planning.inputs.topologies import parse_topology
from specjax.planning.memory import RESERVED
from specjax.planning.reports.fits import MAX_PASS_COST, Fits, ModelFit
from specjax.planning.reports.tables import LARGEST, describe_fraction, milliseconds


def show_fits(fits: Fits, out) -> None:
    """Print a row for each model and dtype or scheme on a rich console."""
    from rich import box
    from rich.table import Table

    write = lambda text, **style: out.print(text, highlight=False, markup=False, soft_wrap=True, **style)
    cache = f", {fits.cache_dtype} cache" if fits.cache_dtype else ""
    write(
        f"{fits.topology}, {gib(fits.device_bytes)} per device; batch {fits.batch}, prompts of {fits.context} and "
        f"texts of {fits.max_new_tokens} tokens{cache}"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("model", no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    for heading in ("size\nGiB", "needed\nGiB", "fits", "longest\nprompt", "tree\nnodes", "roof-\nline\nms"):
        table.add_column(heading, justify="right")
    for model in fits.models:
        nodes = "--" if model.num_nodes is None else str(model.num_nodes or "--")
        table.add_row(
            model.target, _kind(model), gib_cell(model.weights_bytes),
            gib_cell(model.needed_bytes),
            "no" if model.reason else "yes", f"{model.largest_context:,}" if model.largest_context else "--", nodes,
            "--" if model.reason else milliseconds(model.step_seconds), style="yellow" if model.reason else "",
        )  # fmt: skip
    out.print(table)
    if len({model.target for model in fits.models}) == 1:
        for model in fits.models:
            if model.reason:
                write(f"{model.target} in {_kind(model)} does not fit: {model.reason}", style="yellow")
    if any(model.module_bytes for model in fits.models):
        names = dict.fromkeys(model.target for model in fits.models if model.module_bytes)
        write(
            f"with its own module, which drafts too (without: --method autoregressive): {', '.join(names)}", style="dim"
        )
    if any(model.scheme for model in fits.models):
        write("int8, int8-weights, int4-weights, fp8: schemes of --quantize, other parts in bfloat16", style="dim")
    for formats in dict.fromkeys(model.formats for model in fits.models if model.formats):
        write(
            f"file: the formats in which the file stores its matrices ({formats}), other parts in the dtype",
            style="dim",
        )
    if parse_topology(fits.topology).chip.platform == "gpu":
        write(f"{describe_fraction(LARGEST)}, for the memory of this table", style="dim")
    write(
        f"estimates from shapes, with {RESERVED:.1%} of the memory left free; to check one with the compiler: specjax "
        f"compile --target MODEL --topology {fits.topology}\ntree: largest number of nodes at this prompt whose pass "
        f"costs at most {MAX_PASS_COST} passes over one token; diffusion models draft no tree",
        style="dim",
    )


def _kind(model: ModelFit) -> str:
    """Return the dtype of a row, its scheme, or "file" with the dtype of the other parts."""
    return model.scheme or (f"file, {model.dtype}" if model.formats else model.dtype)
