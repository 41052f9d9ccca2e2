"""Checkpoints made to break their readers: each is either restored or refused in one short sentence."""

import os
import shutil

import jax
import numpy as np
import pytest
from hostile import attacks, changed_bytes, survives
from toy import markov

import specjax
from specjax import persistence
from specjax.drafters import prompt_lookup

TREE = {"x": np.arange(6, dtype=np.float32), "y": {"z": np.ones((2, 3), np.int32)}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    persistence.save(folder, TREE)
    return folder


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A stream that was left."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    go_on(folder, stop=4)
    return folder


def go_on(folder, stop=None):
    steps = specjax.stream(
        markov(), prompt_lookup(2), [[1, 2, 0, 1, 2], [2]], checkpoint=persistence.Checkpoints(folder, 2),
        key=jax.random.key(0), max_new_tokens=12, temperature=0.8,
    )  # fmt: skip
    for number, _ in enumerate(steps, 1):
        if number == stop:
            break


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def attack(rng, source, folder):
    """Copy a checkpoint to `folder`, with one or two files changed, removed or replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    for _ in range(rng.randint(1, 2)):
        files = files_of(folder)
        file = rng.choice(files)
        kind = rng.randrange(8)
        if kind == 0 and len(files) > 1:
            file.unlink()
        elif kind == 1:
            file.write_bytes(rng.choice(files).read_bytes())
        elif kind == 2:
            file.write_bytes(rng.choice((b"", b"[" * 100_000, b"null", b"7", b"{}", b"\xff" * 50)))
        else:
            file.write_bytes(changed_bytes(rng, file.read_bytes()))
    return folder


@pytest.mark.parametrize(("rng", "count"), attacks(20, 3000))
def test_parameters(rng, count, saved, tmp_path):
    like = jax.tree.map(jax.numpy.asarray, TREE)
    for case in range(count):
        folder = attack(rng, saved, tmp_path / "model")
        survives(lambda folder=folder: persistence.restore(folder, like), case)


@pytest.mark.parametrize(("rng", "count"), attacks(8, 1000))
def test_running_decodes(rng, count, run_folder, tmp_path):
    for case in range(count):
        folder = attack(rng, run_folder, tmp_path / "run")
        survives(lambda folder=folder: go_on(folder), case)


def test_what_never_ends_is_not_opened(saved, run_folder, tmp_path):
    for full, read in ((saved, lambda f: persistence.restore(f, TREE)), (run_folder, go_on)):
        for number, file in enumerate(files_of(full)):
            folder = shutil.copytree(full, tmp_path / f"{full.name}{number}")
            pipe = folder / file.relative_to(full)
            pipe.unlink()
            os.mkfifo(pipe)
            assert "is not a regular file" in survives(lambda f=folder, read=read: read(f), file)


@pytest.mark.parametrize("name", ["-1", "9" * 40, "x", "7.orbax-checkpoint-tmp", "007"])
def test_steps_of_strange_names(name, run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    (folder / name).mkdir()
    survives(lambda: go_on(folder))


@pytest.mark.parametrize("length", [1 << 30, -1, 0])
def test_lengths_that_no_run_has(length, tmp_path):
    """The shapes are right, but the contents would need gigabytes or read out of bounds."""
    from specjax.persistence import running

    retained = running.Running.save

    def spoiled(self, step, state, stats, *, is_last=False):
        retained(self, step, state._replace(length=state.length * 0 + length), stats, is_last=is_last)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running.Running, "save", spoiled)
        go_on(tmp_path / "run", stop=4)
    assert "is not a complete checkpoint of stream" in survives(lambda: go_on(tmp_path / "run"))
