"""The training pipeline: one call goes from a target to a served draft head or draft model.

    settings = TrainingSettings(epochs=3, max_new_tokens=128)
    train_drafter(target, tokenizer, "eagle3", prompts, folder="head", settings=settings)
    drafter = specjax.make_drafter("eagle3", target, specjax.load_head("head", target))
    specjax.decode(target, drafter, prompts, key=0, max_new_tokens=128)

The steps are: generation of responses by the target, packing, cached activations, initialisation, training with
evaluation on held-out prompts, and writing of the best head. `specjax train` parses flags for this function.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.arrays.modes import with_standard_modes
from specjax.errors import UsageError
from specjax.files.homes import in_home
from specjax.models import prune_layers
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.kinds import TRAINABLE
from specjax.models.variants.expanding import expand_target
from specjax.parallel import check_same, gather
from specjax.persistence.fingerprint import digest_model
from specjax.training.data.conversations import TextSource
from specjax.training.data.corpus import Corpus, CorpusBuilder, CorpusSettings
from specjax.training.data.packing import TrainingText
from specjax.training.drafter_card import make_card, write_report
from specjax.training.loop.checkpoints import read_position
from specjax.training.loop.history import TrainingHistory, read_history
from specjax.training.loop.target_activations import ActivationCache
from specjax.training.loop.trainer import LoopSettings, TrainingProgress, run_identity, train
from specjax.training.measure.acceptance_eval import MeasuredAcceptance, measure_acceptance
from specjax.training.measure.confidence_scaling import has_temperatures, scale_confidence
from specjax.training.measure.scaling import MIN_BUDGETS, fit
from specjax.training.objectives.recipes import Recipe, check_recipe, recipe_of
from specjax.training.objectives.trainables import TrainingObjective
from specjax.training.observer import TrainingObserver
from specjax.training.results import BudgetRun, TrainedDrafter
from specjax.training.starting_points import DraftModel, NewHead, StartingPoint, TrainedHead
from specjax.types import Target

DRAFT_MODEL = "two_model"
"""The kind of a draft model. Other kinds are heads, those of `models.heads.kinds.TRAINABLE`."""

CHAIN_LENGTH = 3
"""Default length of the measured chain, unless the head has a lower limit."""

MINIMA = {
    "held_out": 2, "max_new_tokens": 2, "generated_prompts": 0, "batch_size": 1, "epochs": 1, "rows": 1, "length": 8,
    "accumulate": 1, "chunk": 1, "evaluate_every": 1, "patience": 0, "num_draft_tokens": 1, "seed": 0, "temperature": 0,
}  # fmt: skip


@dataclass(frozen=True)
class TrainingSettings:
    """Numeric settings of `train_drafter`. The command line has a flag with the same default for each of them."""

    held_out: int = 16  # prompts that are not trained on; half of them select the best result, the others measure it
    max_new_tokens: int = 256  # limit of a response
    temperature: float = 0.0  # temperature of all responses and of the measured chain
    generated_prompts: int = 0  # additional prompts, which the target writes
    batch_size: int = 16  # prompts that are answered together
    epochs: int = 1
    rows: int = 4  # rows of a training batch
    length: int = 512  # tokens per row
    accumulate: int = 1  # batches whose gradients are added in one step
    chunk: int | None = None  # positions of a row whose logits are computed together; None: all
    evaluate_every: int = 50  # steps between evaluations
    patience: int | None = None  # evaluations in a row without improvement before training stops; None: unlimited
    num_draft_tokens: int | None = None  # length of the measured chain; None: 3, or the limit of the head
    budgets: tuple[int, ...] = ()  # response tokens of each run, if a scaling law is fitted to several; (): one run
    cache_gib: float | None = None  # size limit of cached activations; None: the target runs in every epoch
    seed: int = 0

    replace = replace

    def check(self) -> None:
        """Raise a UsageError for numbers out of range."""
        for name, minimum in MINIMA.items():
            value = getattr(self, name)
            if value is not None and not value >= minimum:
                raise UsageError(f"`{name}` must be at least {minimum}, not {value}")
        if self.cache_gib is not None and not self.cache_gib > 0:
            raise UsageError(f"`cache_gib` must be above 0, not {self.cache_gib}")
        if self.budgets and (len(set(self.budgets)) < MIN_BUDGETS or min(self.budgets) < 1):
            raise UsageError(
                f"`budgets` needs at least {MIN_BUDGETS} different numbers above 0, such as 20000,40000,80000; it has "
                f"{','.join(map(str, self.budgets))}"
            )


@with_standard_modes
def train_drafter(
    target: Target,
    tokenizer: Any,
    kind: str | None,
    prompts: Sequence[TextSource] = (),
    *,
    folder: str | Path,
    texts: Sequence[TextSource] = (),
    draft: DraftHead | Target | None = None,
    layers: Sequence[int] = (),
    start: str | DraftHead = "target",
    head_options: Mapping[str, Any] | None = None,
    recipe: Recipe | None = None,
    on_policy: float = 0.0,
    settings: TrainingSettings | None = None,
    responses: str | Path | None = None,
    activations: str | Path | None = None,
    saved_tokenizer: Any = None,
    system: str | None = None,
    target_name: str | None = None,
    image_processor: Any = None,
    observer: TrainingObserver | None = None,
) -> TrainedDrafter:
    """Train a draft head or draft model on responses of the target, and write the best one to a folder.

    Repeat an interrupted call with the same folder to resume it from its last evaluation, bit for bit.

    Args:
      kind: a kind of head, such as "eagle3", or "two_model" for a draft model. None: the kind of `draft`, or "eagle3".
      prompts: user messages, conversations, or the token ids of complete prompts. The target answers every turn of a
        conversation, after its own earlier answers. Some prompts are held out.
      folder: receives the head or model, `card.json` with the facts of the run, `history.jsonl` and its plot, `run/`
        with the state, and by default the responses in `answers/` and the activations in `states/`.
      texts: texts, token ids, or conversations whose given answers are trained on instead of responses. The prompts
        then only serve for evaluation. Without prompts, some of the conversations are held out, and the target answers
        their questions.
      draft: a head or draft model to continue from, which is not quantised. layers: target layers with which a draft
        model starts instead, in floats if the target is quantised.
      start: a new head copies parameters of the "target" or of another head, or is "random".
      head_options: changes of the head's config, such as draft_vocab_size.
      recipe: None: the recipe of the kind; see `recipe_of`.
      on_policy: share of the steps in which a draft model trains on its own responses (DistillSpec).
      settings: None: `TrainingSettings()`.
      responses: folder of responses, which several runs may share; None: `folder/answers`.
      activations: folder of cached activations, which several runs may share; None: `folder/states`. It is only used
        if `settings.cache_gib` is set.
      saved_tokenizer: a tokenizer or model folder, saved with a draft model; None: `tokenizer`.
      system: system prompt before each user message. It is stored with the responses, as are the variables of the chat
        template (`Tokenizer.template_args`), and a folder of responses to others raises an error.
      target_name: a hub id or path by which other engines load the target, for the head's config; None: its name.
      image_processor: that of a target that reads images (`models.load_image_processor`). Conversations may then have
        images in the first message of the user.
      observer: receives progress.

    Raises: UsageError for invalid arguments. Most of them are checked before responses are generated.
    """
    kind = resolve_kind(kind, draft, layers)
    recipe = recipe or recipe_of("distillspec" if kind == DRAFT_MODEL else kind)
    check_recipe(recipe)
    settings = settings or TrainingSettings()
    settings.check()
    options = _StartOptions(
        kind, draft, tuple(layers), start, head_options or {}, on_policy, settings.seed, target_name
    )
    saved = tokenizer if saved_tokenizer is None else saved_tokenizer
    folder = in_home(folder)
    job = _Job(
        target, tokenizer, _find_start(target, tokenizer, options, saved), recipe, settings, folder,
        in_home(responses or folder / "answers"), in_home(activations or folder / "states"),
        observer or TrainingObserver(), system=system, image_processor=image_processor,
    )  # fmt: skip
    job.check()
    corpus = job.build_corpus(prompts, texts)
    trained = job.train_budgets(corpus) if settings.budgets else job.train_once(corpus)
    return job.write_report(trained)


def resolve_kind(kind: str | None, draft: DraftHead | Target | None, layers: Sequence[int] = ()) -> str:
    """Return the kind to train. Raises: UsageError for an unknown kind, or one that does not fit `draft`."""
    implied = "eagle3"
    if isinstance(draft, DraftHead):
        implied = draft.head.kind
    elif draft is not None or layers:
        implied = DRAFT_MODEL
    kind = kind or implied
    if kind not in TRAINABLE and kind != DRAFT_MODEL:
        raise UsageError(f'kind must be {DRAFT_MODEL} or one of {", ".join(TRAINABLE)}, not "{kind}"')
    if isinstance(draft, DraftHead | Target) and kind != implied:
        raise UsageError(f"`draft` is of kind {implied}, not {kind}; leave out one of the two")
    return kind


def prepare_folder(folder: Path) -> None:
    """Create the folder of a run. Raises: UsageError if it cannot be written, or has another program's history."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "history.jsonl").touch()
        read_history(folder / "history.jsonl")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written ({error.strerror}); give another folder") from error


