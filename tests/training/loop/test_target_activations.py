"""Tests of stored activations of the target: they are those of a pass, and later epochs do not run the target."""

import dataclasses
import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_models import alike
from training_runs import head_of, recipe, target, texts

from specjax.errors import UsageError
from specjax.models.heads.blocks import unembed
from specjax.training.data.packing import TrainingText, number_tokens, pack
from specjax.training.loop.target_activations import ABOUT, INDEX, VALUES, ActivationCache
from specjax.training.loop.trainer import train
from specjax.training.objectives import draft_models, head_objective, trainables
from specjax.training.objectives.recipes import recipe_of
from specjax.training.objectives.trainables import build_objective
from specjax.training.objectives.unroll import DepthOutput, run_target
from specjax.types import Context


def test_a_lesson_finds_what_the_target_says_of_it_wherever_its_texts_are(tmp_path):
    head, progress = head_of("eagle3"), []
    stored = ActivationCache(tmp_path, 1, lambda *args: progress.append(args)).read(
        target(), build_objective(head), texts(), 1, 64
    )
    turned = [texts()[i] for i in (2, 0, 3, 1)]
    columns = pack([number_tokens(texts())[i] for i in (2, 0, 3, 1)], 2, 64)
    for packed, where in zip(pack(turned, 2, 64), columns, strict=True):
        in_text = np.asarray(where.tokens) > 0
        assert in_text.sum() == sum(len(text.tokens) for text in turned)
        fresh, cached = run_target(target(), head.head, packed), stored.lookup(where.tokens)
        for one, other in ((cached.features, fresh.features), (cached.hidden, fresh.hidden)):
            np.testing.assert_allclose(one[in_text], other[in_text], rtol=2**-7, atol=2**-7 * np.abs(other).max())
    assert progress[-1] == (120, 120)


def test_what_was_kept_is_used_again_and_the_target_runs_no_more(tmp_path, monkeypatch):
    fit = lambda target, **more: train(
        target, head_of("eagle3"), texts(), recipe=recipe(losses=(("soft_ce", 1.0),)), epochs=2, rows=2, length=64,
        on_progress=lambda progress: losses.append(progress.loss), **more,
    )  # fmt: skip
    losses = []
    fit(target())
    fit(target(), activation_cache=ActivationCache(tmp_path, 1))
    with monkeypatch.context() as patched:
        patched.setattr(ActivationCache, "_append", None)
        patched.setattr(trainables, "run_target", None)
        fit(target(), activation_cache=ActivationCache(tmp_path, 1))
    run, cached, again = np.reshape(losses, (3, -1))
    np.testing.assert_allclose(cached, run, rtol=1e-2)  # bfloat16
    np.testing.assert_array_equal(again, cached)


def test_more_texts_and_other_heads_take_what_is_there(tmp_path):
    """Stored texts are found in any order, and cut ones too; a reading that was ended goes on, also in the middle of a
    line."""
    length, progress = 24, []
    some, on_progress = texts(), lambda *args: progress.append(args)
    read_all = lambda shelf, kind="eagle3", which=some: shelf.read(
        target(), build_objective(head_of(kind)), which, 1, length
    )
    reference = read_all(ActivationCache(tmp_path / "whole", 1))

    class Ended(Exception):
        pass

    def ended(done, of):
        if done > 40:
            raise Ended

    with pytest.raises(Ended):
        read_all(ActivationCache(tmp_path / "parts", 1, ended), which=some[2:])
    with (tmp_path / "parts" / INDEX).open("a") as index:
        index.write('{"text": "')
    with pytest.raises(Ended):
        read_all(ActivationCache(tmp_path / "parts", 1, ended))
    parts = read_all(ActivationCache(tmp_path / "parts", 1, on_progress))
    assert len(progress) < 4, "texts that are stored do not run through the target again"
    np.testing.assert_array_equal(parts.values[parts.rows], reference.values[reference.rows])
    progress.clear()
    same = read_all(ActivationCache(tmp_path / "parts", 1, on_progress), kind="p_eagle", which=some[1:3])
    assert len(progress) == 1 and progress[0][0] == progress[0][1]
    at = 1 + len(some[0].tokens)
    np.testing.assert_array_equal(
        same.values[same.rows[1:]], reference.values[reference.rows[at : at + len(same.rows) - 1]]
    )


