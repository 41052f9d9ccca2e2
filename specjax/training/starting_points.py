"""Starting points of training: a new head, a trained head, or a draft model. Each one checks and writes its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.kinds import KINDS, abstract_head
from specjax.models.loading.formats.writing import check_model_writable, save_model
from specjax.models.loading.heads.writing import check_writable, save_head
from specjax.persistence.fingerprint import digest_weights
from specjax.training.data.packing import TrainingText
from specjax.training.data.vocabulary import most_frequent_ids
from specjax.training.loop.head_init import check_not_repeated, matching_share, new_head
from specjax.training.objectives.draft_models import OnPolicy
from specjax.training.objectives.trainables import TrainingObjective, build_head_objective, build_objective
from specjax.types import PyTree, Target


@dataclass(frozen=True)
class NewHead:
    """A new draft head."""

    target: Target
    eos: tuple[int, ...]
    kind: str
    changes: Mapping[str, Any]  # changed fields of the head's config
    source: str | DraftHead = "target"  # "target", "random", or a head whose parameters are copied where they fit
    target_name: str | None = None  # name of the target for other engines
    is_trained: ClassVar[bool] = False

    @property
    def identity(self) -> dict[str, Any]:
        """Return the values that a resumed run must share."""
        return {"start": self.source if isinstance(self.source, str) else digest_weights(self.source.params)}

    @property
    def replace_batch(self) -> None:
        """Return None: the batches of heads are trained on as they are."""
        return None

    @property
    def max_positions(self) -> int | None:
        """Return the limit of text lengths, or None."""
        return None

    def config(self) -> Any:
        """Return the config of the head."""
        return KINDS[self.kind].of_target(self.target.model.config, **self.changes)

    def objective(self) -> TrainingObjective:
        """Return the training objective."""
        return build_head_objective(abstract_head(self.kind, self.config()).head)

    def abstract_params(self) -> PyTree:
        """Return the shapes of the parameters."""
        return abstract_head(self.kind, self.config()).params

    def check(self, num_tokens: int) -> str | None:
        """Check the head, and return a remark about its start or None.

        Raises: UsageError for a head that cannot be initialised or written.
        """
        if self.source != "random":
            check_not_repeated(self.target)
        size, vocab_size = self.changes.get("draft_vocab_size", 0), self.target.model.vocab_size
        if size > vocab_size:
            raise UsageError(
                f"draft_vocab_size={size} is more than the {vocab_size} tokens of the target; leave it out to draft all"
            )
        head = abstract_head(self.kind, self.config())
        ones = jax.tree.map(lambda x: np.broadcast_to(np.ones((), x.dtype), x.shape), head.params)
        check_writable(
            head.replace(params=ones), target=self.target, num_tokens=num_tokens, target_name=self.target_name
        )
        if isinstance(self.source, str):
            return None
        try:
            share = matching_share(head.params, self.source.params)
        except UsageError as error:
            raise UsageError(f"`start`: {error}") from None
        return f"{share:.0%} of the parameters are copied from the head to start from"

    def build(self, texts: Sequence[TrainingText], seed: int) -> Any:
        """Return the untrained head. Args: texts: their most frequent tokens form a draft vocabulary."""
        config, ids = self.config(), None
        if getattr(config, "is_trimmed", False):
            size = self.changes.get("draft_vocab_size") or config.layer.vocab_size
            ids = most_frequent_ids(texts, size, self.target.model.vocab_size, self.eos)
        other = None if isinstance(self.source, str) else self.source.params
        return new_head(
            self.kind, config, self.target, jax.random.key(seed), ids=ids, random=self.source == "random", other=other
        )

    def save(self, folder: Path, head: Any, num_tokens: int) -> None:
        """Write the head."""
        save_head(folder, head, target=self.target, num_tokens=num_tokens, target_name=self.target_name)


@dataclass(frozen=True)
class TrainedHead:
    """A trained draft head from which training continues."""

    target: Target
    head: DraftHead
    target_name: str | None = None  # name of the target for other engines
    is_trained: ClassVar[bool] = True

    @property
    def kind(self) -> str:
        """Return the kind of the head."""
        return self.head.head.kind

    @property
    def identity(self) -> dict[str, Any]:
        """Return the values that a resumed run must share."""
        return {"start": digest_weights(self.head.params)}

    @property
    def replace_batch(self) -> None:
        """Return None: the batches of heads are trained on as they are."""
        return None

    @property
    def max_positions(self) -> int | None:
        """Return the limit of text lengths, or None."""
        layer = getattr(self.head.head.config, "layer", None)
        return layer and layer.max_positions

    def objective(self) -> TrainingObjective:
        """Return the training objective."""
        return build_objective(self.head)

    def abstract_params(self) -> PyTree:
        """Return the parameters."""
        return self.head.params

    def check(self, num_tokens: int) -> None:
        """Raise a UsageError for a head that cannot be written."""
        shapes = jax.tree.map(lambda x: np.broadcast_to(np.ones((), x.dtype), x.shape), self.head.params)
        head = self.head.replace(params=shapes)
        check_writable(head, target=self.target, num_tokens=num_tokens, target_name=self.target_name)

    def build(self, texts: Sequence[TrainingText], seed: int) -> Any:
        """Return the head."""
        return self.head

    def save(self, folder: Path, head: Any, num_tokens: int) -> None:
        """Write the head."""
        save_head(folder, head, target=self.target, num_tokens=num_tokens, target_name=self.target_name)


@dataclass(frozen=True)
class DraftModel:
    """A draft model: a smaller model, or the target with only some of its layers."""

    model: Target
    eos: tuple[int, ...]
    layers: tuple[int, ...]  # layers of the target that the model has; (): it is a separate model
    on_policy: float  # share of the steps that train on the model's own responses
    seed: int  # random seed of these responses
    tokenizer: Any  # saved with the model: a `Tokenizer`, or a model folder whose files are copied; None: not saved
    kind: ClassVar[str] = "two_model"
    is_trained: ClassVar[bool] = True

    @property
    def identity(self) -> dict[str, Any]:
        """Return the values that a resumed run must share."""
        return {"start": list(self.layers) or digest_weights(self.model.params)}

    @property
    def replace_batch(self) -> OnPolicy | None:
        """Return the function that replaces batches by the model's own responses, or None."""
        return OnPolicy(eos=self.eos, share=self.on_policy, seed=self.seed) if self.on_policy else None

    @property
    def max_positions(self) -> int | None:
        """Return the limit of text lengths."""
        return self.model.model.max_positions

    def objective(self) -> TrainingObjective:
        """Return the training objective."""
        return build_objective(self.model)

    def abstract_params(self) -> PyTree:
        """Return the parameters."""
        return self.model.params

    def check(self, num_tokens: int) -> None:
        """Raise a UsageError for a model that cannot be written."""
        check_model_writable(self.model)

    def build(self, texts: Sequence[TrainingText], seed: int) -> Any:
        """Return the model."""
        return self.model

    def save(self, folder: Path, model: Any, num_tokens: int) -> None:
        """Write the model."""
        save_model(folder, model, self.tokenizer)


StartingPoint = NewHead | TrainedHead | DraftModel
