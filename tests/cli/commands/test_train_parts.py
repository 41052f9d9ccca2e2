"""`specjax train` of probes, routers, decision heads and changed models: what it writes, `generate` takes."""

import json

import numpy as np
import pytest
from tiers import those
from toy import tiny_llama

import specjax
from specjax.cli.training.start_options import PART_NAMES
from specjax.models import loading
from specjax.training import save_denoiser_model
from specjax.training.data.packing import TrainingText
from specjax.training.parts import PARTS, PartJob

SMALL = ("--max-new-tokens", 8, "--length", 32)
SHORT = ("--max-new-tokens", 6, "--json")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": words}) + "\n" for words in ("ab", "the cat", "x y")))
    return path


@pytest.fixture(autouse=True)
def files(monkeypatch, reward_folder):
    """Four layers for targets, the tokenizer of the reward model beside changed models, and folders that are read."""
    plain, model = specjax.load, tiny_llama(layers=4, vocab=259, stacked=True)

    def load(source=None, **options):
        if source is not None and "/" in str(source):
            return loading.read_model(source).target, plain()[1]
        return (plain(source, **options)[0] if source == "draft" else model), plain()[1]

    monkeypatch.setattr(specjax, "load", load, raising=False)
    resolve = loading.resolve
    monkeypatch.setattr(loading, "resolve", lambda source: reward_folder if source is None else resolve(source))
    return model


RUNS = {
    "lora_drop": (("steps=2", "every=2"), ()),
    "deer": (("num_tokens=3", "layers=1"), ()),
    "diffuspec": (("num_tokens=3", "layers=1", "refine=0"), ()),
    "failfast": (("num_tokens=3", "layers=2"), ()),
    "spec_kv": (("gammas=1/2", "steps=5"), ("--draft", "draft")),
    "lud": (("steps=2", "slots=2"), ()),
    "ceed_vla": (("block=4", "steps=2"), ()),
    "hamburger_decoding": (("steps=2",), ()),
    "dynamax": (("steps=3", "every=1"), ()),
    "first": (("steps=2", "lora_steps=2"), ()),
    "matformer": (("steps=2",), ()),
    "s2d": (("steps=2", "exits=2"), ()),
    "specdec++": (("blocks=1",), ("--draft", "draft")),
}


@pytest.mark.parametrize("name", those({"first", "lora_drop", "deer", "lud"}, RUNS))
def test_what_is_written_is_used_by_the_command_that_is_printed(cli, prompts, tmp_path, name):
    settings, draft = RUNS[name]
    flags = [flag for text in settings for flag in ("--set", text)]
    command = ("train", "--method", name, "--prompts", prompts, "--out", tmp_path / "out", *SMALL, *flags, *draft)
    result = cli(*command, "--json")
    assert result.code == 0, result.err
    card = json.loads(result.out)
    assert card["method"] == name and card["texts"] == 3 and card["options"][settings[0].split("=")[0]]
    served = cli("generate", "ab", *draft, *card["flags"].split(), *SHORT)
    assert served.code == 0, served.err
    assert len(json.loads(served.out)["results"][0]["token_ids"]) == 6
    again = cli(*command)
    assert again.code == 0 and "answering" not in again.err, "responses are read from the folder"
    assert card["flags"] in " ".join(again.out.split())


@pytest.mark.parametrize("name", ["lud", "dparallel"])
def test_quantised_weights_of_the_target_are_not_trained(refused, prompts, reward_folder, tmp_path, name):
    """The refusal comes before any response is written."""
    target = ()
    if name == "dparallel":
        model = tiny_llama(layers=1, vocab=259)
        save_denoiser_model(tmp_path / "in", specjax.Denoiser(model.model, model.params, 0), reward_folder)
        target = ("--target", tmp_path / "in")
    command = ("train", "--method", name, "--prompts", prompts, "--out", tmp_path / "out", *SMALL, *target)
    line = refused(*command, "--quantize", "int8")
    assert f"--method {name} trains the weights of the target" in line and "leave --quantize out" in line
    assert not list((tmp_path / "out").iterdir())


