"""Training a head or a draft model on texts that its target wrote: pure steps, and the loop around them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.numerics.validation import check_integer
from specjax.parallel import gather, place, shard_head
from specjax.persistence.fingerprint import describe, digest, of_model, of_weights
from specjax.training.data.packing import Lesson, Text, choose_places, numbered, pack, places_that_count
from specjax.training.loop.checkpoints import Kept
from specjax.training.loop.optimizers import check_frozen, joined, optimizer_of, split
from specjax.training.loop.target_activations import Shelf
from specjax.training.measure.acceptance_eval import Served, on_devices, served
from specjax.training.objectives.head_objective import Report
from specjax.training.objectives.recipes import RECIPES, Recipe, check, recipe_of
from specjax.training.objectives.trainables import Learner, Pupil, learner_of
from specjax.training.objectives.unroll import Reading
from specjax.types import Array, PyTree, Target


class Plan(NamedTuple):
    """What is the same in all steps of a run. Hashable."""

    recipe: Recipe
    learner: Learner
    steps: int
    chunk: int | None = None  # places of a row that are judged at a time
    dtype: str = "float32"  # of products; the parameters that are trained are float32


class State(NamedTuple):
    """What a step changes."""

    trained: PyTree  # float32 parameters, None in place of those that stay
    optimizer: PyTree
    step: Array  # int32[]


class Outcome(NamedTuple):
    """What a step says."""

    loss: Array  # float32[]
    report: Report
    finite: Array  # bool[]; a step that was not changed nothing


def begin(plan: Plan, params: PyTree) -> tuple[State, PyTree]:
    """(state, the parameters that stay) of what is to be trained."""
    trained, rest = split(params, plan.recipe.frozen)
    trained = jax.tree.map(lambda x: jnp.array(x, jnp.float32), trained)
    return State(trained, optimizer_of(plan.recipe, plan.steps).init(trained), jnp.int32(0)), rest


def one_step(
    plan: Plan, state: State, rest: PyTree, target: Target | None, lesson: Lesson, places: Array, key: Array,
    reading: Reading | None = None,
) -> tuple[State, Outcome]:  # fmt: skip
    """One step of the optimizer on a lesson. Pure; the target and `rest` get no derivative.

    Args:
      rest: from `begin`. lesson: int32[B, T] and so on. places: int32[B, R], where rounds begin; -1: nowhere.
      key: of the noise on features, where the recipe has some.
      reading: what the target says of the lesson, where that is known (`readings`); None: it is run.
    """
    import optax

    known = {} if reading is None else {"reading": reading}

    def loss_of(trained: PyTree) -> tuple[Array, Report]:
        params = joined(jax.tree.map(lambda x: x.astype(plan.dtype), trained), rest)
        return plan.learner.loss(plan.recipe, params, target, lesson, places, key, plan.chunk, **known)

    (loss, report), gradient = jax.value_and_grad(loss_of, has_aux=True)(state.trained)
    finite = jnp.isfinite(loss) & jnp.isfinite(optax.global_norm(gradient))
    updates, optimizer = optimizer_of(plan.recipe, plan.steps).update(gradient, state.optimizer, state.trained)
    new = State(optax.apply_updates(state.trained, updates), optimizer, state.step + 1)
    kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, state)
    return kept, Outcome(loss, report, finite)


def _as_a_step_leaves_it(state: State, mesh: Mesh) -> State:
    """All of it on the mesh, counts too, with shardings in the shortest words: else the second step compiles anew.

    It still does, once, where XLA splits what the head keeps whole (a head whose attention the mesh does not divide).
    """

    def one(x: Array) -> Array:
        spec = list(x.sharding.spec) if isinstance(x.sharding, NamedSharding) else []
        while spec and spec[-1] is None:
            spec.pop()
        return place(x, mesh, *spec)

    return jax.tree.map(one, state)


train_step = jax.jit(one_step, static_argnames="plan", donate_argnames="state")
"""`one_step` compiled; the state given is used up."""


def dtype_of(params: PyTree) -> str:
    """Of the weights."""
    floats = [x.dtype for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)]
    return str(max(floats, key=floats.count))


def as_served(pupil: Pupil, state: State, rest: PyTree) -> Any:
    """What is trained, as it is served, in the dtypes that it began with. A step uses the state up, and not this."""
    served = joined(jax.tree.map(jnp.copy, state.trained), rest)
    params = jax.tree.map(lambda x, old: x.astype(old.dtype), served, pupil.params)
    return dataclasses.replace(pupil, params=params)


def fingerprint(texts: Sequence[Text]) -> str:
    """Of the texts, in their order."""
    return digest([(int(text.answer), *map(int, text.tokens)) for text in texts])


class Progress(NamedTuple):
    """What a run has to say after some steps."""

    step: int
    steps: int
    epoch: int
    tokens: int  # places trained on so far
    seconds: float  # of training so far
    loss: float | None  # None: before the first step
    accuracy: tuple[float, ...]  # of drafts by depth
    served: Served | None = None  # of the texts held out, where they were looked at
    best: Any = None  # the pupil as it is served, where none before served more


class Schedule(NamedTuple):
    """The lessons of a run, in order."""

    epochs: list[list[Lesson]]
    places: int  # of a row
    columns: list[list[Lesson]]  # the same with, in place of each token, its number among those of all texts

    @property
    def steps(self) -> int:
        return sum(map(len, self.epochs))

    def after(self, done: int, seed: int) -> Iterator[tuple[int, Lesson, np.ndarray, Array]]:
        """(epoch, lesson, places, numbers of its tokens) of each step but the first `done`."""
        number = 0
        for epoch, (lessons, columns) in enumerate(zip(self.epochs, self.columns, strict=True)):
            for i, (lesson, column) in enumerate(zip(lessons, columns, strict=True)):
                if number >= done:
                    places = choose_places(lesson, self.places, np.random.default_rng([seed, epoch, i]))
                    yield epoch, lesson, places, column.tokens
                number += 1


def scheduled(
    texts: Sequence[Text], *, epochs: int, rows: int, length: int, places: int | None, seed: int, packs: bool = True,
    multiple: int = 1, grows: bool = False,
) -> Schedule:  # fmt: skip
    """Every epoch has all texts once, in an order of its own.

    places: the most that a row is trained on; None: all that there are. multiple: of what their number is. grows:
    whether lessons may be answered anew, at more places than the texts have; then as many as `places`, or a row has.
    """
    made, columns, numbers = [], [], numbered(texts)
    for epoch in range(epochs):
        order = np.random.default_rng([seed, epoch]).permutation(len(texts))
        packed = lambda some, order=order: pack([some[i] for i in order], rows, length, alone=not packs)
        made.append(packed(texts))
        columns.append(packed(numbers))
    most = max((int(places_that_count(lesson).sum(1).max()) for lessons in made for lesson in lessons), default=0)
    if not most:
        raise UsageError(f"no text of {length} tokens has an answer to learn from; give longer rows or other prompts")
    if grows:
        most = length
    most = most if places is None else min(places, most)
    return Schedule(made, -(-most // multiple) * multiple, columns)


def _of_frozen(rest: PyTree) -> str:
    """Of what stays: of weights some values, of a vocabulary all."""
    whole = [x for x in jax.tree.leaves(rest) if jnp.issubdtype(x.dtype, jnp.integer) and x.ndim == 1]
    return digest((of_weights(rest), [np.asarray(gather(x)).tolist() for x in whole]))


def _check_tokens(target: Target | None, texts: Sequence[Text]) -> None:
    """Raises: UsageError for tokens that the target has not."""
    if target is None:
        return
    count = target.model.vocab_size
    for text in texts:
        if len(text.tokens) and not 0 <= min(text.tokens) <= max(text.tokens) < count:
            raise UsageError(f"the texts have tokens that the target has not, whose ids are from 0 to {count - 1}")


def _check_rows(target: Target | None, held_out: Sequence[Text], rows: int, length: int, mesh: Mesh | None) -> None:
    """Raises: UsageError for texts of which nothing can be measured, and rows that the mesh does not divide."""
    if target is None and held_out:
        raise UsageError("tokens per pass of texts held out are those of a target; give it, or hold none out")
    if held_out and not any(places_that_count(lesson).any() for lesson in pack(held_out, rows, length)):
        raise UsageError(
            f"no text held out has an answer of two tokens in its first {length}; hold out others, or give longer rows"
        )
    if mesh is not None and rows % mesh.shape.get("data", 1):
        raise UsageError(
            f'rows={rows} cannot be split over the {mesh.shape["data"]} devices of "data"; give a multiple'
        )


def beginning(
    target: Target | None, learner: Learner, params: PyTree, recipe: Recipe, *, epochs: int, chunk: int | None,
    num_tokens: int | None, seed: int, readings: bool, about: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """What a run in a folder has to have in common with another to go on from it, as far as texts do not say it.

    params: of what is trained, or their shapes.
    Raises: UsageError for a recipe that trains nothing, or a chain longer than what is trained drafts.
    """
    known = RECIPES.get(learner.kind)  # names that only some heads of a kind have
    check_frozen(params, [name for name in recipe.frozen if known is None or name not in known.frozen])
    trained, _ = split(params, recipe.frozen)
    if not jax.tree.leaves(trained):
        raise UsageError(f"all parameters are frozen ({', '.join(recipe.frozen)}); leave some to be trained")
    if num_tokens is not None and learner.deepest and num_tokens > learner.deepest:
        raise UsageError(
            f"a chain of {num_tokens} tokens is more than the {learner.deepest} that {learner.kind} drafts; shorten it"
        )
    return {
        "recipe": repr(recipe), "config": repr(learner.config), "seed": seed, "epochs": epochs, "chunk": chunk,
        "target": None if target is None else of_model(target), "readings": readings, "dtype": dtype_of(trained),
        "num_tokens": num_tokens or min(recipe.depths, learner.deepest or recipe.depths), **about,
    }  # fmt: skip


def train(
    target: Target | None,
    pupil: Pupil,
    texts: Sequence[Text],
    *,
    recipe: Recipe | None = None,
    held_out: Sequence[Text] = (),
    epochs: int = 1,
    rows: int = 4,
    length: int = 512,
    places: int | None = None,
    chunk: int | None = None,
    num_tokens: int | None = None,
    evaluate_every: int = 100,
    evaluate_first: bool = False,
    patience: int | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    readings: Shelf | None = None,
    about: Mapping[str, Any] = MappingProxyType({}),
    data: Callable[[int, int, Lesson, Any], Lesson] | None = None,
    listen: Callable[[Progress], Any] = lambda progress: None,
) -> Any:
    """The pupil, trained on texts that the target wrote; of those seen at evaluations the one that serves most.

    Args:
      target: None for losses that do not read it, with nothing held out.
      pupil: what it begins with: a head, such as `starts.new_head` gives, or a draft model, a `Target` too.
      recipe: default: that of its kind. held_out: texts, written greedily, on which tokens per pass are measured.
      rows, length: of a lesson: tokens int32[rows, length]; over a mesh "data" must divide the rows.
      places: the most of a row that rounds begin at.
      chunk: places of a row that are judged at a time: less memory, more arithmetic. None: all.
      num_tokens: of the chain that is measured; default: as many as the recipe drafts.
      evaluate_first: before the first step too, of a pupil that serves already, and that stays if nothing serves more.
      patience: evaluations in a row that may not be better before it stops; None: any number.
      folder: where the run is kept at every evaluation; one that was ended there goes on, to the same bits.
      readings: where what the target says of the texts is kept; it then runs over them once, and not in every epoch.
      about: more that a run in the folder has to have in common with this one to go on, such as what it began with.
      data: (step, steps, lesson, the pupil as it is) -> the lesson that the step takes in its place, of the same shape,
        a function of its arguments alone: `draft_models.OnPolicy`.
      listen: is told every step's loss and accuracy.

    Raises: UsageError for a recipe that cannot be followed, texts without answers, or a loss that is no number; it then
      names the step, and the folder has the last good state.
    """
    learner = learner_of(pupil)
    recipe = recipe or recipe_of(learner.kind)
    check(recipe)
    mesh = None if target is None else target.model.mesh
    counts = {
        "rows": rows, "length": length, "epochs": epochs, "places": places, "chunk": chunk, "num_tokens": num_tokens,
        "evaluate_every": evaluate_every,
    }  # fmt: skip
    for name, count in counts.items():
        check_integer(name, count)
    for name, count in (("seed", seed), ("patience", patience)):
        check_integer(name, count, minimum=0)
    _check_tokens(target, [*texts, *held_out])
    _check_rows(target, held_out, rows, length, mesh)
    known = beginning(
        target, learner, pupil.params, recipe, epochs=epochs, chunk=chunk, num_tokens=num_tokens, seed=seed,
        readings=readings is not None, about=about,
    )  # fmt: skip
    if readings is not None and data is not None:
        raise UsageError("what the target says is kept of texts that stay as they are; leave data or readings out")
    if isinstance(pupil, DraftHead) and mesh is not None:
        pupil = shard_head(pupil, mesh)
    schedule = scheduled(
        texts, epochs=epochs, rows=rows, length=length, places=places, seed=seed, packs=recipe.packs and data is None,
        multiple=chunk or 1, grows=data is not None,
    )  # fmt: skip
    plan = Plan(recipe, learner, schedule.steps, chunk, known["dtype"])
    state, rest = begin(plan, pupil.params)
    if mesh is not None:
        state = _as_a_step_leaves_it(state, mesh)
    depths, of_texts = known["num_tokens"], {}
    if folder is not None:  # else nobody asks which run it is
        of_texts = {
            "texts": fingerprint(texts), "held_out": fingerprint(held_out), "shape": [rows, length, schedule.places],
            "data": data and digest(describe(data)), "frozen parameters": _of_frozen(rest),
        }  # fmt: skip
    kept = Kept(folder, pupil, state, known | of_texts)
    stored = None if readings is None else readings.read(target, learner, texts, rows, length)
    state = kept.state

    def measured(step: int, state: State) -> tuple[Served | None, Any]:
        """(what is served, the pupil if that is the most so far)."""
        if not held_out or target is None:
            return None, None
        now = as_served(pupil, state, rest)
        found = served(target, now, held_out, depths=depths, rows=rows, length=length)
        return found, now if kept.consider(now, step, found) else None

    if evaluate_first and not int(state.step):
        listen(Progress(0, schedule.steps, 0, 0, 0.0, None, (), *measured(0, state)))
    started, tokens = time.perf_counter() - kept.reached.seconds, kept.reached.tokens
    for number, (epoch, lesson, where, columns) in enumerate(schedule.after(int(state.step), seed), int(state.step)):
        if patience is not None and kept.reached.since_best > patience:
            break
        if data is not None:
            lesson = data(number, schedule.steps, lesson, as_served(pupil, state, rest))
            where = choose_places(lesson, schedule.places, np.random.default_rng([seed, number]))
        key = jax.random.fold_in(jax.random.key(seed), number)
        said = None if stored is None else stored.of(columns)
        lesson, where, said = on_devices(target, (lesson, where, said))
        state, outcome = train_step(plan, state, rest, target, lesson, where, key, said)
        if not bool(outcome.finite):
            raise UsageError(
                f"the loss was {float(outcome.loss)} at step {number + 1}; what was reached before is kept. Lower the "
                "learning rate, or look at the texts"
            )
        tokens += int(outcome.report.tokens)
        last = number + 1 == schedule.steps
        seconds = time.perf_counter() - started
        found: tuple[Served | None, Any] = None, None
        is_looked_at = last or (number + 1) % evaluate_every == 0
        if is_looked_at:
            found = measured(number + 1, state)
        accuracy = tuple(np.asarray(outcome.report.accuracy).tolist())
        listen(Progress(number + 1, schedule.steps, epoch, tokens, seconds, float(outcome.loss), accuracy, *found))
        if is_looked_at:  # once it was told: of what is kept nothing is told again
            kept.keep(state, tokens, seconds)
    return kept.best or as_served(pupil, state, rest)
