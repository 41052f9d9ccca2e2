"""The run of `specjax train`: prompts from files, progress on the terminal, and the report."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specjax.cli.options import hosts
from specjax.cli.options.common import parse_flag
from specjax.cli.options.groups import ModelOptions
from specjax.cli.options.prompts import LISTED
from specjax.cli.output.console import Console, print_json
from specjax.cli.runs.environment import stage
from specjax.cli.runs.session import CARD, Session, open_session, provenance
from specjax.errors import UsageError, require
from specjax.models import loading
from specjax.models.loading.heads import read_head
from specjax.training.data.conversation_files import TextFile, read_text_file
from specjax.training.data.conversations import TextSource, is_conversation
from specjax.training.loop.trainer import TrainingProgress
from specjax.training.measure.plot import plot
from specjax.training.objectives.recipes import Recipe
from specjax.training.observer import TrainingObserver
from specjax.training.pipeline import DRAFT_MODEL, TrainedDrafter, TrainingSettings, prepare_folder, train_drafter

PLOT = "training.png"

FLAGS = {
    "generated_prompts": "--own-prompts", "evaluate_every": "--every", "cache_gib": "--keep-states",
    "draft_vocab_size": "--draft-vocab", "num_tokens": "--num-draft-tokens",
}  # fmt: skip
"""Flags whose names differ from those of settings."""

NAMES = {field.name for field in dataclasses.fields(TrainingSettings)} | {*FLAGS, "layers", "start", "draft", "depths"}


class SourceFile(NamedTuple):
    """A file of prompts or texts, which is read before the models are loaded."""

    path: Path
    content: TextFile


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


def to_flag(name: str) -> str:
    """Return the flag of a setting."""
    return FLAGS.get(name, f"--{name.replace('_', '-')}")


def read_settings(arguments: Mapping[str, Any], **changes: Any) -> TrainingSettings:
    """Return the settings of the flags. Raises: UsageError for numbers out of range."""
    names = [field.name for field in dataclasses.fields(TrainingSettings) if field.name not in changes]
    values = {name: arguments[to_flag(name).removeprefix("--").replace("-", "_")] for name in names}
    settings = TrainingSettings(**values, **changes)
    settings.check()
    return settings


def name_flags(message: str) -> str:
    """Replace names of settings in a message by flags."""
    message = re.sub(r"`(\w+)`", lambda match: to_flag(match[1]) if match[1] in NAMES else match[0], message)
    return re.sub(r"\b(\w+)=(?=\S)", lambda match: f"{to_flag(match[1])} " if match[1] in NAMES else match[0], message)


@contextlib.contextmanager
def in_flags() -> Iterator[None]:
    """Raise UsageErrors with the names of flags."""
    try:
        yield
    except UsageError as error:
        raise UsageError(name_flags(str(error))) from None


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
            target_name=_name_target(flags),
            observer=observer,
        )  # fmt: skip
    card = _make_card(session, trained, flags.settings) | {"system": flags.system}
    if is_first:
        _write_report(trained, card, session, log)
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


def read_files(paths: Sequence[Path], flag: str) -> list[SourceFile]:
    """Read files of prompts or texts. Raises: UsageError that names the flag."""
    return [SourceFile(path, parse_flag(flag, read_text_file, path)) for path in paths]


def has_conversation(files: Sequence[SourceFile]) -> bool:
    """Return True if one of the texts is a conversation."""
    return any(is_conversation(source) for _, content in files for source in content.sources)


def check_folder(folder: Path | None, flag: str) -> None:
    """Raise a UsageError for a folder that cannot be written, without creating it."""
    if folder is None:
        return
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    require(existing.is_dir(), f"{flag}: {folder} cannot be written ({existing} is no folder); give another folder")
    require(
        os.access(existing, os.W_OK | os.X_OK),
        f"{flag}: {folder} cannot be written (no permission in {existing}); give another folder",
    )


def check_sources(out: Path, sources: Mapping[str, str | None], parts: Sequence[str] = ()) -> None:
    """Raise a UsageError if a run would overwrite a model that it reads.

    Args: sources: the model of each flag. parts: names of folders in `out` that the run writes too.
    """
    written = [folder.resolve() for folder in (out, *(out / part for part in parts))]
    for flag, source in sources.items():
        is_same = source is not None and Path(source).expanduser().resolve() in written
        require(not is_same, f"--out {out} is the folder of {flag}, which must not change; give another folder")


def list_sources(files: Sequence[SourceFile], log: Console) -> list[TextSource]:
    """Return the prompts or texts of all files, and print the entries that cannot be used."""
    for path, content in files:
        if content.bad:
            shown = "; ".join(f"{path}, {entry.number}: {entry.error}" for entry in content.bad[:LISTED])
            more = f"; and {len(content.bad) - LISTED} more" if len(content.bad) > LISTED else ""
            log.print(f"left out: {shown}{more}", soft_wrap=True)
    return [source for _, content in files for source in content.sources]


def _name_target(flags: TrainingFlags) -> str | None:
    """Return the name by which other engines load the target; None: the name of the model, a hub id."""
    if flags.target_name is not None or flags.target is None:
        return flags.target_name
    path = Path(flags.target).expanduser()
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


class ConsoleObserver(TrainingObserver):
    """An observer that shows progress bars and prints measurements."""

    def __init__(self, log: Console):
        self.log = log
        self._bar: Progress | None = None
        self._title, self._started, self._loss = "", 0.0, ""

    def on_note(self, note: str) -> None:
        self.close()
        self.log.print(name_flags(note), style="dim", soft_wrap=True)

    def on_responses(self, stage: str, done: int, total: int, tokens: int) -> None:
        seconds = time.perf_counter() - self._started
        self._update(stage, done, total, f"{tokens / seconds:.0f} tokens/s" if done else "")
        if done == total:
            self.close()
            self.log.print(f"{stage}: {total} prompts, {tokens} tokens, {seconds:.0f} s", style="dim")

    def on_run(self, name: str) -> None:
        self.close()

    def on_activations(self, done: int, total: int) -> None:
        self._update("target", done, total, "tokens read by the target")
        if done == total:
            self.close()

    def on_step(self, progress: TrainingProgress) -> None:
        loss = "" if progress.loss is None else f"loss {progress.loss:.3f}"
        rate = ""
        if loss:
            speed = progress.tokens / max(progress.seconds, 1e-9)
            rate = f"{loss}  first draft {progress.accuracy[0]:.0%}  {speed:.0f} tokens/s"
        self._update("training", progress.step, progress.steps, rate)
        measured = progress.measured
        if measured is not None:
            where = f"step {progress.step}: {loss}" if loss else "at the start"
            best = ", the best so far" if progress.best else ""
            line = f"{where}, {measured.per_pass:.3f} tokens per pass, first draft {measured.first:.1%}{best}"
            self.log.print(line, style="dim")
        if progress.step == progress.steps:
            self.close()

    def _update(self, title: str, done: int, total: int, rate: str) -> None:
        if self._bar is None or self._title != title:
            self.close()
            columns = TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self.log, transient=True)
            self._bar.start()
            self._bar.add_task("", total=total, rate=rate)
            self._title, self._started = title, time.perf_counter()
        self._bar.update(self._bar.task_ids[0], total=total, completed=done, rate=rate)

    def close(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = None


def _make_card(session: Session, trained: TrainedDrafter, settings: TrainingSettings) -> dict[str, Any]:
    """Return the result as plain values."""
    measured, last = trained.measured, trained.history[-1] if trained.history else {}
    return {
        **provenance(session), "method": trained.kind, "recipe": dataclasses.asdict(trained.recipe),
        "answers": trained.texts, "answer_tokens": trained.response_tokens, "epochs": settings.epochs,
        "temperature": settings.temperature, "seed": settings.seed, "seconds": last.get("seconds", 0.0),
        "served": {
            "tokens_per_pass": measured.per_pass, **measured._asdict(), "num_draft_tokens": trained.num_draft_tokens,
            "texts": trained.held_out,
        },
        "accuracy": last.get("accuracy", []), "law": _describe_law(trained),
    }  # fmt: skip


def _describe_law(trained: TrainedDrafter) -> dict[str, Any] | None:
    """Return the scaling law with its predictions for 2, 4 and 16 times the largest budget."""
    law = trained.law
    if law is None:
        return None
    predicted = []
    for budget in (factor * trained.runs[-1].tokens for factor in (2, 4, 16)):
        low, high = law.predict_interval(budget)
        predicted.append({"tokens": budget, "tokens_per_pass": float(law(budget)), "from": low, "to": high})
    runs = [{"tokens": run.tokens, "tokens_per_pass": run.per_pass} for run in trained.runs]
    return {
        "form": law.form, "slope": law.slope, "start": law.intercept, "r2": law.r2, "runs": runs,
        "predicted": predicted,
    }  # fmt: skip


def _write_report(trained: TrainedDrafter, card: dict[str, Any], session: Session, log: Console) -> None:
    """Write the card and the plot into the folder of the head."""
    out = trained.folder
    with stage(log, "writing the report", f"wrote {out}"):
        (out / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
        if trained.history:
            with contextlib.suppress(UsageError):  # without matplotlib history.jsonl still has the numbers
                image = plot(trained.history, f"{trained.kind} for {session.target.model.name}")
                (out / PLOT).write_bytes(image)


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
