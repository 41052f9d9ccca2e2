"""Tests of the flags that libtpu receives before it is loaded."""

import os

import pytest

from specjax.files import libtpu


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A function (PCI id of a TPU, or None) -> prepares for a machine with that one, without variables of its own."""
    for name in (*libtpu._QUIET, "LIBTPU_INIT_ARGS"):
        monkeypatch.setenv(name, "")  # to be restored
        monkeypatch.delenv(name)

    def prepare(device: str | None) -> None:
        (tmp_path / "device").write_text(f"{device}\n")
        devices = {"/dev/accel[0-9]*": ["/dev/accel0"] * (device is not None), libtpu._PCI: [str(tmp_path / "device")]}
        monkeypatch.setattr("glob.glob", lambda pattern: devices.get(pattern, []))
        libtpu.prepare_environment()

    return prepare


def test_a_real_tpu_is_left_alone(machine):
    machine("0x0062")  # v5p
    assert not {*libtpu._QUIET, "LIBTPU_INIT_ARGS"} & os.environ.keys()


@pytest.mark.parametrize("device", ["0x0063", "0x006f"])  # v5e and v6e
def test_large_vmem_is_used_on_chips_that_have_it(machine, monkeypatch, device):
    machine(device)
    machine(device)
    assert os.environ["LIBTPU_INIT_ARGS"] == f"--{libtpu.VMEM_LIMIT}=65536"
    assert not libtpu._QUIET.keys() & os.environ.keys()
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{libtpu.VMEM_LIMIT}=32768")
    machine(device)
    assert os.environ["LIBTPU_INIT_ARGS"] == f"--{libtpu.VMEM_LIMIT}=32768"


def test_options_of_absent_chips(machine, monkeypatch):
    machine(None)
    assert libtpu.VMEM_LIMIT not in os.environ["LIBTPU_INIT_ARGS"]  # chips with less could not be compiled for
    assert libtpu.options_of("v5e") == {libtpu.VMEM_LIMIT: "65536"}
    assert libtpu.options_of("v4") == libtpu.options_of("tpu7x") == {}
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{libtpu.VMEM_LIMIT}=32768")
    assert libtpu.options_of("v5e") == {}


def test_where_there_is_none_nothing_looks_for_it(machine, monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "mine")
    machine(None)
    assert os.environ["TPU_SKIP_MDS_QUERY"] == "1" and os.environ["TPU_WORKER_HOSTNAMES"] == "mine"


def test_tiles_of_tpu7x(machine, monkeypatch):
    """The flag is set where weights would be tiled anew, and where programs for such chips are compiled; the user's own
    flags stay."""
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_mine=1")
    for device in ("0x0076", None, None):
        machine(device)
        assert os.environ["LIBTPU_INIT_ARGS"] == f"--xla_mine=1 {libtpu.TILES}=false"
    assert "TPU_SKIP_MDS_QUERY" in os.environ
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"{libtpu.TILES}=true")
    machine("0x0076")
    assert os.environ["LIBTPU_INIT_ARGS"] == f"{libtpu.TILES}=true"
