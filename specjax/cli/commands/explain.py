"""`specjax explain`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specjax.cli.options import common as o
from specjax.cli.options import completion
from specjax.cli.options.processing import MinPOption

if TYPE_CHECKING:
    from rich.text import Text

    from specjax.analysis.explain import Round
    from specjax.cli.runs.session import Session

HELP = """Show a run round by round: what was drafted, what of it was kept, and why.

Each round is one pass of the target. Green tokens were drafted and accepted,
the blue one is the target's own; grey ones were drafted in vain. The number
behind a token is its chance in the target's distribution. The cost of a pass
is in passes over one token, by a rule of thumb, or as --costs says; what
drafting costs is not in it.

--out draws it: all rounds, and the tree of one of them.
"""


def explain(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads it from stdin.", show_default=False)] = None,
    target: o.TargetOption = None,
    draft: o.DraftOption = None,
    datastore: o.DatastoreOption = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method", help="See `specjax methods`; default: as for generate.", show_default=False,
            autocompletion=completion.words("drafters"),
        ),
    ] = None,
    num_draft_tokens: o.BudgetOption = None,
    tree: o.TreeOption = None,
    draft_stop: o.StopOption = None,
    exit_layer: o.ExitOption = None,
    settings: o.SetOption = None,
    source: o.SourceOption = None,
    controller: o.ControllerOption = None,
    costs: o.CostsOption = None,
    verifier: o.VerifierOption = None,
    sampling: o.SamplingOption = "speculative",
    max_new_tokens: o.LengthOption = 48,
    temperature: o.TemperatureOption = 0.0,
    top_k: o.TopKOption = None,
    top_p: o.TopPOption = None,
    min_p: MinPOption = None,
    seed: o.SeedOption = 0,
    raw: o.RawOption = False,
    system: o.SystemOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Draw it into this file, .png.", show_default=False)
    ] = None,
    number: Annotated[
        int | None,
        typer.Option("--round", help="Whose tree is drawn; default: that which kept most.", show_default=False),
    ] = None,
    dtype: o.DtypeOption = "auto",
    max_positions: o.PositionsOption = None,
    as_json: o.JsonOption = False,
    no_cache: o.NoCacheOption = False,
) -> None:  # fmt: skip
    decoding = o.Settings(max_new_tokens, temperature, top_k, top_p, seed, sampling, verifier, controller, min_p)
    o.check_system(raw, system)
    o.require(prompt is not None, "PROMPT is missing; give a text, or - to read it from stdin")
    o.require(out is None or out.suffix == ".png", f"--out must end in .png, not {out}")
    o.require(number is None or out is not None, "--round says whose tree --out draws; give --out too")
    o.require(number is None or number >= 1, f"--round counts from 1, not {number}")
    from specjax.cli.options import prompts as p
    from specjax.cli.options.drafter_flags import read_costs, read_drafting, recognised, resolve_defaults
    from specjax.cli.output import files

    if out is not None:
        files.check_writable(out, "--out")
    head = recognised(draft)
    named = {
        "--num-draft-tokens": num_draft_tokens, "--tree": tree, "--draft-stop": draft_stop, "--exit-layer": exit_layer
    }  # fmt: skip
    method, decoding, named = resolve_defaults(method, draft, head, decoding, named, settings)
    drafting = read_drafting([method], draft, datastore, named=named, settings=settings, source=source, head=head)
    weighed = read_costs(costs, [method], decoding.controller)

    from specjax.analysis import explain as told
    from specjax.analysis.drawing import best, draw
    from specjax.bench import measure
    from specjax.cli.output.console import Console, print_json
    from specjax.cli.runs.session import open_session, stage, weigh

    asked = p.Asked(prompt, None, raw, system)
    inputs, bad = asked.read()
    log = Console(stderr=True)
    if decoding.remark:
        log.print(decoding.remark, soft_wrap=True)
    models = o.Models(target, draft, dtype, no_cache, max_positions=max_positions)
    session = open_session(log, models, datastore, has_head=head is not None)
    [row], _ = asked.fitting(inputs, bad, session, max_new_tokens)
    session = weigh(session, weighed, 1, log)
    with stage(log, "decoding", "decoded"):
        key = measure.row_keys(seed, [row.ordinal])  # as generate: the same text
        rounds = told.explain(
            session.target, session.drafter(method, drafting), row.ids, key=key, costs=session.costs,
            **session.keywords(decoding, method),
        )  # fmt: skip
    if out is not None:
        last = len(rounds)
        o.require(number is None or number <= last, f"--round must be at most {last}, the last of this run")
        chosen = best(rounds) if number is None else number - 1
        picture = draw(rounds, session.show_token, chosen, f"{method} with {session.target.model.name}")
        files.write_atomically(out, lambda file: file.write(picture))
        log.print(f"wrote {out}, with the tree of round {chosen + 1}", style="dim", soft_wrap=True)
    if as_json:
        print_json(_document(rounds, session, method, decoding))
        return
    console = Console()
    for line in (*lines(rounds, session.show_token), *summary(rounds)):
        console.print(line, soft_wrap=True)
    if decoding.promise(method) == "lossy":
        console.print("lossy: the text need not be one that the target would write", soft_wrap=True)


explain.__doc__ = HELP


def lines(rounds: list[Round], shown: Any) -> list[Text]:
    """Of each round; those without a draft that follow one another share a line."""
    from rich.text import Text

    found: list[Text] = []
    plain: list[tuple[int, Round]] = []

    def flush() -> None:
        if plain:
            (first, _), (last, one) = plain[0], plain[-1]
            which = f"{first}" if first == last else f"{first}-{last}"
            text = Text(f"{which:>7}  ").append(" ".join(shown(r.added[-1]) for _, r in plain if r.added), "blue")
            found.append(text.append(f"  {one.why or 'nothing drafted'}", "dim"))
            plain.clear()

    for place, one in enumerate(rounds, 1):
        if len(one.tokens) == 1:
            if plain and plain[-1][1].why != one.why and not (one.why or "").startswith("rests"):
                flush()
            plain.append((place, one))
            continue
        flush()
        text = Text(f"{place:>7}  ")
        for index, token in enumerate(one.added):
            text.append(shown(token) + " ", "bold green" if index < one.drafted else "blue")
        count, why = len(one.tokens) - 1, f"; {one.why}" if one.why else ""
        found.append(text.append(f" {one.drafted} of {count} drafted; a pass of {one.cost:.2f}{why}", "dim"))
        found += _tree(one, shown)
    flush()
    return found


def _tree(one: Round, shown: Any) -> list[Text]:
    """A line for each depth of the accepted path and one for what failed below it: a node and its siblings."""
    import numpy as np
    from rich.text import Text

    found, told = [], 1
    for node in np.flatnonzero(one.accepted).tolist():
        children = np.flatnonzero(one.parents == node)
        if not len(children):
            break
        text = Text(" " * 9 + "└ ")
        order = sorted(children.tolist(), key=lambda child: (not one.accepted[child], -one.chances[child]))
        for child in order[:SIBLINGS]:
            style = "green" if one.accepted[child] else "bright_black"
            text.append(f"{shown(int(one.tokens[child]))} {one.chances[child]:.2f}   ", style)
        if len(order) > SIBLINGS:
            text.append(f"and {len(order) - SIBLINGS} more", "bright_black")
        told += len(order)
        found.append(text)
    if told < len(one.tokens):
        found.append(Text(" " * 9 + f"and {len(one.tokens) - told} below those that failed", "bright_black"))
    return found


SIBLINGS = 5
"""Drafts of one place that a line names."""


def totals(rounds: list[Round]) -> dict[str, float]:
    """Sums of a run."""
    tokens, cost = sum(len(one.added) for one in rounds), sum(one.cost for one in rounds)
    return {
        "tokens": tokens,
        "passes": len(rounds),
        "drafted": sum(len(one.tokens) - 1 for one in rounds),
        "accepted": sum(one.drafted for one in rounds),
        "cost": cost,
        "tokens_per_cost": tokens / cost if cost else 0.0,
    }


def summary(rounds: list[Round]) -> list[str]:
    """The same in words."""
    sums = totals(rounds)
    return [
        f"{sums['tokens']} tokens in {sums['passes']} passes, {sums['tokens'] / max(sums['passes'], 1):.2f} per pass; "
        f"{sums['accepted']} of {sums['drafted']} drafted tokens were kept",
        f"the passes cost {sums['cost']:.1f} plain ones, so {sums['tokens_per_cost']:.2f} of plain decoding's speed if "
        "drafting were free",
    ]


def _document(rounds: list[Round], session: Session, method: str, decoding: o.Settings) -> dict[str, Any]:
    from specjax.cli.runs.session import provenance

    names = "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed"
    return {
        "method": method,
        "guarantee": decoding.promise(method),
        **provenance(session),
        "settings": {name: getattr(decoding, name) for name in names},
        **totals(rounds),
        "text": session.tokenizer.decode([token for one in rounds for token in one.added]),
        "rounds": [
            {
                **{name: getattr(one, name).tolist() for name in ("tokens", "parents", "accepted")},
                "chances": [round(float(chance), 6) for chance in one.chances],
                **{name: getattr(one, name) for name in ("added", "drafted", "width", "cost", "why")},
            }
            for one in rounds
        ],
    }
