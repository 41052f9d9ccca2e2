"""`specjax train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specjax.cli.options import common as o
from specjax.cli.options import completion, hosts
from specjax.errors import UsageError

if TYPE_CHECKING:
    from specjax.training.objectives.recipes import Recipe

MODEL, RAW = "two_model", "fastdraft_pretraining"

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

--draft HEAD goes on from a head that there is, anybody's, on your own texts.
--method two_model trains a draft model: the one of --draft, or the target with
some of its layers. OUT is then a model folder in the Hugging Face layout.
"""


def train(
    target: o.TargetOption = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            help="A kind of head, see `specjax methods`, or two_model for a draft model; default: what --draft is, or "
            "eagle3.",
            show_default=False,
            autocompletion=completion.words("heads", more=["two_model"]),
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft", help="What training goes on from: a head, or two_model's draft model.", show_default=False
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers",
            help="Or: layers of the target that two_model begins with, such as 0,1,28,29.",
            show_default=False,
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            help="Of a draft model: distillspec, direct_alignment, fastdraft or fastdraft_pretraining; default: the "
            "first.",
            show_default=False,
        ),
    ] = None,
    on_policy: Annotated[
        float | None,
        typer.Option(
            "--on-policy",
            help="Share of the steps of a draft model on what it answers itself (DistillSpec).",
            show_default=False,
        ),
    ] = None,
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
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            "--texts",
            help="Texts to learn as they are, in place of answers: one per line, or JSONL; may be given several times.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The folder of the head.", show_default=False)] = None,
    answers: Annotated[
        Path | None, typer.Option("--answers", help="Where answers are kept; default: OUT/answers.", show_default=False)
    ] = None,
    temperature: o.TemperatureOption = 0.0,
    max_new_tokens: o.LengthOption = 256,
    held_out: Annotated[int, typer.Option("--held-out", help="Prompts that are measured and not trained on.")] = 16,
    epochs: Annotated[int, typer.Option("--epochs", help="Times that every answer is read.")] = 1,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            "--learning-rate",
            help="Default: that of the method and the optimizer; Muon's is ten times AdamW's.",
            show_default=False,
        ),
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
    freeze: Annotated[
        list[str] | None,
        typer.Option(
            "--freeze",
            help="Parameters that stay as they are, such as head or layers/0; may be given several times.",
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
            "--shape",
            help="NAME=NUMBER of the method's config, embeds=no, or taps=2+15+27 (streams of the target); may be given "
            "several times.",
            show_default=False,
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--start",
            help="Of a head. target, the default: from the target's layers where they fit; random; or another head, of "
            "any kind, of which it takes what fits.",
            show_default=False,
        ),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", help="Rows of a step.")] = 4,
    length: Annotated[int, typer.Option("--length", help="Tokens of a row.")] = 512,
    chunk: Annotated[
        int | None,
        typer.Option("--chunk", help="Places of a row judged at a time: less memory, more work.", show_default=False),
    ] = None,
    keep_states: Annotated[
        float | None,
        typer.Option(
            "--keep-states",
            help="GiB: run the target over the answers once, and keep (bfloat16) what is learnt from, so that "
            "later epochs do not run it again; refused where it is more.",
            show_default=False,
        ),
    ] = None,
    states: Annotated[
        Path | None,
        typer.Option(
            "--states",
            help="Where --keep-states keeps them; default: OUT/states. Other runs, with more answers or other heads of "
            "the same taps, take what is there.",
            show_default=False,
        ),
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
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-draft-tokens",
            help="Of the chain that is measured; default: 3, or as many as are drafted.",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Prompts answered together.")] = 16,
    seed: o.SeedOption = 0,
    report: Annotated[
        str | None,
        typer.Option(
            "--report",
            help="Chips such as v5e:2x4: compile a step of training a head for them, say whether it fits and how fast "
            "it might be, and train nothing. --target is then shapes alone, as for `specjax compile`.",
            show_default=False,
        ),
    ] = None,
    dtype: o.DtypeOption = "auto",
    max_positions: o.PositionsOption = None,
    distributed: hosts.DistributedOption = False,
    coordinator: hosts.CoordinatorOption = None,
    num_processes: hosts.NumProcessesOption = None,
    process_id: hosts.ProcessIdOption = None,
    connect_timeout: hosts.ConnectOption = 300,
    heartbeat: hosts.HeartbeatOption = 30,
    data: hosts.DataOption = None,
    model: hosts.ModelOption = None,
    as_json: o.JsonOption = False,
    no_cache: o.NoCacheOption = False,
) -> None:
    arguments = dict(locals())
    from specjax.cli.options.drafter_flags import recognised
    from specjax.models.heads.kinds import KINDS

    given = None if method == MODEL else recognised(draft)
    o.require(given in (None, method) or method is None, f"--draft is a head of {given}, not of --method {method}")
    asked, method = method, method or given or "eagle3"
    o.require(
        method in KINDS or method == MODEL,
        f'--method must be {MODEL} or one of {", ".join(KINDS)}, not "{method}"',
    )
    known = start in (None, "target", "random") or recognised(start, "--start") is not None
    o.require(known, f'--start must be target, random or a head, not "{start}"')
    has_prompts = bool(prompts) or own_prompts > 0
    o.require(out is not None or report is not None, "--out FOLDER is missing: where the head goes")
    o.require(
        has_prompts or report is not None, "give --prompts FILE, or --own-prompts N to have the target write them"
    )
    for flag, value, least in (
        ("--held-out", held_out, 1), ("--epochs", epochs, 1), ("--rows", rows, 1), ("--length", length, 8),
        ("--every", every, 1), ("--batch-size", batch_size, 1), ("--max-new-tokens", max_new_tokens, 2),
        ("--own-prompts", own_prompts, 0), ("--chunk", 1 if chunk is None else chunk, 1),
        ("--num-draft-tokens", 1 if num_draft_tokens is None else num_draft_tokens, 1),
    ):  # fmt: skip
        o.require(value >= least, f"{flag} must be at least {least}, not {value}")
    o.require(keep_states is None or keep_states > 0, f"--keep-states must be above 0, not {keep_states}")
    o.require(states is None or keep_states is not None, "--states is where --keep-states GIB keeps them; give both")
    o.require(patience is None or patience >= 0, f"--patience must be at least 0, not {patience}")
    o.require(temperature >= 0, f"--temperature must be 0 or more, not {temperature}")
    o.check_seed(seed)
    o.require(
        not texts or not temperature, "--temperature is of answers, and --texts are learnt as they are; leave it out"
    )
    of_new: dict[str, object] = {"--shape": shape, "--draft-vocab": draft_vocab, "--start": start}
    for flag, other in of_new.items():
        o.require(other is None or given is None, f"{flag} is of a new head, and --draft is one already; leave one out")
    of_head = of_new | {"--depths": depths}
    of_model: dict[str, object] = {"--layers": layers, "--recipe": recipe, "--on-policy": on_policy}
    of_model |= {} if given else {"--draft": draft}
    o.require(
        draft is None or given is not None or method == MODEL or asked is not None,
        f"--draft {draft} is no head; for a draft model give --method {MODEL} too",
    )
    for flag, other in (of_head if method == MODEL else of_model).items():
        o.require(other is None, f"{flag} is not of --method {method}; leave it out")
    chosen = _recipe(
        _recipe_name(recipe) if method == MODEL else method, learning_rate, optimizer, loss, depths, freeze
    )
    o.require(
        keep_states is None or method != MODEL or (chosen.reads_teacher and not on_policy),
        "--keep-states keeps what the target says of texts that stay as they are, and a draft model by the loss ce or "
        "--on-policy learns nothing of it; leave it out",
    )
    shapes = {} if method == MODEL else _shapes(method, shape, draft_vocab)
    sizes = _budgets(budgets)
    o.require(report is None or not distributed, "--report needs no hosts but this one; leave --distributed out")
    split = data or 1
    o.require(rows % split == 0, f"--rows {rows} cannot be split over --data {split}; make it a multiple")
    hosts.join(arguments)
    if report is not None:
        o.require(max_positions is None, "--report is of steps of --length tokens; leave --max-positions out")
        o.require(method != MODEL, f"--report is of heads, not of --method {MODEL}; leave one out")
        o.require(given is None, "--report is of shapes alone, and --draft is a head with parameters; leave one out")
        axes = {name: size for name, size in (("data", data), ("model", model)) if size is not None}
        _report(target, report, method, shapes, chosen, rows, length, chunk, dtype, axes, as_json)
        return
    o.require(recipe != RAW or bool(texts), f"--recipe {RAW} learns texts as they are; give them by --texts FILE")

    from specjax.cli.output.console import Console
    from specjax.cli.runs.trainables import OfGivenHead, OfHead, OfModel
    from specjax.cli.runs.training import Run

    first = hosts.is_first()
    assert out is not None
    for flag, other in (("--draft", draft), ("--start", start)):
        same = other is not None and Path(other).expanduser().resolve() == out.resolve()
        o.require(not same, f"--out {out} is what {flag} names, which stays as it is; give another folder")
    pupil: OfHead | OfModel = OfHead(method, shapes, start or "target")
    if given:
        assert draft is not None
        pupil = OfGivenHead(method, shapes, "target", draft)
    if method == MODEL:
        kept = _layers(draft, layers)
        pupil = OfModel(target if kept else draft, kept, _on_policy(on_policy, chosen), seed)
    run = Run(
        pupil=pupil, recipe=chosen, out=out, answers=answers or out / "answers", prompts=prompts or [],
        own_prompts=own_prompts, texts=texts or [], temperature=temperature, max_new_tokens=max_new_tokens,
        held_out=held_out, epochs=epochs, rows=rows, length=length, chunk=chunk, every=every, patience=patience,
        num_tokens=num_draft_tokens or 0, batch_size=batch_size, seed=seed, budgets=sizes, first=first,
        freeze=freeze or (), keep_states=keep_states, states=states or out / "states",
        log=Console(stderr=True, quiet=not first),
    )  # fmt: skip
    models = o.Models(target, draft, dtype, no_cache, max_positions=max_positions)
    run.open(models, hosts.make_mesh(distributed, data, model), has_head=given is not None)
    run.run(as_json)


train.__doc__ = HELP


def _recipe(
    method: str, learning_rate: float | None, optimizer: str | None, loss: str | None, depths: int | None,
    freeze: list[str] | None,
) -> Recipe:  # fmt: skip
    from specjax.training.objectives.recipes import recipe_of

    changes: dict = {}
    if learning_rate is not None:
        changes["learning_rate"] = learning_rate
    if optimizer is not None:
        changes["optimizer"] = optimizer
    if depths is not None:
        changes["depths"] = depths
    if freeze:
        changes["frozen"] = (*recipe_of(method).frozen, *freeze)
    if loss is not None:
        changes["losses"] = tuple(map(_share, loss.split(",")))
    return recipe_of(method, **changes)


def _report(
    target: str | None, topology: str, method: str, shapes: dict[str, Any], recipe: Recipe, rows: int, length: int,
    chunk: int | None, dtype: str, axes: dict[str, int], as_json: bool,
) -> None:  # fmt: skip
    from specjax.cli.options.planning import progress
    from specjax.cli.output.console import Console, print_json
    from specjax.models.heads.kinds import format_changes
    from specjax.planning import training_report
    from specjax.planning.reports.tables import show_training

    changes = ",".join(format_changes(shapes))
    with progress(Console(stderr=True)) as notify:
        try:
            found = training_report(
                target or "smollm2_135m", topology, head=f"{method}:{changes}" if changes else method, rows=rows,
                length=length, chunk=chunk, recipe=recipe, dtype="bfloat16" if dtype == "auto" else dtype,
                on_step=notify, **axes,
            )  # fmt: skip
        except UsageError as error:
            raise UsageError(str(error).replace("--topology", "--report")) from None
    if as_json:
        print_json(found.to_json())
    else:
        show_training(found, Console())


def _recipe_name(recipe: str | None) -> str:
    known = ("distillspec", "direct_alignment", "fastdraft", RAW)
    o.require(recipe is None or recipe in known, f'--recipe must be one of {", ".join(known)}, not "{recipe}"')
    return recipe or known[0]


def _layers(draft: str | None, written: str | None) -> tuple[int, ...]:
    """Those of --layers, () where there is a draft model."""
    o.require(
        (draft is None) != (written is None),
        f"--method {MODEL} begins with --draft MODEL, or with --layers of the target; give one of the two",
    )
    if written is None:
        return ()
    parts = [part.strip() for part in written.split(",")]
    o.require(all(part.isdecimal() for part in parts), f'--layers must be numbers such as 0,1,28,29, not "{written}"')
    return tuple(map(int, parts))


def _on_policy(share: float | None, recipe: Recipe) -> float:
    if not share:
        return 0.0
    o.require(0 <= share <= 1, f"--on-policy must be from 0 to 1, not {share:g}")
    o.require(
        recipe.reads_teacher,
        "--on-policy learns what the target says of the draft model's own answers, which the loss ce does not ask; "
        "leave it out, or use --recipe distillspec",
    )
    return share


def _budgets(written: str | None) -> tuple[int, ...]:
    if written is None:
        return ()
    parts = [part.strip() for part in written.split(",")]
    good = all(part.isdecimal() and int(part) > 0 for part in parts)
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


def _shapes(method: str, shape: list[str] | None, draft_vocab: int | None) -> dict[str, Any]:
    from specjax.models.heads.kinds import KINDS

    kind = KINDS[method]
    shapes: dict[str, Any] = {}
    known = kind.changes
    for entry in shape or ():
        name, change = entry.partition("=")[0], kind.parse_change(entry)
        o.require(name in known, f'--shape: {method} has {", ".join(known) or "none"}, not "{name}"')
        if change is None:
            form = kind.forms[known.index(name)].replace("=N", "=4")
            others = "yes or no" if name in kind.flags else "number above 0"
            what = "streams of the target" if name == "taps" else others
            raise UsageError(f'--shape: "{entry}" names no {what}; write {form}')
        shapes[change[0]] = change[1]
    if draft_vocab is not None:
        o.require(
            "draft_vocab_size" in known,
            f"--draft-vocab: a head of {method} drafts all of the target's tokens; leave it out",
        )
        o.require(draft_vocab > 1, f"--draft-vocab must be at least 2, not {draft_vocab}")
        shapes["draft_vocab_size"] = draft_vocab
    return shapes
