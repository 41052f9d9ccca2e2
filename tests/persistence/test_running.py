"""A resumed run has its whole state, with any processors, and deletes no checkpoint but its own."""

from __future__ import annotations

import json
import pathlib
import time

import jax
import numpy as np
import pytest
from processed import by_row, some
from tiers import those
from toy import branching_drafter, markov

import specjax
from specjax import UsageError, persistence
from specjax.persistence import running
from specjax.types import DecodeState

VOCAB = 12
MANY = np.random.default_rng(0).dirichlet(np.full(VOCAB, 0.4), VOCAB).astype(np.float32)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [5], [7, 7, 7]]
DRAFTER = branching_drafter((3, 2)).replace(params=jax.numpy.asarray(MANY))
OPTIONS = {"key": jax.random.key(0), "max_new_tokens": 20, "temperature": 0.9, "eos": 0}
PROCESSORS = {name: (processor,) for name, processor in some(VOCAB).items()} | {"all": by_row(VOCAB)}


def run(folder, stop=None, processors=(), every=2):
    """The text of each row; `stop`: leave after so many steps."""
    checkpoint = folder and persistence.Checkpoints(folder, every)
    rows = [[] for _ in PROMPTS]
    steps = specjax.stream(markov(MANY), DRAFTER, PROMPTS, checkpoint=checkpoint, processors=processors, **OPTIONS)
    for number, step in enumerate(steps, 1):
        for row, new in zip(rows, step.tokens, strict=True):
            row += new
        if number == stop:
            break
    return rows


def as_older(folder, monkeypatch, **settings):
    """Write checkpoints of two steps in the form of versions that did not name their fields."""
    with monkeypatch.context() as patch:
        patch.setattr(running, "TEXT", tuple(running.UNNAMED["text"]))
        patch.setattr(running, "REST", tuple(running.UNNAMED["rest"]))
        run(folder, stop=3, **settings)
    for path in pathlib.Path(folder).glob("*/about/metadata"):
        about = json.loads(path.read_text())
        del about["fields"]
        path.write_text(json.dumps(about))


def forgetful(self, state, stats, resume=running.Running.resume):
    """A mutant of `resume`: the processors begin anew."""
    steps, saved, stats = resume(self, state, stats)
    return steps, saved._replace(processed=state.processed), stats


def test_every_field_is_saved_or_passed_again():
    assert sorted((*running.GIVEN, *running.TEXT, *running.REST)) == sorted(DecodeState._fields)


@pytest.mark.parametrize("name", those(("all",), PROCESSORS))
def test_a_resumed_run_has_its_processors(name, tmp_path, monkeypatch):
    """A run that resumes without the states of its processors writes another text."""
    processors = PROCESSORS[name]
    expected = run(None, processors=processors)
    run(tmp_path / "run", stop=3, processors=processors)
    assert run(tmp_path / "run", processors=processors) == expected
    if name == "all":
        run(tmp_path / "mutant", stop=3, processors=processors)
        monkeypatch.setattr(running.Running, "resume", forgetful)
        assert run(tmp_path / "mutant", processors=processors) != expected


def test_older_checkpoints_are_continued_only_without_processors(tmp_path, monkeypatch):
    as_older(tmp_path / "plain", monkeypatch)
    assert run(tmp_path / "plain") == run(None)
    processors = PROCESSORS["all"]
    as_older(tmp_path / "processed", monkeypatch, processors=processors)
    with pytest.raises(UsageError, match="older version, which does not save the state of processors; give another"):
        run(tmp_path / "processed", processors=processors)


def test_strange_fields_are_refused(tmp_path):
    run(tmp_path, stop=3)
    twice, unknown, none = (
        {"text": ["tokens"], "rest": ["tokens"]},
        {"text": ["x"], "rest": []},
        {"text": [], "rest": []},
    )
    for fields in (None, 3, {"text": []}, twice, unknown, none):
        for path in tmp_path.glob("*/about/metadata"):
            path.write_text(json.dumps(json.loads(path.read_text()) | {"fields": fields}))
        with pytest.raises(UsageError, match=r"not a complete checkpoint of stream|does not save the state of tokens"):
            run(tmp_path)


def test_steps_and_remains_of_others_stay(tmp_path):
    """Old steps of another program, and a folder that it was writing, are not deleted; own ones are."""
    other, torn = tmp_path / "0" / "default", tmp_path / "1.orbax-checkpoint-tmp" / "weights"
    for folder in (other, torn):
        folder.mkdir(parents=True)
        (folder / "array").write_text("mine")
    (tmp_path / "thesis").write_text("mine")
    leftover = tmp_path / "12.orbax-checkpoint-tmp" / "text"
    with pytest.raises(UsageError, match=r"step 0 in .* is not a complete checkpoint of stream"):
        run(tmp_path)
    manager = running.Running(persistence.Checkpoints(tmp_path), {"prompts": "a"})
    rows = jax.numpy.zeros((1,), np.int32)
    state = DecodeState(rows, rows, rows < 0, rows, rows, rows, (), (), rows < 0)
    for step in range(2, 7):
        manager.save(step, state, rows)
    manager.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1.orbax-checkpoint-tmp", "5", "6", "thesis"]
    assert all((folder / "array").read_text() == "mine" for folder in (other, torn))
    for path in (tmp_path / "1.orbax-checkpoint-tmp", tmp_path / "0"):
        path.rename(tmp_path.parent / f"{tmp_path.name}-{path.name}")
    leftover.mkdir(parents=True)
    running.Running(persistence.Checkpoints(tmp_path), {"prompts": "a"}).close()
    deadline = time.monotonic() + 120  # Orbax deletes it in a thread
    while leftover.parent.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
