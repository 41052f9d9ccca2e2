"""Default drafter, options, controller and tree of a target."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from specjax.catalog import METHODS
from specjax.catalog.defaults import SHIPPED_HEADS, defaults


def target(name="m", *, vocab_size=10, num_layers=2, trees=True, taps=True):
    able = SimpleNamespace(trees=trees, taps=taps, num_layers=num_layers)
    return SimpleNamespace(model=SimpleNamespace(name=name, vocab_size=vocab_size, capabilities=able))


def head(kind, max_depth=None):
    return SimpleNamespace(head=SimpleNamespace(kind=kind, max_depth=max_depth))


def test_each_draft_has_a_default_drafter():
    assert defaults(target(), None, "cpu").drafter == "auto"
    assert defaults(target(trees=False), None, "cpu").drafter == "prompt_lookup"
    assert defaults(target(), head("eagle3"), "cpu").drafter == "auto"
    assert defaults(target(), head("ppd"), "cpu").drafter == "ppd", "it drafts in the target's own pass"
    model = defaults(target(), target(), "tpu")
    assert (model.drafter, model.options, model.controller) == ("two_model", {"num_tokens": 7}, "goodput")


def test_budgets_depend_on_the_backend_and_the_head():
    assert defaults(target(), None, "cpu", drafter="suffix").options == METHODS["suffix"].cpu_options
    assert defaults(target(), None, "tpu", drafter="suffix").options == {}
    eagle = defaults(target(), head("eagle3"), "gpu", drafter="eagle3")
    assert (eagle.options, eagle.tree, eagle.controller) == ({}, "eagle2:8x6x60", None)
    assert defaults(target(), head("medusa", 2), "gpu", drafter="medusa").tree == "top:8x2"
    assert defaults(target(), head("medusa", 2), "cpu", drafter="medusa").options == {"num_tokens": 2}


@pytest.mark.parametrize("change", [{"vocab_size": 9}, {"num_layers": 29}, {"taps": False}, {"trees": False}])
def test_a_shipped_head_is_used_with_its_own_target_only(change):
    (name, shipped), *_ = SHIPPED_HEADS.items()
    shapes = {"vocab_size": shipped.vocab_size, "num_layers": shipped.num_layers}
    assert defaults(target(name, **shapes), None, "cpu").head == shipped.name
    assert defaults(target(name, **shapes | change), None, "cpu").head is None
    assert defaults(target("other", **shapes), None, "cpu").head is None
    assert defaults(target(name, **shapes), head("eagle"), "cpu").head is None
    assert defaults(target(name, **shapes), None, "cpu", drafter="auto").head is None


def test_defaults_import_no_jax():
    code = "import sys, specjax.catalog.defaults; raise SystemExit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