def test_a_draft_model_with_exits_is_used_as_a_draft(tmp_path):
    trained = tiny_llama(layers=4, vocab=259, stacked=True)
    job = PartJob(trained, tmp_path, {"exits": 2, "steps": 0}, [TrainingText((5, 6, 7, 8), 2)], draft=trained)
    expected = f"--draft {tmp_path} --method two_model --set depth=s2d:exits=2"
    assert PARTS["s2d"].train(job).flags == expected


@pytest.mark.parametrize(("name", "settings"), [("dparallel", ("block=4",)), ("learn2pd", ("block=4", "steps=2"))])
def test_parts_of_diffusion_models(cli, refused, prompts, reward_folder, tmp_path, name, settings):
    """A model folder is the target, and the trained model is one too."""
    model = tiny_llama(layers=1, vocab=259)
    save_denoiser_model(tmp_path / "in", specjax.Denoiser(model.model, model.params, 0), reward_folder)
    flags = [flag for text in settings for flag in ("--set", text)]
    command = ("train", "--method", name, "--prompts", prompts, "--out", tmp_path / "out", *SMALL, *flags)
    result = cli(*command, "--target", tmp_path / "in", "--json")
    assert result.code == 0, result.err
    card = json.loads(result.out)
    target = () if "--target" in card["flags"] else ("--target", tmp_path / "in")
    served = cli("generate", "ab", *target, *card["flags"].split(), *SHORT)
    assert served.code == 0, served.err
    assert len(json.loads(served.out)["results"][0]["token_ids"]) == 6
    if name == "dparallel":
        loaded, _ = specjax.load_denoiser(tmp_path / "out")
        assert loaded.mask_token == 0 and not np.array_equal(
            loaded.params["head"]["weight"], model.params["head"]["weight"]
        )
        specjax.save_model(tmp_path / "plain", model, reward_folder)
        assert "is an autoregressive model" in refused(*command, "--target", tmp_path / "plain")


