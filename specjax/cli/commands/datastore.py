"""`specjax datastore build`, `info` and `find`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specjax.cli.options import common as o

app = typer.Typer(no_args_is_help=True, help="Corpora for methods that retrieve (rest): build, describe, search.")

BUILD_HELP = """Build a datastore from text.

A file *.jsonl holds one document per line; of each the field text counts,
else turns, else prompt, or those named by --field. Every other file is one
document of UTF-8 text.

The folder appears when it is whole. A build that was interrupted goes on
where it was when the same command is run again, once the finished shards are
seen to be whole; after a change of the files or options it starts anew, and
says so. One shard is in memory at a time,
20 to 50 bytes per token; a token takes 6 bytes on disk and on the device (8
for vocabularies above 65,535).
"""

FolderArgument = Annotated[Path, typer.Argument(help="The folder of a datastore.", show_default=False)]


def build(
    files: Annotated[list[Path], typer.Argument(help="Text files, and JSONL files.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="The folder to write.", show_default=False)],
    target: o.TargetOption = None,
    field: Annotated[
        list[str] | None,
        typer.Option("--field", help="Of JSONL; may be given several times.", show_default=False),
    ] = None,
    shard_tokens: Annotated[
        int | None, typer.Option("--shard-tokens", help="Tokens per shard; default: 2**25.", show_default=False)
    ] = None,
    as_json: o.JsonOption = False,
) -> None:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from specjax.cli.output.console import Console
    from specjax.cli.output.files import FULL
    from specjax.errors import UsageError
    from specjax.retrieval import datastore as d
    from specjax.retrieval.datastore.store import SHARD_TOKENS

    shard_tokens = SHARD_TOKENS if shard_tokens is None else shard_tokens
    o.require(2 <= shard_tokens < 1 << 31, f"--shard-tokens must be from 2 to 2**31 - 1, not {shard_tokens}")
    log = Console(stderr=True)
    say = lambda sentence: log.print(sentence, style="dim", soft_wrap=True)
    tokenizer = _tokenizer(target)
    columns = TextColumn("building"), BarColumn(), DownloadColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=log, transient=True, disable=not log.is_terminal) as bar:
        task = bar.add_task("", total=None)
        show = lambda done, total: bar.update(task, completed=done, total=total)
        try:
            d.build(files, out, tokenizer, fields=field or (), shard_tokens=shard_tokens, progress=show, notify=say)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("run the same command again to go on") from None
        except OSError as error:
            if error.errno not in FULL:
                raise
            sentence = (
                f"--out: cannot write {out} ({error.strerror}); make room and run the same command again to go on"
            )
            raise UsageError(sentence) from None
    _show(out, as_json)


build.__doc__ = BUILD_HELP
app.command("build")(build)


@app.command("info")
def info(folder: FolderArgument, as_json: o.JsonOption = False) -> None:
    """Check the files of a datastore and say what is in it."""
    _show(folder, as_json)


@app.command("find")
def find(
    folder: FolderArgument,
    text: Annotated[str, typer.Argument(help="What stands before the words to find.", show_default=False)],
    target: o.TargetOption = None,
    max_span: Annotated[int, typer.Option("--max-span", help="Tokens of the text's end to look for, at most.")] = 16,
    length: Annotated[int, typer.Option("--length", help="Tokens to show of each continuation.")] = 10,
    limit: Annotated[int, typer.Option("--limit", help="Continuations to show.")] = 10,
    as_json: o.JsonOption = False,
) -> None:
    """Find the longest end of a text in a datastore, and what follows it how often."""
    import collections

    from specjax.cli.output.console import Console, print_json
    from specjax.retrieval import datastore as d

    for flag, value in (("--max-span", max_span), ("--length", length), ("--limit", limit)):
        o.require(value >= 1, f"{flag} must be at least 1, not {value}")
    tokenizer = _tokenizer(target)
    store = d.open_datastore(folder, tokenizer)
    match = store.search(tokenizer.encode(text, special=False), max_span, min_span=1)
    read = min(sum(match.counts), 5000)
    paths = [tuple(t for t in path if t >= 0) for path in store.continuations(match, read, length).tolist()]
    best = collections.Counter(paths).most_common(limit)
    found = [{"text": tokenizer.decode(path), "token_ids": list(path), "count": count} for path, count in best]
    if as_json:
        print_json({"span": match.span, "count": sum(match.counts), "read": read, "continuations": found})
        return
    out = Console()
    print_plain = lambda line: out.print(line, soft_wrap=True)
    print_plain(f"the last {match.span} tokens occur {sum(match.counts)} times" if match.span else "not found")
    for entry in found:
        print_plain(f"{entry['count']:6d}  {entry['text']!r}")


def _tokenizer(target: str | None):
    from specjax.errors import UsageError
    from specjax.models import loading

    try:
        return loading.load_tokenizer(target)
    except UsageError as error:
        raise UsageError(f"--target: {error}") from None


def _show(folder: Path, as_json: bool) -> None:
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