def read_some(folder, which=slice(None), gib=1, on_progress=lambda *args: None):
    return ActivationCache(folder, gib, on_progress).read(
        target(), build_objective(head_of("eagle3")), texts()[which], 1, 64
    )


@pytest.mark.parametrize("left", [None, 0, 0.5, 0.99])
def test_what_the_large_file_has_lost_is_read_again(tmp_path, left):
    """Deleted, emptied, or cut off: nothing is taken for states that is none."""
    reference = read_some(tmp_path / "whole")
    read_some(tmp_path / "part", slice(0, 3))
    path = tmp_path / "part" / VALUES
    path.unlink() if left is None else os.truncate(path, int(left * path.stat().st_size))
    part = read_some(tmp_path / "part")
    values, wanted = (np.asarray(one.values[one.rows], np.float32) for one in (part, reference))
    np.testing.assert_allclose(values, wanted, atol=0.02)  # in another place of a row
    assert np.any(part.values[part.rows[1:]] != 0, axis=-1).all()


def test_runs_at_once_wait_for_one_another(tmp_path):
    """Each finds its texts, whichever reads first."""
    with ThreadPoolExecutor(2) as pool:
        parts = slice(0, 3), slice(1, 4)
        first, second = (states.result() for states in [pool.submit(read_some, tmp_path, part) for part in parts])
    for states, part in ((first, parts[0]), (second, parts[1])):
        reference = read_some(tmp_path / "whole", part)
        np.testing.assert_allclose(
            np.asarray(states.values[states.rows], np.float32),
            np.asarray(reference.values[reference.rows], np.float32),
            atol=0.1,
        )
    assert len((tmp_path / INDEX).read_text().splitlines()) == 4


def test_a_shelf_with_all_texts_may_be_larger_than_what_is_given(tmp_path):
    read_some(tmp_path)
    read_some(tmp_path, slice(1, 2), gib=1e-9)
    nothing = ActivationCache(tmp_path, 1).read(
        target(), build_objective(head_of("eagle3")), [*texts()[:1], TrainingText((), 0)], 1, 64
    )
    assert len(nothing.rows) == 1 + len(texts()[0].tokens)
    with pytest.raises(UsageError) as refused:
        ActivationCache(tmp_path, 1e-6).read(
            target(), build_objective(head_of("eagle3")), [TrainingText((1, 2, 3, 4), 1)], 1, 64
        )
    assert str(refused.value).startswith("the activations of 4 tokens, with the 120 stored ones, take 0.")


@pytest.mark.parametrize(("name", "content"), [(ABOUT, ""), (ABOUT, "[]"), (INDEX, '{"text": 3}\n')])
def test_files_that_were_spoilt(tmp_path, name, content):
    """A folder of another model's states is refused; what the index does not list is read again."""
    reference = read_some(tmp_path)
    values = np.array(reference.values[reference.rows])
    (tmp_path / name).write_text(content)
    if name == ABOUT:
        with pytest.raises(
            UsageError, match=r"holds activations with another activations\.json; give another folder, or delete"
        ):
            read_some(tmp_path)
    else:
        again = read_some(tmp_path)
        np.testing.assert_array_equal(again.values[again.rows], values)


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    read_some(tmp_path, slice(0, 2))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        with pytest.raises(
            UsageError, match=r"cannot hold the activations of these texts .*No space left.*; make room"
        ):
            read_some(tmp_path)
    read_some(tmp_path)


