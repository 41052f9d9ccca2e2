"""`specjax chat`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specjax.cli.options import common as o
from specjax.cli.options import completion

if TYPE_CHECKING:
    from specjax.cli.runs.session import Session
    from specjax.persistence.program_cache import ProgramCache
    from specjax.serving.requests import Request

COMMANDS = {
    "/stats": "tokens per pass and per second so far",
    "/system TEXT": "what the model is told before everything, from then on; without TEXT nothing",
    "/undo": "forget the last turn",
    "/clear": "forget all turns",
    "/help": "this list",
    "/exit": "end, as Ctrl-D does",
}
KNOWN = ", ".join(COMMANDS)

HELP = f"""Talk with a model.

On a colour terminal, text that was drafted and accepted is green. What the
drafter learns in one turn it knows in the next. Ctrl-D ends the chat. On a
terminal the keys of a shell work, arrows for earlier lines too.

Lines that begin with / are commands, and /help says what each does:
{KNOWN}.

Turns that no longer fit are forgotten, the oldest first.
"""


def chat(
    target: o.TargetOption = None,
    draft: o.DraftOption = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method", help="See `specjax methods`; default: as for generate.", show_default=False,
            autocompletion=completion.words("drafters"),
        ),
    ] = None,
    settings: o.SetOption = None,
    system: o.SystemOption = None,
    max_new_tokens: o.LengthOption = 512,
    context: Annotated[
        int | None,
        typer.Option(
            "--context", help="Tokens that the turns may take; default: what the model takes, at most 4096.",
            show_default=False,
        ),
    ] = None,
    temperature: o.TemperatureOption = 0.0,
    top_k: o.TopKOption = None,
    top_p: o.TopPOption = None,
    seed: o.SeedOption = 0,
    dtype: o.DtypeOption = "auto",
    max_positions: o.PositionsOption = None,
    no_cache: o.NoCacheOption = False,
) -> None:  # fmt: skip
    arguments = dict(locals())
    decoding = o.Settings(max_new_tokens, temperature, top_k, top_p, seed)
    o.require(context is None or context >= 64, f"--context must be at least 64, not {context}")
    from specjax.cli.options.drafter_flags import read_drafting, recognised, resolve_defaults

    is_default = method is None and draft is None and not settings
    head = recognised(draft)
    method, decoding, named = resolve_defaults(method, draft, head, decoding, {}, settings)
    drafting = read_drafting([method], draft, named=named, settings=settings, head=head)

    from specjax.cli.output.console import Console
    from specjax.cli.runs.session import kept_programs, open_session, with_default_draft

    log = Console(stderr=True)
    programs = kept_programs(arguments)
    models = o.Models(target, draft, dtype, no_cache, max_positions=max_positions)
    session = open_session(log, models, has_head=head is not None)
    if is_default:
        session, method = with_default_draft(session, method, log)
    room = session.capacity - max_new_tokens
    o.require(room >= 64, f"--max-new-tokens {max_new_tokens} leaves no room of {session.capacity} tokens; lower it")
    o.require(context is None or context <= room, f"--context must be at most {room} here, not {context}")
    drafter = session.drafter(method, drafting)
    Chat(session, drafter, decoding, context or min(room, 4096), system, log).run(decoding, method, programs)


chat.__doc__ = HELP


class Chat:
    """The turns so far, and a batch of one row in which each answer takes the place of the one before."""

    def __init__(self, session: Session, drafter: Any, settings: o.Settings, context: int, system: str | None, log):
        from specjax.cli.output.console import Console

        self.session, self.drafter, self.settings, self.context, self.log = session, drafter, settings, context, log
        self.system = system
        self.turns: list[dict[str, str]] = []  # messages of a template, user and assistant by turns
        self.out = Console()
        self.tokens = self.passes = 0
        self.seconds = 0.0
        self.number = 0

    def run(self, settings: o.Settings, method: str, programs: ProgramCache | None = None) -> None:
        """Until there is no more to be said."""
        import time

        import specjax
        from specjax.cli.output.text import TextStream

        eos = self.session.tokenizer.eos
        keywords = self.session.keywords(settings, method)
        self.log.print(f"Type {KNOWN}.", style="dim")
        text, begin = TextStream(self.session.tokenizer, eos), 0.0
        for news in specjax.serve(
            self.session.target, self.drafter, self.requests(), slots=1, longest_prompt=self.context,
            programs=programs, **keywords,
        ):  # fmt: skip
            if text.taken == 0:
                begin = time.perf_counter()
            if news.error is not None:
                self.log.print(news.error, style="red", soft_wrap=True)
                self.turns.pop()
                continue
            self.tokens, self.passes = self.tokens + len(news.tokens), self.passes + 1
            for place, token in enumerate(news.tokens):
                self.out.print(text.push(token, place < news.accepted), end="", soft_wrap=True)
            sys.stdout.flush()
            if news.finish_reason is not None:
                self.out.print(text.flush(), soft_wrap=True)
                self.seconds += time.perf_counter() - begin
                if news.finish_reason == "length":
                    self.log.print("(cut at --max-new-tokens)", style="dim")
                self.turns.append({"role": "assistant", "content": text.plain})
                text = TextStream(self.session.tokenizer, eos)

    def requests(self) -> Iterator[Request]:
        """A turn as soon as it is typed."""
        import jax

        from specjax.serving.requests import Request

        for line in lines():
            if line.startswith("/"):
                if self.obey(line) is False:
                    return
                continue
            if not line.strip():
                continue
            self.turns.append({"role": "user", "content": line})
            ids = self.prompt()
            key = jax.random.fold_in(jax.random.key(self.settings.seed), self.number)
            self.number += 1
            yield Request(ids, key)

    def prompt(self) -> list[int]:
        """Of the turns that fit."""
        from specjax.cli.options.prompts import opening

        while True:
            ids = self.session.tokenizer.chat([*opening(self.system), *self.turns])
            if len(ids) <= self.context or len(self.turns) == 1:
                return ids
            del self.turns[:2]
            self.log.print("(the oldest turn is forgotten: it no longer fits)", style="dim")

    def obey(self, line: str) -> bool:
        """What a line that begins with / asks for. False: the chat is over."""
        word, _, rest = line.strip().partition(" ")
        if word in ("/exit", "/quit"):
            return False
        if word == "/stats":
            self.log.print(self.stats())
        elif word == "/system":
            self.system = rest or None
            self.log.print("(the system prompt is set)" if rest else "(no system prompt)", style="dim")
        elif word == "/undo":
            self.log.print("(the last turn is forgotten)" if self.turns else "(no turn to forget)", style="dim")
            del self.turns[-2:]
        elif word == "/clear":
            self.turns.clear()
            self.log.print("(all turns are forgotten)", style="dim")
        elif word == "/help":
            for command, meaning in COMMANDS.items():
                self.log.print(f"{command:14}{meaning}")
        else:
            self.log.print(f"there is no command {word}; there are {KNOWN}")
        return True

    def stats(self) -> str:
        """Of all answers so far."""
        if not self.passes:
            return "nothing was said yet"
        return (
            f"{self.tokens} tokens, {self.tokens / self.passes:.2f} per pass of the model, "
            f"{self.tokens / max(self.seconds, 1e-9):.1f} per second"
        )


def lines() -> Iterator[str]:
    """What is typed, with the keys of a shell on a terminal; what comes on stdin elsewhere."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    from prompt_toolkit import PromptSession

    typed: PromptSession[str] = PromptSession()
    while True:
        try:
            yield typed.prompt("> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            continue
