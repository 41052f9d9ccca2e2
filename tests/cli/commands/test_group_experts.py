"""`specjax group-experts` on a tiny mixture."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from written_models import VARIANTS, drawn, words

import specjax
from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes
from specjax.parallel.expert_groups import ExpertGroups


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folders of a mixture and of a dense model, and a text."""
    folder = tmp_path_factory.mktemp("models")
    experts = MixtureSizes(8, 16, Routing(2, normalized=True))
    for name, config in ("dense", VARIANTS["qwen3"]), ("mixture", replace(VARIANTS["qwen3"], experts=experts)):
        specjax.save_model(folder / name, drawn(config), words())
    (folder / "text").write_text("w5 w7 w9 " * 30)
    return folder


def test_groups_are_written(cli, folders, tmp_path):
    out = tmp_path / "groups"
    flags = ("--text", folders / "text", "--devices", 2, "--max-tokens", 80, "--json")
    result = cli("group-experts", folders / "mixture", out, *flags)
    assert result.code == 0, result.err
    document = json.loads(result.out)
    groups = ExpertGroups.load(out)
    assert document["devices"] == groups.devices == 2 and document["tokens"] == 80
    assert document["hit_rate"] == groups.hit_rate >= 0.5


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        ("dense", (), "MODEL: dense has no experts to group; choose a mixture of experts"),
        ("mixture", ("--devices", 1), "--devices"),
        ("mixture", ("--text", "missing"), "--text"),
    ],
)
def test_wrong_input(cli, folders, tmp_path, model, flags, message):
    result = cli("group-experts", folders / model, tmp_path / "groups", "--text", folders / "text", *flags)
    assert result.code == 2 and message in result.err
