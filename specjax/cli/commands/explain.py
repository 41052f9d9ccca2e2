"""`specjax explain`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specjax.cli.options import common as o
from specjax.cli.options.groups import DraftOptions, ModelOptions, PromptOptions, SamplingOptions, with_groups
from specjax.errors import require

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.text import Text

    from specjax.analysis.explain import Round
    from specjax.cli.runs.decoding import Decoding
    from specjax.cli.runs.session import Session

HELP = """Show a run step by step: the drafted tokens, the accepted ones, and the reasons.

Each step is one target pass. Green tokens were drafted and accepted, the blue
token is the target's own, and grey tokens were rejected. The number after a
token is its probability under the target. The cost of a pass is in passes of
one token: a rule of thumb, or the costs of --costs. It excludes drafting.

--out draws all steps, and the tree of one of them.
"""

SIBLINGS = 5
"""Maximum number of drafted tokens of one position in a line."""


@dataclass(frozen=True)
class ExplainSampling(SamplingOptions):
    """Length, distribution and seed of the text."""

    max_new_tokens: o.LengthOption = 48


@dataclass(frozen=True)
class PictureOptions:
    """The picture of a run, and the output."""

    out: Annotated[
        Path | None, typer.Option("--out", help="Picture of the run to write, .png.", show_default=False)
    ] = None
    number: Annotated[
        int | None,
        typer.Option(
            "--round",
            help="Step whose tree is drawn, from 1. Default: the step with the most accepted tokens.",
            show_default=False,
        ),
    ] = None
    as_json: o.JsonOption = False

    def __post_init__(self):
        require(self.out is None or self.out.suffix == ".png", f"--out must end in .png, not {self.out}")
        require(self.number is None or self.out is not None, "--round selects the tree that --out draws; add --out")
        require(self.number is None or self.number >= 1, f"--round must be at least 1, not {self.number}")


@with_groups
def explain(
    models: ModelOptions,
    draft: DraftOptions,
    sampling: ExplainSampling,
    prompts: PromptOptions,
    picture: PictureOptions,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads it from stdin.", show_default=False)] = None,
    method: o.MethodOption = None,
) -> None:  # fmt: skip
    require(prompt is not None, "PROMPT is missing; give a text, or - to read it from stdin")
    from specjax.cli.options.prompts import PromptSource
    from specjax.cli.output import files
    from specjax.cli.output.console import Console
    from specjax.cli.runs.environment import stage
    from specjax.cli.runs.selection import select
    from specjax.cli.runs.session import note_training, with_costs

    models.check_raw(prompts.raw)
    if picture.out is not None:
        files.check_writable(picture.out, "--out")
    selection = select([method] if method else [], models, draft, sampling)
    source = PromptSource(prompt, None, prompts.raw, prompts.system)
    lines = source.read()
    log = Console(stderr=True)
    session, method = selection.open(log)
    note_training(models.draft, "system", prompts.system, log)
    [row], _ = source.encode(lines, session, sampling.max_new_tokens)
    session = with_costs(session, selection.costs, 1, log, selection.decoding.settings)

    from specjax.analysis.explain import explain
    from specjax.bench.measure import row_keys

    decoding, drafter = selection.decoding, session.drafter(method, selection.options)
    with stage(log, "decoding", "decoded"):
        rounds = explain(
            session.target, drafter, row.ids, key=row_keys(decoding.seed, [row.ordinal]),
            max_new_tokens=decoding.max_new_tokens, costs=session.costs, **vars(session.settings(decoding, method)),
        )  # fmt: skip
    if picture.out is not None:
        _draw(rounds, session, method, picture, log)
    _print(rounds, session, method, decoding, picture.as_json)


explain.__doc__ = HELP


def _draw(rounds: list[Round], session: Session, method: str, picture: PictureOptions, log: Any) -> None:
    """Draw all steps, and the tree of one of them."""
    from specjax.analysis.drawing import best, draw
    from specjax.cli.output import files

    number, out, count = picture.number, picture.out, len(rounds)
    assert out is not None
    require(number is None or number <= count, f"--round must be at most {count}, the last step, not {number}")
    index = best(rounds) if number is None else number - 1
    image = draw(rounds, session.show_token, index, f"{method} with {session.target.model.name}")
    files.write_atomically(out, lambda file: file.write(image))
    log.print(f"wrote {out}, with the tree of step {index + 1}", style="dim", soft_wrap=True)


def _print(rounds: list[Round], session: Session, method: str, decoding: Decoding, as_json: bool) -> None:
    """Print the JSON document, or the steps and their summary."""
    from specjax.cli.output.console import Console, print_json

    if as_json:
        print_json(_document(rounds, session, method, decoding))
        return
    out = Console()
    for line in (*step_lines(rounds, session.show_token), *summary(rounds)):
        out.print(line, soft_wrap=True)
    if decoding.guarantee(method) == "lossy":
        out.print("lossy: the text may differ from the target's own text", soft_wrap=True)


def step_lines(rounds: list[Round], show_token: Callable[[int], str]) -> list[Text]:
    """Return the lines of each step. Adjacent steps without a draft share a line."""
    from rich.text import Text

    lines: list[Text] = []
    plain: list[tuple[int, Round]] = []

    def flush() -> None:
        if plain:
            (first, _), (last, step) = plain[0], plain[-1]
            numbers = f"{first}" if first == last else f"{first}-{last}"
            tokens = " ".join(show_token(each.added[-1]) for _, each in plain if each.added)
            text = Text(f"{numbers:>7}  ").append(tokens, "blue")
            lines.append(text.append(f"  {step.why or 'no draft'}", "dim"))
            plain.clear()

    for number, step in enumerate(rounds, 1):
        if len(step.tokens) == 1:
            if plain and plain[-1][1].why != step.why and not (step.why or "").startswith("rests"):
                flush()
            plain.append((number, step))
            continue
        flush()
        text = Text(f"{number:>7}  ")
        for index, token in enumerate(step.added):
            text.append(show_token(token) + " ", "bold green" if index < step.drafted else "blue")
        count, why = len(step.tokens) - 1, f"; {step.why}" if step.why else ""
        lines.append(text.append(f" {step.drafted} of {count} accepted; cost of the pass {step.cost:.2f}{why}", "dim"))
        lines += _tree(step, show_token)
    flush()
    return lines


def _tree(step: Round, show_token: Callable[[int], str]) -> list[Text]:
    """Return a line per depth of the accepted path, with the siblings of each node, and one for the depth after it."""
    import numpy as np
    from rich.text import Text

    lines, num_shown = [], 1
    for node in np.flatnonzero(step.accepted).tolist():
        children = np.flatnonzero(step.parents == node)
        if not len(children):
            break
        text = Text(" " * 9 + "└ ")
        order = sorted(children.tolist(), key=lambda child: (not step.accepted[child], -step.chances[child]))
        for child in order[:SIBLINGS]:
            style = "green" if step.accepted[child] else "bright_black"
            text.append(f"{show_token(int(step.tokens[child]))} {step.chances[child]:.2f}   ", style)
        if len(order) > SIBLINGS:
            text.append(f"and {len(order) - SIBLINGS} more", "bright_black")
        num_shown += len(order)
        lines.append(text)
    if num_shown < len(step.tokens):
        count = len(step.tokens) - num_shown
        lines.append(Text(" " * 9 + f"and {count} descendants of rejected tokens", "bright_black"))
    return lines


def totals(rounds: list[Round]) -> dict[str, float]:
    """Return the sums over all steps."""
    tokens, cost = sum(len(step.added) for step in rounds), sum(step.cost for step in rounds)
    return {
        "tokens": tokens,
        "passes": len(rounds),
        "drafted": sum(len(step.tokens) - 1 for step in rounds),
        "accepted": sum(step.drafted for step in rounds),
        "cost": cost,
        "tokens_per_cost": tokens / cost if cost else 0.0,
    }


def summary(rounds: list[Round]) -> list[str]:
    """Return the sums in words."""
    sums = totals(rounds)
    return [
        f"{sums['tokens']} tokens in {sums['passes']} passes, {sums['tokens'] / max(sums['passes'], 1):.2f} per pass; "
        f"{sums['accepted']} of {sums['drafted']} drafted tokens were accepted",
        f"the passes cost as much as {sums['cost']:.1f} plain ones: {sums['tokens_per_cost']:.2f} times the speed of "
        "plain decoding, without the cost of drafting",
    ]


def _document(rounds: list[Round], session: Session, method: str, decoding: Decoding) -> dict[str, Any]:
    """Return the run as JSON."""
    from specjax.cli.runs.session import provenance

    return {
        "method": method,
        "guarantee": decoding.guarantee(method),
        **provenance(session),
        "settings": decoding.record(),
        **totals(rounds),
        "text": session.tokenizer.decode([token for step in rounds for token in step.added]),
        "rounds": [
            {
                **{name: getattr(step, name).tolist() for name in ("tokens", "parents", "accepted")},
                "chances": [round(float(chance), 6) for chance in step.chances],
                **{name: getattr(step, name) for name in ("added", "drafted", "width", "cost", "why")},
            }
            for step in rounds
        ],
    }
