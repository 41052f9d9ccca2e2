"""The command line with the folder of a hybrid model: refusals and plans."""

import json
import shutil

import pytest
from shipped_hybrid import FOLDER


@pytest.fixture(autouse=True)
def folders(tiny, monkeypatch):
    """Load folders: the other tests of the command line replace `specjax.load`."""
    monkeypatch.undo()
    monkeypatch.setenv("SPECJAX_NO_CACHE", "1")
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.parametrize(
    ("command", "fix"),
    [
        (("check-bits", "--length", 64), "add --without to check the model without it"),
        (("generate", "hello", "--same-bits"), "leave --same-bits out"),
        (("compile", "--topology", "v5e:1x1", "--context", 16, "--same-bits"), "leave --same-bits out"),
    ],
)
def test_same_bits_is_refused_with_a_fix_that_the_command_has(refused, command, fix):
    line = refused(*command, "--target", FOLDER)
    assert "--same-bits does not hold for" in line and "because its recurrent layers sum" in line
    assert line.endswith(f"; {fix}") and "same_bits" not in line


def test_check_bits_names_its_own_fix_on_a_device_without_the_promise(refused, monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    line = refused("check-bits", "--target", FOLDER)
    assert 'on the backend "gpu"; use --dtype "float32"' in line
    assert line.endswith(", or add --without to check the model without it")


@pytest.fixture
def short(tmp_path):
    """Return a folder with the config of a model with 128 positions."""
    folder = tmp_path / "short"
    shutil.copytree(FOLDER, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 128}))
    return folder


def test_texts_of_a_plan_end_with_the_positions_of_the_model(cli, refused, short):
    plan = ("plan", "--topology", "v5e:1x1", "--target", short)
    reports = [json.loads(cli(*plan, "--fits", "--json", "--context", n).out) for n in (16, 1024)]
    assert [report["max_new_tokens"] for report in reports] == [112, 64]
    assert not reports[0]["models"][0]["reason"]
    assert "at most 128 tokens" in reports[1]["models"][0]["reason"]
    line = refused(*plan, "--context", 128)
    assert "--context 128 fills the 128 positions of the models; lower it" in line