def test_a_judge(cli, refused, tmp_path):
    file = tmp_path / "judged.jsonl"
    lines = [{"prompt": "2 + 2?", "response": f"It is {n}.", "wrong": None if n == 4 else 6} for n in range(9)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ("train", "--method", "judge", "--texts", file, "--out", tmp_path / "out", "--rows", 2, "--length", 32)
    card = json.loads(cli(*command, "--set", "steps=20", "--json").out)
    assert card["texts"] == 9 and 0 <= card["threshold"] < 1
    served = cli("generate", "ab", "--draft", "draft", *card["flags"].split(), *SHORT)
    assert served.code == 0, served.err
    file.write_text('{"prompt": "a", "response": "b", "wrong": 1}\n')
    assert "line 1 has wrong 1, which must be the place of a character of the response, from 0 to 0" in refused(
        *command
    )
    right = tmp_path / "right.jsonl"
    right.write_text('{"prompt": "a", "response": "b"}\n')
    assert "--texts has no response with an error" in refused(*(right if x == file else x for x in command))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert json.loads(cli(*command, "--texts", right, "--set", "steps=1", "--json").out)["texts"] == 10
    words = "no response has its error in the first 8 tokens; give a larger --length"
    assert words in refused(*command, "--length", 8)
    assert "l2 must be a number of at least 0, not inf" in refused(*command, "--set", "l2=inf")
    assert "--epochs does not fit --method judge; remove it" in refused(*command, "--epochs", 2)


def test_a_model_that_is_read_is_not_overwritten(refused, prompts, tmp_path):
    """The folder of the result is none of the models, also none below a part of the result."""
    for method, flag in (("matformer", "--target"), ("specdec++", "--draft"), ("medusa", "--target")):
        command = ("train", "--method", method, "--prompts", prompts, "--out", tmp_path, "--draft", "draft")
        command = command if flag == "--draft" else command[:-2]
        assert f"is the folder of {flag}, which must not change" in refused(*command, flag, tmp_path)
    command = ("train", "--method", "hamburger_decoding", "--prompts", prompts, "--out", tmp_path)
    assert "is the folder of --target" in refused(*command, "--target", tmp_path / "base")


def test_a_training_that_diverges_writes_nothing(refused, prompts, tmp_path):
    command = ("train", "--method", "lora_drop", "--texts", prompts, "--out", tmp_path / "out")
    words = refused(*command, "--set", "steps=3", "--learning-rate", 1e38)
    assert "the loss became" in words and "train with a smaller learning rate" in words
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_a_folder_without_a_reward_is_refused_before_a_model_loads(refused, prompts, tmp_path, monkeypatch):
    monkeypatch.delattr(specjax, "load")
    command = ("train", "--method", "arbitrage", "--prompts", prompts, "--out", tmp_path / "out", "--draft", "draft")
    words = refused(*command, "--set", f"reward={prompts}")
    assert words.startswith("specjax: --set reward: ") and "is not the folder of a reward model" in words


def test_a_router_of_arbitrage(cli, refused, prompts, reward_folder, tmp_path):
    command = ("train", "--method", "arbitrage", "--prompts", prompts, "--out", tmp_path / "out", *SMALL)
    pair = ("--draft", "draft", "--set", "steps=e|t|a|\\n", "--set", f"router={reward_folder}", "--temperature", 1)
    result = cli(*command, *pair, "--set", f"reward={reward_folder}", "--json")
    assert result.code == 0, result.err
    card = json.loads(result.out)
    assert card["steps"] >= 3 and 0 < card["target_is_better"] < 1
    served = cli("generate", "ab", "--draft", "draft", *card["flags"].split(), *SHORT)
    assert served.code == 0, served.err
    assert json.loads(served.out)["options"]["router_head"].endswith("router.safetensors")
    assert "--method arbitrage needs a process reward model; add --set reward=FOLDER" in refused(*command, *pair)
    assert "--method arbitrage needs a draft model; add --draft MODEL" in refused(*command)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--method", "dynamax", "--loss", "ce"), "--loss does not fit --method dynamax; remove it"),
        (("--method", "dynamax", "--set", "rank=3"), 'training of dynamax has no option "rank"; its options are every'),
        (("--method", "dynamax", "--set", "every=x"), '--set every must be a whole number, not "x"'),
        (("--method", "dynamax", "--draft", "draft"), "--draft does not fit --method dynamax"),
        (("--method", "lora_drop", "--epochs", 3), "--epochs does not fit --method lora_drop; remove it"),
        (("--method", "judge", "--learning-rate", 1), "--learning-rate does not fit --method judge; remove it"),
        (("--method", "judge"), "--method judge reads judged responses; give --texts FILE"),
        (("--method", "medusa", "--set", "steps=3"), "--set is for methods with trained parts"),
        (("--method", "dynamax", "--texts", "texts.jsonl"), "--prompts does not fit --texts, which has the texts to"),
        (("--method", "dynamax", "--epochs", 2), "--epochs does not fit --method dynamax; remove it"),
        (("--method", "ceed_vla", "--temperature", 1), "--temperature does not fit --method ceed_vla; remove it"),
        (("--method", "dynamax", "--learning-rate", -1), "--learning-rate must be a number above 0, not -1"),
    ],
)
def test_what_does_not_fit(refused, prompts, tmp_path, flags, words):
    assert words in refused("train", "--prompts", prompts, "--out", tmp_path / "out", *flags)


def test_every_part_is_named_in_the_help(cli):
    words = " ".join(cli("train", "--help").out.replace("│", " ").split())
    assert all(name in words for name in PARTS) and tuple(PART_NAMES) == tuple(PARTS)
