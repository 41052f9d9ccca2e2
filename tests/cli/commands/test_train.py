"""`specjax train`: from prompts to a head that `generate` takes; whatever is wrong is one sentence, nothing lost."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import specjax
from specjax.training.data.target_responses import ResponseStore
from specjax.training.loop.checkpoints import TrainingCheckpoints

WORDS = ["ab", "the cat", "one two", "x y z", "hello", "why not"]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": words}) + "\n" for words in WORDS), encoding="utf-8")
    return path


SMALL = ("--max-new-tokens", 8, "--held-out", 2, "--rows", 2, "--length", 32, "--every", 2, "--num-draft-tokens", 2)


def test_from_prompts_to_a_head_that_is_served(cli, prompts, tmp_path):
    out = tmp_path / "head"
    arguments = ("train", "--method", "medusa", "--prompts", prompts, "--out", out, "--epochs", 2, *SMALL)
    result = cli(*arguments, "--json")
    assert result.code == 0, result.err
    card = json.loads(result.out)
    assert card["answers"] == 4 and card["answer_tokens"] == 32
    assert card["served"]["tokens"] == 8 and card["served"]["tokens_per_pass"] >= 1.0
    assert "answering: 6 prompts" in result.err and "tokens per pass" in result.err
    steps = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, steps[-1]["steps"] + 1))
    assert (out / "training.png").read_bytes()[:4] == b"\x89PNG"
    served = cli("generate", "ab", "--draft", out, "--method", "medusa", "--max-new-tokens", 6, "--compare", "--json")
    assert json.loads(served.out)["identical"] is True
    again = cli(*arguments, "--json")
    assert again.code == 0 and "answering" not in again.err, "answers and steps that are there are not made again"
    same = lambda card: {name: card[name] for name in ("seconds", "served", "accuracy", "answers")}
    assert same(json.loads(again.out)) == same(card)
    assert [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()] == steps
    other = cli(*arguments, "--start", "random", "--answers", tmp_path / "none")
    assert other.code == 2 and "holds a run with other start" in other.err
    assert not (tmp_path / "none").exists(), "it is refused before anything is answered"
    modes = {path.name: path.stat().st_mode & 0o777 for path in (*out.iterdir(), *(out / "answers").iterdir())}
    assert len({mode for name, mode in modes.items() if "." in name}) == 1, f"one as the other: {modes}"


def test_the_prompts_of_training_and_those_of_a_run(cli, prompts, tmp_path):
    """System prompt and variables of the template are stored with the answers and in the card, and compared."""
    out, suffix = tmp_path / "head", ("--template-args", '{"suffix": "!"}')
    arguments = ("train", "--method", "medusa", "--prompts", prompts, *SMALL, "--json")
    card = json.loads(cli(*arguments, "--out", out, "--system", "be brief", *suffix).out)
    assert card["system"] == "be brief" and card["template_args"] == {"suffix": "!"}
    about = json.loads((out / "answers" / "answers.json").read_text())
    assert about["system"] == "be brief" and about["template_args"] == {"suffix": "!"}
    line = json.loads((out / "answers" / "answers-00000.jsonl").read_text().split("\n")[0])
    assert bytes(i - 3 for i in line["prompt"] if i > 1).startswith(b"be brief!")
    other = cli(*arguments, "--out", tmp_path / "other", "--answers", out / "answers", *suffix)
    assert other.code == 2 and 'holds responses with system "be brief", not None' in other.err
    run = ("generate", "ab", "--draft", out, "--method", "medusa", "--max-new-tokens", 4)
    words = lambda *more: " ".join(cli(*run, *more).err.split())
    assert "the drafter was trained with" not in words("--system", "be brief", *suffix)
    (out / "card.json").write_text(json.dumps(card | {"target_quantized": "int8"}))
    warnings = words()
    assert 'the drafter was trained with the target in "int8", and this run has none' in warnings
    assert 'the drafter was trained with --system "be brief", and this run has none' in warnings
    assert 'the drafter was trained with --template-args {"suffix": "!"}, and this run has none' in warnings


def test_of_a_run_that_was_ended_the_best_head_is_there(cli, prompts, tmp_path, monkeypatch):
    out, history = tmp_path / "head", tmp_path / "head" / "history.jsonl"
    arguments = ("train", "--method", "medusa", "--prompts", prompts, "--out", out, "--epochs", 4, *SMALL)
    save = TrainingCheckpoints.save_state

    def interrupted(self, state, *arguments):
        if int(state.step) == 4:
            raise KeyboardInterrupt
        save(self, state, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingCheckpoints, "save_state", interrupted)
        result = cli(*arguments)
    assert result.code == 130
    assert f"{out} has the best result so far, and the same run resumes" in " ".join(result.err.split())
    assert (out / "model.safetensors").exists()
    assert cli(*arguments).code == 0
    steps = [json.loads(line)["step"] for line in history.read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 4


def test_a_head_that_there_is_goes_on_from_what_it_was(cli, prompts, tmp_path):
    out, tuned = tmp_path / "head", tmp_path / "tuned"
    first = cli("train", "--method", "medusa", "--prompts", prompts, "--out", out, "--epochs", 2, *SMALL, "--json")
    command = ("train", "--draft", out, "--prompts", prompts, "--answers", out / "answers", *SMALL, "--json")
    # Nothing is learnt at a rate of 0: what is served is what the head served.
    result = cli(*command, "--out", tuned, "--learning-rate", 1e-30)
    assert result.code == 0, result.err
    first_run, second_run = json.loads(first.out), json.loads(result.out)
    assert second_run["method"] == "medusa" and second_run["served"] == first_run["served"]
    cli("train", "--method", "medusa", "--prompts", prompts, "--answers", out / "answers", *SMALL, "--json",
              "--out", tmp_path / "new", "--learning-rate", 1e-30)  # fmt: skip
    steps = lambda folder: list(map(json.loads, (folder / "history.jsonl").read_text().splitlines()))
    start, first_step = steps(tuned)[:2]
    assert (start["step"], start["loss"], start["served"]) == (0, None, steps(out)[-1]["served"])
    assert "at the start" in result.err
    assert "no step improved the start, which is kept" in " ".join(result.err.split())
    assert "no step improved" not in " ".join(first.err.split())
    assert first_step["loss"] < steps(tmp_path / "new")[0]["loss"], "a new head knows less"
    for arguments, words in (
        (("--method", "eagle3"), "--draft is a head of medusa, not of --method eagle3"),
        (("--start", "random"), "--start is for a new head, and --draft is one already"),
        (("--layers", "0"), "--layers does not fit --method medusa"),
    ):
        refused = cli(*command, "--out", tuned, *arguments)
        assert refused.code == 2 and words in " ".join(refused.err.split())
    initialized = cli("train", "--method", "medusa", "--start", out, *command[3:], "--out", tmp_path / "begun",
                "--learning-rate", 1e-30)  # fmt: skip
    assert json.loads(initialized.out)["served"] == first_run["served"], "all of a head of the same kind fits"
    assert "100% of the parameters are copied from the head to start from" in " ".join(initialized.err.split())
    refused = cli("train", "--method", "medusa", "--start", out, *command[3:], "--out", out)
    assert refused.code == 2 and "is the folder of --start" in " ".join(refused.err.split())
    refused = cli("train", "--method", "eagle3", "--start", out, "--prompts", prompts, "--out", tmp_path / "other")
    assert refused.code == 2 and "--start: the head to start from has no matrix" in " ".join(refused.err.split())
    refused = cli(*command, "--out", out)
    assert refused.code == 2 and "is the folder of --draft" in " ".join(refused.err.split())


@pytest.mark.exhaustive
def test_budgets_give_a_law(cli, prompts, tmp_path):
    out = tmp_path / "head"
    arguments = ("train", "--method", "medusa", "--prompts", prompts, "--out", out, *SMALL)
    card = json.loads(cli(*arguments, "--budgets", "8,16,32", "--json").out)
    assert [run["tokens"] for run in card["law"]["runs"]] == [8, 16, 32]
    assert [one["tokens"] for one in card["law"]["predicted"]] == [64, 128, 512]
    assert card["answers"] == 4
    assert "the responses have 32 tokens, fewer than 99" in cli(*arguments, "--budgets", "8,16,99").err


def test_states_that_cannot_be_kept_are_refused_before_anything_is_answered(refused, prompts, tmp_path):
    out = tmp_path / "head"
    flags = ("train", "--prompts", prompts, "--out", out, "--keep-states", 1, *SMALL)
    assert "the loss of kangaroo is not a function of the target's activations" in refused(
        *flags, "--method", "kangaroo"
    )
    (tmp_path / "activations.json").write_text('{"target": "another"}')
    assert "holds activations with another target" in refused(*flags, "--method", "medusa", "--states", tmp_path)
    assert "is no folder" in refused(*flags, "--method", "medusa", "--states", prompts / "below")
    assert not list(out.glob("answers*"))


def test_what_is_frozen_stays(cli, prompts, tmp_path):
    def trained(epochs):
        out = tmp_path / str(epochs)
        arguments = ("train", "--method", "medusa", "--prompts", prompts, "--out", out, "--epochs", epochs, *SMALL)
        assert cli(*arguments, "--freeze", "branches/0/head").code == 0
        assert json.loads((out / "card.json").read_text())["recipe"]["frozen"] == ["branches/0/head"]
        branches = specjax.load_head(out, specjax.load()[0]).params["branches"]
        return [np.asarray(branches[i]["head"]["weight"]) for i in (0, 1)]

    once, twice = trained(1), trained(2)
    np.testing.assert_array_equal(once[0], twice[0])
    assert np.any(once[1] != twice[1])


def test_what_is_wrong_is_one_sentence(refused, prompts, tmp_path):
    out = tmp_path / "head"
    for arguments, words in (
        (("--prompts", prompts), "--out FOLDER is missing"),
        (("--out", out), "give --prompts FILE, or --own-prompts N"),
        (("--out", out, "--prompts", prompts, "--method", "two"), '--method must be two_model or one of .*not "two"'),
        (("--out", out, "--prompts", prompts, "--freeze", "heads"), 'no parameter or module is named "heads"'),
        (("--out", out, "--prompts", prompts, "--learning-rate", "inf"), "learning rate must be a number above 0"),
        (("--out", out, "--prompts", prompts, "--loss", "mse"), 'unknown loss "mse"; choose from ce, soft_ce'),
        (("--out", out, "--prompts", prompts, "--loss", "ce=-1"), 'has no share above 0; write ce=0.1,tv=0.9'),
        (("--out", out, "--prompts", prompts, "--shape", "taps=1,2"), "no streams of the target; write"),
        (("--out", out, "--prompts", prompts, "--shape", "taps=9+99"), "taps must be rising streams of the target"),
        (("--out", out, "--prompts", prompts, "--states", out), "--states needs --keep-states GIB"),
        (("--out", out, "--prompts", prompts, "--shape", "layers=2"), 'norm_output, norm_taps, not "layers"'),
        (("--out", out, "--prompts", prompts, "--method", "hydra", "--draft-vocab", 9), "drafts all of the target's"),
        (("--out", out, "--prompts", prompts, "--start", "zero"), "--start must be target, random or a head"),
        (("--out", out, "--prompts", prompts, "--method", "p_eagle", "--shape", "embeds=1"), "no yes or no; write"),
        (("--out", out, "--prompts", prompts, "--held-out", 99), "there are 6 prompts .* and 99 are held out"),
        (("--out", out, "--prompts", tmp_path / "none"), "--prompts: "),
        (("--out", prompts, "--prompts", prompts), "cannot be written"),
        (("--out", out, "--prompts", prompts, "--budgets", "8,9"), "--budgets needs at least 3 different numbers"),
        (("--out", out, "--prompts", prompts, "--budgets", "1\u00b2,2,3"), "--budgets needs at least 3 different"),
        (("--out", out, "--prompts", prompts, "--seed", -1), "--seed must be from 0 to 2.*, not -1"),
        (("--out", out, "--prompts", prompts, "--data", 3), "--rows 4 cannot be split over --data 3; make it"),
        (("--out", out, "--prompts", prompts, "--data", 4, "--model", 4), "--sequence: .* 16 devices, but there"),
        (("--out", out, "--prompts", prompts, "--method", "two_model", "--layers", "0", "--recipe", "fastdraft",
          "--keep-states", 1), "a draft model with the loss ce or --on-policy reads none; leave it out"),
        (("--report", "v5e:2x4", "--method", "two_model"), "--report is about heads, not --method two_model"),
        (("--report", "v5e:9"), '--report: "v5e:9" is not a slice of chips'),
        (("--out", out, "--prompts", prompts, "--draft", "nothing"), "--draft nothing is no head; for a draft model"),
        (("--out", out, "--prompts", prompts, "--draft-vocab", 999), "--draft-vocab 999 is more than the 259 tokens"),
        (("--out", out, "--prompts", prompts, "--method", "medusa", "--num-draft-tokens", 9),
         "--num-draft-tokens 9 is more than the 4 that medusa drafts; lower it, or leave it out"),
        (("--out", out, "--prompts", prompts, "--method", "ppd", "--freeze", "prompts"), "all parameters are frozen"),
        (("--out", out, "--prompts", prompts, "--method", "medusa", "--depths", 9), "--depths 9 is more than the 4"),
        (("--out", out, "--prompts", prompts, "--accumulate", 0), "--accumulate must be at least 1, not 0"),
    ):  # fmt: skip
        line = refused("train", *arguments)
        assert re.search(words, line), line
    assert not list(out.glob("answers*")), "nothing was answered"


@pytest.mark.exhaustive
def test_devices_share_the_work(cli, prompts, tmp_path):
    """Answers, and what is served, are those of one device."""
    outcomes = {}
    for name, flags in (("one", ()), ("two", ("--data", 2, "--model", 1))):
        arguments = ("--prompts", prompts, "--out", tmp_path / name, "--batch-size", 4, *SMALL, *flags)
        result = cli("train", "--method", "medusa", *arguments, "--json")
        assert result.code == 0, result.err
        answers = sorted((tmp_path / name / "answers" / "answers-00000.jsonl").read_text().splitlines())
        outcomes[name] = json.loads(result.out)["served"], answers
    assert outcomes["two"] == outcomes["one"]


def test_the_target_cannot_write_prompts_without_a_template(refused, tmp_path):
    assert "no chat template" in refused("train", "--out", tmp_path / "head", "--own-prompts", 4)


@pytest.mark.exhaustive
def test_prompts_that_the_target_wrote_are_kept_as_they_come(cli, tmp_path, monkeypatch):
    """A run that is ended while they are written goes on with them, and has the same ones."""
    written, tokenizer = [], type(specjax.load()[1])

    def run(folder, limit=None):
        written.clear()
        add = ResponseStore.add

        def counted(self, answer):
            if len(written) == limit:
                raise KeyboardInterrupt
            written.append(answer)
            add(self, answer)

        with monkeypatch.context() as patched:
            patched.setattr(tokenizer, "chat_template", "", raising=False)
            patched.setattr(tokenizer, "eos", tuple(range(100, 259)))  # so that some texts have an end
            patched.setattr(ResponseStore, "add", counted)
            cli(
                "train",
                "--method",
                "medusa",
                "--own-prompts",
                6,
                "--out",
                folder,
                *SMALL,
                "--held-out",
                99,
                "--batch-size",
                2,
            )
        return [one.text for one in written]

    uninterrupted = run(tmp_path / "whole")
    assert len(uninterrupted) == 6
    part = run(tmp_path / "part", limit=2)
    assert sorted(part + run(tmp_path / "part")) == sorted(uninterrupted) and len(written) == 4


def test_files_and_folders_are_checked_before_a_model_is_loaded(refused, prompts, tmp_path, monkeypatch):
    def load(*args, **options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(specjax, "load", load, raising=False)
    (tmp_path / "none.jsonl").write_text('{"nothing": 1}\n')
    flags = {"--out": tmp_path / "head", "--prompts": prompts}
    for changes, words in (
        ({"--prompts": tmp_path / "missing"}, "--prompts: cannot read"),
        ({"--prompts": tmp_path / "none.jsonl"}, "--prompts: .* has no text that can be used"),
        ({"--texts": tmp_path / "missing"}, "--texts: cannot read"),
        ({"--out": prompts / "below"}, "--out: .* is no folder"),
        ({"--answers": prompts / "below"}, "--answers: .* is no folder"),
        ({"--states": prompts / "below", "--keep-states": 1}, "--states: .* is no folder"),
    ):
        line = refused("train", *(part for pair in (flags | changes).items() for part in pair))
        assert re.search(words, line), line
    assert not (tmp_path / "head").exists()


@pytest.mark.exhaustive
def test_files_of_conversations_are_answered_or_trained_on(cli, tmp_path):
    talks = [{"conversations": [{"from": who, "value": text + str(i)} for who, text in
              (("human", "a"), ("gpt", "bc"), ("human", "d"), ("gpt", "ef"))]} for i in range(5)]  # fmt: skip
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([*talks, {"conversations": []}]))
    small = (*SMALL, "--length", 64, "--method", "medusa", "--json")
    answered = cli("train", "--prompts", file, "--out", tmp_path / "asked", *small, "--temperature", 0.9)
    assert answered.code == 0, answered.err
    card = json.loads(answered.out)
    assert f"left out: {file}, 6: no text" in " ".join(answered.err.split())
    assert 24 < card["answer_tokens"] <= 3 * 2 * 8 and card["temperature"] == 0.9
    continued = cli("train", "--texts", file, "--out", tmp_path / "given", *small)
    assert continued.code == 0, continued.err
    assert json.loads(continued.out)["answer_tokens"] == 3 * 2 * 3, "three letters, twice"


@pytest.mark.parametrize(
    ("method", "shape", "more"),
    [
        ("jetspec", ("num_layers=1", "block_size=4"), ("--tree", "ddtree:6")),
        ("longspec", ("window=16",), ("--tree", "eagle2:2x2x3")),
    ],
)
def test_a_head_of_blocks_or_of_long_texts_is_trained_resumed_and_used(cli, prompts, tmp_path, method, shape, more):
    """Both kinds go from prompts to a head that chains and trees draft with. A repeated command trains nothing."""
    out = tmp_path / "head"
    shapes = [word for change in shape for word in ("--shape", change)]
    arguments = ("train", "--method", method, *shapes, "--prompts", prompts, "--out", out, "--epochs", 2, *SMALL)
    result = cli(*arguments, "--json")
    assert result.code == 0, result.err
    card = json.loads(result.out)
    assert card["method"] == method and card["served"]["num_draft_tokens"] == 2
    assert card["served"]["tokens_per_pass"] >= 1.0
    losses = [json.loads(line)["loss"] for line in (out / "history.jsonl").read_text().splitlines()]
    assert len(losses) > 1 and np.isfinite(losses).all()
    run = ("generate", "ab", "--draft", out, "--max-new-tokens", 6, "--compare", "--json")
    for flags in ((), more):
        used = cli(*run, *flags)
        assert used.code == 0, used.err
        answer = json.loads(used.out)
        assert answer["identical"] is True
    again = cli(*arguments, "--json")
    assert json.loads(again.out)["served"] == card["served"] and "answering" not in again.err
