"""`specjax inspect`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specjax.cli.options import common as o
from specjax.cli.options import vllm_sglang_flags as s
from specjax.errors import UsageError, require
from specjax.files.homes import in_home

if TYPE_CHECKING:
    from pathlib import Path

    from specjax.cli.options.groups import ModelOptions
    from specjax.cli.runs.session import Session

HELP = """Describe a model or a draft head.

Of a model: the kinds of its layers, the memory of a text per row, per token and
per drafted token, and the multi-token-prediction module in its files. No
weights are read, and of a hub id they are not downloaded, unless they are
quantised. Of a draft head: its kind and format, and its agreement with
the target. A head that is read wrongly drafts slowly, but the text stays right,
because every draft is verified. Only the agreement shows the error. It is
measured for four drafts in a row, because some errors show only in the later
ones. If it is low or falls steeply, the report names the most likely cause and
the --head-set that mends it.
"""


def inspect(
    source: Annotated[
        str,
        typer.Argument(
            help='Model or draft head: a hub id, a folder, a GGUF file or the name of a built-in config. "native" is '
            "the module of --target.",
            show_default=False,
        ),
    ],
    target: o.TargetOption = None,
    token_map: s.MapOption = None,
    head_set: o.HeadSetOption = None,
    dtype: o.DtypeOption = "auto",
    quantize: o.QuantizeOption = None,
    keep_quantized: o.KeepQuantizedOption = None,
    as_json: o.JsonOption = False,
    no_cache: o.NoCacheOption = False,
) -> None:
    from specjax.cli.options.groups import ModelOptions
    from specjax.cli.runs.environment import choose_dtype

    with _open(source) as local:
        is_head = _is_head(local)
        if not is_head:
            for_heads = {"--target": target, "--speculative-token-map": token_map, "--head-set": head_set}
            for flag, value in for_heads.items():
                require(value is None, f"{flag} is for draft heads, and SOURCE {source} is none; leave it out")
            _inspect_model(local, as_json, dtype=choose_dtype(dtype), quantize=quantize, keep_quantized=keep_quantized)
    if not is_head:
        return
    models = ModelOptions(
        target, source, dtype, no_cache, head_set=head_set, quantize=quantize, keep_quantized=keep_quantized
    )
    _inspect_head(models, token_map, as_json)


CONFIG_SUFFIXES = ".json", ".txt", ".jinja", ".md"
"""Suffixes of the files of a model without weights."""


@contextlib.contextmanager
def _open(source: str) -> Iterator[str]:
    """Yield a source, or of a hub id with safetensors a folder with their tables."""
    from specjax.models import loading

    if not loading.is_hub_id(source):
        yield source
        return
    with contextlib.ExitStack() as stack:
        folder = o.parse_flag("SOURCE", lambda id: stack.enter_context(loading.open_tables(id)), source)
        has_tables = any(folder.glob("*.safetensors"))
        yield str(folder) if has_tables else source  # heads may have weights in PyTorch's format only


def _is_head(source: str) -> bool:
    """Return True for a draft head, which is recognised by its tensors. A folder with configs only is a model."""
    from specjax.cli.options.drafter_flags import find_head_kind

    folder = in_home(source)
    if folder.is_dir() and all(path.suffix in CONFIG_SUFFIXES for path in folder.iterdir()):
        return False
    return find_head_kind(source, "SOURCE") is not None


def _inspect_model(source: str, as_json: bool, **options: Any) -> None:
    from specjax.cli.output.console import Console, print_json
    from specjax.planning.description.model import describe_model
    from specjax.planning.description.words import describe_in_lines, document_of

    try:
        model = describe_model(source, **options)
    except UsageError as error:
        raise UsageError(f"SOURCE: {str(error).removeprefix('source: ')}") from None
    if as_json:
        print_json(document_of(model))
        return
    out = Console()
    for line in describe_in_lines(model):
        out.print(line, soft_wrap=True)


def _inspect_head(models: ModelOptions, token_map: Path | None, as_json: bool) -> None:
    from specjax.cli.output.console import Console, print_json
    from specjax.cli.runs.session import describe_head, describe_length, open_session

    session = open_session(Console(stderr=True, quiet=True), models, has_head=True, token_map=token_map, flag="SOURCE")
    loaded, check = session.head, session.check
    assert loaded is not None and check is not None
    if as_json:
        print_json(_document(session))
        return
    out = Console()
    first, *more = describe_head(loaded, check) + describe_length(loaded, session.target)
    for line in (first, f"{loaded.tensors} tensors, {loaded.num_parameters:,} parameters", *more):
        out.print(line, soft_wrap=True)


def _document(session: Session) -> dict[str, Any]:
    """Return the head and its agreement as JSON."""
    head, check = session.head, session.check
    assert head is not None and check is not None
    return {
        "kind": head.kind, "dialect": head.dialect, "flags": dict(head.flags), "notes": [*head.notes, *head.warnings],
        "unused": list(head.unused), "tensors": head.tensors, "parameters": head.num_parameters,
        "trained_for": head.trained_for, "max_positions": head.max_positions, "target": session.target.model.name,
        "agreement": check.agreement, "agreement_by_depth": list(check.depths), "places": check.places,
        "reason": check.reason,
    }  # fmt: skip


inspect.__doc__ = HELP
