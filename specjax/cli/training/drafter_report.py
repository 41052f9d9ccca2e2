"""The report of `specjax train --report`: memory and speed of a training step on other chips."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from specjax.cli.options.planning import progress
from specjax.cli.output.console import Console, print_json
from specjax.cli.training.drafter_flags import DrafterFlags
from specjax.errors import UsageError, require
from specjax.models.heads.kinds import format_changes
from specjax.planning import training_report
from specjax.planning.reports.tables import show_training
from specjax.training.pipeline import DRAFT_MODEL


def check_report(flags: SimpleNamespace, drafter: DrafterFlags) -> None:
    """Raise a UsageError for flags that a report cannot use."""
    require(not flags.distributed, "--report runs on this host alone; leave --distributed out")
    require(flags.max_positions is None, "--report is about steps of --length tokens; leave --max-positions out")
    unloaded = flags.quantize is None and flags.keep_quantized is None
    require(unloaded, "--report loads no weights; leave --quantize and --keep-quantized out")
    require(drafter.kind != DRAFT_MODEL, f"--report is about heads, not --method {DRAFT_MODEL}; leave one out")
    require(
        drafter.head_kind is None,
        "--report needs no parameters, and --draft is a head with parameters; leave one out",
    )


def print_report(flags: SimpleNamespace, drafter: DrafterFlags) -> None:
    """Compile a training step, and print its memory and speed."""
    changes = ",".join(format_changes(drafter.head_options))
    axes: dict[str, Any] = {
        name: getattr(flags, name) for name in ("data", "model") if getattr(flags, name) is not None
    }
    with progress(Console(stderr=True)) as notify:
        try:
            result = training_report(
                flags.target or "smollm2_135m", flags.report,
                head=f"{drafter.kind}:{changes}" if changes else drafter.kind, rows=flags.rows, length=flags.length,
                accumulate=flags.accumulate, chunk=flags.chunk, recipe=drafter.recipe,
                dtype="bfloat16" if flags.dtype == "auto" else flags.dtype, on_step=notify, **axes,
            )  # fmt: skip
        except UsageError as error:
            raise UsageError(str(error).replace("--topology", "--report")) from None
    if flags.as_json:
        print_json(result.to_json())
    else:
        show_training(result, Console())
