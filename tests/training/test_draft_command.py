"""`specjax train --method two_model`: from a target's folder to the folder of a draft model of it."""

from __future__ import annotations

import json
import re
import types

import jax
import numpy as np
import pytest
import tokenizers
from shipped_hybrid import FOLDER

import specjax
from specjax.cli import main
from specjax.cli.training.drafter_run import _name_target
from specjax.models import LlamaConfig, init_params, make_model
from specjax.models.loading.tokenizers.tokenizer import LibraryCodec, Tokenizer
from specjax.persistence.checkpoint import restore
from specjax.persistence.fingerprint import digest_weights
from specjax.training.data.packing import TrainingText
from specjax.training.data.target_responses import ResponseStore, TargetResponse

VOCAB = 64
CONFIG = LlamaConfig(
    vocab_size=VOCAB, width=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, mlp_width=16, max_positions=64,
    name="tiny",
)  # fmt: skip
SMALL = ("--max-new-tokens", 6, "--held-out", 2, "--rows", 2, "--length", 16, "--every", 1, "--num-draft-tokens", 2)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Return the folder of a saved target."""
    words = ["<unk>", "</s>", *(f"w{i}" for i in range(2, VOCAB))]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("target")
    params = jax.tree.map(lambda x: 4 * x, init_params(CONFIG, jax.random.key(0)))
    tokenizer = Tokenizer(LibraryCodec(backend), tuple(words), (1,))
    specjax.save_model(folder, specjax.Target(make_model(CONFIG), params), tokenizer)
    return folder


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("w2 w3\nw4\nw5 w6 w7\nw8 w9\n")
    return path


@pytest.fixture
def cli(capsys, monkeypatch):
    monkeypatch.setenv("SPECJAX_NO_CACHE", "1")

    def run(*arguments) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        return stop.value.code, *capsys.readouterr()

    return run


def test_from_a_target_to_a_draft_model_that_is_loaded(cli, target, prompts, tmp_path):
    out = tmp_path / "draft"
    weights = digest_weights(specjax.load(target)[0].params)
    about = {"target": target.name, "weights": weights, "vocabulary": VOCAB, "temperature": 0.0, "max_new_tokens": 6}
    answers = ResponseStore(out / "answers", about)  # that are there already
    for prompt in ((2, 3), (4,), (5, 6, 7), (8, 9)):
        answers.add(TargetResponse(TrainingText((*prompt, 9, 8, 9, 8, 9, 8), len(prompt)), "length"))
    arguments = ("train", "--method", "two_model", "--target", target, "--layers", 1, "--prompts", prompts, *SMALL)
    code, out_text, err_text = cli(*arguments, "--out", out, "--recipe", "fastdraft", "--epochs", 2, "--json")
    assert code == 0, err_text
    card = json.loads(out_text)
    assert card["method"] == "two_model" and card["recipe"]["losses"] == [["ce", 1.0]] and card["answers"] == 2
    draft, tokenizer = specjax.load(out)
    assert draft.model.capabilities.num_layers == 1 and tokenizer.encode("w9 w3") == [9, 3]
    (best,) = (out / "run").glob("best-*")
    jax.tree.map(np.testing.assert_array_equal, draft.params, restore(best, draft.params))
    code, _, err_text = cli(*arguments, "--out", out, "--recipe", "fastdraft", "--epochs", 2, "--layers", 0)
    assert code == 2 and "holds a run with other start" in err_text


@pytest.mark.exhaustive
def test_texts_then_answers_of_its_own_then_it_drafts(cli, target, prompts, tmp_path):
    """FastDraft's pre-training, DistillSpec in which half of the steps are on-policy, and decoding with the outcome."""
    first, second = tmp_path / "first", tmp_path / "second"
    common = ("train", "--method", "two_model", "--target", target, "--prompts", prompts, *SMALL)
    code, _, err_text = cli(
        *common, "--layers", "0,1", "--recipe", "fastdraft_pretraining", "--texts", prompts, "--out", first
    )
    assert code == 0, err_text
    code, out_text, err_text = cli(
        *common, "--draft", first, "--on-policy", 0.5, "--epochs", 4, "--out", second, "--json"
    )
    assert code == 0, err_text
    assert json.loads(out_text)["draft"] == "first"
    code, out_text, err_text = cli(
        "generate", "w2 w3", "--target", target, "--draft", second, "--method", "two_model", "--max-new-tokens", 6,
        "--compare", "--json",
    )  # fmt: skip
    assert code == 0 and json.loads(out_text)["identical"] is True, err_text


