"""What `specjax train` trains: a head of a kind, or a draft model; how it begins and how it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from specjax.cli.options import hosts
from specjax.cli.options.common import parsed
from specjax.cli.runs.session import Session
from specjax.errors import UsageError
from specjax.models import loading, prune_layers
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.kinds import KINDS, abstract_head
from specjax.models.loading.formats.writing import check_model_writable
from specjax.models.loading.heads import read_head
from specjax.models.loading.heads.writing import check_writable
from specjax.training.data.packing import TrainingText
from specjax.training.objectives.draft_models import OnPolicy
from specjax.training.objectives.trainables import TrainingObjective, build_objective, of_head
from specjax.types import PyTree


def _named(source: str) -> str:
    """However the path of a folder or a file is written."""
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source


@dataclass(frozen=True)
class OfHead:
    """A new learned head."""

    kind: str
    shapes: dict[str, Any]  # changes of its config
    start: str  # "target", "random", or a head of which it takes what fits
    serves: ClassVar[bool] = False  # before it was trained

    @property
    def about(self) -> dict[str, Any]:
        """What a run that goes on must have begun with too."""
        return {"start": _named(self.start)}

    @property
    def use(self) -> str:
        """Flags of `specjax generate`, behind `--draft FOLDER`."""
        return ""

    def data(self, session: Session) -> None:
        """What `loop.train` is to make of the texts."""
        return None

    def config(self, session: Session) -> Any:
        return KINDS[self.kind].of_target(session.target.model.config, **self.shapes)

    def objective(self, session: Session) -> TrainingObjective:
        return of_head(abstract_head(self.kind, self.config(session)).head)

    def params(self, session: Session) -> PyTree:
        """Their names and shapes."""
        return abstract_head(self.kind, self.config(session)).params

    def check(self, session: Session, num_tokens: int) -> str | None:
        """What is to be said of it. Raises: UsageError for one that nobody could begin or write, before hours are
        spent."""
        from specjax.training.loop.head_init import check_whole, share_of

        if self.start != "random" and not self.serves:
            check_whole(session.target)
        size, vocab = self.shapes.get("draft_vocab_size", 0), session.target.model.vocab_size
        if size > vocab:
            raise UsageError(
                f"--draft-vocab {size} is more than the {vocab} tokens of the target; leave it out for all"
            )
        head = abstract_head(self.kind, self.config(session))
        some = jax.tree.map(lambda x: np.broadcast_to(np.ones((), x.dtype), x.shape), head.params)
        check_writable(head.replace(params=some), target=session.target, num_tokens=num_tokens)
        other = self._other(session)
        if other is None:
            return None
        hosts.check_models(other)
        share = parsed(f"--start {self.start}", lambda other: share_of(head.params, other.params), other)
        return f"of {self.start} it begins with {share:.0%} of its parameters"

    def begin(self, session: Session, texts: Sequence[TrainingText], seed: int) -> Any:
        """What training begins with. texts: of which it drafts the likeliest tokens."""
        from specjax.training.data.vocabulary import most_frequent_ids
        from specjax.training.loop.head_init import new_head

        target, config, ids = session.target, self.config(session), None
        if getattr(config, "is_trimmed", False):
            size = self.shapes.get("draft_vocab_size") or config.layer.vocab_size
            ids = most_frequent_ids(texts, size, target.model.vocab_size, session.tokenizer.eos)
        other = self._other(session)
        return new_head(
            self.kind, config, target, jax.random.key(seed), ids=ids, random=self.start == "random",
            other=other and other.params,
        )  # fmt: skip

    def _other(self, session: Session) -> DraftHead | None:
        """The head that it begins with."""
        if self.serves or self.start in ("target", "random"):
            return None
        return parsed("--start", lambda source: read_head(source, session.target), self.start).head

    def save(self, folder: Path, session: Session, head: Any, num_tokens: int) -> None:
        import specjax

        specjax.save_head(folder, head, target=session.target, num_tokens=num_tokens)


@dataclass(frozen=True)
class OfGivenHead(OfHead):
    """A learned head that goes on from what it is: to more texts, or to a reader's own."""

    source: str  # of its files
    serves = True

    @property
    def about(self) -> dict[str, Any]:
        return {"start": _named(self.source)}

    def config(self, session: Session) -> Any:
        return self.begin(session, (), 0).head.config

    def begin(self, session: Session, texts: Sequence[TrainingText], seed: int) -> Any:
        assert session.head is not None
        return session.head.head


@dataclass(frozen=True)
class OfModel:
    """A draft model: one that is given, or some layers of the target."""

    source: str | None  # of the model whose tokenizer it has: the draft model, or the target
    layers: tuple[int, ...]  # of the target; (): the draft model that the session has
    own: float  # share of the steps on what it answers itself
    seed: int  # of these
    kind: ClassVar[str] = "two_model"
    serves: ClassVar[bool] = True

    @property
    def about(self) -> dict[str, Any]:
        return {"start": [self.source and _named(self.source), *self.layers]}

    @property
    def use(self) -> str:
        return " --method two_model"

    def data(self, session: Session) -> OnPolicy | None:
        return OnPolicy(eos=tuple(session.tokenizer.eos), share=self.own, seed=self.seed) if self.own else None

    def objective(self, session: Session) -> TrainingObjective:
        return build_objective(self.begin(session, (), 0))

    def params(self, session: Session) -> PyTree:
        return self.begin(session, (), 0).params

    def check(self, session: Session, num_tokens: int) -> str | None:
        check_model_writable(self.begin(session, (), 0))
        return None

    def begin(self, session: Session, texts: Sequence[TrainingText], seed: int) -> Any:
        if not self.layers:
            return session.draft
        try:
            return prune_layers(session.target, self.layers)
        except UsageError as error:
            raise UsageError(f"--layers: {error}") from None

    def save(self, folder: Path, session: Session, model: Any, num_tokens: int) -> None:
        import specjax

        source = loading.resolve(self.source)
        tokenizer = source if source.is_dir() else loading.load_tokenizer(self.source)
        specjax.save_model(folder, model, tokenizer)
