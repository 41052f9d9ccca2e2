"""`train_drafter`: one call from a target to a head that is loaded and served, equal to the command line's."""

from __future__ import annotations

import dataclasses
import inspect
import json
import types

import jax
import numpy as np
import pytest
import toy
from training_runs import PROMPTS, SETTINGS, LetterTokenizer

import specjax
from specjax.cli import main
from specjax.errors import UsageError
from specjax.training import TrainingObserver, TrainingSettings, train_drafter

FLAGS = (
    "--held-out", 2, "--max-new-tokens", 8, "--rows", 2, "--length", 32, "--every", 2, "--epochs", 2,
    "--num-draft-tokens", 2,
)  # fmt: skip


class Recorder(TrainingObserver):
    def __init__(self):
        self.responses, self.steps = [], []

    def on_responses(self, stage, done, total, tokens):
        self.responses.append(stage)

    def on_step(self, progress):
        self.steps.append(progress)


def test_one_call_trains_a_head_that_is_loaded_and_served(tmp_path):
    target, recorder = toy.tiny_llama(), Recorder()
    call = lambda **options: train_drafter(
        target, LetterTokenizer(), "medusa", PROMPTS, folder=tmp_path / "head", settings=SETTINGS, **options
    )
    trained = call(observer=recorder)
    assert trained.kind == "medusa" and trained.texts == 4 and trained.improved
    assert set(recorder.responses) == {"answering"} and len(recorder.steps) == recorder.steps[-1].steps
    assert [entry["step"] for entry in trained.history] == [step.step for step in recorder.steps]
    head = specjax.load_head(tmp_path / "head", target)
    jax.tree.map(np.testing.assert_array_equal, head.params, trained.model.params)
    drafter = specjax.make_drafter("medusa", target, head, num_tokens=2)
    prompts = [LetterTokenizer().chat(prompt) for prompt in PROMPTS]
    texts = specjax.decode(target, drafter, prompts, key=0, max_new_tokens=8)
    assert texts.to_lists() == specjax.decode(target, None, prompts, key=0, max_new_tokens=8).to_lists()
    again = call(observer=(repeated := Recorder()))
    assert not repeated.responses and not repeated.steps, "responses and steps that are stored are reused"
    assert again.measured == trained.measured and again.history == trained.history
    with pytest.raises(UsageError, match="holds a run with other start"):
        call(start="random")


def test_the_command_line_with_equal_flags_writes_the_same_head(tmp_path, monkeypatch, capsys):
    target, tokenizer = toy.tiny_llama(), LetterTokenizer()
    monkeypatch.setenv("SPECJAX_NO_CACHE", "1")
    monkeypatch.setattr(specjax, "load", lambda *args, **options: (target, tokenizer), raising=False)
    trained = train_drafter(target, tokenizer, "medusa", PROMPTS, folder=tmp_path / "call", settings=SETTINGS)
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    arguments = ("train", "--method", "medusa", "--prompts", file, "--out", tmp_path / "command", *FLAGS, "--json")
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    output = types.SimpleNamespace(**capsys.readouterr()._asdict())
    assert stop.value.code == 0, output.err
    written = specjax.load_head(tmp_path / "command", target)
    jax.tree.map(np.testing.assert_array_equal, written.params, trained.model.params)
    steps = [json.loads(line) for line in (tmp_path / "command" / "history.jsonl").read_text().splitlines()]
    assert [step["loss"] for step in steps] == [step["loss"] for step in trained.history]
    assert json.loads(output.out)["served"]["tokens_per_pass"] == trained.measured.per_pass


def test_flags_have_the_defaults_of_settings():
    from specjax.cli.commands.train import train
    from specjax.cli.runs.training import to_flag

    parameters = inspect.signature(train).parameters
    for field in dataclasses.fields(TrainingSettings):
        name = to_flag(field.name).removeprefix("--").replace("-", "_")
        assert parameters[name].default == (None if field.name == "budgets" else field.default), field.name


def test_what_is_wrong_is_found_before_responses_are_generated(tmp_path):
    target, tokenizer = toy.tiny_llama(), LetterTokenizer()
    for options, words in (
        ({"settings": SETTINGS.replace(held_out=0)}, "`held_out` must be at least 1, not 0"),
        ({"settings": SETTINGS.replace(length=9999)}, "length=9999 is more than the .* that the model takes"),
        (
            {"settings": SETTINGS.replace(num_draft_tokens=9)},
            "num_draft_tokens=9 is more than the 4 that medusa drafts",
        ),
        ({"settings": SETTINGS.replace(budgets=(8, 9))}, "`budgets` needs at least 3 different numbers"),
        ({"layers": (0,)}, "`layers` and `on_policy` are for draft models, and medusa is a head"),
        ({"draft": target}, "`draft` is of kind two_model, not medusa"),
        ({"kind": "two"}, 'kind must be two_model or one of .*, not "two"'),
    ):
        arguments = {"kind": "medusa", "settings": SETTINGS} | options
        with pytest.raises(UsageError, match=words):
            train_drafter(target, tokenizer, prompts=PROMPTS, folder=tmp_path, **arguments)
    assert not (tmp_path / "answers").exists()


def test_a_draft_model_starts_from_layers_of_the_target(tmp_path):
    target = toy.tiny_llama(layers=2)
    trained = train_drafter(
        target, LetterTokenizer(), None, PROMPTS, folder=tmp_path, layers=(1,), settings=SETTINGS,
        saved_tokenizer=tmp_path,
    )  # fmt: skip
    assert trained.kind == "two_model" and trained.model.model.capabilities.num_layers == 1
    assert (tmp_path / "model.safetensors").exists()
