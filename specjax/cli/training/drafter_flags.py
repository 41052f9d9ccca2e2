"""Checks and parsing of the flags of `specjax train` for draft heads and draft models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from specjax.cli.options.common import check_seed
from specjax.cli.options.drafter_flags import find_head_kind
from specjax.cli.training.drafter_run import TrainingFlags
from specjax.cli.training.files import check_folder, check_sources, has_conversation, read_files
from specjax.cli.training.setting_flags import in_flags, read_settings
from specjax.errors import UsageError, require
from specjax.models.heads.kinds import KINDS, TRAINABLE
from specjax.training.objectives.recipes import Recipe, recipe_of
from specjax.training.pipeline import DRAFT_MODEL

PRETRAINING = "fastdraft_pretraining"
RECIPES = ("distillspec", "direct_alignment", "fastdraft", PRETRAINING)


class DrafterFlags(NamedTuple):
    """The parsed flags about the head or draft model, and its loss."""

    kind: str
    head_kind: str | None  # kind of head that --draft is
    recipe: Recipe
    head_options: dict[str, Any]  # changes of the head's config


def read_drafter(flags: SimpleNamespace) -> DrafterFlags:
    """Return the parsed flags. Raises: UsageError for flags that are missing, wrong or do not fit together."""
    require(not flags.settings, "--set is for methods with trained parts; leave it out, or give their --method")
    kind, head_kind = _read_kind(flags)
    _check_output(flags)
    _check_combinations(flags, kind, head_kind)
    recipe = _read_recipe(flags, kind)
    _check_recipe(flags, kind, recipe)
    head_options = {} if kind == DRAFT_MODEL else _read_head_options(kind, flags.shape, flags.draft_vocab)
    check_seed(flags.seed)
    require(
        flags.rows % (flags.data or 1) == 0,
        f"--rows {flags.rows} cannot be split over --data {flags.data}; make it a multiple",
    )
    return DrafterFlags(kind, head_kind, recipe, head_options)


def _read_kind(flags: SimpleNamespace) -> tuple[str, str | None]:
    """Return (the kind to train, the kind of head that --draft is or None)."""
    method, draft = flags.method, flags.draft
    head_kind = None if method == DRAFT_MODEL else find_head_kind(draft)
    require(
        head_kind in (None, method) or method is None, f"--draft is a head of {head_kind}, not of --method {method}"
    )
    kind = method or head_kind or "eagle3"
    require(
        kind in TRAINABLE or kind == DRAFT_MODEL,
        f'--method must be {DRAFT_MODEL} or one of {", ".join(TRAINABLE)}, not "{kind}"',
    )
    require(
        draft is None or head_kind is not None or method is not None,
        f"--draft {draft} is no head; for a draft model give --method {DRAFT_MODEL} too",
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
    for flag, value in (any_head if kind == DRAFT_MODEL else model).items():
        require(value is None, f"{flag} does not fit --method {kind}; leave it out")


def _read_recipe(flags: SimpleNamespace, kind: str) -> Recipe:
    """Return the recipe of the kind, with the changes of flags."""
    name = kind
    if kind == DRAFT_MODEL:
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
        flags.keep_states is None or kind != DRAFT_MODEL or (recipe.reads_teacher and not share),
        "--keep-states caches activations of texts, and a draft model with the loss ce or --on-policy reads none; "
        "leave it out",
    )


def _read_head_options(kind: str, shape: list[str] | None, draft_vocab: int | None) -> dict[str, Any]:
    """Return the changes of a head's config."""
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
    if kind != DRAFT_MODEL:
        return ()
    text = flags.layers
    require(
        (flags.draft is None) != (text is None),
        f"--method {DRAFT_MODEL} starts from --draft MODEL, or from --layers of the target; give one of the two",
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


def read_training(flags: SimpleNamespace, drafter: DrafterFlags) -> TrainingFlags:
    """Return the parsed flags. Raises: UsageError for numbers out of range, and folders that must not be written."""
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
        kind=drafter.kind, out=flags.out, prompts=prompts, texts=texts, layers=_read_layers(flags, drafter.kind),
        start=flags.start or "target", head_options=drafter.head_options, recipe=drafter.recipe,
        on_policy=flags.on_policy or 0.0, settings=settings, responses=flags.answers, activations=flags.states,
        target=flags.target, draft=flags.draft, system=flags.system, target_name=flags.target_name,
    )  # fmt: skip
