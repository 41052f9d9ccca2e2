"""Learned heads on the command line: recognised, compared with the target, and called as others call them."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from heads import tiny_head
from mtp_oracles import write_checkpoint

import specjax
from specjax.api import load
from specjax.catalog.defaults import SHIPPED_HEADS, ShippedHead
from specjax.cli.options.drafter_flags import default_method
from specjax.cli.options.vllm_sglang_flags import DraftFlags, SpeculativeOptions, translate
from specjax.models.heads.acceptance import init_acceptance
from specjax.models.loading.decision_heads import save_acceptance, save_judge
from specjax.models.loading.heads import recognise, shipped


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(kind)`: a folder with a tiny random head of the tiny target."""
    folders = {}

    def make(kind):
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            specjax.save_head(folders[kind], tiny_head(kind, specjax.load()[0]))
        return folders[kind]

    return make


def test_a_head_alone_drafts_within_auto(cli, saved):
    result = cli("generate", "ab", "--draft", saved("eagle"), "--max-new-tokens", 6, "--compare", "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert (document["method"], document["head"], document["draft"]) == ("auto", "eagle", None)
    assert document["identical"] is True
    assert "head: eagle in the format of safeailab (bias=True" in result.err
    assert "warning: its first draft equals the target's token at" in result.err  # its weights are random


def test_the_demo_model_drafts_with_the_head_that_comes_with_it(cli, saved, monkeypatch):
    head = ShippedHead(str(saved("eagle")), vocab_size=259, num_layers=1)
    monkeypatch.setitem(SHIPPED_HEADS, "tiny", head)
    run = lambda *flags: cli("generate", "ab", "--max-new-tokens", 6, "--json", *flags)
    result = run("--compare")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert (document["method"], document["head"], document["identical"]) == ("auto", "eagle", True)
    assert "the draft head of the demo model drafts too" in result.err and "warning" not in result.err
    assert json.loads(run("--method", "auto").out)["head"] is None
    assert json.loads(run("--verifier", "standard").out)["head"] is None
    assert json.loads(run("--speculative-config", "{}").out)["head"] == "eagle"


def test_flags_that_set_how_to_draft_select_the_heads_own_method():
    assert default_method("head", "eagle") == default_method(None, None) == "auto"
    assert default_method("head", "eagle", [None, 3]) == "eagle"
    set_to = lambda *settings: default_method("head", "eagle", settings=settings)
    assert set_to("num_tokens=3") == set_to("num_recycled=4", "num_tokens=3") == set_to("eagle.nothing=3") == "eagle"
    assert set_to("num_recycled=4") == set_to("auto.num_recycled=4") == set_to("nothing=3") == set_to("=") == "auto"
    assert default_method("model", None) == default_method("model", None, [None, 3]) == "two_model"


@pytest.mark.exhaustive
def test_a_head_of_its_own_method(cli, saved):
    result = cli("generate", "ab", "--draft", saved("eagle"), "--method", "eagle", "--max-new-tokens", 6, "--json")
    document = json.loads(result.out)
    assert document["method"] == document["head"] == "eagle"
    assert len(document["acceptance_by_depth"]) == 3, "a chain of three, on a CPU"


def test_the_check_of_a_head_needs_a_few_tokens(refused, saved):
    message = refused("generate", "hello", "--draft", saved("eagle"), "--max-positions", 2, "--max-new-tokens", 1)
    assert "--max-positions must be at least 3 with a draft head" in message


def test_inspect_says_what_a_head_is(cli, saved):
    result = cli("inspect", saved("eagle3"), "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert (report["kind"], report["dialect"], report["flags"]["taps"]) == ("eagle3", "speculators", [0, 1, 1])
    assert report["flags"]["norm_taps"] == "each" and report["flags"]["draft_vocab_size"] == 258
    assert report["places"] > 100 and 0 <= report["agreement"] < 0.2 and report["reason"]
    assert report["unused"] == [] and report["parameters"] > 10_000
    shown = cli("inspect", saved("eagle3")).out
    assert "eagle3 in the format of speculators (taps=(0, 1, 1)" in shown and "Likely cause: " in shown


def test_a_word_for_another_head_names_both(refused, saved, tmp_path):
    eagle = saved("eagle")
    assert "is a draft head of kind eagle, and method eagle3 needs one of kind eagle3; use --method eagle" in refused(
        "generate", "ab", "--draft", eagle, "--method", "eagle3"
    )
    assert "is a draft head of kind eagle, and method two_model needs a draft model" in refused(
        "generate", "ab", "--draft", eagle, "--method", "two_model"
    )
    assert "--draft is a draft head of kind eagle, and suffix does not use one" in refused(
        "generate", "ab", "--draft", eagle, "--method", "suffix"
    )
    assert "no draft head of a known kind, and method eagle needs" in refused(
        "generate", "ab", "--draft", "draft", "--method", "eagle"
    )
    assert "method eagle needs a draft head of the target; add --draft" in refused(
        "generate", "ab", "--method", "eagle"
    )
    assert "--speculative-token-map needs a draft head" in refused(
        "generate", "ab", "--speculative-token-map", tmp_path / "freq.pt"
    )
    nothing = refused("generate", "ab", "--draft", eagle, "--speculative-token-map", tmp_path / "freq.pt")
    assert "--speculative-token-map: " in nothing and "freq.pt cannot be read" in nothing
    assert 'SOURCE: no file or folder "draft" exists' in refused("inspect", "draft")


def test_damaged_and_unfit_heads_in_one_sentence(refused, saved, tmp_path):
    config = json.loads((saved("eagle") / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((saved("eagle") / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    assert "vocab_size 300, and the vocabulary of the target tiny has 259" in refused(
        "generate", "ab", "--draft", tmp_path
    )
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    assert "is not a whole safetensors file" in refused("generate", "ab", "--draft", tmp_path)


def test_the_length_of_a_head_limits_nothing_else(cli, saved, tmp_path):
    config = json.loads((saved("eagle") / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((saved("eagle") / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    result = cli("generate", "ab" * 9, "--draft", tmp_path, "--max-new-tokens", 6, "--json")
    assert result.code == 0, result.err
    assert result.err.count("the head was trained for texts of 16 tokens; in longer ones it reads the last 16") == 1


def test_settings_of_a_head(cli, refused, saved):
    folder = saved("dspark")
    result = cli("inspect", folder, "--head-set", "from_anchor=no", "--head-set", "causal=all", "--json")
    assert result.code == 0, result.err
    shown = json.loads(result.out)
    assert (shown["flags"]["from_anchor"], shown["flags"]["causal"]) == (False, "all")
    assert len(shown["agreement_by_depth"]) == 3, "of four slots, the root's does not draft"
    generate = lambda *flags: refused("generate", "ab", "--draft", folder, *flags)
    assert '--draft: a dspark head has no setting "anchor"; it has taps' in generate("--head-set", "anchor=yes")
    assert "--head-set from_anchor must be NAME=VALUE" in generate("--head-set", "from_anchor")
    assert "--head-set causal is given twice" in generate("--head-set", "causal=all", "--head-set", "causal=no")
    assert "--head-set is for a draft head, and --draft is not one" in refused(
        "generate", "ab", "--draft", "draft", "--head-set", "causal=all"
    )
    assert "--head-set is for a draft head" in refused("generate", "ab", "--head-set", "causal=all")


def test_heads_that_decide(cli, tmp_path):
    """SpecDec++'s stops a draft model behind its first token, Judge's accepts whatever is drafted."""
    head = init_acceptance(32, 1)
    save_acceptance(tmp_path / "stops", head._replace(out=head.out._replace(bias=jnp.array([9.0, -9.0]))))
    save_judge(tmp_path / "judge.safetensors", np.zeros(32), 9.0)
    result = cli(
        "generate", "ab", "--draft", "draft", "--num-draft-tokens", 4, "--set", f"acceptance={tmp_path / 'stops'}",
        "--verifier", f"judge:{tmp_path / 'judge.safetensors'},0.9", "--max-new-tokens", 12, "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert document["guarantee"] == "lossy" and document["block_efficiency"] == 3.0, "two drafted, both accepted"


def asked(**options):
    plain = {name: options.pop(name, None) for name in ("method", "draft", "num_draft_tokens", "tree", "settings")}
    names = {
        "config": "config", "algorithm": "algorithm", "model": "draft_model_path", "steps": "num_steps",
        "topk": "eagle_topk", "tokens": "num_draft_tokens",
    }  # fmt: skip
    flags = SpeculativeOptions(**{f"speculative_{names[name]}": value for name, value in options.items()})
    return translate(DraftFlags(**plain), flags)


def test_the_words_of_vllm_and_sglang():
    config = '{"method": "eagle3", "model": "org/head", "num_speculative_tokens": 5}'
    assert asked(config=config)[:4] == ("eagle3", "org/head", 5, None)
    assert asked(config=config, draft="org/head", num_draft_tokens=5)[:3] == ("eagle3", "org/head", 5)
    ngram = asked(config='{"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 3}')
    assert ngram == ("prompt_lookup", None, 3, None, ["max_ngram=4"], ())
    assert (
        asked(config='{"method": "dflash"}').kinds == ("dflash2", "domino", "jetspec")
        and asked(method="dflash").kinds == ()
    )
    assert asked(config='{"method": "draft_model", "model": "m"}')[:2] == ("two_model", "m")
    assert asked(algorithm="EAGLE3", model="org/head", steps=5, tokens=6)[:4] == ("eagle3", "org/head", 5, None)
    assert asked(algorithm="EAGLE", tokens=6).num_draft_tokens == 5
    assert asked(steps=5, topk=4, tokens=32).tree == "eagle2:4x5x31"
    assert asked(config='{"method": "mimo_mtp"}')[0] == asked(algorithm="NEXTN").method == "mtp"
    assert asked(tree="2x2") == (None, None, None, "2x2", None, ())


@pytest.mark.parametrize(
    ("options", "message"),
    CONTRADICTIONS := [
        (
            {"config": '{"method": "eagle"}', "method": "eagle3"},
            "--method is eagle3 and --speculative-config: method",
        ),
        ({"config": '{"model": "a"}', "draft": "b"}, "--draft is b and --speculative-config: model is a"),
        ({"config": '{"num_speculative_tokens": 5}', "steps": 4}, "is 5 and --speculative-num-steps is 4"),
        ({"config": "[]"}, "must be a JSON object"),
        ({"config": "{"}, "--speculative-config is not valid JSON"),
        ({"config": '{"quantization": "fp8"}'}, 'the unknown key "quantization"; the supported keys are method, model'),
        ({"config": '{"method": "tmp"}'}, 'unknown method "tmp"; choose one of ngram, draft_model'),
        ({"config": '{"num_speculative_tokens": "5"}'}, 'num_speculative_tokens "5", which must be a whole number'),
        ({"algorithm": "NEXT"}, 'unknown method "NEXT"'),
        ({"algorithm": "EAGLE", "method": "eagle3"}, "--method is eagle3 and --speculative-algorithm is eagle"),
        ({"steps": 5, "tokens": 5}, "a chain of --speculative-num-steps 5 has 6, not 5"),
        ({"topk": 4, "steps": 5}, "--speculative-eagle-topk 4 also needs --speculative-num-steps"),
        ({"tokens": 1}, "--speculative-num-draft-tokens must be at least 2, not 1"),
        ({"tree": "2x2", "topk": 2, "steps": 3, "tokens": 8}, "--tree is 2x2 and --speculative-eagle-topk 2"),
    ],
    ids=[f"given{number}-{message}" for number, (_, message) in enumerate(CONTRADICTIONS)],
)
def test_words_that_contradict_each_other_are_both_named(options, message):
    with pytest.raises(specjax.UsageError) as error:
        asked(**options)
    assert message in str(error.value)


def test_the_heads_that_come_along_are_small_and_say_how_they_are_made_again():
    for name in shipped.NAMES:
        folder = shipped.find_folder(name)
        card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
        assert recognise(name)[0] == card["method"]
        assert (folder / "model.safetensors").stat().st_size < 12e6
        assert card["command"].startswith("specjax train ") and card["answer_tokens"] > 0 and card["seconds"] > 0
        assert card["served"]["tokens_per_pass"] > 1 and len(card["accuracy"]) >= 3


@pytest.fixture(scope="module")
def with_module(tmp_path_factory):
    """Return the folder of a tiny checkpoint with a module for multi-token prediction."""
    return write_checkpoint(tmp_path_factory.mktemp("mimo"))[0]


def test_the_module_of_a_checkpoint_drafts_without_a_flag(cli, monkeypatch, with_module):
    monkeypatch.setattr(specjax, "load", load)
    result = cli("generate", "w3 w4 w3 w4", "--raw", "--target", with_module, "--max-new-tokens", 4, "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert (document["method"], document["head"]) == ("auto", "mtp")
    assert "the multi-token-prediction module of the target's files drafts too; use --method auto" in result.err
    report = json.loads(cli("inspect", "native", "--target", with_module, "--json").out)
    assert (report["kind"], report["dialect"], report["flags"]["hidden_first"]) == ("mtp", "mimo", True)


def test_a_target_without_a_module_has_no_native_draft(refused, monkeypatch, with_module):
    def load_without(source, **options):
        target, tokenizer = load(source, **options)
        return specjax.Target(target.model, target.params), tokenizer

    monkeypatch.setattr(specjax, "load", load_without)
    for flags in (("--draft", "native"), ("--method", "mtp")):
        message = refused("generate", "w3", "--raw", "--target", with_module, *flags, "--max-new-tokens", 2)
        assert "--draft: the files of" in message and "have no multi-token-prediction module" in message


@pytest.mark.exhaustive
@pytest.mark.parametrize("flags", [("--method", "mtp"), ("--draft", "native", "--num-draft-tokens", 3)])
def test_the_module_alone(cli, monkeypatch, with_module, flags):
    monkeypatch.setattr(specjax, "load", load)
    plain = "generate", "w3 w4", "--raw", "--target", with_module, "--json"
    document = json.loads(cli(*plain, "--max-new-tokens", 6, "--compare", *flags).out)
    assert (document["method"], document["head"], document["identical"]) == ("mtp", "mtp", True)
    assert json.loads(cli(*plain, "--max-new-tokens", 2, "--method", "auto").out)["head"] is None
