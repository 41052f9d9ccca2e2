"""Flags of `specjax train` about the training loop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from specjax.cli.options import common as o


@dataclass(frozen=True)
class LoopOptions:
    """The training loop."""

    epochs: Annotated[int, typer.Option("--epochs", help="Passes over all responses.")] = 1
    learning_rate: Annotated[
        float | None,
        typer.Option(
            "--learning-rate",
            help="Learning rate. Default: that of the method and the optimizer. Muon's is ten times AdamW's.",
            show_default=False,
        ),
    ] = None
    optimizer: Annotated[
        str | None, typer.Option("--optimizer", help="adamw or muon; default: that of the method.", show_default=False)
    ] = None
    loss: Annotated[
        str | None,
        typer.Option(
            "--loss",
            help="ce, soft_ce, kl, rkl, jsd, tv, tvd++, nla, lk_hybrid, or a sum such as ce=0.1,tv=0.9; default: that "
            "of the method.",
            show_default=False,
        ),
    ] = None
    freeze: Annotated[
        list[str] | None,
        typer.Option(
            "--freeze",
            help="Parameters that are not trained, such as head or layers/0. Repeatable.",
            show_default=False,
        ),
    ] = None
    depths: Annotated[
        int | None,
        typer.Option(
            "--depths",
            help="Drafted tokens per round of training; default: all that the head drafts, or the authors' number.",
            show_default=False,
        ),
    ] = None
    rows: Annotated[int, typer.Option("--rows", help="Rows of a training batch.")] = 4
    length: Annotated[int, typer.Option("--length", help="Tokens per row.")] = 512
    accumulate: Annotated[
        int,
        typer.Option(
            "--accumulate",
            help="Batches whose gradients are added in one step, which is that of so many times --rows in less memory.",
        ),
    ] = 1
    chunk: Annotated[
        int | None,
        typer.Option(
            "--chunk",
            help="Positions of a row whose logits are computed at a time. Small values need less memory and more time.",
            show_default=False,
        ),
    ] = None
    keep_states: Annotated[
        float | None,
        typer.Option(
            "--keep-states",
            help="Size limit in GiB. The target then runs over the responses once, and its activations are cached in "
            "bfloat16 for later epochs. Without the flag it runs in every epoch.",
            show_default=False,
        ),
    ] = None
    states: Annotated[
        Path | None,
        typer.Option(
            "--states",
            help="Folder of the cached activations; default: OUT/states. Several runs can share it, also with more "
            "responses, if their heads read the same layers of the target.",
            show_default=False,
        ),
    ] = None
    every: Annotated[int, typer.Option("--every", help="Steps between measurements.")] = 50
    patience: Annotated[
        int | None,
        typer.Option(
            "--patience", help="Training stops after this many measurements without improvement.", show_default=False
        ),
    ] = None
    budgets: Annotated[
        str | None,
        typer.Option(
            "--budgets",
            help="At least 3 numbers of response tokens, such as 20000,40000,80000. Trains once per budget and fits a "
            "scaling law (Scylla). The last head is kept.",
            show_default=False,
        ),
    ] = None
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-draft-tokens",
            help="Length of the measured chain; default: 3, or the limit of the head.",
            show_default=False,
        ),
    ] = None
    seed: o.SeedOption = 0