def test_a_module_for_a_model_that_has_none(cli, target, prompts, tmp_path):
    common = ("train", "--target", target, "--prompts", prompts, *SMALL)
    code, out_text, err_text = cli(*common, "--method", "mtp", "--out", tmp_path / "head", "--json")
    assert code == 0, err_text
    assert json.loads(out_text)["method"] == "mtp"
    code, out_text, err_text = cli(
        "generate", "w2 w3", "--target", target, "--draft", tmp_path / "head", "--method", "mtp", "--max-new-tokens", 6,
        "--compare", "--json",
    )  # fmt: skip
    document = json.loads(out_text)
    assert code == 0 and document["identical"] is True and document["head"] == "mtp", err_text
    code, out_text, err_text = cli(*common, "--draft", "native", "--out", tmp_path / "tuned")
    assert code == 2 and "have no multi-token-prediction module" in err_text and "Traceback" not in out_text + err_text


@pytest.mark.exhaustive
def test_the_module_of_a_target_is_tuned_and_drafts(cli, prompts, tmp_path):
    arguments = ("--target", FOLDER, "--max-new-tokens", 12)
    code, out_text, err_text = cli(
        "train", "--draft", "native", *arguments, "--prompts", prompts, "--held-out", 2, "--rows", 2, "--length", 32,
        "--every", 1, "--out", tmp_path / "head", "--json",
    )  # fmt: skip
    assert code == 0, err_text
    assert (json.loads(out_text)["method"], json.loads(out_text)["head"]) == ("mtp", "mtp")
    code, out_text, err_text = cli(
        "generate", "Eva has 3", *arguments, "--draft", tmp_path / "head", "--method", "mtp", "--compare", "--json"
    )
    document = json.loads(out_text)
    assert code == 0 and document["identical"] is True and document["block_efficiency"] > 1.5, err_text


@pytest.mark.parametrize(
    ("folder", "name"), [("models--org--name", "org/name"), ("models--gpt2", "gpt2"), ("models-gpt2", None)]
)
def test_a_target_in_the_cache_of_the_hub_has_its_hub_id(tmp_path, folder, name):
    path = tmp_path / folder / "snapshots" / "a1"
    path.mkdir(parents=True)
    flags = types.SimpleNamespace(target=str(path), target_name=None)
    assert _name_target(flags) == (name or str(path.resolve()))


def test_what_is_wrong_is_one_sentence(cli, target, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").touch()
    model = ("train", "--method", "two_model", "--target", target, "--prompts", prompts, "--out", tmp_path / "draft")
    head = ("train", "--target", target, "--prompts", prompts, "--out", tmp_path / "head")
    for arguments, words in (
        (model, "starts from --draft MODEL, or from --layers"),
        ((*model, "--layers", "0,-1"), "--layers must be numbers such as 0,1,28,29"),
        (
            (*model, "--length", 16, "--layers", 2),
            r"--layers: the target has layers 0 to 1; choose one or more of these, not \[2\]",
        ),
        ((*model, "--layers", 0, "--recipe", "eagle"), '--recipe must be one of distillspec, .*, not "eagle"'),
        ((*model, "--layers", 0, "--recipe", "fastdraft_pretraining"), "give it by --texts FILE"),
        ((*model, "--layers", 0, "--recipe", "fastdraft", "--on-policy", 0.5), "which the loss ce does not read"),
        ((*model, "--layers", 0, "--start", "random"), "--start does not fit --method two_model; leave it out"),
        ((*model, "--draft", tmp_path / "draft"), "is the folder of --draft, which must not change"),
        ((*model, "--layers", 0, "--length", 65), "--length 65 is more than the 64 tokens that the model takes"),
        ((*head, "--layers", 0), "--layers does not fit --method eagle3; leave it out"),
        ((*head, "--out=~/file/head"), "--out: .*/file/head cannot be written"),
        ((*head, "--answers=~/file/answers"), "--answers: .*/file/answers cannot be written"),
    ):
        code, out_text, err_text = cli(*arguments)
        assert code == 2 and "Traceback" not in out_text + err_text
        assert re.search(words, " ".join(err_text.split())), err_text
