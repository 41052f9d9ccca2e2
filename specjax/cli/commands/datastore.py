"""`specjax datastore build`, `info` and `find`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specjax.cli.options import common as o
from specjax.errors import UsageError, require

app = typer.Typer(
    no_args_is_help=True,
    help="Build, describe and search corpora for methods that retrieve (rest, suffix, rasd, aded).",
)

BUILD_HELP = """Build a datastore from text.

A file *.jsonl has one document per line. Its field text is used, else turns,
else prompt, or the fields of --field. Any other file is one document of UTF-8
text.

The folder appears when it is complete. The same command continues an
interrupted build after it has checked the finished shards. If the files or
options changed, it starts again and prints that. One shard is in memory at a
time, 20 to 50 bytes per token. A token takes 6 bytes on disk and on the
device (8 for vocabularies above 65,535).
"""

FolderArgument = Annotated[Path, typer.Argument(help="The folder of a datastore.", show_default=False)]


def build(
    files: Annotated[list[Path], typer.Argument(help="Text files, and JSONL files.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="The folder to write.", show_default=False)],
    target: o.TargetOption = None,
    field: Annotated[
        list[str] | None,
        typer.Option("--field", help="Field of JSONL with the text. Repeatable.", show_default=False),
    ] = None,
    shard_tokens: Annotated[
        int | None, typer.Option("--shard-tokens", help="Tokens per shard. Default: 2**25.", show_default=False)
    ] = None,
    as_json: o.JsonOption = False,
) -> None:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from specjax.cli.output.console import Console
    from specjax.cli.output.files import FULL
    from specjax.retrieval import datastore as d
    from specjax.retrieval.datastore.store import SHARD_TOKENS

    shard_tokens = SHARD_TOKENS if shard_tokens is None else shard_tokens
    require(2 <= shard_tokens < 1 << 31, f"--shard-tokens must be from 2 to 2**31 - 1, not {shard_tokens}")
    log = Console(stderr=True)
    note = lambda sentence: log.print(sentence, style="dim", soft_wrap=True)
    tokenizer = _tokenizer(target)
    columns = TextColumn("building"), BarColumn(), DownloadColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=log, transient=True, disable=not log.is_terminal) as bar:
        task = bar.add_task("", total=None)
        show = lambda done, total: bar.update(task, completed=done, total=total)
        try:
            d.build(files, out, tokenizer, fields=field or (), shard_tokens=shard_tokens, progress=show, notify=note)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("run the same command to continue") from None
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise UsageError(
                f"--out: cannot write {out} ({error.strerror}); free some space, and run the same command to continue"
            ) from None
    _show(out, as_json)


build.__doc__ = BUILD_HELP
app.command("build")(build)


@app.command("info")
def info(folder: FolderArgument, as_json: o.JsonOption = False) -> None:
    """Check the files of a datastore, and print its summary."""
    _show(folder, as_json)


@app.command("find")
def find(
    folder: FolderArgument,
    text: Annotated[str, typer.Argument(help="The text before the continuations to find.", show_default=False)],
    target: o.TargetOption = None,
    max_span: Annotated[int, typer.Option("--max-span", help="Maximum length of the suffix, in tokens.")] = 16,
    length: Annotated[int, typer.Option("--length", help="Length of the continuations, in tokens.")] = 10,
    limit: Annotated[int, typer.Option("--limit", help="Maximum number of continuations.")] = 10,
    as_json: o.JsonOption = False,
) -> None:
    """Find the longest suffix of a text in a datastore, and print its continuations with their counts."""
    import collections

    from specjax.cli.output.console import Console, print_json
    from specjax.retrieval import datastore as d

    for flag, value in (("--max-span", max_span), ("--length", length), ("--limit", limit)):
        o.check_minimum(flag, value, 1)
    tokenizer = _tokenizer(target)
    store = d.open_datastore(folder, tokenizer)
    match = store.search(tokenizer.encode(text, special=False), max_span, min_span=1)
    read = min(sum(match.counts), 5000)
    paths = [tuple(t for t in path if t >= 0) for path in store.continuations(match, read, length).tolist()]
    best = collections.Counter(paths).most_common(limit)
    entries = [{"text": tokenizer.decode(path), "token_ids": list(path), "count": count} for path, count in best]
    if as_json:
        print_json({"span": match.span, "count": sum(match.counts), "read": read, "continuations": entries})
        return
    out = Console()
    print_plain = lambda line: out.print(line, soft_wrap=True)
    print_plain(f"the last {match.span} tokens occur {sum(match.counts)} times" if match.span else "not found")
    for entry in entries:
        print_plain(f"{entry['count']:6d}  {entry['text']!r}")


def _tokenizer(target: str | None):
    """Load the tokenizer of a target. Raises: UsageError that names --target."""
    from specjax.models import loading

    return o.parse_flag("--target", loading.load_tokenizer, target)


def _show(folder: Path, as_json: bool) -> None:
    """Print the summary of a datastore."""
    from rich.table import Table

    from specjax.cli.output.console import Console, print_json
    from specjax.retrieval import datastore as d

    store = d.open_datastore(folder)
    if as_json:
        print_json({"folder": str(folder)} | store.summary)
        return
    table = Table(show_header=False)
    for name, value in store.summary.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    Console().print(table)
