"""The command `specjax train`. It parses flags for `specjax.training.train_drafter`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specjax.cli.options import common as o
from specjax.cli.options import completion, hosts
from specjax.cli.options.groups import ModelOptions, flag_of, flag_values, refuse_flags, with_groups
from specjax.errors import UsageError, require

if TYPE_CHECKING:
    from specjax.cli.runs.training import TrainingFlags
    from specjax.training.objectives.recipes import Recipe

PART_FLAGS = frozenset((
    "method", "draft", "prompts", "texts", "system", "template_args", "length", "seed", "settings",
))  # fmt: skip
"""Flags that the training of every part of a method reads or refuses itself. `PartKind.flags` has the others."""
MODEL, PRETRAINING = "two_model", "fastdraft_pretraining"
RECIPES = ("distillspec", "direct_alignment", "fastdraft", PRETRAINING)

HELP = """Train a drafter for a target, on responses of the target itself.

specjax first generates responses to the prompts, at --temperature. It should
be the temperature of later decoding. The responses are stored in OUT/answers,
and later runs reuse them. Some prompts are held out. Every few steps the head
is measured on half of them, in tokens per target pass of a chain at the same
temperature, as `specjax generate` counts them. The best head is kept, and
measured on the other half.

OUT gets the head (`specjax generate --draft OUT`), history.jsonl, and a plot
of the run. Repeat an interrupted command to resume it from its last
measurement, bit for bit. Ctrl-C keeps the best head so far.

Responses of chat models follow their template. Only responses are trained on.
Files of ShareGPT and OpenAI have conversations: --prompts FILE has the target
answer every turn, and --texts FILE trains on the answers that are given.

