"""libtpu is told that there is no TPU only where there is none."""

import os

from specjax import libtpu


def test_a_real_tpu_is_left_alone(monkeypatch):
    for name in libtpu._QUIET:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("glob.glob", lambda pattern: ["/dev/accel0"])
    libtpu.prepare_environment()
    assert "TPU_SKIP_MDS_QUERY" not in os.environ
    monkeypatch.setattr("glob.glob", lambda pattern: [])
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "mine")
    for name in libtpu._QUIET.keys() - {"TPU_WORKER_HOSTNAMES"}:
        monkeypatch.setenv(name, "")  # to be restored
        monkeypatch.delenv(name)
    libtpu.prepare_environment()
    assert os.environ["TPU_SKIP_MDS_QUERY"] == "1" and os.environ["TPU_WORKER_HOSTNAMES"] == "mine"
