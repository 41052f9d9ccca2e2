"""The command line with a hybrid target: methods that rewind it or skip its layers end with exit code 2."""

import json

import pytest
from hybrids import tiny_hybrid

import specjax

DRAFT = ("--draft", "draft")


@pytest.fixture(autouse=True)
def hybrid(monkeypatch):
    """Load a hybrid model for every name of a model."""
    plain, model = specjax.load, tiny_hybrid(259)
    monkeypatch.setattr(specjax, "load", lambda *args, **options: (model, plain(*args, **options)[1]), raising=False)
    return model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "early_exit"), "cannot run a part of its layers, which early_exit needs"),
        (("--method", "dynamic_exit"), "cannot run a part of its layers, which dynamic_exit needs"),
        (("--method", "superposed"), "cannot run a part of its layers, which superposed needs"),
        (("--method", "swift"), "cannot run a part of its layers, which swift needs"),
        (("--method", "thinned"), "no layers that can be skipped, which calm needs"),
        (("--adapt", "calm"), "no layers that can be skipped, which calm needs"),
        (("--method", "easyspec", *DRAFT), "cannot run its layers in groups, which easyspec needs; use two_model"),
        (("--method", "hierarchical", *DRAFT), "cannot rewind its cache, which the middle model of hierarchical needs"),
        (("--method", "pearl", *DRAFT), "cannot rewind its cache, which PEARL needs; use two_model"),
        (
            ("--method", "pearl_in_one_program", *DRAFT, "--set", "num_tokens=3"),
            "cannot rewind its cache, which PEARL needs; use two_model",
        ),
        (("--method", "entropy_adaptive", *DRAFT), "cannot rewind its cache, which entropy_adaptive needs"),
    ],
)
def test_methods_that_do_not_suit_are_refused(refused, arguments, message):
    line = refused("generate", "hello", *arguments, "--max-new-tokens", 4)
    assert message in line and "hybrid" in line


def test_a_tree_of_a_draft_model_is_lossless(cli):
    flags = ("--max-new-tokens", 24, "--json", "--compare")
    document = json.loads(cli("generate", "hello", "--method", "stree", *DRAFT, *flags).out)
    assert document["identical"] and document["guarantee"] == "distribution"
