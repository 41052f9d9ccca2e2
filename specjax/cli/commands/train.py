"""The command `specjax train`. It parses flags for `specjax.training.train_drafter` and `specjax.training.parts`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from specjax.cli.options import common as o
from specjax.cli.options import hosts
from specjax.cli.options.groups import ModelOptions, flag_values, with_groups
from specjax.cli.training.loop_options import LoopOptions
from specjax.cli.training.start_options import StartOptions
from specjax.cli.training.text_options import TextOptions
from specjax.files.homes import in_home

HELP = """Train a drafter for a target, on responses of the target itself.

specjax first generates responses to the prompts, at --temperature. It should
be the temperature of later decoding. The responses are stored in OUT/answers,
and later runs reuse them. Some prompts are held out. Every few steps the head
is measured on half of them, in tokens per target pass of a chain at the same
temperature, as `specjax generate` counts them. The best head is kept, and
measured on the other half.

OUT gets the head (`specjax generate --draft OUT`), history.jsonl, and a plot
of the run. Repeat an interrupted command to resume it from its last
measurement, bit for bit. Ctrl-C keeps the best head so far.

Responses of chat models follow their template. Only responses are trained on.
Files of ShareGPT and OpenAI have conversations: --prompts FILE has the target
answer every turn, and --texts FILE trains on the answers that are given.

--draft HEAD continues from a trained head, on your own texts. --method
two_model trains a draft model. It starts from the model of --draft, or from
some of the target's layers (--layers). OUT is then a model folder in the
Hugging Face layout.
"""


@with_groups
def train(
    *,
    target: o.TargetOption = None,
    begin: StartOptions,
    text: TextOptions,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the head.", show_default=False)] = None,
    target_name: Annotated[
        str | None,
        typer.Option(
            "--target-name",
            help="Name of the target in the head's config, by which other engines load it; default: the hub id or the "
            "path of --target.",
            show_default=False,
        ),
    ] = None,
    loop: LoopOptions,
    report: Annotated[
        str | None,
        typer.Option(
            "--report",
            help="Chips such as v5e:2x4. Compiles a training step for them, reports memory and speed, and trains "
            "nothing. --target then needs no weights, as for `specjax compile`.",
            show_default=False,
        ),
    ] = None,
    dtype: o.DtypeOption = "auto",
    max_positions: o.PositionsOption = None,
    quantize: o.QuantizeOption = None,
    keep_quantized: o.KeepQuantizedOption = None,
    host: hosts.HostOptions,
    as_json: o.JsonOption = False,
    no_cache: o.NoCacheOption = False,
) -> None:
    values = {
        "target": target, "out": out, "target_name": target_name, "report": report, "dtype": dtype,
        "max_positions": max_positions, "quantize": quantize, "keep_quantized": keep_quantized,
        "as_json": as_json, "no_cache": no_cache,
        **flag_values(begin, text, loop, host),
    }  # fmt: skip
    flags = SimpleNamespace(**{name: _in_home(value) for name, value in values.items()})
    from specjax.cli.training import part_flags

    if part_flags.is_part(flags.method):
        from specjax.cli.training.part_run import run_part

        run = part_flags.read_part(flags, (begin, text, loop, host))
        run_part(run.flags, run.models, as_json=as_json)
    else:
        _train_drafter(flags, values, host)


train.__doc__ = HELP


def _train_drafter(flags: SimpleNamespace, values: dict[str, Any], host: hosts.HostOptions) -> None:
    """Train a head or draft model, or print the report of a step. values: the values of all flags as they were set."""
    from specjax.cli.training import drafter_flags, drafter_report, drafter_run

    drafter = drafter_flags.read_drafter(flags)
    if flags.report is not None:
        drafter_report.check_report(flags, drafter)
        hosts.join(values)
        drafter_report.print_report(flags, drafter)
        return
    models = ModelOptions(
        flags.target, flags.draft, flags.dtype, flags.no_cache, max_positions=flags.max_positions,
        head_set=flags.head_set, template_args=flags.template_args, quantize=flags.quantize,
        keep_quantized=flags.keep_quantized,
    )  # fmt: skip
    has_head = drafter.head_kind is not None
    models.check_head(has_head)
    training = drafter_flags.read_training(flags, drafter)
    hosts.join(values)
    mesh = hosts.make_mesh(host)
    drafter_run.run_training(training, models, mesh, has_head=has_head, as_json=flags.as_json)


def _in_home(value: Any) -> Any:
    """Return a path, or a list of paths, with the folder of the user in place of ~. Other values stay."""
    if isinstance(value, list):
        return [_in_home(entry) for entry in value]
    return in_home(value) if isinstance(value, Path) else value
