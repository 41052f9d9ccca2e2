"""One run of `specjax train`: answers, training, what is written."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specjax.cli import prompts as p
from specjax.cli.console import Console, print_json
from specjax.cli.session import Session, open_session, provenance, stage
from specjax.errors import UsageError
from specjax.models.heads.kinds import KINDS, abstract_head
from specjax.models.loading.heads.writing import check_writable
from specjax.training import answers as a
from specjax.training.lessons import BORDER, Text
from specjax.training.recipes import Recipe

HISTORY, PICTURE, CARD = "history.jsonl", "training.png", "card.json"


@dataclass
class Run:
    """What was asked for, and what became of it."""

    method: str
    recipe: Recipe
    shapes: dict[str, int]
    draft_vocab: int | None
    start: str
    out: Path
    answers: Path
    prompts: list[Path]
    own_prompts: int
    temperature: float
    max_new_tokens: int
    held_out: int
    epochs: int
    rows: int
    length: int
    chunk: int | None
    every: int
    patience: int | None
    num_tokens: int
    batch_size: int
    seed: int
    log: Console = field(default_factory=lambda: Console(stderr=True))
    session: Session | None = None

    def open(self, target: str | None, dtype: str, no_cache: bool) -> None:
        """Load the target, and look whether the folder can be written before hours are spent."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / HISTORY).touch()
        except OSError as error:
            raise UsageError(f"--out: {self.out} cannot be written ({error.strerror}); give another folder") from error
        self.session = open_session(self.log, target, None, dtype, no_cache)
        head = abstract_head(self.method, self._config(self.session))
        some = jax.tree.map(lambda x: np.broadcast_to(np.ones((), x.dtype), x.shape), head.params)
        check_writable(head.replace(params=some), target=self.session.target, num_tokens=self.num_tokens)

    def _config(self, session: Session) -> Any:
        return KINDS[self.method].of_target(session.target.model.config, **self.shapes)

    def run(self, as_json: bool) -> None:
        """Answer, train, write."""
        session = self.session
        assert session is not None
        chats = self._chats(session)
        texts = self._answered(session, chats, self.answers, self.temperature)
        few = chats[: self.held_out]
        greedy = [text for text in texts[: len(few)]]
        if self.temperature > 0:  # what is measured is a greedy chain
            greedy = self._answered(session, few, self.out / "held_out", 0.0)
        head, history = self._trained(session, texts[len(few) :], greedy)
        card = self._write(session, head, texts[len(few) :], greedy, history)
        if as_json:
            print_json(card)
            return
        out = Console()
        out.print(
            f"{self.method}: {card['served']['tokens_per_pass']:.2f} tokens per pass on {len(greedy)} texts held out "
            f"(chain of {self.num_tokens}, greedy, bonus included), first draft right at {card['served']['first']:.0%}",
            soft_wrap=True,
        )
        out.print(f"specjax generate --draft {self.out} ...", soft_wrap=True)

    def _chats(self, session: Session) -> list[list[int]]:
        """Ids of the prompts, in an order of `seed`."""
        found, bad = [], []
        for path in self.prompts:
            some, lines = p.read(path, "--prompts")
            found += some
            bad += lines
        if self.own_prompts:
            found += self._own(session)
        rows, unfit = p.encode(found, session.tokenizer, session.capacity, self.max_new_tokens, raw=False)
        fit = [row for row in rows if len(row.ids) + BORDER <= self.length]
        if len(fit) < len(rows):
            self.log.print(
                f"left out: {len(rows) - len(fit)} prompts that fill rows of {self.length} tokens (--length)"
            )
        rows = fit
        if bad or unfit:
            self.log.print(f"left out: {p.describe([*bad, *unfit], None)}", soft_wrap=True)
        different = list({tuple(row.ids): row.ids for row in rows}.values())
        if len(different) <= self.held_out:
            raise UsageError(
                f"there are {len(different)} prompts that fit rows of {self.length} tokens, and {self.held_out} are "
                "held out; give more --prompts, longer rows (--length) or a smaller --held-out"
            )
        order = np.random.default_rng(self.seed).permutation(len(different))
        return [different[i] for i in order]

    def _own(self, session: Session) -> list[p.Prompt]:
        path = self.answers / "own_prompts.jsonl"
        try:
            *lines, end = map(json.loads, path.read_text(encoding="utf-8").splitlines())
            known, asked = [line["prompt"] for line in lines], int(end["asked"])
        except (OSError, ValueError, KeyError, TypeError):
            known, asked = [], 0
        if asked < self.own_prompts:  # of so many some have no end, and some come twice
            known = []
            with self._bar("writing prompts") as bar:
                task = bar.add_task("", total=self.own_prompts, rate="")
                written = a.own_prompts(
                    session.target, session.tokenizer, self.own_prompts, slots=self.batch_size, seed=self.seed
                )
                for words in written:
                    known.append(words)
                    bar.advance(task)
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [*({"prompt": words} for words in known), {"asked": self.own_prompts}]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return [p.Prompt(words) for words in known[: self.own_prompts] if p.is_whole(words)]

    def _answered(self, session: Session, chats: list[list[int]], folder: Path, temperature: float) -> list[Text]:
        about = {
            "target": session.target.model.name, "vocabulary": session.target.model.vocab_size,
            "temperature": temperature, "max_new_tokens": self.max_new_tokens,
        }  # fmt: skip
        kept = a.Answers(folder, about)
        open_ = [chat for chat in chats if kept.of(chat) is None]
        if open_:
            begin, tokens = time.perf_counter(), 0
            with self._bar("answering") as bar:
                task = bar.add_task("", total=len(open_), rate="")
                # Texts of one length in a batch end together.
                open_.sort(key=len)
                told = a.answer(
                    session.target, open_, eos=session.tokenizer.eos, max_new_tokens=self.max_new_tokens,
                    temperature=temperature, slots=self.batch_size, seed=self.seed,
                )  # fmt: skip
                for one in told:
                    kept.add(one)
                    tokens += len(one.text.tokens) - one.text.answer
                    bar.update(task, advance=1, rate=f"{tokens / (time.perf_counter() - begin):.0f} tokens/s")
            self.log.print(
                f"answered {len(open_)} prompts: {tokens} tokens, {time.perf_counter() - begin:.0f} s", style="dim"
            )
        return [text for chat in chats if (text := kept.of(chat)) is not None]

    def _trained(self, session: Session, texts: Sequence[Text], greedy: Sequence[Text]) -> tuple[Any, list[dict]]:
        import specjax
        from specjax.training.loop import train
        from specjax.training.starts import new_head
        from specjax.training.vocabulary import likeliest_ids

        target = session.target
        config = self._config(session)
        ids = None
        if getattr(config, "is_trimmed", False):
            size = self.shapes.get("draft_vocab_size") or config.layer.vocab_size
            ids = likeliest_ids(texts, size, target.model.vocab_size, session.tokenizer.eos)
        head = new_head(self.method, config, target, jax.random.key(self.seed), ids=ids, random=self.start == "random")
        history = read_history(self.out / HISTORY)
        with self._bar("training") as bar, (self.out / HISTORY).open("a", encoding="utf-8") as file:
            task = bar.add_task("", total=None, rate="")

            def listen(progress) -> None:
                entry = asdict_of(progress)
                if not history or history[-1]["step"] >= entry["step"]:  # of steps that are taken again
                    history[:] = [known for known in history if known["step"] < entry["step"]]
                    file.truncate(0)
                    file.writelines(json.dumps(known) + "\n" for known in history)
                history.append(entry)
                file.write(json.dumps(entry) + "\n")
                rate = f"loss {progress.loss:.3f}  first draft {progress.accuracy[0]:.0%}"
                rate += f"  {progress.tokens / max(progress.seconds, 1e-9):.0f} tokens/s"
                bar.update(task, total=progress.steps, completed=progress.step, rate=rate)
                if progress.best is not None:  # whatever happens later, it is there
                    specjax.save_head(self.out, progress.best, target=target, num_tokens=self.num_tokens)
                if progress.served is not None:
                    file.flush()
                    said, best = progress.served, ", the best so far" if progress.best else ""
                    line = f"step {progress.step}: loss {progress.loss:.3f}, {said.per_pass:.3f} tokens per pass, "
                    self.log.print(line + f"first draft {said.first:.1%}{best}", style="dim")

            try:
                fitted = train(
                target, head, texts, recipe=self.recipe, held_out=greedy, epochs=self.epochs, rows=self.rows,
                length=self.length, chunk=self.chunk, num_tokens=self.num_tokens, evaluate_every=self.every,
                patience=self.patience, seed=self.seed, folder=self.out / "run", listen=listen,
                )  # fmt: skip
            except KeyboardInterrupt:
                has_head = any(entry["best"] for entry in history)
                kept = f"{self.out} has the best head so far, and the" if has_head else "the"
                raise KeyboardInterrupt(f"{kept} same command goes on from the last measurement") from None
        return fitted, history

    def _write(
        self, session: Session, head: Any, texts: Sequence[Text], greedy: Sequence[Text], history: list[dict]
    ) -> dict[str, Any]:
        import specjax
        from specjax.training.served import served

        said = served(session.target, head, greedy, depths=self.num_tokens, rows=self.rows, length=self.length)
        specjax.save_head(self.out, head, target=session.target, num_tokens=self.num_tokens)
        answered = sum(len(text.tokens) - text.answer for text in texts)
        card = {
            **provenance(session), "method": self.method, "recipe": asdict(self.recipe), "answers": len(texts),
            "answer_tokens": answered, "epochs": self.epochs, "temperature": self.temperature, "seed": self.seed,
            "seconds": history[-1]["seconds"] if history else 0.0,
            "served": {
                "tokens_per_pass": said.per_pass, "tokens": said.tokens, "passes": said.passes, "first": said.first,
                "num_draft_tokens": self.num_tokens, "texts": len(greedy),
            },
            "accuracy": history[-1]["accuracy"] if history else [],
        }  # fmt: skip
        with stage(self.log, "writing the head", f"wrote {self.out}"):
            (self.out / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
            if history:
                from specjax.training.plot import plot

                (self.out / PICTURE).write_bytes(plot(history, f"{self.method} for {session.target.model.name}"))
        return card

    def _bar(self, doing: str) -> Progress:
        columns = TextColumn(doing), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")
        return Progress(*columns, TimeRemainingColumn(), console=self.log, transient=True)


def read_history(path: Path) -> list[dict[str, Any]]:
    """The steps of a run so far, as far as whole lines tell them."""
    history: list[dict[str, Any]] = []
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
        entry["served"] = {**progress.served._asdict(), "tokens_per_pass": progress.served.per_pass}
    return entry
