"""`specjax quantize`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from specjax.catalog.schemes import SCHEME_NAMES, check_scheme
from specjax.cli.options import common as o
from specjax.cli.options import completion
from specjax.cli.options.groups import with_groups
from specjax.errors import require
from specjax.files.homes import in_home

HELP = """Write a quantised model as a folder, and measure what quantisation changes.

specjax quantize MODEL OUT rounds the matrices of MODEL to few bits. OUT is a
Hugging Face folder in the format compressed-tensors: config.json, weights and
tokenizer. specjax loads it with the same values. Embedding and output layer
are quantised too, which other libraries may not read. The schemes are those
of --quantize: int8, int8-weights, int4-weights and fp8.

specjax quantize --evaluate TEXTFILE MODEL prints perplexity and bytes of the
model and of each --scheme. The text is cut into windows that are read alone.
The ratio is the perplexity relative to that of the unquantised model.
"""


@dataclass(frozen=True)
class EvaluationOptions:
    """The measurement of a model on a text."""

    evaluate: Annotated[
        Path | None,
        typer.Option(
            "--evaluate",
            help="Text file, on which the model is measured with and without quantisation.",
            show_default=False,
        ),
    ] = None
    window: Annotated[
        int | None,
        typer.Option(
            "--window",
            help="Tokens per window of the text, whose first one is not scored. Default: 512, or the model's limit.",
            show_default=False,
        ),
    ] = None
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Tokens of the text to read. Default: all.", show_default=False)
    ] = None

    def __post_init__(self):
        o.check_minimum("--window", self.window, 2)
        o.check_minimum("--max-tokens", self.max_tokens, 2)
        require(
            self.evaluate is not None or self.max_tokens is None,
            "--max-tokens is about the text of --evaluate; add --evaluate TEXTFILE, or leave it out",
        )


@with_groups
def quantize(
    evaluation: EvaluationOptions,
    model: Annotated[str, typer.Argument(help=f"The model: {o.MODEL_HELP}.", show_default=False)],
    out: Annotated[
        Path | None, typer.Argument(help="Folder of the quantised model. Optional with --evaluate.", show_default=False)
    ] = None,
    scheme: Annotated[
        list[str] | None,
        typer.Option(
            "--scheme",
            help=f"Scheme: {', '.join(SCHEME_NAMES)}. Repeatable with --evaluate. Default: int8.",
            show_default=False,
            autocompletion=completion.one_of(*SCHEME_NAMES),
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            help="float32 or bfloat16: dtype of the parts that are not quantised, and of the measurement.",
            autocompletion=completion.one_of("float32", "bfloat16"),
        ),
    ] = "float32",
    as_json: o.JsonOption = False,
    no_cache: o.NoCacheOption = False,
) -> None:
    schemes = list(dict.fromkeys(scheme or ["int8"]))
    for name in schemes:
        check_scheme(name, "--scheme")
    require(dtype in ("float32", "bfloat16"), f'--dtype must be float32 or bfloat16, not "{dtype}"')
    require(
        out is not None or evaluation.evaluate is not None,
        "OUT is missing; name the folder of the quantised model, or add --evaluate TEXTFILE to measure it only",
    )
    require(
        out is None or len(schemes) == 1,
        f"OUT is the folder of one model, and --scheme is given for {len(schemes)}; give one, or leave OUT out",
    )
    from specjax.cli.output.console import Console, print_json
    from specjax.cli.output.files import read_text
    from specjax.cli.runs.environment import describe_command, use_compilation_cache
    from specjax.persistence.cards import describe_machine

    text = None if evaluation.evaluate is None else read_text(evaluation.evaluate, "--evaluate")
    if text is not None:
        _check_perplexity(model)
    log = Console(stderr=True)
    document: dict[str, Any] = {**describe_command(), "model": model, "dtype": dtype}
    use_compilation_cache(not no_cache)
    if out is not None:
        document["written"] = _write(model, in_home(out), schemes[0], dtype, log)
    if text is not None:
        document |= {"text": str(evaluation.evaluate), "machine": describe_machine()}
        document["evaluation"] = _evaluate(model, text, schemes, dtype, evaluation, log)
    if as_json:
        print_json(document)
    else:
        _show(document, Console())


quantize.__doc__ = HELP


def _check_perplexity(source: str) -> None:
    """Raise a UsageError for a diffusion model, which has no probability of a token after those before it."""
    from specjax.models.loading import is_diffusion

    require(
        not is_diffusion(source),
        f"--evaluate measures perplexity from left to right, and {source} is a diffusion model; leave --evaluate out",
    )


def _write(source: str, out: Path, scheme: str, dtype: str, log: Any) -> dict[str, Any]:
    """Write the folder of a quantised model. Return its sizes."""
    import specjax
    from specjax.cli.runs.environment import stage
    from specjax.models import loading
    from specjax.models.loading.formats.hf import SAFETENSORS_FILE
    from specjax.models.storage import num_bytes

    path = o.parse_flag("MODEL", loading.resolve, source)
    _check_out(out, path)
    with stage(log, f"reading and rounding {source}", "read and rounded"):
        read = functools.partial(loading.read_model, quantize=scheme, dtype=dtype)
        loaded = o.parse_flag("MODEL", read, source)
    target, tokenizer = loaded.target, path if path.is_dir() else loaded.tokenizer
    with stage(log, f"writing {out}", f"wrote {out}"):
        write = functools.partial(specjax.save_model, denoiser_settings=loaded.denoiser_settings)
        o.parse_flag("OUT", lambda folder: write(folder, target, tokenizer), out)
    return {
        "folder": str(out), "name": target.model.name, "scheme": scheme, "weights_bytes": num_bytes(target.params),
        "file_bytes": (out / SAFETENSORS_FILE).stat().st_size,
    }  # fmt: skip


def _check_out(out: Path, source: Path) -> None:
    """Raise a UsageError for a folder that cannot be written, or that has the weights of another model."""
    from specjax.cli.training.files import check_folder
    from specjax.models.loading.formats.hf import INDEX, SAFETENSORS_FILE

    check_folder(out, "OUT")
    require(not (out.exists() and out.samefile(source)), f"OUT: {out} is the folder of MODEL; name another folder")
    kinds = ("*.safetensors", "*.bin", "*.gguf", INDEX)
    for name in sorted({file.name for kind in kinds for file in out.glob(kind)} - {SAFETENSORS_FILE}):
        require(False, f"OUT: {out} has {name}, weights of another model; name another folder")


def _evaluate(
    source: str, text: str, schemes: list[str], dtype: str, options: EvaluationOptions, log: Any
) -> list[dict[str, Any]]:
    """Measure the model and its quantised forms on a text."""
    import dataclasses

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from specjax.analysis.perplexity import evaluate_quantization
    from specjax.errors import UsageError

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=log, disable=not log.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def advance(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done)
            if done == total and not log.is_terminal:
                log.print(f"measured {name}", style="dim")

        try:
            results = evaluate_quantization(
                source, text, schemes, window=options.window, max_tokens=options.max_tokens, on_window=advance,
                dtype=dtype,
            )  # fmt: skip
        except UsageError as error:
            message = str(error)
            flag = "--" if message.startswith("window ") else "--evaluate: " if message.startswith("the text ") else ""
            raise UsageError(f"{flag or 'MODEL: '}{message}") from None
    return [dataclasses.asdict(result) for result in results]


def _show(document: dict[str, Any], out: Any) -> None:
    """Print the written folder, and the table of the measurement."""
    from rich import box
    from rich.table import Table

    written = document.get("written")
    if written is not None:
        out.print(
            f"{written['folder']}: {written['name']}, {written['weights_bytes'] / 2**20:,.1f} MiB in memory, "
            f"{written['file_bytes'] / 2**20:,.1f} MiB in its file",
            soft_wrap=True, highlight=False,
        )  # fmt: skip
        out.print(f"specjax generate --target {written['folder']} --keep-quantized ...", soft_wrap=True, markup=False)
    if "evaluation" not in document:
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("model", no_wrap=True)
    for heading in ("MiB", "perplexity", "ratio", "tokens"):
        table.add_column(heading, justify="right")
    for entry in document["evaluation"]:
        table.add_row(
            entry["model"], f"{entry['num_bytes'] / 2**20:,.1f}", f"{entry['perplexity']:.4f}", f"{entry['ratio']:.4f}",
            f"{entry['tokens']:,}",
        )  # fmt: skip
    out.print(table)
    out.print(
        f"{document['text']} in windows of {document['evaluation'][0]['window']} tokens, {document['dtype']}",
        style="dim",
    )
