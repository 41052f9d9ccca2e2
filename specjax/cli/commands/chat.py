"""`specjax chat`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from specjax.cli.options import common as o
from specjax.cli.options.common import parse_flag
from specjax.cli.options.groups import DraftOptions, ModelOptions, SamplingOptions, flag_values, with_groups
from specjax.errors import require

HELP = """Chat with a model.

On a colour terminal, drafted and accepted text is green. The drafter reuses
results of earlier turns. Ctrl-D ends the chat. On a terminal, lines can be
edited as in a shell, and the arrow keys recall earlier lines.

Lines that begin with / are commands; /help lists them: /stats, /image FILE,
/system TEXT, /undo, /clear, /help, /exit. Models that read images get those of
/image with the next message, and keep them in later turns.

If the chat exceeds its maximum length (--context), the oldest turns are
dropped.
"""

MIN_CONTEXT = 64
"""Minimum number of tokens of all turns."""
DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class ChatSampling(SamplingOptions):
    """Length, distribution and seed of the answers."""

    max_new_tokens: o.LengthOption = 512


@with_groups
def chat(
    models: ModelOptions,
    draft: DraftOptions,
    sampling: ChatSampling,
    method: o.MethodOption = None,
    system: o.SystemOption = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            "--image",
            help="Image before the first message, for a model that reads images. Repeat the flag for several images.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context", help="Maximum tokens of all turns. Default: the model's limit, at most 4096.",
            show_default=False,
        ),
    ] = None,
) -> None:  # fmt: skip
    o.check_minimum("--context", context, MIN_CONTEXT)
    from specjax.cli.output.console import Console
    from specjax.cli.runs.chat import Chat
    from specjax.cli.runs.environment import open_program_cache
    from specjax.cli.runs.run import Report, execute
    from specjax.cli.runs.selection import select
    from specjax.cli.runs.session import note_training, with_costs

    log = Console(stderr=True)
    selection = select([method] if method else [], models, draft, sampling)
    flags = flag_values(models, draft, sampling) | {"method": method, "context": context}
    programs = open_program_cache(flags)
    session, method = selection.open(log)
    note_training(models.draft, "system", system, log)
    length, room = sampling.max_new_tokens, session.capacity - sampling.max_new_tokens
    require(
        room >= MIN_CONTEXT,
        f"--max-new-tokens {length} leaves {max(room, 0)} of {session.capacity} tokens for the turns; lower it",
    )
    require(context is None or context <= room, f"--context must be at most {room} for this model, not {context}")
    session = with_costs(session, selection.costs, 1, log, selection.decoding.settings)
    drafter = session.drafter(method, selection.options)
    run = Chat(
        session, selection.decoding, drafter, method, context=context or min(room, DEFAULT_CONTEXT), system=system,
        programs=programs, source=models.target,
    )  # fmt: skip
    for file in image or ():
        parse_flag("--image", run.add_picture, file)
    execute(run, Report(log, Console()))


chat.__doc__ = HELP
