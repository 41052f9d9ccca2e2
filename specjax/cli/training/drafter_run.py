"""The run of `specjax train` for draft heads and draft models, and its report."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from specjax.cli.options import hosts
from specjax.cli.options.common import parse_flag
from specjax.cli.options.groups import ModelOptions
from specjax.cli.output.console import Console, print_json
from specjax.cli.runs.environment import describe_command
from specjax.cli.runs.session import open_session
from specjax.cli.training.files import SourceFile, has_picture, list_sources
from specjax.cli.training.observer import ConsoleObserver
from specjax.cli.training.setting_flags import in_flags
from specjax.files.homes import in_home
from specjax.models import load_image_processor, loading
from specjax.models.loading.heads import read_head
from specjax.models.vision.config import VisionLanguageConfig
from specjax.persistence.cards import write_card
from specjax.training.objectives.recipes import Recipe
from specjax.training.pipeline import DRAFT_MODEL, TrainedDrafter, TrainingSettings, prepare_folder, train_drafter


@dataclass(frozen=True)
class TrainingFlags:
    """The parsed flags of `specjax train`, apart from those that load models."""

    kind: str
    out: Path
    prompts: list[SourceFile]
    texts: list[SourceFile]
    layers: tuple[int, ...]
    start: str
    head_options: Mapping[str, Any]
    recipe: Recipe
    on_policy: float
    settings: TrainingSettings
    responses: Path | None
    activations: Path | None
    target: str | None
    draft: str | None
    system: str | None
    target_name: str | None


def run_training(
    flags: TrainingFlags, models: ModelOptions, mesh: Mesh | None, *, has_head: bool, as_json: bool
) -> None:
    """Load the models, train, and print the result."""
    is_first = hosts.is_first()
    log = Console(stderr=True, quiet=not is_first)
    parse_flag("--out", prepare_folder, flags.out)
    session = open_session(log, models, mesh=mesh, has_head=has_head)
    head = session.head and session.head.head
    start: Any = flags.start
    if start not in ("target", "random"):
        start = parse_flag("--start", lambda source: read_head(source, session.target), start).head
    prompts, texts = list_sources(flags.prompts, log), list_sources(flags.texts, log)
    observer = ConsoleObserver(log)
    with in_flags(), contextlib.closing(observer):
        trained = train_drafter(
            session.target, session.tokenizer, flags.kind, prompts, folder=flags.out, texts=texts,
            draft=head or session.draft, layers=flags.layers, start=start, head_options=flags.head_options,
            recipe=flags.recipe, on_policy=flags.on_policy, settings=flags.settings, responses=flags.responses,
            system=flags.system, activations=flags.activations, saved_tokenizer=_find_tokenizer(flags),
            target_name=_name_target(flags), image_processor=_find_image_processor(flags, session), observer=observer,
        )  # fmt: skip
    card: dict[str, Any] = {**describe_command(), **trained.card}
    if is_first:
        write_card(flags.out, card)
        log.print(f"wrote {flags.out}", style="dim")
    if not trained.improved:
        log.print(
            "no step improved the start, which is kept; train on more responses, or with a --learning-rate below "
            f"{trained.recipe.learning_rate:g}",
            style="dim", soft_wrap=True,
        )  # fmt: skip
    if not as_json:
        _print_result(trained, card, Console(quiet=not is_first))
    elif is_first:
        print_json(card)


def _name_target(flags: TrainingFlags) -> str | None:
    """Return the name by which other engines load the target; None: the name of the model, a hub id."""
    if flags.target_name is not None or flags.target is None:
        return flags.target_name
    path = in_home(flags.target)
    if not path.exists():
        return None
    prefix, *hub_id = path.resolve().parent.parent.name.split("--")  # models--ORGANIZATION--NAME, in the hub's cache
    return "/".join(hub_id) if prefix == "models" and hub_id else str(path.resolve())


def _find_tokenizer(flags: TrainingFlags) -> Any:
    """Return the tokenizer to write next to a draft model: the files of its source, if that is a folder."""
    if flags.kind != DRAFT_MODEL:
        return None
    name = flags.target if flags.layers else flags.draft
    source = loading.resolve(name)
    return source if source.is_dir() else loading.load_tokenizer(name)


def _find_image_processor(flags: TrainingFlags, session: Any) -> Any:
    """Return the image processor of the target; None if no prompt has an image, or if the target reads none."""
    if not isinstance(session.target.model.config, VisionLanguageConfig) or not has_picture(flags.prompts):
        return None
    load = lambda folder: load_image_processor(folder, session.target, session.tokenizer)
    return parse_flag("--prompts", load, loading.resolve(flags.target))


def _print_result(trained: TrainedDrafter, card: dict[str, Any], out: Console) -> None:
    """Print the result for people."""
    measured = trained.measured
    temperature = card["temperature"]
    chain = f"sampled chain at temperature {temperature:g}" if temperature else "greedy chain"
    out.print(
        f"{trained.kind}: {measured.per_pass:.2f} tokens per pass on {trained.held_out} held-out texts ({chain} "
        f"of {trained.num_draft_tokens}, with bonus tokens), first draft correct at {measured.first:.0%}",
        soft_wrap=True,
    )
    if card["law"] is not None:
        _print_law(card["law"], out)
    method = f" --method {DRAFT_MODEL}" if trained.kind == DRAFT_MODEL else ""
    out.print(f"specjax generate --draft {trained.folder}{method} ...", soft_wrap=True)


def _print_law(law: dict[str, Any], out: Console) -> None:
    runs = ", ".join(f"{run['tokens']}: {run['tokens_per_pass']:.3f}" for run in law["runs"])
    predicted = ", ".join(
        f"{entry['tokens']}: {entry['tokens_per_pass']:.2f} ({entry['from']:.2f} to {entry['to']:.2f})"
        for entry in law["predicted"]
    )
    out.print(f"tokens per pass by response tokens: {runs}", soft_wrap=True)
    out.print(f"predicted by the {law['form']} law: {predicted}", soft_wrap=True)
