"""Flags of `specjax train` about the texts to train on and to measure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from specjax.cli.options import common as o


@dataclass(frozen=True)
class TextOptions:
    """The texts to train on and to measure."""

    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            "--prompts",
            help="File of prompts: one per line, or JSON with prompts or conversations, of which the target answers "
            "all turns. Repeatable.",
            show_default=False,
        ),
    ] = None
    own_prompts: Annotated[
        int,
        typer.Option(
            "--own-prompts", help="Number of prompts that the target writes itself, by continuing an empty chat."
        ),
    ] = 0
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            "--texts",
            help="File of texts to train on instead of responses: one per line, or JSON with texts or conversations, "
            "of which only the answers are trained. Repeatable.",
            show_default=False,
        ),
    ] = None
    answers: Annotated[
        Path | None,
        typer.Option(
            "--answers", help="Folder of responses that runs share; default: OUT/answers.", show_default=False
        ),
    ] = None
    system: o.SystemOption = None
    template_args: o.TemplateArgsOption = None
    temperature: o.TemperatureOption = 0.0
    max_new_tokens: o.LengthOption = 256
    held_out: Annotated[
        int,
        typer.Option(
            "--held-out",
            help="Number of prompts that are not trained on. Half of them select the best head, and the others "
            "measure it.",
        ),
    ] = 16
    batch_size: Annotated[
        int, typer.Option("--batch-size", help="Number of prompts whose responses are generated together.")
    ] = 16
