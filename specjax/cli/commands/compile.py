"""`specjax compile`."""

from __future__ import annotations

from typing import Annotated

import typer

from specjax.cli.options import common as o
from specjax.cli.options import completion
from specjax.cli.options import planning as p
from specjax.cli.options.drafter_flags import read_settings

HELP = """Compile a decode for TPUs that are not here: does it fit, how fast might it be.

Needs the TPU compiler (pip install 'specjax\\[tpu-compile]'), but no TPU and no
weights: --target and --draft are shapes only, of a built-in config
(llama3_8b, smollm2_135m, ...), a folder with a config.json or a GGUF file.

For prefill, one step and the whole loop, per device: memory as the compiler
lays it out (args + temps + out - alias), what must move at least and what
does, FLOPs, collectives, and the time by two clocks. Roofline: bytes over
the published HBM bandwidth, FLOPs over the peak, and collectives; a lower
bound, which sees no waiting. Schedule: the compiler's own cycles; an upper one
for programs of many small pieces. Neither is a measurement; docs/tpu.md says
which to believe for what.

Of a diffusion model (llada_8b, sdar_4b, dream_7b, ...) the programs are a
pass, one that also renews what is kept, such as the pass over a finished
block that is fused with the first one over the next, and the whole loop; the
table is by columns that a pass decides, and the largest array of logits is
named, which should have a window's columns and not a canvas'.

What does not compile is a result (exit code 0), with the smallest changes
that do. The table by acceptance counts the siblings of a tree as accepted
with the same chance, one after another.
"""


def compile_(
    target: p.TargetOption,
    topology: p.TopologyOption,
    draft: p.DraftOption = None,
    head: p.HeadOption = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            help="Of `specjax methods`; default: that of --head, two_model with --draft, of diffusion models sdar or "
            "llada.",
            show_default=False,
            autocompletion=completion.words("drafters", "diffusion"),
        ),
    ] = None,
    block: p.BlockOption = None,
    tree: o.TreeOption = None,
    num_draft_tokens: o.BudgetOption = None,
    settings: o.SetOption = None,
    batch_size: o.BatchOption = 1,
    context: p.ContextOption = 1024,
    max_new_tokens: o.LengthOption = 128,
    dtype: p.DtypeOption = "bfloat16",
    cache_dtype: o.CacheDtypeOption = None,
    same_bits: o.SameBitsOption = False,
    temperature: o.TemperatureOption = 0.0,
    data: p.DataOption = 1,
    model: p.ModelOption = None,
    layer: p.LayerOption = 1,
    sequence: p.SequenceOption = 1,
    as_json: o.JsonOption = False,
    no_cache: p.NoCacheOption = False,
) -> None:
    named = method or (head and head.partition(":")[0]) or (draft and "two_model")
    options = read_settings(settings, named or _default_method(target)) if settings else {}

    from specjax.cli.output.console import Console, print_json
    from specjax.planning import compile_report
    from specjax.planning.reports.tables import show_report

    log = Console(stderr=True)
    with p.progress(log) as notify:
        report = compile_report(
            target, topology, draft=draft, head=head, method=method, block=block, tree=tree,
            num_draft_tokens=num_draft_tokens, options=options, batch=batch_size, context=context,
            max_new_tokens=max_new_tokens, dtype=dtype, cache_dtype=cache_dtype, same_bits=same_bits,
            temperature=temperature, data=data, model=model, layer=layer, sequence=sequence, cache=not no_cache,
            on_step=notify,
        )  # fmt: skip
    if as_json:
        print_json(report.to_json())
    else:
        show_report(report, Console())


def _default_method(target: str) -> str:
    """Where nothing is said of drafts."""
    from specjax.planning.inputs.denoiser_inputs import default_method
    from specjax.planning.inputs.model_configs import load_denoiser_settings

    reading = load_denoiser_settings(target)
    return "autoregressive" if reading is None else default_method(reading)


compile_.__doc__ = HELP
