"""The prompts of --compress: a model selects the tokens that the target reads, or that its cache keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from specjax.bench.records import MeasuredRun
from specjax.catalog.schemes import compressed_form
from specjax.cli.options.common import parse_flag
from specjax.cli.options.prompts import Encoded
from specjax.cli.output.console import Console
from specjax.cli.runs.environment import stage
from specjax.cli.runs.session import Session, load_beside
from specjax.compression import Compression, parse_compression
from specjax.errors import require
from specjax.types import Target


class CompressedPrompts(NamedTuple):
    """The compression of a run's prompts."""

    text: str  # the value of --compress
    model: str  # the name of the model that selected the tokens, or that looked ahead
    lengths: dict[int, int]  # tokens of each complete prompt, by its ordinal
    lengths_after: dict[int, int]  # tokens that remain of each prompt or, with `is_of_cache`, of its cache
    is_of_cache: bool = False  # the prompts are complete, and their caches are compressed
    seconds: float = 0.0  # of the compression before decoding starts, without compilation
    compile_seconds: float = 0.0

    @property
    def is_lossy(self) -> bool:
        """Return True if a token of any prompt was dropped."""
        return self.lengths_after != self.lengths

    @property
    def lossy_part(self) -> tuple[str, str] | None:
        """Return the lossy part of the run: its name in JSON, and words for it. None: no token was dropped."""
        if not self.is_lossy:
            return None
        if self.is_of_cache:
            return "compressed_caches", f"the target with caches compressed by {self.text}"
        return "compressed_prompts", f"the target on prompts compressed by {self.text}"

    def add_time(self, run: MeasuredRun) -> MeasuredRun:
        """Return a run with the seconds of the compression, of all prompts; the first token waits for one prompt."""
        first = run.first_token_seconds
        if first is not None:
            first += self.seconds / len(self.lengths)
        return run._replace(seconds=run.seconds + self.seconds, first_token_seconds=first)

    def record(self, ordinal: int) -> dict[str, int]:
        """Return the tokens of a prompt before the compression, or those that remain of its cache."""
        if self.is_of_cache:
            return {"kept_prompt_tokens": self.lengths_after[ordinal]}
        return {"complete_prompt_tokens": self.lengths[ordinal]}

    def describe(self, ordinals: Iterable[int]) -> str:
        """Return the numbers of tokens before and after the compression, in words."""
        ordinals = list(ordinals)
        num_complete, num_left = (sum(by[n] for n in ordinals) for by in (self.lengths, self.lengths_after))
        if self.is_of_cache:
            return f"{num_left:,} of {num_complete:,} in the cache, after {self.model} looked ahead"
        return f"{num_left:,} of {num_complete:,}, selected by {self.model} in {self.seconds:.2f} s"


def read_compression(text: str | None, adapt: str | None, same_bits: bool = False) -> Compression | None:
    """Parse --compress before models load.

    Raises: UsageError for a wrong value, for --adapt, which is lossy too, and for --same-bits and a compressed cache.
    """
    if text is None:
        return None
    require(
        adapt is None, "--compress and --adapt both change the text, so no guarantee would name one cause; remove one"
    )
    compression = parse_flag("--compress", parse_compression, text)
    require(
        not (same_bits and compression.is_of_cache),
        f"--same-bits does not apply to --compress {text}, because its scores depend on the batch; remove one",
    )
    return compression


def check_one_loss(cache_dtype: str | None, compress: str | None, adapt: str | None) -> None:
    """Check that a compressed cache is the only lossy part of a run, so that a guarantee can name the cause.

    Raises: UsageError for --compress or --adapt beside it.
    """
    if compressed_form(cache_dtype) is not None:
        flag = "--compress" if compress is not None else "--adapt"
        require(
            compress is None and adapt is None,
            f"--cache-dtype {cache_dtype} and {flag} both change the text, so no guarantee would name one cause; "
            "remove one",
        )


def compress_prompts(
    rows: Sequence[Encoded], compression: Compression, session: Session, max_new_tokens: int, log: Console
) -> tuple[list[Encoded], Session, CompressedPrompts]:
    """Return the prompts, the session and a description of the compression. One of the first two is compressed.

    The model of the option `draft` selects the tokens or looks ahead. Without it, that of --draft or the target does.

    Raises: UsageError for a model that cannot be loaded, has another vocabulary, or does not fit the method.
    """
    draft = session.draft or session.target
    if compression.draft is not None:
        draft = load_beside(session, compression.draft, "--compress")
    compress = _compress_caches if compression.is_of_cache else _shorten_prompts
    rows, session, compressed = parse_flag(
        "--compress", lambda rows: compress(rows, compression, session, draft, max_new_tokens, log), rows
    )
    if compressed.is_lossy:
        verb = "drops cached tokens of prompts" if compression.is_of_cache else "selects the tokens of prompts"
        log.print(f"lossy: {compression.text} {verb} that the target reads", style="yellow")
    else:
        log.print(f"{compression.text} drops nothing, because all prompts are short enough", style="dim")
    return rows, session, compressed


def _shorten_prompts(
    rows: Sequence[Encoded], compression: Compression, session: Session, draft: Target, max_new_tokens: int,
    log: Console,
) -> tuple[list[Encoded], Session, CompressedPrompts]:  # fmt: skip
    """Return the shortened prompts, and the unchanged session."""
    prompts = [row.ids for row in rows]
    with stage(log, "compiling the compression", "compiled the compression") as compiling:
        compression.compile(draft, prompts)
    with stage(log, "compressing prompts", "compressed prompts") as clock:
        short = compression.shorten(draft, prompts)
    short_rows = [row._replace(ids=ids) for row, ids in zip(rows, short, strict=True)]
    compressed = CompressedPrompts(
        compression.text, draft.model.name, _lengths(rows), _lengths(short_rows), False, clock.seconds,
        compiling.seconds,
    )  # fmt: skip
    return short_rows, session, compressed


def _compress_caches(
    rows: Sequence[Encoded], compression: Compression, session: Session, draft: Target, max_new_tokens: int,
    log: Console,
) -> tuple[list[Encoded], Session, CompressedPrompts]:  # fmt: skip
    """Return the prompts, and a session whose target has compressed caches if any prompt exceeds the capacity.

    The compression is a part of reading the prompts, so its time is a part of theirs.
    """
    target = compression.compress_cache(session.target, draft, max_new_tokens)
    num_kept = {row.ordinal: min(len(row.ids), compression.capacity + 1) for row in rows}
    compressed = CompressedPrompts(compression.text, draft.model.name, _lengths(rows), num_kept, True)
    return list(rows), session._replace(target=target) if compressed.is_lossy else session, compressed


def _lengths(rows: Sequence[Encoded]) -> dict[int, int]:
    return {row.ordinal: len(row.ids) for row in rows}
