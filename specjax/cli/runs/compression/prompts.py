"""The prompts of --compress: a model selects their tokens before the target reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specjax.catalog.schemes import compressed_form
from specjax.cli.options.common import parse_flag
from specjax.cli.options.prompts import Encoded
from specjax.cli.output.console import Console
from specjax.cli.runs.environment import stage
from specjax.cli.runs.session import Session, load_beside
from specjax.compression import Compression, parse_compression
from specjax.errors import require


class CompressedPrompts(NamedTuple):
    """The compression of a run's prompts."""

    text: str  # the value of --compress
    model: str  # the name of the model that selected the tokens
    lengths: dict[int, int]  # tokens of each complete prompt, by its ordinal

    def describe(self, rows: Sequence[Encoded]) -> str:
        """Return the numbers of tokens before and after compression, in words."""
        num_complete, num_left = sum(self.lengths[row.ordinal] for row in rows), sum(len(row.ids) for row in rows)
        return f"{num_left:,} of {num_complete:,}, selected by {self.model}"


def read_compression(text: str | None, adapt: str | None) -> Compression | None:
    """Parse --compress before models load. Raises: UsageError for a wrong value, or for --adapt, which is lossy too."""
    if text is None:
        return None
    require(
        adapt is None, "--compress and --adapt both change the text, so no guarantee would name one cause; remove one"
    )
    return parse_flag("--compress", parse_compression, text)


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
    rows: Sequence[Encoded], compression: Compression, session: Session, log: Console
) -> tuple[list[Encoded], CompressedPrompts]:
    """Return the prompts with the tokens that a model selects: that of the option `draft`, of --draft, or the target.

    Raises: UsageError for a model that cannot be loaded, has another vocabulary, or cannot select tokens.
    """
    draft = session.draft or session.target
    if compression.draft is not None:
        draft = load_beside(session, compression.draft, "--compress")
    lengths = {row.ordinal: len(row.ids) for row in rows}
    with stage(log, "compressing prompts", "compressed prompts"):
        prompts = parse_flag("--compress", lambda ids: compression(draft, ids), [row.ids for row in rows])
    log.print(f"lossy: {compression.text} selects the tokens of prompts that the target reads", style="yellow")
    rows = [row._replace(ids=ids) for row, ids in zip(rows, prompts, strict=True)]
    return rows, CompressedPrompts(compression.text, draft.model.name, lengths)
