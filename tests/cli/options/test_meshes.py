"""The command line with a cache whose slots are split over devices."""

import pytest

from specjax import parallel
from specjax.cli.options.hosts import HostOptions
from specjax.cli.options.planning import ProgramOptions
from specjax.parallel import mesh

LONG = "Once upon a time there was a little girl who liked to play. " * 6


@pytest.fixture(autouse=True)
def folders(tiny, monkeypatch):
    """Do not read stored programs."""
    monkeypatch.setenv("SPECJAX_NO_CACHE", "1")
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.parametrize("drafts", [("--method", "token_recycling"), ("--method", "prompt_lookup")])
def test_devices_share_the_slots(cli, monkeypatch, drafts):
    """Eight devices with parts of the heads and of the slots write the text of one device, with trees and chains."""
    meshes = []
    monkeypatch.setattr(parallel, "mesh", lambda *args, **axes: meshes.append(mesh(*args, **axes)) or meshes[-1])
    command = ("generate", LONG, "--raw", "--temperature", 0, "--max-new-tokens", 12, *drafts)
    one, spread = cli(*command), cli(*command, "--sequence", 4, "--model", 2)
    assert one.code == spread.code == 0, spread.err
    text = lambda result: result.out.split("\u250c")[0]
    assert text(one) == text(spread) and len(text(one)) > 5
    assert len(meshes) == 1 and {"data": 1, "sequence": 4, "model": 2}.items() <= meshes[0].shape.items()


def test_the_default_is_that_of_python():
    assert HostOptions().sequence == ProgramOptions().sequence == mesh.__kwdefaults__["sequence"] == 1


@pytest.mark.parametrize("command", [("generate", "x"), ("serve", "--port", 0)])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--sequence", 0), "--sequence: the parts of a mesh (data, layer, sequence, model) must be at least 1"),
        (("--sequence", 16), "--sequence: a mesh of 1 x 1 x 16 x 1 "),
        (("--sequence", 2, "--same-bits"), 'set its axis "sequence" to 1, or leave --same-bits out'),
    ],
)
def test_flags_that_are_refused(refused, command, flags, message):
    assert message in refused(*command, *flags)
