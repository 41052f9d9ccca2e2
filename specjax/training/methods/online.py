"""Online speculative decoding: a drafter is trained while it serves, on the tokens that replace its rejected drafts.

Liu, Hu, Bailis, Cheung, Deng, Stoica, Zhang: Online Speculative Decoding (ICML 2024), arXiv 2310.07177.
Rule: every round records the token that the target wrote in place of a rejected draft. When a record is full, one step

    minimises the mean over these tokens of -sum(p log q)

Guarantee: that of decoding without training. p does not change, and each round is verified with the q that drafted it.
Deviations: the authors' code stores the last token of a round and reads q one position later. We use the token that
replaced the rejected draft, and the q that drafted it. Rounds without a rejection are not recorded. A head drafts the
whole round again, so deeper tokens count if a later round had a rejection there. A round of a tree counts as rejected
if the tree was deeper than the accepted path. The drafter's memory keeps values that old parameters computed. Several
drafters, such as one per topic, need one trainer each.

Training only happens if `serve` runs through a trainer, which sends new parameters to the drafter:

    trainer = OnlineTrainer(target, head, texts=8, size=512)
    drafter = specjax.make_drafter("eagle3", target, head)
    for step in trainer.run(specjax.serve(target, drafter, requests, max_new_tokens=256), prompts):
        ...  # as in `serve`
    specjax.save_head("head", trainer.trained, target=target)

`stream` returns the same numbers in `step.info`. Record them with a `RejectionRecorder`, call `update`, and pass
`drafter.replace(params=...)` to the next call.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.modes import jit
from specjax.training.data.packing import PAIR_TOKENS, PackedBatch
from specjax.training.loop.step import State, TrainingOutcome, TrainingPlan, compute_step, export_trainable, init_state
from specjax.training.objectives.recipes import recipe_of
from specjax.training.objectives.trainables import Trainable, build_objective
from specjax.types import Array, PyTree, Target


class RejectionRecord(NamedTuple):
    """A record of at most N decoded texts. A new text replaces the oldest one."""

    tokens: Array  # int32[N, S], prompts and responses; longer texts are cut
    length: Array  # int32[N], 0: no text
    rejected: Array  # bool[N, S], True for tokens that replaced a rejected draft
    roots: Array  # bool[N, S], True for the last token before a round with a rejection
    total: Array  # int32[], texts added so far


def empty_record(texts: int, size: int) -> RejectionRecord:
    """Return an empty record for `texts` texts of at most `size` tokens."""
    mask = jnp.zeros((texts, size), bool)
    return RejectionRecord(mask.astype(jnp.int32), jnp.zeros((texts,), jnp.int32), mask, mask, jnp.int32(0))


@jit
def add_text(record: RejectionRecord, tokens: Array, length: Array, rejected: Array, roots: Array) -> RejectionRecord:
    """Return the record with one more text. Pure. The arguments are arrays [S], and the length of the text."""
    slot = record.total % len(record.length)
    new = tokens, length, rejected, roots
    old = record.tokens, record.length, record.rejected, record.roots
    tokens, length, rejected, roots = (x.at[slot].set(value) for x, value in zip(old, new, strict=True))
    return RejectionRecord(tokens, length, rejected, roots, record.total + 1)


def plan_updates(trainable: Trainable, *, chunk: int | None = None, **changes: Any) -> TrainingPlan:
    """Return the plan of online steps: the recipe of the kind, with soft cross entropy and AdamW at a constant 1e-4.

    Args: chunk: positions of a text whose logits are computed together; None: all. changes: fields of the recipe.
    """
    objective = build_objective(trainable)
    online: dict[str, Any] = {
        "losses": (("soft_ce", 1.0),), "optimizer": "adamw", "learning_rate": 1e-4, "schedule": "constant",
        "warmup": 0.0, "weight_decay": 0.0, "weighting": "decay", "noise": 0.0,
    }  # fmt: skip
    return TrainingPlan(recipe_of(objective.kind, **(online | changes)), objective, 1, chunk)


@jit(static_argnames=("plan", "limit"))
def update(
    plan: TrainingPlan, state: State, frozen: PyTree, target: Target, record: RejectionRecord, limit: int | None = None
) -> tuple[State, TrainingOutcome]:
    """Take one optimizer step on a record. Pure; a record without rejections changes nothing.

    Args:
      state, frozen: from `init_state(plan, params)`. target: the model that wrote the texts.
      limit: number of rejections per text that are used, from the first on; None: all.
    """
    positions = find_positions(record, plan.objective.whole_rounds, limit)
    updated, outcome = compute_step(plan, state, frozen, target, to_batch(record), positions, jax.random.key(0))
    has_rejections = jnp.any(positions >= 0)
    return jax.tree.map(lambda new, old: jnp.where(has_rejections, new, old), updated, state), outcome


def to_batch(record: RejectionRecord) -> PackedBatch:
    """Return the texts as a packed batch whose loss mask covers the tokens that replaced rejected drafts."""
    column = jnp.arange(record.tokens.shape[1])
    is_text = column < record.length[:, None]
    text_start = jnp.where(is_text, 0, record.length[:, None])
    return PackedBatch(record.tokens, text_start.astype(jnp.int32), record.rejected & is_text)


def find_positions(record: RejectionRecord, whole_rounds: bool, limit: int | None = None) -> Array:
    """Return int32[N, R], the positions of the rounds to train on, then -1.

    Args: whole_rounds: True: return the rounds that had a rejection. False: return for each rejection the round that
      drafts the rejected token first.
    """
    ahead, marks = (1, record.roots) if whole_rounds else (PAIR_TOKENS, record.rejected)
    size = limit or marks.shape[1]
    columns = jax.vmap(lambda row: jnp.nonzero(row, size=size, fill_value=-1)[0])(marks)
    return jnp.where(columns >= ahead, columns - ahead, -1).astype(jnp.int32)


class RejectionRecorder:
    """A recorder that collects running texts by name, and adds complete texts to a record."""

    def __init__(self, texts: int, size: int):
        """Create an empty recorder.

        Args: texts: number of texts of a full record. size: limit of their tokens, including prompts.
        """
        self.texts, self.size = texts, size
        self.record = empty_record(texts, size)
        self._running: dict[Any, _RunningText] = {}

    def add_step(
        self, name: Any, prompt: Sequence[int], tokens: Sequence[int], accepted: int, drafted: int, ended: Any = False
    ) -> None:
        """Record the tokens that one step added to a text.

        Args:
          accepted: number of leading tokens that were drafted. drafted: depth of the draft.
          ended: True for the last step of the text.
        """
        text = self._running.setdefault(name, _RunningText(list(map(int, prompt)), [], []))
        if accepted < min(drafted, len(tokens)):
            text.rejected.append(len(text.tokens) + accepted)
            text.roots.append(len(text.tokens) - 1)
        text.tokens.extend(tokens)
        if ended:
            self.end_text(name)

    def end_text(self, name: Any) -> None:
        """Move a text to the record. Only needed if its last step did not have `ended`."""
        self.record = add_text(self.record, *self._running.pop(name).to_arrays(self.size))

    @property
    def is_full(self) -> bool:
        """Return True if the record holds as many texts as it has room for."""
        return int(self.record.total) >= self.texts

    def take_record(self) -> RejectionRecord:
        """Return the record, and start an empty one."""
        record, self.record = self.record, empty_record(self.texts, self.size)
        return record


class _RunningText(NamedTuple):
    tokens: list[int]
    rejected: list[int]
    roots: list[int]

    def to_arrays(self, size: int) -> tuple[np.ndarray, np.int32, np.ndarray, np.ndarray]:
        tokens = np.zeros(size, np.int32)
        cut = self.tokens[:size]
        tokens[: len(cut)] = cut
        rejected, roots = (np.isin(np.arange(size), columns) for columns in (self.rejected, self.roots))
        return tokens, np.int32(len(cut)), rejected, roots


class OnlineTrainer:
    """A trainer that updates a drafter while `serve` runs."""

    def __init__(self, target: Target, trainable: Trainable, *, texts: int = 8, size: int = 512, **changes: Any):
        """Prepare training.

        Args:
          trainable: the head or draft model of the drafter. texts: complete texts per update.
          size: limit of tokens of a text, including its prompt. changes: arguments of `plan_updates`.
        """
        self.target, self.trainable = target, trainable
        self.recorder = RejectionRecorder(texts, size)
        self.plan = plan_updates(trainable, **changes)
        self.state, self._frozen = init_state(self.plan, trainable.params)
        self.updates = 0

    @property
    def trained(self) -> Any:
        """Return the head or draft model with its current parameters."""
        return export_trainable(self.trainable, self.state, self._frozen)

    def run(self, steps: Generator[Any, Any, None], prompts: Sequence[Sequence[int]]) -> Iterator[Any]:
        """Yield the steps of `serve`, and send new parameters to its drafter whenever a record is full.

        Args: prompts: the token ids of each request.
        """
        step = next(steps, None)
        while step is not None:
            yield step
            self.recorder.add_step(
                step.request, prompts[step.request], step.tokens, step.accepted, step.drafted, step.finish_reason
            )
            params = None
            if self.recorder.is_full:
                record = self.recorder.take_record()
                self.state, _ = update(self.plan, self.state, self._frozen, self.target, record)
                self.updates += 1
                params = self.trained.params
            step = send_params(steps, params)


def send_params(steps: Generator[Any, Any, None], params: PyTree | None) -> Any:
    """Send new parameters to the drafter of `serve`, and return the next step, or None at the end."""
    try:
        return steps.send(params)
    except StopIteration:
        return None
