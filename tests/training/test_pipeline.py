"""`train_drafter`: one call from a target to a head that is loaded and served, equal to the command line's."""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
import warnings

import jax
import numpy as np
import pytest
import toy
from training_runs import PROMPTS, SETTINGS, LetterTokenizer

import specjax
from specjax.cli import main
from specjax.errors import CheckpointWarning, UsageError
from specjax.files.untrusted import read_json
from specjax.models.variants.expanding import expand_target
from specjax.training import TrainingObserver, TrainingSettings, recipe_of, train_drafter
from specjax.training.data.corpus import CorpusBuilder, CorpusSettings

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
    """The target is quantised, so that the files also name its scheme."""
    target, tokenizer = toy.quantized(toy.tiny_llama(), "int4-weights"), LetterTokenizer()
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
    cards = [json.loads((tmp_path / name / "card.json").read_text()) for name in ("call", "command")]
    assert cards[1] == json.loads(output.out) and cards[0] == trained.card
    differing = {"command", "date", "seconds"}
    of_call, of_command = ({name: card[name] for name in card.keys() - differing} for card in cards)
    assert of_call == of_command and of_call["served"]["texts"] == 1 and of_call["target"] == target.model.name
    files = lambda name: {path.name for path in (tmp_path / name).iterdir()}
    assert files("call") == files("command") >= {"card.json", "training.png", "history.jsonl"}
    for folder in ("call", "command"):
        assert read_json(tmp_path / folder / "config.json")["target_quantized"] == "int4-weights"
    assert [card["target_quantized"] for card in cards] == ["int4-weights"] * 2
    assert trained.improved and jax.tree.leaves(trained.model.params)[0].dtype == "float32"
    for other, form in ((toy.tiny_llama(), "not quantised"), (toy.quantized(toy.tiny_llama(), "int8"), "in int8")):
        with pytest.warns(CheckpointWarning, match=f'the scheme "int4-weights" of its target, and .* is {form}; '):
            specjax.load_head(tmp_path / "command", other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        specjax.load_head(tmp_path / "command", target)


def test_a_head_learns_on_a_quantised_target_what_it_learns_on_its_float_copy(tmp_path):
    """The gradient passes the target's quantised output, whose products differ by rounding only."""
    target = toy.quantized(toy.tiny_llama(), "int4-weights")
    stored = jax.tree.map(np.array, target.params)
    losses = [
        [step["loss"] for step in train_drafter(
            model, LetterTokenizer(), "eagle3", PROMPTS, folder=tmp_path / name, settings=SETTINGS
        ).history]
        for name, model in (("quantized", target), ("expanded", expand_target(target)))
    ]  # fmt: skip
    np.testing.assert_allclose(*losses, rtol=1e-3)
    assert losses[0][-1] < losses[0][0]
    jax.tree.map(np.testing.assert_array_equal, target.params, stored)


def test_flags_have_the_defaults_of_settings():
    from specjax.cli.commands.train import train
    from specjax.cli.training.setting_flags import to_flag

    parameters = inspect.signature(train).parameters
    for field in dataclasses.fields(TrainingSettings):
        name = to_flag(field.name).removeprefix("--").replace("-", "_")
        assert parameters[name].default == (None if field.name == "budgets" else field.default), field.name


def test_what_is_wrong_is_found_before_responses_are_generated(tmp_path):
    target, tokenizer = toy.tiny_llama(), LetterTokenizer()
    for options, words in (
        ({"settings": SETTINGS.replace(held_out=1)}, "`held_out` must be at least 2, not 1"),
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
    """It starts in floats, and a quantised draft model is refused."""
    target = toy.quantized(toy.tiny_llama(layers=2), "int4-weights")
    with pytest.raises(UsageError, match="the weights of the two_model to train are quantised"):
        train_drafter(target, LetterTokenizer(), None, PROMPTS, folder=tmp_path, draft=target, settings=SETTINGS)
    trained = train_drafter(
        target, LetterTokenizer(), None, PROMPTS, folder=tmp_path, layers=(1,), settings=SETTINGS,
        saved_tokenizer=tmp_path,
    )  # fmt: skip
    assert trained.kind == "two_model" and trained.model.model.capabilities.num_layers == 1
    assert trained.model.model.config.quantized == () and trained.improved
    assert (tmp_path / "model.safetensors").exists()


CONVERSATIONS = [
    [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, turns, strict=True)]
    for turns in (("ab", "c", "de", "f"), ("gh", "i", "jk", "l"), ("mn", "o", "pq", "r"), ("st", "u", "vw", "x"))
]


class Turns(LetterTokenizer):
    """A template with a mark of the role before every message, an end after it, and a start of the answer."""

    def encode(self, text, special=True):
        return [ord(letter) - 87 for letter in text]

    def decode(self, ids):
        return "".join(chr(87 + id) for id in ids)

    def chat(self, text):
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        marks = {"user": 2, "assistant": 3}
        return [id for m in messages for id in (marks[m["role"]], *self.encode(m["content"]), 1)] + [3]


def build(tmp_path, prompts=(), texts=(), temperature=0.0, **changes):
    numbers = {"held_out": 2, "max_new_tokens": 6, "generated_prompts": 0, "batch_size": 4, "length": 64, "seed": 0}
    settings = CorpusSettings(**numbers | changes, temperature=temperature, max_positions=128)
    return CorpusBuilder(toy.tiny_llama(), Turns(), settings, tmp_path / "answers", Recorder()).build(prompts, texts)


def test_the_target_answers_every_turn_after_its_own_answers(tmp_path):
    corpus = build(tmp_path, CONVERSATIONS)
    assert len(corpus.texts) == 2 and (len(corpus.held_out), len(corpus.reported)) == (1, 1)
    target, tokenizer = toy.tiny_llama(), Turns()
    for text in (*corpus.texts, *corpus.held_out, *corpus.reported):
        (begin, end), (later, stop) = text.responses
        for start, finish in ((begin, end), (later, stop)):
            prompt = [list(text.tokens[:start])]
            answer = specjax.decode(target, None, prompt, key=0, max_new_tokens=6, eos=tokenizer.eos).to_lists()[0]
            assert tuple(answer) == text.tokens[start:finish], "after exactly these tokens the target writes this"


def test_selection_and_report_have_different_prompts_at_the_temperature_of_the_run(tmp_path):
    prompts = ["abc" + chr(97 + i) * 3 for i in range(9)]
    corpus = build(tmp_path, prompts, held_out=5, temperature=0.9)
    parts = corpus.texts, corpus.held_out, corpus.reported
    assert [len(part) for part in parts] == [4, 3, 2]
    questions = [text.tokens[: text.prompt_length] for part in parts for text in part]
    assert len(set(questions)) == 9
    assert json.loads((tmp_path / "answers" / "answers.json").read_text())["temperature"] == 0.9
    assert not (tmp_path / "held_out").exists()


def test_given_answers_are_trained_and_some_conversations_are_held_out(tmp_path):
    corpus = build(tmp_path, texts=[*CONVERSATIONS, "sometext"])
    letters = lambda text: Turns().encode(text)
    expected = [[*letters(turns[1]["content"]), 1, *letters(turns[3]["content"]), 1] for turns in CONVERSATIONS]
    trained = [text.response_tokens for text in corpus.texts]
    assert sum(answer in expected for answer in trained) == 2 and letters("sometext") in trained
    assert len(corpus.held_out) == len(corpus.reported) == 1, "answered by the target"
    assert all(text.response_tokens not in expected for text in (*corpus.held_out, *corpus.reported))


def test_conversations_that_cannot_be_answered_are_not_held_out(tmp_path):
    """Neither long ones, nor two with the same question; those with a question that is held out are not trained on."""
    letters = lambda text: Turns().encode(text)
    chat = lambda question, answer: [
        {"role": "user", "content": question}, {"role": "assistant", "content": answer},
    ]  # fmt: skip
    long = [chat("long" * 16 + chr(97 + i), "k") for i in range(6)]
    same = [chat("why", chr(97 + i) * 2) for i in range(6)]
    for seed in range(3):
        corpus = build(tmp_path / str(seed), texts=[*long, *same, chat("ab", "cd"), chat("de", "fg")], seed=seed)
        (first,), (second,) = corpus.held_out, corpus.reported
        questions = {text.tokens[1 : text.prompt_length - 2] for text in (first, second)}
        assert len(questions) == 2 and questions <= {tuple(letters(text)) for text in ("why", "ab", "de")}
        assert all(text.tokens[1 : text.prompt_length - 2] not in questions for text in corpus.texts)
        assert len(corpus.texts) == (1 if tuple(letters("why")) in questions else 6), "long prompts leave no answer"


def test_the_number_in_the_report_is_that_of_other_prompts(tmp_path):
    trained = train_drafter(toy.tiny_llama(), LetterTokenizer(), "medusa", PROMPTS, folder=tmp_path, settings=SETTINGS)
    stored = [json.loads(line)["served"] for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert trained.held_out == 1 and trained.measured.tokens == 8
    assert all(entry is None or entry["tokens"] == 8 for entry in stored)


def test_responses_are_written_as_they_come(tmp_path):
    """An interrupted run keeps every response that was complete."""

    class Stopped(Exception):
        pass

    class Stopping(Recorder):
        def on_responses(self, stage, done, total, tokens):
            lines = [line for path in tmp_path.glob("answers/*.jsonl") for line in path.read_text().splitlines()]
            assert len(lines) == done
            if done == 3:
                raise Stopped

    call = lambda observer: train_drafter(
        toy.tiny_llama(), LetterTokenizer(), "medusa", PROMPTS, folder=tmp_path, observer=observer,
        settings=SETTINGS.replace(batch_size=2),
    )  # fmt: skip
    with pytest.raises(Stopped):
        call(Stopping())
    again = Recorder()
    call(again)
    assert len(again.responses) == 1 + 3, "three of six were there"


def test_fewer_depths_than_the_head_drafts_are_noted(tmp_path):
    notes = []

    class Noting(TrainingObserver):
        def on_note(self, note):
            notes.append(note)

    train_drafter(
        toy.tiny_llama(), LetterTokenizer(), "medusa", PROMPTS, folder=tmp_path, settings=SETTINGS,
        recipe=recipe_of("medusa", depths=2), head_options={"num_heads": 6}, observer=Noting(),
    )  # fmt: skip
    assert notes == ["medusa drafts 6 tokens, and only the first 2 are trained (`depths`)"]
