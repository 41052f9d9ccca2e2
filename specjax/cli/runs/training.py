"""One run of `specjax train`: answers, training, what is written."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specjax.cli.options import hosts
from specjax.cli.options import prompts as p
from specjax.cli.options.common import Models, parsed
from specjax.cli.output.console import Console, print_json
from specjax.cli.runs.session import Session, open_session, provenance, stage
from specjax.cli.runs.trainables import OfHead, OfModel
from specjax.errors import UsageError
from specjax.parallel import check_same, gather
from specjax.persistence.fingerprint import of_weights
from specjax.training.data import target_responses as a
from specjax.training.data.packing import PAIR_TOKENS, TrainingText
from specjax.training.loop.optimizers import check_frozen
from specjax.training.objectives.recipes import Recipe
from specjax.training.objectives.trainables import TrainingObjective

CHAIN = 3
"""Drafted tokens of the chain that is measured, where nothing else is said and so many are drafted."""
HISTORY, PICTURE, CARD = "history{}.jsonl", "training.png", "card.json"


@dataclass
class Run:
    """What was asked for, and what became of it."""

    trainable: OfHead | OfModel
    recipe: Recipe
    out: Path
    answers: Path
    prompts: list[Path]
    own_prompts: int
    texts: list[Path]
    temperature: float
    max_new_tokens: int
    held_out: int
    epochs: int
    rows: int
    length: int
    chunk: int | None
    every: int
    patience: int | None
    num_tokens: int  # 0: CHAIN, or as many as are drafted
    batch_size: int
    seed: int
    budgets: tuple[int, ...] = ()
    keep_states: float | None = None  # GiB
    states: Path = Path("states")
    freeze: Sequence[str] = ()  # names that --freeze gave, which the recipe has too
    log: Console = field(default_factory=lambda: Console(stderr=True))
    session: Session | None = None
    first: bool = True  # of several hosts the one that writes, apart from the state of the run, which all write

    def open(self, models: Models, mesh: Mesh | None = None, has_head: bool = False) -> None:
        """Load the models, and look whether the folder can be written before hours are spent."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / HISTORY.format("")).touch()
        except OSError as error:
            raise UsageError(f"--out: {self.out} cannot be written ({error.strerror}); give another folder") from error
        session = self.session = open_session(self.log, models, mesh=mesh, has_head=has_head)
        hosts.check_models(session.target, session.draft, session.head and session.head.head)
        parts = 1 if mesh is None else mesh.shape["data"]
        for flag, count in (("--rows", self.rows), ("--batch-size", self.batch_size)):
            if count % parts:
                raise UsageError(f"{flag} {count} cannot be split over --data {parts}; make it a multiple")
        if self.length > session.capacity:
            raise UsageError(
                f"--length {self.length} is more than the {session.capacity} tokens that {session.shortest} takes; "
                "lower it"
            )
        objective = self.trainable.objective(session)
        self.num_tokens = self.num_tokens or min(CHAIN, objective.max_depth or CHAIN)
        remark = self.trainable.check(session, self.num_tokens)
        parsed("--freeze", lambda names: check_frozen(self.trainable.params(session), names), self.freeze)
        self._check_run(session, objective)
        if self.keep_states is not None:
            from specjax.training.loop.target_activations import ActivationCache

            ActivationCache(self.states, self.keep_states).check(session.target, objective)
        if remark:
            self.log.print(remark, style="dim", soft_wrap=True)

    def _check_run(self, session: Session, objective: TrainingObjective) -> None:
        """Raises: UsageError for folders of other runs, and what `loop.train` would refuse after all is answered."""
        from specjax.training.loop.checkpoints import found
        from specjax.training.loop.trainer import run_identity

        if objective.max_depth and self.num_tokens > objective.max_depth:
            raise UsageError(
                f"--num-draft-tokens {self.num_tokens} is more than the {objective.max_depth} that {objective.kind} drafts; "
                "lower it, or leave it out"
            )
        about = run_identity(
            session.target, objective, self.trainable.params(session), self.recipe, epochs=self.epochs, chunk=self.chunk,
            num_tokens=self.num_tokens, seed=self.seed, activation_cache=self.keep_states is not None, about=self.trainable.about,
        )  # fmt: skip
        for name in self._names():
            parsed("--out", lambda folder: found(folder, about), self.out / f"run{name}")

    def _names(self) -> list[str]:
        """Of the runs, in the names of their files."""
        return [f"-{budget}" for budget in self.budgets] or [""]

    def run(self, as_json: bool) -> None:
        """Answer, train, write."""
        session = self.session
        assert session is not None
        chats = self._chats(session)
        few = chats[: self.held_out]
        if self.texts:
            texts = self._raw(session)
            check_same(texts, "texts")
            greedy = self._answered(session, few, self.answers, 0.0)
        else:
            texts = self._answered(session, chats, self.answers, self.temperature)
            greedy, texts = texts[: len(few)], texts[len(few) :]
            if self.temperature > 0:  # what is measured is a greedy chain
                greedy = self._answered(session, few, self.out / "held_out", 0.0)
        law = None
        if self.budgets:
            head, history, texts, law = self._by_budget(session, texts, greedy)
        else:
            head, history = self._trained(session, texts, greedy)
        if self.trainable.serves and not any(entry["best"] and entry["step"] for entry in history):
            self.log.print(
                "nothing served more than what it begins with, which stays; more answers, or a --learning-rate below "
                f"{self.recipe.learning_rate:g}, may teach it more",
                style="dim", soft_wrap=True,
            )  # fmt: skip
        card = self._write(session, head, texts, greedy, history, law)
        if as_json:
            if self.first:
                print_json(card)
            return
        out, served = Console(quiet=not self.first), card["served"]
        out.print(
            f"{self.trainable.kind}: {served['tokens_per_pass']:.2f} tokens per pass on {len(greedy)} texts held out "
            f"(chain of {self.num_tokens}, greedy, bonus included), first draft right at {served['first']:.0%}",
            soft_wrap=True,
        )
        for line in _lines_of(law):
            out.print(line, soft_wrap=True)
        out.print(f"specjax generate --draft {self.out}{self.trainable.use} ...", soft_wrap=True)

    def _chats(self, session: Session) -> list[list[int]]:
        """Ids of the prompts, in an order of `seed`."""
        read: list[tuple[Path | None, list[p.Prompt], list[p.BadLine]]]
        read = [(path, *p.read(path, "--prompts")) for path in self.prompts]
        if self.own_prompts:
            read.append((None, self._own(session), []))
        rows: list[p.Encoded] = []
        for path, found, bad in read:
            some, unfit = p.encode(found, session.tokenizer, session.capacity, self.max_new_tokens, raw=False)
            rows += some
            if bad or unfit:
                self.log.print(f"left out: {p.describe([*bad, *unfit], path)}", soft_wrap=True)
        fit = [row for row in rows if len(row.ids) + PAIR_TOKENS <= self.length]
        if len(fit) < len(rows):
            self.log.print(
                f"left out: {len(rows) - len(fit)} prompts that fill rows of {self.length} tokens (--length)"
            )
        rows = fit
        different = list({tuple(row.ids): row.ids for row in rows}.values())
        if len(different) < self.held_out + (not self.texts):
            raise UsageError(
                f"there are {len(different)} prompts that fit rows of {self.length} tokens, and {self.held_out} are "
                "held out; give more --prompts, longer rows (--length) or a smaller --held-out"
            )
        order = np.random.default_rng(self.seed).permutation(len(different))
        return [different[i] for i in order]

    def _raw(self, session: Session) -> list[TrainingText]:
        """Texts that are learnt as they are, in pieces of a row."""
        pieces = []
        for path in self.texts:
            found, bad = p.read(path, "--texts")
            rows, _ = p.encode(found, session.tokenizer, sys.maxsize, 0, raw=True)
            if bad:
                self.log.print(f"left out: {p.describe(bad, path)}", soft_wrap=True)
            for row in rows:
                pieces += [row.ids[i : i + self.length] for i in range(0, len(row.ids), self.length)]
        return [TrainingText(tuple(ids), 0) for ids in pieces if len(ids) > PAIR_TOKENS]

    def _own(self, session: Session) -> list[p.Prompt]:
        """User turns by the target itself: answers to an empty chat, of which some have no end, and some come twice."""
        count = self.own_prompts
        chats = [a.opening(session.tokenizer)] * count
        about = {"max_new_tokens": a.OWN_TOKENS, "seed": self.seed}
        told = self._answers(
            session, chats, self.answers / "own_prompts", 1.0, about, numbers=range(count), doing="writing prompts"
        )
        return [p.Prompt(words) for words in a.turns(told, session.tokenizer) if p.is_whole(words)]

    def _answered(self, session: Session, chats: list[list[int]], folder: Path, temperature: float) -> list[TrainingText]:
        about = {"max_new_tokens": self.max_new_tokens}
        told = self._answers(session, chats, folder, temperature, about, numbers=[0] * len(chats), doing="answering")
        return [one.text for one in told]

    def _answers(
        self, session: Session, chats: list[list[int]], folder: Path, temperature: float, about: dict[str, int], *,
        numbers: Sequence[int], doing: str,
    ) -> list[a.TargetResponse]:  # fmt: skip
        """Those of the folder, and the others, written into it as they come."""
        target = session.target.model
        known = {"target": target.name, "weights": of_weights(session.target.params), "vocabulary": target.vocab_size,
                 "temperature": temperature}  # fmt: skip
        kept = a.ResponseStore(folder, known | about, writes=self.first)
        asked = list(zip(chats, numbers, strict=True))
        check_same([(chat, number, kept.of(chat, number)) for chat, number in asked], "prompts and answers")
        # Texts of one length in a batch end together.
        open_ = sorted(((chat, number) for chat, number in asked if kept.of(chat, number) is None), key=_length)
        if open_:
            begin, tokens = time.perf_counter(), 0
            with self._bar(doing) as bar:
                task = bar.add_task("", total=len(open_), rate="")
                told = a.answer(
                    session.target, [chat for chat, _ in open_], eos=session.tokenizer.eos,
                    max_new_tokens=about["max_new_tokens"], temperature=temperature, slots=self.batch_size,
                    seed=self.seed, numbers=[number for _, number in open_],
                )  # fmt: skip
                for one in told:
                    kept.add(one)
                    tokens += len(one.text.tokens) - one.text.answer
                    bar.update(task, advance=1, rate=f"{tokens / (time.perf_counter() - begin):.0f} tokens/s")
            self.log.print(
                f"{doing}: {len(open_)} prompts, {tokens} tokens, {time.perf_counter() - begin:.0f} s", style="dim"
            )
        return [found for chat, number in asked if (found := kept.of(chat, number)) is not None]

    def _by_budget(self, session: Session, texts: Sequence[TrainingText], greedy: Sequence[TrainingText]):
        """The head of the largest budget, how it came, its texts, and the law of all."""
        from specjax.training.measure.scaling import fit

        total = sum(len(text.tokens) - text.answer for text in texts)
        if self.budgets[-1] > total:
            raise UsageError(
                f"--budgets: the answers have {total} tokens, fewer than {self.budgets[-1]}; give more --prompts, or "
                "smaller budgets"
            )
        runs = []
        for budget, name in zip(self.budgets, self._names(), strict=True):
            some = _up_to(texts, budget)
            self.log.print(f"a budget of {budget} tokens: {len(some)} answers", style="dim")
            head, history = self._trained(session, some, greedy, name)
            served = self._served(session, head, greedy, history)
            runs.append({"tokens": budget, "tokens_per_pass": served["tokens_per_pass"]})
        found = fit(self.budgets, [run["tokens_per_pass"] for run in runs])
        ahead = [
            {"tokens": size, "tokens_per_pass": float(found(size)), "from": found.range(size).low,
             "to": found.range(size).high}
            for size in (2 * self.budgets[-1], 4 * self.budgets[-1], 16 * self.budgets[-1])
        ]  # fmt: skip
        law = {"form": found.form, "slope": found.slope, "start": found.start, "r2": found.r2, "runs": runs,
               "predicted": ahead}  # fmt: skip
        return head, history, some, law

    def _served(self, session: Session, head: Any, greedy: Sequence[TrainingText], history: list[dict]) -> dict[str, Any]:
        """By the head: as it was measured when it was found the best, or else now."""
        for entry in reversed(history):
            if entry.get("best") and isinstance(entry.get("served"), dict):
                return entry["served"]
        from specjax.training.measure.acceptance_eval import served

        return _counts(served(session.target, head, greedy, depths=self.num_tokens, rows=self.rows, length=self.length))

    def _trained(
        self, session: Session, texts: Sequence[TrainingText], greedy: Sequence[TrainingText], name: str = ""
    ) -> tuple[Any, list[dict]]:
        """(the head, its steps). name: of the run, where there are several."""
        from specjax.training.loop.target_activations import ActivationCache
        from specjax.training.loop.trainer import train

        target = session.target
        trainable = self.trainable.begin(session, texts, self.seed)
        path = self.out / HISTORY.format(name)
        history = read_history(path)
        with self._bar("training") as bar, path.open("a", encoding="utf-8") if self.first else io.StringIO() as file:
            task = bar.add_task("", total=None, rate="")

            def on_progress(progress) -> None:
                entry = asdict_of(progress)
                if not history or history[-1]["step"] >= entry["step"]:  # of steps that are taken again
                    history[:] = [known for known in history if known["step"] < entry["step"]]
                    file.truncate(0)
                    file.writelines(json.dumps(known) + "\n" for known in history)
                history.append(entry)
                file.write(json.dumps(entry) + "\n")
                rate, loss = "", ""
                if progress.loss is not None:
                    loss = f"loss {progress.loss:.3f}"
                    rate = f"{loss}  first draft {progress.accuracy[0]:.0%}"
                    rate += f"  {progress.tokens / max(progress.seconds, 1e-9):.0f} tokens/s"
                bar.update(task, total=progress.steps, completed=progress.step, rate=rate)
                if progress.best is not None:  # whatever happens later, it is there
                    self._save(session, progress.best)
                if progress.served is not None:
                    file.flush()
                    said, best = progress.served, ", the best so far" if progress.best else ""
                    where = f"step {progress.step}: {loss}" if loss else "what it begins with"
                    line = f"{where}, {said.per_pass:.3f} tokens per pass, first draft {said.first:.1%}{best}"
                    self.log.print(line, style="dim")

            def activations(done: int, of: int) -> None:
                bar.update(task, description="", total=of, completed=done, rate="tokens read by the target")

            shelf = None if self.keep_states is None else ActivationCache(self.states, self.keep_states, activations)
            try:
                fitted = train(
                    target, trainable, texts, recipe=self.recipe, held_out=greedy, epochs=self.epochs, rows=self.rows,
                    length=self.length, chunk=self.chunk, num_tokens=self.num_tokens, evaluate_every=self.every,
                    evaluate_first=self.trainable.serves,
                    patience=self.patience, seed=self.seed, folder=self.out / f"run{name}", activation_cache=shelf,
                    about=self.trainable.about, data=self.trainable.data(session), on_progress=on_progress,
                )  # fmt: skip
            except KeyboardInterrupt:
                has_head = any(entry["best"] for entry in history)
                kept = f"{self.out} has the best head so far, and the" if has_head else "the"
                raise KeyboardInterrupt(f"{kept} same command goes on from the last measurement") from None
        return fitted, history

    def _save(self, session: Session, head: Any) -> None:
        whole = replace(head, params=gather(head.params))
        if self.first:
            self.trainable.save(self.out, session, whole, self.num_tokens)

    def _write(
        self, session: Session, head: Any, texts: Sequence[TrainingText], greedy: Sequence[TrainingText], history: list[dict],
        law: dict[str, Any] | None,
    ) -> dict[str, Any]:  # fmt: skip
        said = self._served(session, head, greedy, history)
        self._save(session, head)
        answered = sum(len(text.tokens) - text.answer for text in texts)
        card = {
            **provenance(session), "method": self.trainable.kind, "recipe": asdict(self.recipe), "answers": len(texts),
            "answer_tokens": answered, "epochs": self.epochs, "temperature": self.temperature, "seed": self.seed,
            "seconds": history[-1]["seconds"] if history else 0.0,
            "served": {**said, "num_draft_tokens": self.num_tokens, "texts": len(greedy)},
            "accuracy": history[-1]["accuracy"] if history else [], "law": law,
        }  # fmt: skip
        if not self.first:
            return card
        with stage(self.log, "writing the head", f"wrote {self.out}"):
            (self.out / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
            if history:
                from specjax.training.measure.plot import plot

                with contextlib.suppress(UsageError):  # matplotlib is not there; history.jsonl has the figures
                    picture = plot(history, f"{self.trainable.kind} for {session.target.model.name}")
                    (self.out / PICTURE).write_bytes(picture)
        return card

    def _bar(self, doing: str) -> Progress:
        columns = TextColumn(doing), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")
        return Progress(*columns, TimeRemainingColumn(), console=self.log, transient=True)


def _length(chat: tuple[list[int], int]) -> int:
    return len(chat[0])


def _up_to(texts: Sequence[TrainingText], budget: int) -> list[TrainingText]:
    """The first texts whose answers have as many tokens."""
    before = np.cumsum([0, *(len(text.tokens) - text.answer for text in texts)])
    return [text for text, count in zip(texts, before, strict=False) if count < budget]


def _lines_of(law: dict[str, Any] | None) -> list[str]:
    """What a law says, for people."""
    if law is None:
        return []
    runs = ", ".join(f"{run['tokens']}: {run['tokens_per_pass']:.3f}" for run in law["runs"])
    ahead = ", ".join(
        f"{one['tokens']}: {one['tokens_per_pass']:.2f} ({one['from']:.2f} to {one['to']:.2f})"
        for one in law["predicted"]
    )
    return [f"tokens per pass by tokens of answers: {runs}", f"by the law ({law['form']}) of more: {ahead}"]


def read_history(path: Path) -> list[dict[str, Any]]:
    """The steps of a run so far, as far as whole lines tell them."""
    history: list[dict[str, Any]] = []
    if not path.exists():
        return history
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
            history.append(entry | {"step": int(entry["step"])})
        except (ValueError, KeyError, TypeError):
            break
    return history


def asdict_of(progress: Any) -> dict[str, Any]:
    """A step for JSON."""
    entry = progress._asdict()
    entry["best"] = progress.best is not None
    if progress.served is not None:
        entry["served"] = _counts(progress.served)
    return entry


def _counts(served: Any) -> dict[str, Any]:
    return {"tokens_per_pass": served.per_pass, **served._asdict()}
