"""Modules that moved keep their former names for one release, and say where they are now."""

from __future__ import annotations

import importlib
import sys

import pytest

import specjax
from specjax.retrieval import datastore
from specjax.trees import operations, templates


@pytest.mark.parametrize(
    ("name", "now", "member", "same"),
    [
        ("tree", "specjax.trees.operations", "chain", operations.chain),
        ("tree", "specjax.trees.templates", "Template", templates.Template),
        ("datastore", "specjax.retrieval.datastore", "open_datastore", datastore.open_datastore),
    ],
)
def test_a_former_name_warns_and_gives_the_same(name, now, member, same, monkeypatch):
    monkeypatch.delitem(sys.modules, f"specjax.{name}", raising=False)
    with pytest.warns(DeprecationWarning, match=now):
        assert getattr(importlib.import_module(f"specjax.{name}"), member) is same


@pytest.mark.parametrize("name", ["tree", "datastore"])
def test_it_is_an_attribute_as_before(name, monkeypatch):
    monkeypatch.delitem(sys.modules, f"specjax.{name}", raising=False)
    monkeypatch.delattr(specjax, name, raising=False)
    with pytest.warns(DeprecationWarning, match="is now"):
        assert getattr(specjax, name) is sys.modules[f"specjax.{name}"]