--draft HEAD continues from a trained head, on your own texts. --method
two_model trains a draft model. It starts from the model of --draft, or from
some of the target's layers (--layers). OUT is then a model folder in the
Hugging Face layout.
"""


@dataclass(frozen=True)
class StartOptions:
    """The head or draft model that training starts from."""

    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            help="A kind of head, see `specjax methods`; two_model for a draft model; or a method with trained parts: "
            "dynamax, first, lora_drop, matformer, s2d, lud, ceed_vla, hamburger_decoding, learn2pd, specdec++, judge "
            "or arbitrage. "
            "Default: the kind of --draft, or eagle3.",
            show_default=False,
            autocompletion=completion.words("heads", more=["two_model"]),
        ),
    ] = None
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft", help="Head to continue from, or draft model of --method two_model.", show_default=False
        ),
    ] = None
    head_set: o.HeadSetOption = None
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers",
            help="Layers of the target from which a draft model is initialized, such as 0,1,28,29.",
            show_default=False,
        ),
    ] = None
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            help="Recipe of a draft model: distillspec, direct_alignment, fastdraft or fastdraft_pretraining; default: "
            "distillspec.",
            show_default=False,
        ),
    ] = None
    on_policy: Annotated[
        float | None,
        typer.Option(
            "--on-policy",
            help="Share of the steps in which a draft model trains on its own responses (DistillSpec).",
            show_default=False,
        ),
    ] = None
    start: Annotated[
        str | None,
        typer.Option(
            "--start",
            help="Initial parameters of a new head: target (default), random, or another head of any kind. They are "
            "copied where the shapes match.",
            show_default=False,
        ),
    ] = None
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            help="Change of the head's config: NAME=NUMBER, embeds=no, norm_taps=each, or taps=2+15+27 (layers of the "
            "target whose hidden states the head reads). Repeatable.",
            show_default=False,
        ),
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Option NAME=VALUE of a method with trained parts, such as steps=300 or reward=FOLDER. Repeatable.",
            show_default=False,
        ),
    ] = None
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            "--draft-vocab", help="Size of a draft vocabulary of the most frequent tokens.", show_default=False
        ),
    ] = None


@dataclass(frozen=True)
class TextOptions:
    """The texts to train on and to measure."""

    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            "--prompts",
            help="File of prompts: one per line, or JSON with prompts or conversations, of which the target answers "
            "all turns. Repeatable.",
            show_default=False,
        ),
    ] = None
    own_prompts: Annotated[
        int,
        typer.Option(
            "--own-prompts", help="Number of prompts that the target writes itself, by continuing an empty chat."
        ),
    ] = 0
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            "--texts",
            help="File of texts to train on instead of responses: one per line, or JSON with texts or conversations, "
            "of which only the answers are trained. Repeatable.",
            show_default=False,
        ),
    ] = None
    answers: Annotated[
        Path | None,
        typer.Option(
            "--answers", help="Folder of responses that runs share; default: OUT/answers.", show_default=False
        ),
    ] = None
    system: o.SystemOption = None
    template_args: o.TemplateArgsOption = None
    temperature: o.TemperatureOption = 0.0
    max_new_tokens: o.LengthOption = 256
    held_out: Annotated[
        int,
        typer.Option(
            "--held-out",
            help="Number of prompts that are not trained on. Half of them select the best head, and the others "
            "measure it.",
        ),
    ] = 16
    batch_size: Annotated[
        int, typer.Option("--batch-size", help="Number of prompts whose responses are generated together.")
    ] = 16


@dataclass(frozen=True)
class LoopOptions:
    """The training loop."""

    epochs: Annotated[int, typer.Option("--epochs", help="Passes over all responses.")] = 1
    learning_rate: Annotated[
        float | None,
        typer.Option(
            "--learning-rate",
            help="Learning rate. Default: that of the method and the optimizer. Muon's is ten times AdamW's.",
            show_default=False,
        ),
    ] = None
    optimizer: Annotated[
        str | None, typer.Option("--optimizer", help="adamw or muon; default: that of the method.", show_default=False)
    ] = None
    loss: Annotated[
        str | None,
        typer.Option(
            "--loss",
            help="ce, soft_ce, kl, rkl, jsd, tv, tvd++, nla, lk_hybrid, or a sum such as ce=0.1,tv=0.9; default: that "
            "of the method.",
            show_default=False,
        ),
    ] = None
    freeze: Annotated[
        list[str] | None,
        typer.Option(
            "--freeze",
            help="Parameters that are not trained, such as head or layers/0. Repeatable.",
            show_default=False,
        ),
    ] = None
    depths: Annotated[
        int | None,
        typer.Option(
            "--depths",
            help="Drafted tokens per round of training; default: all that the head drafts, or the authors' number.",
            show_default=False,
        ),
    ] = None
    rows: Annotated[int, typer.Option("--rows", help="Rows of a training batch.")] = 4
    length: Annotated[int, typer.Option("--length", help="Tokens per row.")] = 512
    accumulate: Annotated[
        int,
        typer.Option(
            "--accumulate",
            help="Batches whose gradients are added in one step, which is that of so many times --rows in less memory.",
        ),
    ] = 1
    chunk: Annotated[
        int | None,
        typer.Option(
            "--chunk",
            help="Positions of a row whose logits are computed at a time. Small values need less memory and more time.",
            show_default=False,
        ),
    ] = None
    keep_states: Annotated[
        float | None,
        typer.Option(
            "--keep-states",
            help="Size limit in GiB. The target then runs over the responses once, and its activations are cached in "
            "bfloat16 for later epochs. Without the flag it runs in every epoch.",
            show_default=False,
        ),
    ] = None
    states: Annotated[
        Path | None,
        typer.Option(
            "--states",
            help="Folder of the cached activations; default: OUT/states. Several runs can share it, also with more "
            "responses, if their heads read the same layers of the target.",
            show_default=False,
        ),
    ] = None
    every: Annotated[int, typer.Option("--every", help="Steps between measurements.")] = 50
    patience: Annotated[
        int | None,
        typer.Option(
            "--patience", help="Training stops after this many measurements without improvement.", show_default=False
        ),
    ] = None
    budgets: Annotated[
        str | None,
        typer.Option(
            "--budgets",
            help="At least 3 numbers of response tokens, such as 20000,40000,80000. Trains once per budget and fits a "
            "scaling law (Scylla). The last head is kept.",
            show_default=False,
        ),
    ] = None
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-draft-tokens",
            help="Length of the measured chain; default: 3, or the limit of the head.",
            show_default=False,
        ),
    ] = None
    seed: o.SeedOption = 0


@with_groups
def train(
    *,
    target: o.TargetOption = None,
    begin: StartOptions,
    text: TextOptions,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the head.", show_default=False)] = None,
    target_name: Annotated[
        str | None,
        typer.Option(
            "--target-name",
            help="Name of the target in the head's config, by which other engines load it; default: the hub id or the "
            "path of --target.",
            show_default=False,
        ),
    ] = None,
    loop: LoopOptions,
    report: Annotated[
        str | None,
        typer.Option(
            "--report",
            help="Chips such as v5e:2x4. Compiles a training step for them, reports memory and speed, and trains "
            "nothing. --target then needs no weights, as for `specjax compile`.",
            show_default=False,
        ),
    ] = None,
    dtype: o.DtypeOption = "auto",
    max_positions: o.PositionsOption = None,
    quantize: o.QuantizeOption = None,
    keep_quantized: o.KeepQuantizedOption = None,
    host: hosts.HostOptions,
    as_json: o.JsonOption = False,
    no_cache: o.NoCacheOption = False,
) -> None:
    values = {
        "target": target, "out": out, "target_name": target_name, "report": report, "dtype": dtype,
        "max_positions": max_positions, "quantize": quantize, "keep_quantized": keep_quantized,
        "as_json": as_json, "no_cache": no_cache,
        **flag_values(begin, text, loop, host),
    }  # fmt: skip
    flags = SimpleNamespace(**{name: _in_home(value) for name, value in values.items()})
    if _is_part(method := flags.method):
        _train_part(flags, method, (begin, text, loop, host))
        return
    require(not flags.settings, "--set is for methods with trained parts; leave it out, or give their --method")
    kind, head_kind = _read_kind(flags)
    _check_output(flags)
    _check_combinations(flags, kind, head_kind)
    recipe = _read_recipe(flags, kind)
    _check_recipe(flags, kind, recipe)
    head_options = {} if kind == MODEL else _read_head_options(kind, flags.shape, flags.draft_vocab)
    o.check_seed(flags.seed)
    require(
        flags.rows % (flags.data or 1) == 0,
        f"--rows {flags.rows} cannot be split over --data {flags.data}; make it a multiple",
    )
    if report is not None:
        _check_report(flags, kind, head_kind)
        hosts.join(values)
        _report(flags, kind, head_options, recipe)
        return
    models = ModelOptions(
        target, flags.draft, dtype, no_cache, max_positions=max_positions, head_set=flags.head_set,
        template_args=text.template_args, quantize=quantize, keep_quantized=keep_quantized,
    )  # fmt: skip
    models.check_head(head_kind is not None)
    training = _read_training(flags, kind, head_options, recipe)
    hosts.join(values)

    from specjax.cli.runs.training import run_training

    mesh = hosts.make_mesh(flags.distributed, flags.data, flags.model)
    run_training(training, models, mesh, has_head=head_kind is not None, as_json=as_json)


train.__doc__ = HELP


def _is_part(method: str | None) -> bool:
    """Return True if a method has trained parts that are no draft head."""
    from specjax.training.parts import PARTS

    return method in PARTS


def _train_part(flags: SimpleNamespace, method: str, groups: tuple[Any, ...]) -> None:
    """Train the parts of a method. Raises: UsageError for flags that do not fit."""
    from specjax.cli.runs.collaboration.checks import check_reward_options
    from specjax.cli.runs.part_training import PartFlags, parse_options, run_part
    from specjax.cli.runs.training import check_folder, check_sources, read_files
    from specjax.training.methods.judged_files import check_judged, read_judged
    from specjax.training.parts import PARTS

    part, reason = PARTS[method], f"does not fit --method {method}"
    refuse_flags(groups, PART_FLAGS | part.flags, reason)
    if flags.texts and part.data == "responses":
        read = (PART_FLAGS | part.settings) - {"prompts"}
        refuse_flags(groups, read, "does not fit --texts, which has the texts to train on")
    for name in ("target_name", "report"):
        require(getattr(flags, name) is None, f"{flag_of(name)} {reason}; remove it")
    options = parse_options(method, flags.settings)
    require(part.takes_draft or flags.draft is None, f"--draft does not fit --method {method}; leave it out")
    require(
        flags.draft is not None or not part.takes_draft or method == "s2d",
        f"--method {method} needs a draft model; add --draft MODEL",
    )
    require(flags.out is not None, "--out FOLDER is missing; name the folder of the result")
    models = {f"--set {name}": options.get(name) for name in ("reward", "router")}
    check_sources(flags.out, {"--target": flags.target, "--draft": flags.draft} | models, ("base", "head"))
    require(not part.denoises or not flags.own_prompts, "--own-prompts needs an autoregressive target; give --prompts")
    if method == "arbitrage":
        words = f"--method {method} needs a process reward model; add --set reward=FOLDER"
        require(options["reward"] is not None, words)
        check_reward_options("reward", {name: value for name, value in options.items() if value is not None})
    judged: list[dict[str, Any]] = []
    if part.data == "judged":
        require(bool(flags.texts) and not flags.prompts, "--method judge reads judged responses; give --texts FILE")
        judged = [entry for path in flags.texts for entry in parse_judged(path, read_judged)]
        check_judged(judged)
    else:
        has_texts = bool(flags.texts) and part.data == "responses"
        require(
            bool(flags.prompts) or flags.own_prompts > 0 or has_texts,
            "give --prompts FILE, or --own-prompts N to have the target write them",
        )
        require(part.data == "responses" or not flags.texts, f"--method {method} reads prompts; give --prompts FILE")
    prompts = read_files(flags.prompts or [], "--prompts")
    texts = [] if judged else read_files(flags.texts or [], "--texts")
    for flag, folder in (("--out", flags.out), ("--answers", flags.answers)):
        check_folder(folder, flag)
    o.check_seed(flags.seed)
    for name, minimum in (("rows", 1), ("length", 8), ("epochs", 1), ("max_new_tokens", 2), ("batch_size", 1)):
        o.check_minimum(f"--{name.replace('_', '-')}", getattr(flags, name), minimum)
    rate = flags.learning_rate
    require(rate is None or 0 < rate < float("inf"), f"--learning-rate must be a number above 0, not {rate}")
    loaded = ModelOptions(
        flags.target, flags.draft, flags.dtype, flags.no_cache, max_positions=flags.max_positions,
        template_args=flags.template_args, quantize=flags.quantize, keep_quantized=flags.keep_quantized,
    )  # fmt: skip
    run_part(PartFlags(method, options, prompts, texts, judged, flags), loaded, as_json=flags.as_json)


def parse_judged(path: Path, read: Any) -> list[dict[str, Any]]:
    """Return the judged responses of a file. Raises: UsageError that names the flag."""
    return o.parse_flag("--texts", read, path)


def _in_home(value: Any) -> Any:
    """Return a path, or a list of paths, with the folder of the user in place of ~. Other values stay."""
    if isinstance(value, list):
        return [_in_home(entry) for entry in value]
    return value.expanduser() if isinstance(value, Path) else value


def _read_training(flags: SimpleNamespace, kind: str, head_options: dict[str, Any], recipe: Recipe) -> TrainingFlags:
    """Return the parsed flags. Raises: UsageError for numbers out of range, and folders that must not be written."""
    from specjax.cli.runs.training import (
        TrainingFlags,
        check_folder,
        check_sources,
        has_conversation,
        in_flags,
        read_files,
        read_settings,
    )

    with in_flags():
        settings = read_settings(vars(flags), budgets=_read_budgets(flags.budgets))
    require(
        flags.recipe != PRETRAINING or bool(flags.texts),
        f"--recipe {PRETRAINING} trains on raw text; give it by --texts FILE",
    )
    check_sources(flags.out, {"--target": flags.target, "--draft": flags.draft, "--start": flags.start})
    prompts, texts = read_files(flags.prompts or [], "--prompts"), read_files(flags.texts or [], "--texts")
    require(
        bool(prompts) or flags.own_prompts > 0 or has_conversation(texts),
        "--texts has no conversations, so the measurement needs prompts; give --prompts FILE, or --own-prompts N to "
        "have the target write them",
    )
    for flag, folder in (("--out", flags.out), ("--answers", flags.answers), ("--states", flags.states)):
        check_folder(folder, flag)
    return TrainingFlags(
        kind=kind, out=flags.out, prompts=prompts, texts=texts,
        layers=_read_layers(flags, kind), start=flags.start or "target", head_options=head_options, recipe=recipe,
        on_policy=flags.on_policy or 0.0, settings=settings, responses=flags.answers, activations=flags.states,
        target=flags.target, draft=flags.draft, system=flags.system, target_name=flags.target_name,
    )  # fmt: skip


def _read_kind(flags: SimpleNamespace) -> tuple[str, str | None]:
    """Return (the kind to train, the kind of head that --draft is or None)."""
    from specjax.cli.options.drafter_flags import find_head_kind
    from specjax.models.heads.kinds import KINDS

    method, draft = flags.method, flags.draft
    head_kind = None if method == MODEL else find_head_kind(draft)
    require(
        head_kind in (None, method) or method is None, f"--draft is a head of {head_kind}, not of --method {method}"
    )
    kind = method or head_kind or "eagle3"
    require(kind in KINDS or kind == MODEL, f'--method must be {MODEL} or one of {", ".join(KINDS)}, not "{kind}"')
    require(
        draft is None or head_kind is not None or method is not None,
        f"--draft {draft} is no head; for a draft model give --method {MODEL} too",
    )
    start = flags.start
    is_start = start in (None, "target", "random") or find_head_kind(start, "--start") is not None
    require(is_start, f'--start must be target, random or a head, not "{start}"')
    return kind, head_kind


def _check_output(flags: SimpleNamespace) -> None:
    """Raise a UsageError without --out or prompts, unless there is a report."""
    if flags.report is None:
        require(flags.out is not None, "--out FOLDER is missing; name the folder of the head")
        has_prompts = bool(flags.prompts or flags.texts) or flags.own_prompts > 0
        require(has_prompts, "give --prompts FILE, or --own-prompts N to have the target write them")


def _check_combinations(flags: SimpleNamespace, kind: str, head_kind: str | None) -> None:
    """Raise a UsageError for flags that do not fit the kind, or each other."""
    require(
        flags.states is None or flags.keep_states is not None, "--states needs --keep-states GIB; give both or none"
    )
    new_head = {"--shape": flags.shape, "--draft-vocab": flags.draft_vocab, "--start": flags.start}
    for flag, value in new_head.items():
        require(
            value is None or head_kind is None, f"{flag} is for a new head, and --draft is one already; leave one out"
        )
    any_head = new_head | {"--depths": flags.depths}
    model = {"--layers": flags.layers, "--recipe": flags.recipe, "--on-policy": flags.on_policy}
    if head_kind is None:
        model["--draft"] = flags.draft
    for flag, value in (any_head if kind == MODEL else model).items():
        require(value is None, f"{flag} does not fit --method {kind}; leave it out")


def _read_recipe(flags: SimpleNamespace, kind: str) -> Recipe:
    """Return the recipe of the kind, with the changes of flags."""
    from specjax.training.objectives.recipes import recipe_of

    name = kind
    if kind == MODEL:
        require(flags.recipe in (None, *RECIPES), f'--recipe must be one of {", ".join(RECIPES)}, not "{flags.recipe}"')
        name = flags.recipe or RECIPES[0]
    names = ("learning_rate", "optimizer", "depths")
    changes: dict[str, Any] = {key: getattr(flags, key) for key in names if getattr(flags, key) is not None}
    if flags.freeze:
        changes["frozen"] = (*recipe_of(name).frozen, *flags.freeze)
    if flags.loss is not None:
        changes["losses"] = tuple(map(_read_share, flags.loss.split(",")))
    return recipe_of(name, **changes)


def _check_recipe(flags: SimpleNamespace, kind: str, recipe: Recipe) -> None:
    """Raise a UsageError for flags of draft models that do not fit the recipe."""
    share = flags.on_policy
    require(share is None or 0 <= share <= 1, f"--on-policy must be from 0 to 1, not {share}")
    require(
        not share or recipe.reads_teacher,
        "--on-policy trains on the target's distributions, which the loss ce does not read; leave it out, or use "
        "--recipe distillspec",
    )
    require(
        flags.keep_states is None or kind != MODEL or (recipe.reads_teacher and not share),
        "--keep-states caches activations of texts, and a draft model with the loss ce or --on-policy reads none; "
        "leave it out",
    )


def _read_head_options(kind: str, shape: list[str] | None, draft_vocab: int | None) -> dict[str, Any]:
    """Return the changes of a head's config."""
    from specjax.models.heads.kinds import KINDS

    entry = KINDS[kind]
    options: dict[str, Any] = {}
    names = entry.changes
    for text in shape or ():
        name, change = text.partition("=")[0], entry.parse_change(text)
        require(name in names, f'--shape: {kind} has {", ".join(names) or "none"}, not "{name}"')
        if change is None:
            form = entry.forms[names.index(name)].replace("=N", "=4")
            value = "yes or no" if name in entry.flags else "number above 0"
            value = "streams of the target" if name == "taps" else value
            value = "word of these" if name in dict(entry.choices) else value
            raise UsageError(f'--shape: "{text}" names no {value}; write {form}')
        options[change[0]] = change[1]
    if draft_vocab is not None:
        require(
            "draft_vocab_size" in names,
            f"--draft-vocab: a head of {kind} drafts all of the target's tokens; leave it out",
        )
        require(draft_vocab > 1, f"--draft-vocab must be at least 2, not {draft_vocab}")
        options["draft_vocab_size"] = draft_vocab
    return options