class _StartOptions(NamedTuple):
    """The arguments of `train_drafter` that describe its starting point."""

    kind: str
    draft: DraftHead | Target | None
    layers: tuple[int, ...]
    source: str | DraftHead
    head_options: Mapping[str, Any]
    on_policy: float
    seed: int
    target_name: str | None


def _find_start(target: Target, tokenizer: Any, options: _StartOptions, saved_tokenizer: Any) -> StartingPoint:
    """Return the starting point. Raises: UsageError for arguments that do not fit together."""
    draft, layers, kind, eos = options.draft, options.layers, options.kind, tuple(tokenizer.eos)
    if kind != DRAFT_MODEL:
        if layers or options.on_policy:
            raise UsageError(f"`layers` and `on_policy` are for draft models, and {kind} is a head; leave them out")
        if isinstance(draft, DraftHead):
            return TrainedHead(target, draft, options.target_name)
        return NewHead(target, eos, kind, options.head_options, options.source, options.target_name)
    if (draft is None) == (not layers):
        raise UsageError("a draft model starts from `draft`, or from `layers` of the target; give one of the two")
    if isinstance(draft, Target):
        model = draft
    else:
        try:
            model = expand_target(prune_layers(target, layers))
        except UsageError as error:
            raise UsageError(f"`layers`: {error}") from None
    return DraftModel(model, eos, layers, options.on_policy, options.seed, saved_tokenizer)


