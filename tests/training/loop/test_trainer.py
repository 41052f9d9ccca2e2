"""Training of a head: measured tokens per pass are those of decoding, and an interrupted run resumes bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import exhaustive
from training_runs import DEPTHS, NEW, head_of, recipe, target, texts

import specjax
from specjax.errors import UsageError
from specjax.models.heads.kinds import KINDS
from specjax.training.data.packing import TrainingText
from specjax.training.loop.head_init import new_head
from specjax.training.loop.schedule import ScheduleOptions, make_schedule
from specjax.training.loop.step import TrainingPlan, init_state, train_step
from specjax.training.loop.trainer import train
from specjax.training.measure.acceptance_eval import measure_acceptance
from specjax.training.objectives.trainables import build_objective


@pytest.mark.parametrize("kind", ["eagle3", exhaustive("medusa"), exhaustive("dflash"), exhaustive("hydra")])
def test_fitted_to_four_texts_it_serves_all_that_it_drafts(kind):
    fitted = train(target(), head_of(kind), texts(), recipe=recipe(kind), epochs=100, rows=2, length=64)
    measured = measure_acceptance(target(), fitted, texts(), depths=DEPTHS, rows=2, length=64)
    drafter = specjax.make_drafter(kind, target(), fitted, num_tokens=DEPTHS)
    prompts = [list(text.tokens[: text.prompt_length]) for text in texts()]
    result = specjax.decode(target(), drafter, prompts, key=0, max_new_tokens=NEW)
    assert [tuple(text) for text in result.to_lists()] == [text.tokens[text.prompt_length :] for text in texts()]
    assert measured.passes == int(np.sum(result.stats.target_passes)) == len(texts()) * NEW // (DEPTHS + 1)
    assert measured.tokens == len(texts()) * NEW


@functools.cache
def half_trained():
    return train(target(), head_of("eagle3"), texts()[:2], recipe=recipe(), epochs=30, rows=2, length=64)


def test_of_a_head_that_errs_the_rounds_are_those_of_the_decoder():
    fitted = half_trained()
    measured = measure_acceptance(target(), fitted, texts(), depths=DEPTHS, rows=2, length=64)
    drafter = specjax.make_drafter("eagle3", target(), fitted, num_tokens=DEPTHS)
    prompts = [list(text.tokens[: text.prompt_length]) for text in texts()]
    result = specjax.decode(target(), drafter, prompts, key=0, max_new_tokens=NEW)
    passes = int(np.sum(result.stats.target_passes))
    assert measured.passes == passes
    assert len(texts()) * NEW // (DEPTHS + 1) < passes < len(texts()) * NEW  # neither always right nor never


@pytest.mark.parametrize("optimizer", ["adamw", exhaustive("muon")])
def test_a_run_that_was_ended_goes_on_to_the_same_bits(tmp_path, optimizer):
    class Ended(Exception):
        pass

    def run(folder, on_progress=lambda progress: None):
        return train(
            target(), head_of("eagle3"), texts(), recipe=recipe(optimizer=optimizer), held_out=texts()[:1], epochs=6,
            rows=2, length=64, evaluate_every=2, folder=folder, on_progress=on_progress,
        )  # fmt: skip

    def end(progress):
        if progress.step == 5:
            raise Ended

    progress_log, again = [], []
    uninterrupted = run(tmp_path / "whole", progress_log.append)
    with pytest.raises(Ended):
        run(tmp_path / "ended", end)
    (step,) = (tmp_path / "ended").glob("step-4-*")
    step.with_name(f"{step.name.replace('4', '9', 1)}.orbax-checkpoint-tmp-1").mkdir()  # as of a write that was killed
    names = "step-9", "best-1", "step-9-thesis", "best-9.orbax-checkpoint-tmp"
    checkpoints = [tmp_path / "ended" / name for name in names]
    for other in checkpoints:
        other.mkdir()
    jax.tree.map(np.testing.assert_array_equal, run(tmp_path / "ended", again.append).params, uninterrupted.params)
    figures = lambda progress: (
        progress.step,
        progress.tokens,
        progress.loss,
        progress.measured,
        progress.best is not None,
    )
    assert list(map(figures, again)) == list(map(figures, progress_log))[4:]
    for other in checkpoints:  # they are still there
        other.rmdir()
    assert sorted(path.name for path in (tmp_path / "ended").iterdir()) == sorted(
        path.name for path in (tmp_path / "whole").iterdir()
    )
    with pytest.raises(UsageError, match="recipe"):
        other, uninterrupted = recipe(optimizer=optimizer, clip=2.0), tmp_path / "whole"
        train(target(), head_of("eagle3"), texts(), recipe=other, epochs=6, rows=2, length=64, folder=uninterrupted)


def test_a_loss_that_is_no_number_names_the_step_and_changes_nothing():
    broken = head_of("eagle3")
    plan = TrainingPlan(recipe(), build_objective(broken), 4)
    schedule = make_schedule(texts(), ScheduleOptions(epochs=1, rows=2, length=64, seed=0))
    _, packed, places, _ = next(schedule.iterate_from(0, 0))
    nan = jax.tree.map(lambda x: x * jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else x, broken.params)
    state, fixed = init_state(plan, nan)
    old_state = jax.tree.map(np.asarray, state)
    state, outcome = train_step(plan, state, fixed, target(), packed, places, jax.random.key(0))
    assert not outcome.finite
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state), old_state)
    with pytest.raises(UsageError, match="at step 1"):
        train(target(), broken.replace(params=nan), texts(), recipe=recipe(), rows=2, length=64)


def test_what_is_frozen_stays_and_what_is_not_moves():
    head = head_of("eagle3")
    fitted = train(target(), head, texts(), recipe=recipe(frozen=("fc", "first/mlp")), epochs=2, rows=2, length=64)
    moved = jax.tree_util.tree_map_with_path(
        lambda path, old, new: ("/".join(str(entry.key) for entry in path), bool(np.any(old != new))),
        head.params, fitted.params,
    )  # fmt: skip
    by_name = dict(jax.tree.leaves(moved, is_leaf=lambda x: isinstance(x, tuple)))
    stays = [name for name, changed in by_name.items() if not changed]
    assert stays and all(name.startswith(("fc", "first/mlp/")) for name in stays)
    assert any(name.startswith("first/attention") for name in by_name if by_name[name])


def test_it_ends_after_measurements_that_are_no_better_also_when_it_goes_on(tmp_path):
    def run(**options):
        progress_log = []
        fitted = train(
            target(), head_of("medusa"), texts(), recipe=recipe("medusa", learning_rate=1e-9), held_out=texts()[:1],
            epochs=9, rows=2, length=64, evaluate_every=1, patience=1, folder=tmp_path, on_progress=progress_log.append,
            **options,
        )  # fmt: skip
        assert jax.tree.map(np.asarray, fitted.params), "the best is there, whatever came behind it"
        return [progress.step for progress in progress_log]

    assert run() == [1, 2, 3]  # the first is the best, one may be no better, the next ends it
    assert run() == []
    with pytest.raises(UsageError, match="holds a run with other num_tokens"):
        run(num_tokens=2)
    (tmp_path / "run.json").write_text("[1]")
    with pytest.raises(UsageError, match="cannot hold a run"):
        run()


def test_a_head_that_serves_already_stays_if_nothing_serves_more(tmp_path):
    """At a rate that ruins it; also when the run is asked for again."""
    options = {"rows": 2, "length": 64, "recipe": recipe("medusa")}
    head = train(target(), head_of("medusa"), texts(), epochs=20, **options)
    begin = measure_acceptance(target(), head, texts(), depths=3, rows=2, length=64)
    for _ in range(2):
        progress_log = []
        options["recipe"] = recipe("medusa", learning_rate=10.0)
        stays = train(
            target(), head, texts(), held_out=texts(), evaluate_first=True, evaluate_every=1, folder=tmp_path,
            on_progress=progress_log.append, **options,
        )  # fmt: skip
        jax.tree.map(np.testing.assert_array_equal, stays.params, head.params)
    assert begin.per_pass > 1.5 and not progress_log, "it had ended"


def test_what_cannot_be_measured_or_trained_is_refused():
    with pytest.raises(UsageError, match="no held-out text has a response of two tokens in its first 64"):
        train(target(), head_of("eagle3"), texts(), recipe=recipe(), held_out=[TrainingText((1, 2), 2)], length=64)
    with pytest.raises(UsageError, match="all parameters are frozen"):
        train(target(), head_of("ppd"), texts(), recipe=recipe("ppd", frozen=("prompts",)), rows=2, length=64)
    for name in ("rows", "length", "epochs", "starts_per_row", "chunk", "num_tokens", "evaluate_every"):
        with pytest.raises(UsageError, match=f"{name} must be a whole number of at least 1, not 0"):
            train(target(), head_of("eagle3"), texts(), recipe=recipe(), **{"rows": 2, "length": 64, name: 0})
    max_depth = build_objective(head_of("medusa")).max_depth
    with pytest.raises(UsageError, match=f"num_tokens={max_depth + 1} is more than the {max_depth} that medusa"):
        train(target(), head_of("medusa"), texts(), rows=2, length=64, num_tokens=max_depth + 1)


def once(folder, **options):
    return train(target(), head_of("eagle3"), texts(), recipe=recipe(), rows=2, length=64, folder=folder, **options)


def test_a_run_with_another_vocabulary_is_another_run(tmp_path):
    """Rows of an output that were trained for some ids say nothing of others."""
    config = KINDS["eagle3"].of_target(target().model.config, draft_vocab_size=8)
    of = lambda ids: new_head("eagle3", config, target(), jax.random.key(0), ids=ids)
    run = lambda head: train(target(), head, texts(), recipe=recipe(), rows=2, length=64, folder=tmp_path)
    run(of(np.r_[:7, 30]))
    with pytest.raises(UsageError, match="holds a run with other frozen parameters"):
        run(of(np.r_[:7, 31]))


def test_a_run_is_known_by_values_that_a_file_can_hold(tmp_path):
    """Functions by their names, numbers of NumPy as numbers, and tuples as lists."""
    same = lambda: lambda step, steps, packed, trainable: packed
    options = {
        "seed": np.int64(1),
        "epochs": np.int32(1),
        "identity": {"ids": (1, np.int64(2)), "rate": np.float32(0.5)},
    }
    first = once(tmp_path, replace_batch=same(), **options)
    again = once(tmp_path, replace_batch=same(), **options, on_progress=lambda progress: pytest.fail("it had ended"))
    jax.tree.map(np.testing.assert_array_equal, first.params, again.params)
    with pytest.raises(UsageError, match="holds a run with other replace_batch"):
        once(tmp_path, replace_batch=lambda step, steps, packed, trainable: packed, **options)
    with pytest.raises(UsageError, match="must be plain values"):
        once(tmp_path / "other", identity={"rate": float("nan")})


def test_settings_that_mean_nothing_are_refused(tmp_path):
    for options, words in (
        ({"seed": -1}, "seed must be a whole number of at least 0, not -1"),
        ({"patience": -1}, "patience must be a whole number of at least 0"),
        ({"evaluate_every": 2.5}, "evaluate_every must be a whole number"),
    ):
        with pytest.raises(UsageError, match=words):
            once(None, **options)
    with pytest.raises(UsageError, match='no parameter or module is named "headz"'):
        train(target(), head_of("eagle3"), texts(), recipe=recipe(frozen=("headz",)), rows=2, length=64)
    count = target().model.vocab_size
    for token in (-1, count):
        with pytest.raises(UsageError, match=f"its ids are from 0 to {count - 1}"):
            train(target(), head_of("eagle3"), [TrainingText((1, token, 3), 1)], recipe=recipe(), rows=2, length=64)


def test_texts_without_answers_are_refused():
    with pytest.raises(UsageError, match="no text has a response within 64 tokens"):
        train(target(), head_of("eagle3"), [TrainingText((1, 2, 3), 3)], recipe=recipe(), rows=2, length=64)
    with pytest.raises(UsageError, match='unknown loss "mse"'):
        recipe(losses=(("mse", 1.0),))