def _read_layers(flags: SimpleNamespace, kind: str) -> tuple[int, ...]:
    """Return the numbers of --layers, or () for a head or a draft model."""
    if kind != MODEL:
        return ()
    text = flags.layers
    require(
        (flags.draft is None) != (text is None),
        f"--method {MODEL} starts from --draft MODEL, or from --layers of the target; give one of the two",
    )
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    require(all(part.isdecimal() for part in parts), f'--layers must be numbers such as 0,1,28,29, not "{text}"')
    return tuple(map(int, parts))


def _read_budgets(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    is_valid = all(part.isdecimal() and int(part) > 0 for part in parts)
    budgets = tuple(sorted({int(part) for part in parts})) if is_valid else ()
    require(
        len(budgets) >= 3, f"--budgets needs at least 3 different numbers above 0, such as 20000,40000,80000: {text}"
    )
    return budgets


def _read_share(part: str) -> tuple[str, float]:
    """Return (name, share) of one loss."""
    name, _, share = part.partition("=")
    try:
        value = float(share or 1)
    except ValueError:
        value = -1.0
    require(0 < value < float("inf"), f'--loss: "{part}" has no share above 0; write ce=0.1,tv=0.9')
    return name.strip(), value


def _check_report(flags: SimpleNamespace, kind: str, head_kind: str | None) -> None:
    """Raise a UsageError for flags that a report cannot use."""
    require(not flags.distributed, "--report runs on this host alone; leave --distributed out")
    require(flags.max_positions is None, "--report is about steps of --length tokens; leave --max-positions out")
    unloaded = flags.quantize is None and flags.keep_quantized is None
    require(unloaded, "--report loads no weights; leave --quantize and --keep-quantized out")
    require(kind != MODEL, f"--report is about heads, not --method {MODEL}; leave one out")
    require(head_kind is None, "--report needs no parameters, and --draft is a head with parameters; leave one out")


def _report(flags: SimpleNamespace, kind: str, head_options: dict[str, Any], recipe: Recipe) -> None:
    """Compile a training step, and print its memory and speed."""
    from specjax.cli.options.planning import progress
    from specjax.cli.output.console import Console, print_json
    from specjax.models.heads.kinds import format_changes
    from specjax.planning import training_report
    from specjax.planning.reports.tables import show_training

    changes = ",".join(format_changes(head_options))
    axes = {name: getattr(flags, name) for name in ("data", "model") if getattr(flags, name) is not None}
    with progress(Console(stderr=True)) as notify:
        try:
            result = training_report(
                flags.target or "smollm2_135m", flags.report, head=f"{kind}:{changes}" if changes else kind,
                rows=flags.rows, length=flags.length, accumulate=flags.accumulate, chunk=flags.chunk, recipe=recipe,
                dtype="bfloat16" if flags.dtype == "auto" else flags.dtype, on_step=notify, **axes,
            )  # fmt: skip
        except UsageError as error:
            raise UsageError(str(error).replace("--topology", "--report")) from None
    if flags.as_json:
        print_json(result.to_json())
    else:
        show_training(result, Console())
