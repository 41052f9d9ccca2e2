"""Flags of `specjax train` about the head or draft model that training starts from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from specjax.cli.options import common as o
from specjax.cli.options import completion

PART_NAMES = (
    "dynamax", "first", "lora_drop", "matformer", "s2d", "lud", "ceed_vla", "hamburger_decoding", "learn2pd",
    "dparallel", "deer", "diffuspec", "failfast", "specdec++", "spec_kv", "judge", "arbitrage",
)  # fmt: skip
"""The keys of `specjax.training.parts.PARTS`, which imports JAX."""


@dataclass(frozen=True)
class StartOptions:
    """The head or draft model that training starts from."""

    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            help="A kind of head, see `specjax methods`; two_model for a draft model; or a method with trained parts: "
            f"{', '.join(PART_NAMES[:-1])} or {PART_NAMES[-1]}. Default: the kind of --draft, or eagle3.",
            show_default=False,
            autocompletion=completion.words("heads", more=["two_model", *PART_NAMES]),
        ),
    ] = None
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            help="Head to continue from (native: the module in the files of the target), or draft model of --method "
            "two_model.",
            show_default=False,
        ),
    ] = None
    head_set: o.HeadSetOption = None
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers",
            help="Layers of the target from which a draft model is initialized, such as 0,1,28,29.",
            show_default=False,
        ),
    ] = None
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            help="Recipe of a draft model: distillspec, direct_alignment, fastdraft or fastdraft_pretraining; default: "
            "distillspec.",
            show_default=False,
        ),
    ] = None
    on_policy: Annotated[
        float | None,
        typer.Option(
            "--on-policy",
            help="Share of the steps in which a draft model trains on its own responses (DistillSpec).",
            show_default=False,
        ),
    ] = None
    start: Annotated[
        str | None,
        typer.Option(
            "--start",
            help="Initial parameters of a new head: target (default), random, or another head of any kind. They are "
            "copied where the shapes match.",
            show_default=False,
        ),
    ] = None
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            help="Change of the head's config: NAME=NUMBER, embeds=no, norm_taps=each, or taps=2+15+27 (layers of the "
            "target whose hidden states the head reads). Repeatable.",
            show_default=False,
        ),
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Option NAME=VALUE of a method with trained parts, such as steps=300 or reward=FOLDER. Repeatable.",
            show_default=False,
        ),
    ] = None
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            "--draft-vocab", help="Size of a draft vocabulary of the most frequent tokens.", show_default=False
        ),
    ] = None