def test_states_of_another_target_or_of_other_taps_are_refused(tmp_path):
    fit = lambda target, kind="eagle3": train(
        target,
        head_of(kind),
        texts(),
        recipe=recipe(kind),
        rows=2,
        length=64,
        activation_cache=ActivationCache(tmp_path, 1),
    )
    fit(target())
    other = jax.tree.map(lambda x: x * 2, target().params["layers"])
    with pytest.raises(
        UsageError, match=r"^[^(]* holds activations with another target; give another folder, or delete it$"
    ):
        fit(dataclasses.replace(target(), params=target().params | {"layers": other}))
    with pytest.raises(UsageError, match="holds activations with another taps"):
        fit(target(), "medusa")


def test_what_cannot_be_kept_is_refused(tmp_path):
    fit = lambda kind, gib, **more: train(
        target(), head_of(kind), texts(), recipe=recipe(kind), epochs=1, rows=2, length=64,
        activation_cache=ActivationCache(tmp_path, gib), **more,
    )  # fmt: skip
    with pytest.raises(
        UsageError,
        match=r"^the activations of 120 tokens take .* MiB, more than the limit of 1e-06 GiB; raise it, or give fewer",
    ):
        fit("eagle3", 1e-6)
    with pytest.raises(UsageError, match="the loss of kangaroo is not a function of the target's activations alone"):
        fit("kangaroo", 1)
    with pytest.raises(UsageError, match="cached activations need fixed texts"):
        fit("eagle3", 1, replace_batch=lambda *args: None)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="make room"):
        train(
            target(),
            head_of("eagle3"),
            texts(),
            recipe=recipe(),
            length=64,
            activation_cache=ActivationCache(tmp_path / "file", 1),
        )


def test_a_teacher_of_few_tokens_says_of_them_what_it_says_among_all():
    vocab, drafted = target().model.vocab_size, np.array([3, 17, 40])
    ids = np.full(vocab, 3, np.int32)
    ids[drafted] = np.arange(3)
    hidden = jax.random.normal(jax.random.key(0), (5, target().model.config.width))
    label = jnp.zeros(5, jnp.int32)
    depth = DepthOutput(jnp.zeros((5, 3)), label, hidden, jnp.ones(5), None, None)
    full_logits = unembed(hidden, Context(label[:, None], label, target=target()))
    few = head_objective._teacher_logits(target(), depth, jnp.asarray(ids))
    np.testing.assert_allclose(few, full_logits[:, drafted], rtol=1e-5, atol=1e-6)
    assert head_objective._restrict_outputs(target(), jnp.asarray(drafted)) is not None


def test_of_what_a_head_cannot_draft_nothing_is_accepted():
    """A head that is equally sure of a token that it has and of one that it lacks is right of the first alone."""
    logits = jax.random.normal(jax.random.key(0), (2, 3))
    label = jnp.array([1, 3])  # of three tokens: the second has no place among them
    depth = DepthOutput(logits, label, jnp.zeros((2, 4)), jnp.ones(2), jnp.array([0.9, 0.9]), None)
    losses = head_objective._confidence_loss([depth], [logits], jnp.zeros((1, 2), bool), (label < 3)[None])
    np.testing.assert_allclose(losses[0], -np.log([0.9, 0.1]), rtol=1e-5)


def test_a_draft_model_learns_what_was_kept_as_it_learns_what_is_said(tmp_path, monkeypatch):
    """And then passes over texts are its own alone."""
    losses, passes = [], []
    fit = lambda **more: train(
        target(), alike(target(), 0.1), texts(), recipe=recipe_of("direct_alignment"), epochs=2, rows=2, length=64,
        on_progress=lambda progress: losses.append(progress.loss), **more,
    )  # fmt: skip
    fit()
    forward_packed = draft_models.forward_packed
    monkeypatch.setattr(draft_models, "forward_packed", lambda *args: passes.append(args) or forward_packed(*args))
    fit(activation_cache=ActivationCache(tmp_path, 1))
    assert len(passes) == 1, "of the step that was compiled"
    run, cached = np.reshape(losses, (2, -1))
    np.testing.assert_allclose(cached, run, rtol=1e-2, atol=1e-3)  # bfloat16
    assert np.any(run[1:] != run[0])