@dataclass
class _Job:
    """The steps of one call of `train_drafter`."""

    target: Target
    tokenizer: Any
    start: StartingPoint
    recipe: Recipe
    settings: TrainingSettings
    folder: Path
    responses: Path
    activations: Path
    observer: TrainingObserver
    system: str | None = None  # system prompt before each user message
    image_processor: Any = None
    writes: bool = field(default_factory=lambda: not jax.process_index())  # True on one host, which writes the results

    def check(self) -> None:
        """Raise a UsageError for everything that can be checked before responses are generated."""
        prepare_folder(self.folder)
        if jax.process_count() > 1:
            drafts = [digest_model(self.start.build((), 0))] if self.start.is_trained else []
            check_same([digest_model(self.target), *drafts], "models")
        self._check_sizes()
        objective = self.start.objective()
        self._check_chain(objective)
        remark = self.start.check(self.num_draft_tokens)
        params = self.start.abstract_params()
        identity = run_identity(
            self.target, objective, params, self.recipe, self._loop_settings(), self.settings.cache_gib is not None,
            self.start.identity,
        )  # fmt: skip
        for name in self._run_names():
            read_position(self.folder / f"run{name}", identity)
        if self.settings.cache_gib is not None:
            self._open_cache().check(self.target, objective)
        depths, limit = objective.depths(self.recipe), objective.max_depth
        if limit and depths < limit:
            self.observer.on_note(
                f"{objective.kind} drafts {limit} tokens, and only the first {depths} are trained (`depths`)"
            )
        if remark:
            self.observer.on_note(remark)

    def _check_sizes(self) -> None:
        """Raise a UsageError for rows that the mesh splits unevenly, or that are longer than a model allows."""
        settings, mesh = self.settings, self.target.model.mesh
        parts = 1 if mesh is None else mesh.shape.get("data", 1)
        for name in ("rows", "batch_size"):
            if getattr(settings, name) % parts:
                raise UsageError(
                    f'{name}={getattr(settings, name)} cannot be split over the {parts} devices of "data"; '
                    "make it a multiple"
                )
        if settings.length > self.max_positions:
            raise UsageError(
                f"length={settings.length} is more than the {self.max_positions} tokens that the model takes; lower it"
            )

    @property
    def max_positions(self) -> int:
        """Return the limit of text lengths."""
        limit, other = self.target.model.max_positions, self.start.max_positions
        return limit if other is None else min(limit, other)

    @functools.cached_property
    def num_draft_tokens(self) -> int:
        """Return the length of the measured chain."""
        limit = self.start.objective().max_depth
        return self.settings.num_draft_tokens or min(CHAIN_LENGTH, limit or CHAIN_LENGTH)

    def _check_chain(self, objective: TrainingObjective) -> None:
        """Raise a UsageError for a chain that is longer than the head drafts."""
        limit = objective.max_depth
        if limit and self.num_draft_tokens > limit:
            raise UsageError(
                f"num_draft_tokens={self.num_draft_tokens} is more than the {limit} that {objective.kind} drafts; "
                "lower it, or leave it out"
            )

    def _loop_settings(self) -> LoopSettings:
        """Return the settings of the training loop."""
        names = (
            "epochs", "rows", "length", "accumulate", "chunk", "temperature", "evaluate_every", "patience", "seed",
        )  # fmt: skip
        return LoopSettings(**{name: getattr(self.settings, name) for name in names}, num_tokens=self.num_draft_tokens)

    def _run_names(self) -> list[str]:
        """Return the suffixes of the runs in file names."""
        return [f"-{budget}" for budget in self.settings.budgets] or [""]

    def _open_cache(self) -> ActivationCache:
        assert self.settings.cache_gib is not None
        return ActivationCache(self.activations, self.settings.cache_gib, self.observer.on_activations)

    def build_corpus(self, prompts: Sequence[TextSource], texts: Sequence[TextSource]) -> Corpus:
        """Return the texts for training and evaluation. Generate missing responses first."""
        settings = self.settings
        corpus_settings = CorpusSettings(
            settings.held_out, settings.max_new_tokens, settings.temperature, settings.generated_prompts,
            settings.batch_size, settings.length, settings.seed, self.max_positions, self.system,
        )  # fmt: skip
        builder = CorpusBuilder(
            self.target,
            self.tokenizer,
            corpus_settings,
            self.responses,
            self.observer,
            self.writes,
            self.image_processor,
        )
        return builder.build(prompts, texts)

    def train_once(self, corpus: Corpus) -> TrainedDrafter:
        """Train on all texts, and write the result."""
        model, history = self._train(corpus)
        return self._finish(model, history, corpus)

    def train_budgets(self, corpus: Corpus) -> TrainedDrafter:
        """Train once per budget, fit a scaling law, and write the result of the largest budget."""
        total = sum(text.response_length for text in corpus.texts)
        budgets = self.settings.budgets
        if budgets[-1] > total:
            raise UsageError(
                f"`budgets`: the responses have {total} tokens, fewer than {budgets[-1]}; give more prompts, or "
                "smaller budgets"
            )
        runs = []
        for budget, name in zip(budgets, self._run_names(), strict=True):
            part = corpus._replace(texts=_take_tokens(corpus.texts, budget))
            self.observer.on_note(f"a budget of {budget} tokens: {len(part.texts)} responses")
            model, history = self._train(part, name)
            runs.append(BudgetRun(budget, self._measure(model, part).per_pass))
        law = fit(budgets, [run.per_pass for run in runs])
        return replace(self._finish(model, history, part), runs=tuple(runs), law=law)

    def _train(self, corpus: Corpus, name: str = "") -> tuple[Any, TrainingHistory]:
        """Run the training loop. Args: name: suffix of the run in file names."""
        model = self.start.build(corpus.texts, self.settings.seed)
        history = TrainingHistory(self.folder / f"history{name}.jsonl", self.writes)

        def on_progress(progress: TrainingProgress) -> None:
            history.add(progress)
            if progress.best is not None:  # an interrupted run thus leaves the best head or model
                self._save(progress.best)
            self.observer.on_step(progress)

        self.observer.on_run(name)
        cache = None if self.settings.cache_gib is None else self._open_cache()
        try:
            trained = train(
                self.target, model, corpus.texts, recipe=self.recipe, held_out=corpus.held_out,
                evaluate_first=self.start.is_trained, folder=self.folder / f"run{name}", activation_cache=cache,
                identity=self.start.identity, replace_batch=self.start.replace_batch, on_progress=on_progress,
                **self._loop_settings()._asdict(),
            )  # fmt: skip
        except KeyboardInterrupt:
            stored = f"{self.folder} has the best result so far, and the" if history.has_best else "the"
            raise KeyboardInterrupt(f"{stored} same run resumes from its last evaluation") from None
        return trained, history

    def write_report(self, trained: TrainedDrafter) -> TrainedDrafter:
        """Write the card and the plot, and return the result with the card."""
        start, names = self.start, ("epochs", "temperature", "seed")
        settings = {name: getattr(self.settings, name) for name in names} | {
            "system": self.system,
            "draft": start.model.model.name if isinstance(start, DraftModel) and not start.layers else None,
            "head": start.kind if isinstance(start, TrainedHead) else None,
        }
        trained = replace(trained, card=make_card(trained, self.target, self.tokenizer, settings))
        if self.writes:
            write_report(trained, f"{trained.kind} for {self.target.model.name}")
        return trained

    def _measure(self, model: Any, corpus: Corpus) -> MeasuredAcceptance:
        """Measure the best result on prompts that did not select it."""
        settings = self.settings
        return measure_acceptance(
            self.target, model, corpus.reported, depths=self.num_draft_tokens, rows=settings.rows,
            length=settings.length, temperature=settings.temperature,
        )  # fmt: skip

    def _save(self, model: Any) -> None:
        gathered = replace(model, params=gather(model.params))
        if self.writes:
            self.start.save(self.folder, gathered, self.num_draft_tokens)

    def _finish(self, model: Any, history: TrainingHistory, corpus: Corpus) -> TrainedDrafter:
        """Write and return the result."""
        if has_temperatures(model):
            settings = self.settings
            model = scale_confidence(
                self.target, model, corpus.held_out or corpus.texts, rows=settings.rows, length=settings.length,
                temperature=settings.temperature,
            )  # fmt: skip
        measured = self._measure(model, corpus)
        self._save(model)
        improved = not self.start.is_trained or any(entry["best"] and entry["step"] for entry in history.entries)
        return TrainedDrafter(
            model, self.start.kind, self.folder, self.recipe, self.num_draft_tokens, measured, len(corpus.reported),
            improved, len(corpus.texts), sum(text.response_length for text in corpus.texts), history.entries,
        )  # fmt: skip


def _take_tokens(texts: Sequence[TrainingText], budget: int) -> list[TrainingText]:
    """Return the first texts, until their responses have at least `budget` tokens together."""
    preceding = np.cumsum([0, *(text.response_length for text in texts)])
    return [text for text, count in zip(texts, preceding, strict=False) if count < budget]
