"""The command line with a mixture of experts that is split over devices."""

import pytest
from shipped_mixture import FOLDER

from specjax import parallel
from specjax.cli.options.hosts import HostOptions
from specjax.cli.options.planning import ProgramOptions
from specjax.parallel import mesh


@pytest.fixture(autouse=True)
def folders(tiny, monkeypatch):
    """Load folders: the other tests of the command line replace `specjax.load`."""
    monkeypatch.undo()
    monkeypatch.setenv("SPECJAX_NO_CACHE", "1")
    monkeypatch.setenv("COLUMNS", "100")


def test_devices_share_the_experts(cli, monkeypatch, tmp_path):
    """Eight devices with parts of the batch, the experts and the widths write the text of one device."""
    meshes = []
    monkeypatch.setattr(parallel, "mesh", lambda *args, **axes: meshes.append(mesh(*args, **axes)) or meshes[-1])
    (tmp_path / "prompts").write_text("Once upon a time\nThe dog\n")
    command = ("generate", "--target", FOLDER, "--batch-file", tmp_path / "prompts", "--batch-size", 2, "--raw")
    command += ("--temperature", 0, "--max-new-tokens", 12, "--method", "autoregressive")
    one, spread = cli(*command), cli(*command, "--data", 4, "--expert", 2, "--model", 1)
    assert one.code == spread.code == 0, spread.err
    text = lambda result: result.out.split("┌")[0]
    assert text(one) == text(spread) and len(text(one)) > 40
    assert len(meshes) == 1 and {"data": 4, "expert": 2, "model": 1}.items() <= meshes[0].shape.items()


def test_the_default_is_that_of_python():
    assert HostOptions().expert == ProgramOptions().expert == mesh.__kwdefaults__["expert"] == 1


@pytest.mark.parametrize("command", [("generate", "x"), ("serve", "--port", 0)])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--expert", 0),
            "--sequence: the parts of a mesh (data, layer, sequence, expert, model) must be",
        ),
        (("--expert", 16), "--data, --model, --expert, --sequence: a mesh of 1 x 1 x 1 x 16 x 1 "),
        (("--expert", 3, "--model", 1), "the mesh splits attention into 3 parts (axes expert)"),
    ],
)
def test_flags_that_are_refused(refused, command, flags, message):
    assert message in refused(*command, "--target", FOLDER, *flags)
