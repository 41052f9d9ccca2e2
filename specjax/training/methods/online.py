"""Online Speculative Decoding: a drafter learns, while it serves, from the places where the target rejected its drafts.

Liu, Hu, Bailis, Cheung, Deng, Stoica, Zhang: Online Speculative Decoding (ICML 2024), arXiv 2310.07177.
Rule: of every round is kept which token the target wrote in place of a rejected draft; once a record is full, one step

    minimise the mean over these tokens of -sum(p log q)

Guarantee: that of decoding, since p does not change and each round is verified with the q that it was drafted with.
Deviations: the authors' code keeps the last token that a round emitted and reads q one place later; here it is the
token that replaced the rejected one, with the q that said it, and rounds of which all was accepted leave nothing. A
head drafts the whole round again, so that the tokens of its deeper steps are counted where a later round was rejected
there. Of trees a round counts as rejected if it was deeper than what was accepted. What old parameters left in the
drafter's memory stays. Several drafters, one for each topic, are as many watches.

Nothing of it runs unless it is asked for. `serve` takes new parameters of its drafter while it runs:

    watch, state, rest = Watch(texts=8, size=512), *loop.begin(plan, pupil.params)
    steps = serve(target, drafter, requests, ...)
    step = next(steps, None)
    while step is not None:
        watch.see(step.request, prompts[step.request], step.tokens, step.accepted, step.drafted, step.finish_reason)
        learnt = None
        if watch.full:
            state, _ = update(plan, state, rest, target, watch.take())
            learnt = loop.as_served(pupil, state, rest).params
        step = sent(steps, learnt)

After a `stream`, whose steps have the same in `step.info`, the next call takes `drafter.replace(params=learnt)`.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.training.data.packing import BORDER, Lesson
from specjax.training.loop.trainer import Outcome, Plan, State, one_step
from specjax.training.objectives.recipes import Recipe, recipe_of
from specjax.training.objectives.trainables import Pupil, learner_of
from specjax.types import Array, PyTree, Target


class Record(NamedTuple):
    """Texts that were decoded, N at most: the next one takes the place of the oldest."""

    tokens: Array  # int32[N, S], prompts included; of longer texts the first
    length: Array  # int32[N], 0: none
    rejected: Array  # bool[N, S], tokens that the target wrote in place of a draft
    roots: Array  # bool[N, S], last tokens before the rounds in which that happened
    seen: Array  # int32[], texts that came


def empty(texts: int, size: int) -> Record:
    """A record with room for so many texts of so many tokens."""
    nothing = jnp.zeros((texts, size), bool)
    return Record(nothing.astype(jnp.int32), jnp.zeros((texts,), jnp.int32), nothing, nothing, jnp.int32(0))


@jax.jit
def push(record: Record, tokens: Array, length: Array, rejected: Array, roots: Array) -> Record:
    """With one more text: [S] each, and its length. Pure."""
    place = record.seen % len(record.length)
    news = tokens, length, rejected, roots
    old = record.tokens, record.length, record.rejected, record.roots
    tokens, length, rejected, roots = (x.at[place].set(new) for x, new in zip(old, news, strict=True))
    return Record(tokens, length, rejected, roots, record.seen + 1)


def plan_of(pupil: Pupil, *, places: int | None = None, **changes: Any) -> Plan:
    """How a drafter learns online: as its kind does, but by AdamW at a constant 1e-4 and by soft cross entropy.

    changes: of the recipe. places: of a record of texts with so many rejections, of which all are learnt from at once;
      None: no chunks.
    """
    learner = learner_of(pupil)
    asked: dict[str, Any] = {
        "losses": (("soft_ce", 1.0),), "optimizer": "adamw", "learning_rate": 1e-4, "schedule": "constant",
        "warmup": 0.0, "weight_decay": 0.0, "weighting": "decay", "noise": 0.0,
    }  # fmt: skip
    recipe: Recipe = recipe_of(learner.kind, **(asked | changes))
    return Plan(recipe, learner, 1, places)


@functools.partial(jax.jit, static_argnames=("plan", "places"))
def update(
    plan: Plan, state: State, rest: PyTree, target: Target, record: Record, places: int | None = None
) -> tuple[State, Outcome]:
    """One step of the optimizer on a record. Pure; of one without rejections nothing changes.

    Args:
      state, rest: from `loop.begin(plan, params)`. target: of the texts.
      places: the most rejections of a text that are learnt from, the first; None: all.
    """
    lesson = lesson_of(record)
    where = places_of(record, plan.learner.whole_rounds, places)
    new, outcome = one_step(plan, state, rest, target, lesson, where, jax.random.key(0))
    learns = jnp.any(where >= 0)
    return jax.tree.map(lambda new, old: jnp.where(learns, new, old), new, state), outcome


def lesson_of(record: Record) -> Lesson:
    """The texts, of which what was rejected counts."""
    place = jnp.arange(record.tokens.shape[1])
    there = place < record.length[:, None]
    first = jnp.where(there, 0, record.length[:, None])
    return Lesson(record.tokens, first.astype(jnp.int32), record.rejected & there)


def places_of(record: Record, whole_rounds: bool, most: int | None = None) -> Array:
    """int32[N, R]: where drafts begin that are learnt from, -1: nowhere.

    whole_rounds: those of the rounds themselves; else one at each rejected token, as its first.
    """
    ahead, marks = (1, record.roots) if whole_rounds else (BORDER, record.rejected)
    size = marks.shape[1]
    found = jax.vmap(lambda row: jnp.nonzero(row, size=most or size, fill_value=-1)[0])(marks)
    return jnp.where(found >= ahead, found - ahead, -1).astype(jnp.int32)


class Watch:
    """Texts that are being decoded, by name, and a record of those that have ended."""

    def __init__(self, texts: int, size: int):
        """texts: how many make a record full. size: their most tokens, prompts included; of longer ones the first."""
        self.texts, self.size = texts, size
        self.record = empty(texts, size)
        self._running: dict[Any, _Running] = {}

    def see(
        self, name: Any, prompt: Sequence[int], tokens: Sequence[int], accepted: int, drafted: int, ended: Any = False
    ) -> None:
        """What one step added to a text.

        accepted: how many of the tokens, from the front, were drafted. drafted: how deep the draft was. ended: whether
          it was the text's last step.
        """
        text = self._running.setdefault(name, _Running(list(map(int, prompt)), [], []))
        if accepted < min(drafted, len(tokens)):
            text.rejected.append(len(text.tokens) + accepted)
            text.roots.append(len(text.tokens) - 1)
        text.tokens.extend(tokens)
        if ended:
            self.end(name)

    def end(self, name: Any) -> None:
        """A text has ended, which no step said."""
        self.record = push(self.record, *self._running.pop(name).arrays(self.size))

    @property
    def full(self) -> bool:
        """Whether as many texts have ended as the record holds."""
        return int(self.record.seen) >= self.texts

    def take(self) -> Record:
        """The record; a new one begins."""
        record, self.record = self.record, empty(self.texts, self.size)
        return record


class _Running(NamedTuple):
    tokens: list[int]
    rejected: list[int]
    roots: list[int]

    def arrays(self, size: int) -> tuple[np.ndarray, np.int32, np.ndarray, np.ndarray]:
        tokens = np.zeros(size, np.int32)
        cut = self.tokens[:size]
        tokens[: len(cut)] = cut
        rejected, roots = (np.isin(np.arange(size), places) for places in (self.rejected, self.roots))
        return tokens, np.int32(len(cut)), rejected, roots


def sent(steps: Generator[Any, Any, None], learnt: PyTree | None) -> Any:
    """The next step of `serve`, whose drafter has these parameters from now on; None at the end."""
    try:
        return steps.send(learnt)
    except StopIteration:
        return None
