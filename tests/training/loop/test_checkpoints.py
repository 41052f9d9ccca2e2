"""Tests of what a folder of a training run may hold: its own run, which other files do not disturb, and no strange
values."""

import json

import jax.numpy as jnp
import pytest
from training_runs import head_of

from specjax import UsageError
from specjax.training.data.target_responses import ResponseStore
from specjax.training.loop.checkpoints import RUN_FILE, RunFolder, TrainingCheckpoints, read_position
from specjax.training.loop.history import TrainingHistory, read_history
from specjax.training.loop.trainer import TrainingProgress

NESTED = "[" * 100_000
REACHED = {"step": 2, "tokens": 7, "seconds": 1.5, "best": 1, "served": 2.0, "since_best": 0}


def written(folder, reached):
    (folder / RUN_FILE).write_text(json.dumps({"about": {}, "reached": reached}))
    return folder


def test_a_position_is_read(tmp_path):
    assert read_position(written(tmp_path, REACHED), {})._asdict() == REACHED


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "../../other"}, {"step": -1}, {"step": 1.0}, {"step": True}, {"best": "/tmp"}, {"best": []},
        {"tokens": None}, {"seconds": "long"}, {"served": 1e999}, {"seconds": 10**400},
        {"since_best": 1 << 70}, {"more": 1},
    ],
)  # fmt: skip
def test_strange_positions_are_refused(changes, tmp_path):
    with pytest.raises(UsageError, match="cannot hold a run"):
        read_position(written(tmp_path, REACHED | changes), {})


@pytest.mark.parametrize("content", [NESTED, "7", "null", "{}", '{"about": 1, "reached": {}}', "\udcff"])
def test_strange_files_of_a_run_are_refused(content, tmp_path):
    (tmp_path / RUN_FILE).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match="cannot hold a run"):
        read_position(tmp_path, {})


def test_an_identity_that_is_nested_too_deeply_is_refused(tmp_path):
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UsageError, match="must be plain values that JSON can store"):
        TrainingCheckpoints(None, head_of("medusa"), jnp.zeros(()), {"texts": deep})


def test_only_checkpoints_of_the_run_are_deleted(tmp_path):
    folder = RunFolder(tmp_path, "abc")
    foreign = ["step-1", "best-1", "step-1-abcd", "step-1-xyz", "best-2.orbax-checkpoint-tmp", "x-step-1-abc"]
    for path in (folder.step(1), folder.step(2), folder.best(1), *(tmp_path / name for name in foreign)):
        path.mkdir()
    folder.step(3).with_name(f"{folder.step(3).name}.orbax-checkpoint-tmp-7").mkdir()
    folder.step(4).symlink_to(tmp_path / "step-1")
    folder.delete_others(folder.step(2))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*foreign, folder.step(2).name, folder.step(4).name}


def test_the_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    TrainingCheckpoints("~/run", head_of("medusa"), jnp.zeros(()), {})
    ResponseStore("~/answers", {})
    assert {path.name for path in tmp_path.iterdir()} == {"run", "answers"}


def test_a_history_of_another_program_stays(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_text('{"step": 1, "reward": 2}\n')
    with pytest.raises(UsageError, match="is not the history of a training run; give another folder"):
        TrainingHistory(path)
    assert path.read_text() == '{"step": 1, "reward": 2}\n'


@pytest.mark.parametrize("left", [0, 1, 20, -1])
def test_a_torn_last_line_is_replaced(tmp_path, left):
    """A run that was killed in the middle of a write goes on, and its later steps can be read."""
    path = tmp_path / "history.jsonl"
    report = lambda step: TrainingProgress(step, 9, 0, step, 0.5, 1.0, (0.5,))
    history = TrainingHistory(path)
    for step in (1, 2, 3):
        history.add(report(step))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:left])
    resumed = TrainingHistory(path)
    assert [entry["step"] for entry in resumed.entries] == ([1, 2, 3] if left == -1 else [1, 2])
    for step in (3, 4):
        resumed.add(report(step))
    assert [entry["step"] for entry in TrainingHistory(path).entries] == [1, 2, 3, 4]
    for text in (lines[0][:9], "\0\0\0"):
        path.write_text(text)
        TrainingHistory(path).add(report(1))
        assert path.read_text() == lines[0]


@pytest.mark.parametrize("text", ["hello\n", "[1, 2]\n", '{"step": 1, "reward": 2}\n', '"text"\n'])
def test_histories_of_other_programs_are_refused(tmp_path, text):
    path = tmp_path / "history.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match="is not the history of a training run"):
        TrainingHistory(path)


def test_histories_and_responses_that_are_nested_too_deeply(tmp_path):
    entry = {"step": 1, "loss": 1.0, "served": None, "best": False}
    path = tmp_path / "history.jsonl"
    path.write_text(f"{json.dumps(entry)}\n{NESTED}\n")
    assert read_history(path).entries == [entry]
    answers = tmp_path / "answers"
    ResponseStore(answers, {"target": "a"})
    (answers / "answers-00000.jsonl").write_text(NESTED + "\n")
    with pytest.raises(UsageError, match="line 1 is not a response"):
        ResponseStore(answers, {"target": "a"})
    (answers / "answers-00000.jsonl").unlink()
    (answers / "answers.json").write_text(NESTED)
    with pytest.raises(UsageError, match="cannot hold responses"):
        ResponseStore(answers, {"target": "a"})
