"""`specjax train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specjax.cli import options as o

if TYPE_CHECKING:
    from specjax.training.recipes import Recipe

HELP = """Train a drafter for a target, on what the target itself answers.

The prompts are answered first, by specjax, at the temperature that will be
served; answers are kept in OUT/answers, and a later run takes those that are
there. Some prompts are held out. Every few steps the head is measured on
them: tokens per pass that a greedy chain serves, bonus included, exactly as
`specjax generate` would; of the heads measured the best is kept.

OUT gets the head (`specjax generate --draft OUT`), history.jsonl, and a
picture of the run. A run that was ended goes on from its last measurement,
to the same bits; Ctrl-C keeps what was reached.

Answers of chat models follow their template; only the answers are learnt.
"""


def train(
    target: o.TargetOption = None,
    method: Annotated[str, typer.Option("--method", help="A kind of head, see `specjax methods`.")] = "eagle3",
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            "--prompts",
            help='Prompts to answer: one per line, or JSONL with "turns" or "prompt"; may be given several times.',
            show_default=False,
        ),
    ] = None,
    own_prompts: Annotated[
        int,
        typer.Option("--own-prompts", help="How many user turns the target writes itself, continuing an empty chat."),
    ] = 0,
    out: Annotated[Path | None, typer.Option("--out", help="The folder of the head.", show_default=False)] = None,
    answers: Annotated[
        Path | None, typer.Option("--answers", help="Where answers are kept; default: OUT/answers.", show_default=False)
    ] = None,
    temperature: o.TemperatureOption = 0.0,
    max_new_tokens: o.LengthOption = 256,
    held_out: Annotated[int, typer.Option("--held-out", help="Prompts that are measured and not trained on.")] = 16,
    epochs: Annotated[int, typer.Option("--epochs", help="Times that every answer is read.")] = 1,
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", help="Default: that of the method.", show_default=False)
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option("--optimizer", help="adamw or muon; default: that of the method.", show_default=False)
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            "--loss",
            help="ce, soft_ce, kl, rkl, jsd, tv, tvd++, nla, lk_hybrid, or a sum such as ce=0.1,tv=0.9; default: that "
            "of the method.",
            show_default=False,
        ),
    ] = None,
    depths: Annotated[
        int | None, typer.Option("--depths", help="Drafted tokens that a round is trained on.", show_default=False)
    ] = None,
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            "--draft-vocab", help="Tokens that the head drafts: those that answers have most.", show_default=False
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape", help="NAME=NUMBER, of the method's config; may be given several times.", show_default=False
        ),
    ] = None,
    start: Annotated[
        str, typer.Option("--start", help="target: from the target's layers where they fit; or random.")
    ] = "target",
    rows: Annotated[int, typer.Option("--rows", help="Rows of a step.")] = 4,
    length: Annotated[int, typer.Option("--length", help="Tokens of a row.")] = 512,
    chunk: Annotated[
        int | None,
        typer.Option("--chunk", help="Places of a row judged at a time: less memory, more work.", show_default=False),
    ] = None,
    every: Annotated[int, typer.Option("--every", help="Steps between measurements.")] = 50,
    patience: Annotated[
        int | None,
        typer.Option(
            "--patience", help="Measurements in a row that may be no better before it ends.", show_default=False
        ),
    ] = None,
    budgets: Annotated[
        str | None,
        typer.Option(
            "--budgets",
            help="Tokens of answers, at least 3 such as 20000,40000,80000: a run for each, and the law by which more "
            "would serve more (Scylla). The last head is kept.",
            show_default=False,
        ),
    ] = None,
    num_draft_tokens: Annotated[int, typer.Option("--num-draft-tokens", help="Of the chain that is measured.")] = 3,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Prompts answered together.")] = 16,
    seed: o.SeedOption = 0,
    dtype: o.DtypeOption = "auto",
    as_json: o.JsonOption = False,
    no_cache: o.NoCacheOption = False,
) -> None:
    from specjax.models.heads.kinds import KINDS

    o.require(out is not None, "--out FOLDER is missing: where the head goes")
    o.require(bool(prompts) or own_prompts > 0, "give --prompts FILE, or --own-prompts N to have the target write them")
    o.require(method in KINDS, f'--method must be one of {", ".join(KINDS)}, not "{method}"')
    o.require(start in ("target", "random"), f'--start must be target or random, not "{start}"')
    for flag, value, least in (
        ("--held-out", held_out, 1), ("--epochs", epochs, 1), ("--rows", rows, 1), ("--length", length, 8),
        ("--every", every, 1), ("--batch-size", batch_size, 1), ("--max-new-tokens", max_new_tokens, 2),
        ("--num-draft-tokens", num_draft_tokens, 1), ("--own-prompts", own_prompts, 0),
        ("--chunk", 1 if chunk is None else chunk, 1),
    ):  # fmt: skip
        o.require(value >= least, f"{flag} must be at least {least}, not {value}")
    o.require(patience is None or patience >= 0, f"--patience must be at least 0, not {patience}")
    o.require(temperature >= 0, f"--temperature must be 0 or more, not {temperature}")
    recipe = _recipe(method, learning_rate, optimizer, loss, depths)
    shapes = _shapes(method, shape, draft_vocab)
    sizes = _budgets(budgets)

    from specjax.cli.training import Run

    assert out is not None
    run = Run(
        method=method, recipe=recipe, shapes=shapes, draft_vocab=draft_vocab, start=start, out=out,
        answers=answers or out / "answers", prompts=prompts or [], own_prompts=own_prompts, temperature=temperature,
        max_new_tokens=max_new_tokens, held_out=held_out, epochs=epochs, rows=rows, length=length, chunk=chunk,
        every=every, patience=patience, num_tokens=num_draft_tokens, batch_size=batch_size, seed=seed, budgets=sizes,
    )  # fmt: skip
    run.open(target, dtype, no_cache)
    run.run(as_json)


train.__doc__ = HELP


def _recipe(
    method: str, learning_rate: float | None, optimizer: str | None, loss: str | None, depths: int | None
) -> Recipe:
    from specjax.training.recipes import recipe_of

    changes: dict = {}
    if learning_rate is not None:
        changes["learning_rate"] = learning_rate
    if optimizer is not None:
        changes["optimizer"] = optimizer
    if depths is not None:
        changes["depths"] = depths
    if loss is not None:
        changes["losses"] = tuple(map(_share, loss.split(",")))
    return recipe_of(method, **changes)


def _budgets(written: str | None) -> tuple[int, ...]:
    if written is None:
        return ()
    parts = [part.strip() for part in written.split(",")]
    good = all(part.isdigit() and int(part) > 0 for part in parts)
    sizes = tuple(sorted({int(part) for part in parts})) if good else ()
    o.require(
        len(sizes) >= 3, f"--budgets needs at least 3 different numbers above 0, such as 20000,40000,80000: {written}"
    )
    return sizes


def _share(part: str) -> tuple[str, float]:
    name, _, share = part.partition("=")
    try:
        value = float(share or 1)
    except ValueError:
        value = -1.0
    o.require(0 < value < float("inf"), f'--loss: "{part}" has no share above 0; write ce=0.1,tv=0.9')
    return name.strip(), value


def _shapes(method: str, shape: list[str] | None, draft_vocab: int | None) -> dict[str, int]:
    from specjax.models.heads.kinds import KINDS

    known = KINDS[method].numbers
    shapes = {}
    for entry in shape or ():
        name, _, value = entry.partition("=")
        o.require(name in known, f'--shape: {method} has {", ".join(known) or "none"}, not "{name}"')
        o.require(value.isdigit() and int(value) > 0, f'--shape: "{entry}" names no number above 0; write {name}=4')
        shapes[name] = int(value)
    if draft_vocab is not None:
        o.require(
            "draft_vocab_size" in known,
            f"--draft-vocab: a head of {method} drafts all of the target's tokens; leave it out",
        )
        o.require(draft_vocab > 0, f"--draft-vocab must be at least 1, not {draft_vocab}")
        shapes["draft_vocab_size"] = draft_vocab
    return shapes
