"""`specjax compile`."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from specjax.catalog.defaults import IMAGE_PATCHES, NATIVE, NATIVE_METHOD
from specjax.cli.options import common as o
from specjax.cli.options import completion
from specjax.cli.options import planning as p
from specjax.cli.options.drafter_flags import read_settings
from specjax.cli.options.groups import with_groups
from specjax.errors import UsageError, require

HELP = """Compile a decode for TPUs or GPUs without one: memory, and estimates of the speed.

It needs the compiler (pip install 'specjax\\[tpu-compile]' for v5e:2x2 and
other TPUs, 'specjax\\[gpu-compile]' for h200:1 or h100:8), but no device and no
weights. --target and --draft are shapes only: a built-in config
(llama3_8b, smollm2_135m, ...), a folder with a config.json, or a GGUF file.
--draft native is the multi-token-prediction module of the target's own release
or files, and the default for a target that has one.

The report covers prefill, one step and the whole loop, per device: memory in
the compiler's layout (args + temps + out - alias), the minimum and the actual
memory traffic, FLOPs, collectives, and the time by two estimates. Roofline is
bytes over the published HBM bandwidth, FLOPs over the peak, and collectives;
it is a lower bound that ignores latency. Schedule is the TPU compiler's own
cycle count, an upper bound for programs of many small operations. For GPUs,
it is the bytes that the program moves, and the launches of its kernels and
loops; a table has their numbers. Neither is a measurement. docs/tpu.md and
docs/gpu.md explain their use.

For a diffusion model (llada_8b, sdar_4b, dream_7b, ...) there are three
programs: a pass, a pass that also updates the cache, and the whole loop. A
cache update can read a finished block together with the first pass over the
next one. The table has one row per number of columns that a pass decides. The
report names the largest array of logits, which should have the columns of a
window, not of the canvas.

--stages A:F compiles the attention part and the feed-forward part of the target
as two programs (Step-3, arXiv 2507.19427): the rows of one of A devices, and all
rows on F devices, for passes over --widths nodes. The table has the formulas of
`specjax plan --stages` beside both estimates.

A program that does not compile is a result (exit code 0), with the smallest
changes that compile. The table by acceptance rate assumes that each sibling
is accepted with this rate if the siblings before it were rejected.
"""


@with_groups
def compile_(
    target: p.TargetOption,
    topology: p.TopologyOption,
    programs: p.ProgramOptions,
    draft: p.DraftOption = None,
    head: p.HeadOption = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            help="A method of `specjax methods`. Default: that of --head; mtp with the target's own module; two_model "
            "with another --draft; sdar or llada for diffusion models; else autoregressive.",
            show_default=False,
            autocompletion=completion.words("drafters", "diffusion"),
        ),
    ] = None,
    block: p.BlockOption = None,
    tree: o.TreeOption = None,
    num_draft_tokens: o.NumDraftTokensOption = None,
    settings: o.SetOption = None,
    max_new_tokens: o.LengthOption = 128,
    same_bits: o.SameBitsOption = False,
    stages: Annotated[
        str | None,
        typer.Option(
            "--stages",
            help="Compile attention and feed-forward layers apart, for A:F devices, such as 1:1.",
            show_default=False,
        ),
    ] = None,
    widths: Annotated[
        str | None,
        typer.Option("--widths", help="Nodes per row in the passes of --stages. Default: 1,16.", show_default=False),
    ] = None,
    image_tiles: Annotated[
        int,
        typer.Option("--image-tiles", help="Tiles of images in each prompt; their vectors are a part of --context."),
    ] = 0,
    image_patches: Annotated[
        int, typer.Option("--image-patches", help="Patches of an image, for models that read images of any size.")
    ] = IMAGE_PATCHES,
    as_json: o.JsonOption = False,
) -> None:
    require(stages is not None or widths is None, "--widths applies only to --stages; leave it out, or add --stages")
    if stages is not None:
        drafting = {
            "--draft": draft, "--head": head, "--method": method, "--block": block, "--tree": tree,
            "--num-draft-tokens": num_draft_tokens, "--set": settings, "--image-tiles": image_tiles or None,
            "--image-patches": None if image_patches == IMAGE_PATCHES else image_patches,
        }  # fmt: skip
        p.check_stages(programs, drafting)
        sizes = {"max_new_tokens": max_new_tokens, "same_bits": same_bits}
        _show_stages(target, topology, programs, stages, "1,16" if widths is None else widths, sizes, as_json)
        return
    of_draft = draft and (NATIVE_METHOD if draft == NATIVE else "two_model")
    named = method or (head and head.partition(":")[0]) or of_draft
    options = read_settings(settings, named or _default_method(target)) if settings else {}

    from specjax.cli.output.console import Console, print_json
    from specjax.planning import compile_report
    from specjax.planning.reports.tables import show_report

    log = Console(stderr=True)
    with p.progress(log) as notify:
        report = compile_report(
            target, topology, draft=draft, head=head, method=method, block=block, tree=tree,
            num_draft_tokens=num_draft_tokens, options=options, max_new_tokens=max_new_tokens, same_bits=same_bits,
            image_tiles=image_tiles, image_patches=image_patches, on_step=notify, **programs.arguments,
        )  # fmt: skip
    if as_json:
        print_json(report.to_json())
    else:
        show_report(report, Console())


def _show_stages(
    target: str, topology: str, programs: p.ProgramOptions, stages: str, widths: str, sizes: dict, as_json: bool
) -> None:
    """Compile and print the stages. Raises: UsageError for a text that is not two numbers of devices."""
    match = re.fullmatch(r"(\d{1,6}):(\d{1,6})", stages)
    if match is None:
        raise UsageError(f'--stages must be two numbers of devices, such as 2:6, not "{stages}"')

    from specjax.cli.output.console import Console, print_json
    from specjax.planning.stages import compile_stage_passes
    from specjax.planning.stages.table import show_compiled_stages

    with p.progress(Console(stderr=True)) as notify:
        result = compile_stage_passes(
            target, topology, widths=p.parse_widths(widths), split=(int(match[1]), int(match[2])), on_step=notify,
            **p.without_mesh(programs), cache=not programs.no_cache, **sizes,
        )  # fmt: skip
    if as_json:
        print_json(result.to_json())
    else:
        show_compiled_stages(result, Console())


def _default_method(target: str) -> str:
    """Return the method of a run without flags for drafting."""
    from specjax.planning.inputs.denoiser_inputs import default_method
    from specjax.planning.inputs.model_configs import load_config, load_denoiser_settings
    from specjax.planning.inputs.native_heads import has_default_native

    settings = load_denoiser_settings(target)
    if settings is not None:
        return default_method(settings)
    has_module = has_default_native(target, load_config(target, "bfloat16"))
    return NATIVE_METHOD if has_module else "autoregressive"


compile_.__doc__ = HELP
