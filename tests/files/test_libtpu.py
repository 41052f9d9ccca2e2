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
    machine("0x0063")  # v5e
    assert not {*libtpu._QUIET, "LIBTPU_INIT_ARGS"} & os.environ.keys()


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
