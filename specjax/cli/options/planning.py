"""Options and progress that `specjax compile` and `specjax plan` share."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from specjax.cli.options import common as o
from specjax.cli.options import completion, hosts
from specjax.cli.options.processing import FrequencyOption, PresenceOption, RepetitionOption
from specjax.cli.output.console import Console
from specjax.errors import UsageError, require

SHAPES = "a built-in config, a folder with config.json or a GGUF file; only shapes are read"
DRAFTS = f"Draft model: {SHAPES}; native: the target's own module"
TargetOption = Annotated[
    str, typer.Option("--target", help=f"Target model: {SHAPES}.", show_default=False, autocompletion=completion.config)
]
OptionalTargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        help=f"Target model: {SHAPES}. With --fits: one model instead of all built-in configs.",
        show_default=False,
        autocompletion=completion.config,
    ),
]
TopologyOption = Annotated[
    str,
    typer.Option("--topology", help="Chips: v5e:2x4, v6e:16x16, v5p:2x2x1, h200:1, h100:8.", show_default=False),
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft",
        help=f"{DRAFTS}.",
        show_default=False,
        autocompletion=completion.config,
    ),
]
HeadOption = Annotated[
    str | None,
    typer.Option(
        "--head",
        help="Draft head with its authors' shapes: eagle3, or eagle3:draft_vocab_size=8192.",
        show_default=False,
    ),
]
DraftsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--draft",
        help=f"{DRAFTS}. It can be repeated.",
        show_default=False,
        autocompletion=completion.config,
    ),
]
HeadsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--head",
        help="Draft head with its authors' shapes: eagle3, or eagle3:draft_vocab_size=8192. It can be repeated.",
        show_default=False,
    ),
]
DraftersOption = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        help="Drafter without a model to compare, with --acceptance. It can be repeated.",
        show_default=False,
        autocompletion=completion.words("drafters"),
    ),
]
BlockOption = Annotated[
    int | None,
    typer.Option(
        "--block",
        help="Block length of a diffusion model, in columns. Default: set by the model or the method.",
        show_default=False,
    ),
]
ContextOption = Annotated[int, typer.Option("--context", help="Prompt tokens in the cache.")]
DtypeOption = Annotated[
    str | None,
    typer.Option("--dtype", help="bfloat16 or float32. Default: bfloat16; plan --fits: both.", show_default=False),
]
DataOption = Annotated[int, typer.Option("--data", help="Number of devices that share the batch.")]
ModelOption = Annotated[
    int | None,
    typer.Option(
        "--model", help="Devices that share weights and heads. Default: all; plan: fastest.", show_default=False
    ),
]
LayerOption = Annotated[int, typer.Option("--layer", help="Layers that a layer-parallel drafter runs in parallel.")]
KeepQuantizedOption = Annotated[
    bool | None,
    typer.Option(
        "--keep-quantized/--no-keep-quantized",
        help="Keep the matrices of quantised files in their formats, which is the default; a built-in config such as "
        "gpt_oss_20b gets the formats of its published files with --keep-quantized only.",
        show_default=False,
    ),
]
NoCacheOption = Annotated[
    bool,
    typer.Option("--no-cache", envvar="SPECJAX_NO_CACHE", help="Compile again, and store nothing in the cache folder."),
]


@dataclass(frozen=True)
class ProgramOptions:
    """The shapes of the programs, their sampling, and the devices that share them."""

    batch_size: o.BatchOption = 1
    context: ContextOption = 1024
    dtype: DtypeOption = None
    cache_dtype: o.CacheDtypeOption = None
    quantize: o.QuantizeOption = None
    keep_quantized: KeepQuantizedOption = None
    data: DataOption = 1
    model: ModelOption = None
    layer: LayerOption = 1
    sequence: hosts.SequenceOption = 1
    expert: hosts.ExpertOption = 1
    temperature: o.TemperatureOption = 0.0
    top_k: o.TopKOption = None
    top_p: o.TopPOption = None
    min_p: o.MinPOption = None
    repetition_penalty: RepetitionOption = None
    presence_penalty: PresenceOption = None
    frequency_penalty: FrequencyOption = None
    no_cache: NoCacheOption = False

    @property
    def arguments(self) -> dict:
        """Return the arguments of `specjax.planning` functions."""
        renamed = {"batch": self.batch_size, "cache": not self.no_cache}
        omitted = {"batch_size", "no_cache"} | ({"dtype"} if self.dtype is None else set())
        return renamed | {name: value for name, value in vars(self).items() if name not in omitted}


def parse_widths(text: str) -> list[int]:
    """Return the numbers of --widths. Raises: UsageError for a text without them."""
    try:
        return [int(n) for n in text.split(",")]
    except ValueError:
        raise UsageError(f'--widths must be numbers joined by commas, such as 1,2,4,8, not "{text}"') from None


def check_stages(programs: ProgramOptions, unused: Mapping[str, Any]) -> None:
    """Raise a UsageError for a flag of `unused` that is set beside --stages, or for an axis of a mesh."""
    for flag, value in unused.items():
        is_unset = value is None or value in ([], ())
        require(is_unset, f"--stages counts target passes only and has no {flag}; leave one of them out")
    axes = {"--data": programs.data, "--layer": programs.layer, "--sequence": programs.sequence,
            "--expert": programs.expert, "--model": 1 if programs.model is None else 0}  # fmt: skip
    for flag, value in axes.items():
        require(value == 1, f"--stages divides the devices itself and has no {flag}; leave it out")


def without_mesh(programs: ProgramOptions) -> dict[str, Any]:
    """Return the arguments of a plan of stages, which has no mesh."""
    omitted = {"cache", "data", "model", "layer", "sequence", "expert"}
    return {name: value for name, value in programs.arguments.items() if name not in omitted}


@contextlib.contextmanager
def progress(log: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the program being compiled: a moving line on a terminal, else one line each."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("compiling {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=log, disable=not log.is_terminal, transient=True) as bar:
        task = bar.add_task("...", total=None)

        def notify(name: str) -> None:
            bar.update(task, description=name)
            if not log.is_terminal:
                log.print(f"compiling {name} ...", style="dim")

        yield notify


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)B", re.IGNORECASE)


def parse_bytes(text: str, flag: str) -> int:
    """Return the bytes of a size such as "16GiB" or "800 MB". Raises: UsageError that names the flag."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f'{flag} must be a number with a unit, such as 16GiB or 800MiB, not "{text}"')
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(prefix.upper()) + 1))
