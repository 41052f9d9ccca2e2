"""Options and progress that `specjax compile` and `specjax plan` share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from specjax.cli.options import completion
from specjax.cli.output.console import Console

SHAPES = "a built-in config, a folder with config.json or a GGUF file; shapes only"
TargetOption = Annotated[
    str, typer.Option("--target", help=f"The model: {SHAPES}.", show_default=False, autocompletion=completion.config)
]
TopologyOption = Annotated[
    str, typer.Option("--topology", help="The chips: v5e:2x4, v6e:16x16, v5p:2x2x1, ...", show_default=False)
]
DraftOption = Annotated[
    str | None,
    typer.Option("--draft", help=f"The draft model: {SHAPES}.", show_default=False, autocompletion=completion.config),
]
HeadOption = Annotated[
    str | None,
    typer.Option(
        "--head",
        help="A learned head as its authors train it: eagle3, or eagle3:draft_vocab_size=8192.",
        show_default=False,
    ),
]
BlockOption = Annotated[
    int | None,
    typer.Option(
        "--block",
        help="Columns of a block of a diffusion model; default: the model's own, or the method's.",
        show_default=False,
    ),
]
ContextOption = Annotated[int, typer.Option("--context", help="Tokens of the prompt, which a step finds in the cache.")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="bfloat16 or float32.")]
DataOption = Annotated[int, typer.Option("--data", help="Devices that the batch is split over.")]
ModelOption = Annotated[
    int | None,
    typer.Option("--model", help="Devices that weights and heads are split over; default: all.", show_default=False),
]
LayerOption = Annotated[int, typer.Option("--layer", help="Layers that a layer-parallel drafter runs at once.")]
SequenceOption = Annotated[int, typer.Option("--sequence", help="Devices that the cache's slots are split over.")]
NoCacheOption = Annotated[
    bool,
    typer.Option("--no-cache", envvar="SPECJAX_NO_CACHE", help="Compile anew; keep nothing in the cache folder."),
]


@contextlib.contextmanager
def progress(log: Console) -> Iterator[Callable[[str], None]]:
    """A function that shows what is being compiled: a moving line on a terminal, else one line each."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("compiling {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=log, disable=not log.is_terminal, transient=True) as bar:
        task = bar.add_task("...", total=None)

        def notify(name: str) -> None:
            bar.update(task, description=name)
            if not log.is_terminal:
                log.print(f"compiling {name} ...", style="dim")

        yield notify
