"""The Python functions with None and the command line without flags make the same choices."""

from __future__ import annotations

import pytest
from heads import tiny_head

import specjax
from specjax import controllers
from specjax.catalog.defaults import SHIPPED_HEADS, ShippedHead
from specjax.cli.runs import session
from specjax.drafters import default


@pytest.fixture
def choices(monkeypatch):
    """The drafters and controllers that were built: (name, kind of draft, options) and (form, other arguments)."""
    built = []
    make, parse = default.make_drafter, controllers.parse

    def record(name, target, draft=None, **options):
        options = {key: value for key, value in options.items() if value is not None}
        built.append((name, draft.head.kind if hasattr(draft, "head") else draft and "model", options))
        return make(name, target, draft, **options)

    def record_controller(*arguments, **options):
        if options:  # of the run; other calls check flags
            built.append((arguments, options))
        return parse(*arguments, **options)

    monkeypatch.setattr(default, "make_drafter", record)
    monkeypatch.setattr(session, "make_drafter", record)
    monkeypatch.setattr(controllers, "parse", record_controller)
    return built


@pytest.mark.parametrize("draft", ["none", "model", "head", "shipped"])
def test_python_and_the_command_line_agree(cli, choices, monkeypatch, tmp_path, draft):
    target = specjax.load()[0]
    python, flags = None, []
    if draft == "model":
        python, flags = specjax.load("draft")[0], ["--draft", "draft"]
    elif draft != "none":
        specjax.save_head(tmp_path, head := tiny_head("eagle", target))
        if draft == "head":
            python, flags = head, ["--draft", tmp_path]
        else:
            monkeypatch.setitem(SHIPPED_HEADS, "tiny", ShippedHead(str(tmp_path), vocab_size=259, num_layers=1))
    text = specjax.decode(target, python, [[5, 6, 5, 6]], key=0, max_new_tokens=3).to_lists()
    assert len(text[0]) == 3
    by_python = choices.copy()
    choices.clear()
    result = cli("generate", "ab", "--max-new-tokens", 3, "--json", *flags)
    assert result.code == 0, result.err
    key = lambda entry: str(entry)
    assert sorted(choices, key=key) == sorted(by_python, key=key)
    expected = {"none": ("auto", None), "model": ("two_model", "model")}.get(draft, ("auto", "eagle"))
    assert any(entry[:2] == expected for entry in by_python)
