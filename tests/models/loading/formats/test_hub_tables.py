"""Hub repositories of which only configs and tables of tensors are read, from a local server."""

from __future__ import annotations

import hashlib
import http.server
import json
import shutil
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from shipped_mixture import FOLDER

from specjax.cli import main
from specjax.models import loading
from specjax.models.loading.formats import hf
from specjax.planning.description.model import describe_model

COMMIT = "a" * 40
REPO = "org/mixture"
SHAPES = {"weight": (64, 64), "bias": (64,)}


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the hub's HTTP interface that the library uses, for one repository."""

    protocol_version = "HTTP/1.1"
    root: Path
    sent: Counter

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        files = sorted(file.name for file in self.root.iterdir())
        if not path.startswith((f"/api/models/{REPO}", f"/{REPO}/resolve/")):
            self.answer(404, json.dumps({"error": "Repository not found"}).encode(), {"X-Error-Code": "RepoNotFound"})
        elif path.startswith(f"/api/models/{REPO}/tree/"):
            entry = lambda name: {
                "type": "file",
                "path": name,
                "size": (self.root / name).stat().st_size,
                "oid": COMMIT,
            }
            self.answer(200, json.dumps([entry(name) for name in files]).encode())
        elif path.startswith("/api/"):
            siblings = [{"rfilename": name} for name in files]
            self.answer(200, json.dumps({"id": REPO, "sha": COMMIT, "siblings": siblings}).encode())
        else:
            self.file(self.root / path.rpartition("/")[2])

    def file(self, file):
        contents = file.read_bytes()
        tag = {"ETag": f'"{hashlib.sha256(contents).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        span = self.headers.get("Range")
        if span is None:
            self.answer(200, contents, tag, name=file.name)
            return
        first, last = (int(bound) for bound in span.removeprefix("bytes=").split("-"))
        last = min(last, len(contents) - 1)
        tag["Content-Range"] = f"bytes {first}-{last}/{len(contents)}"
        self.answer(206, contents[first : last + 1], tag, name=file.name)

    def answer(self, status, body, headers=(), name=None):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **dict(headers)}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            if name is not None:
                self.sent[name] += len(body)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Serve a repository. `hub.files` is its folder, and `hub.sent` counts bytes by file."""
    from huggingface_hub import constants

    files = tmp_path / "files"
    shutil.copytree(FOLDER, files)
    handler = type("Handler", (Hub,), {"root": files, "sent": Counter()})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    yield SimpleNamespace(files=files, sent=handler.sent)
    server.shutdown()
    thread.join()
    server.server_close()


def inspected(capsys, source):
    with pytest.raises(SystemExit) as stop:
        main(["inspect", str(source), "--json"])
    output = capsys.readouterr()
    assert stop.value.code == 0, output.err
    return json.loads(output.out)


def test_inspect_reads_the_tables_only(hub, capsys):
    """The description is that of the complete folder, and few bytes of the weights are sent."""
    document = inspected(capsys, REPO)
    assert document == inspected(capsys, hub.files) | {"name": "mixture"}
    assert document["module"]["dialect"] == "deepseek" and document["module"]["drafts_by_default"]
    assert 0 < hub.sent["model.safetensors"] <= 100_001 and hub.sent["tokenizer.json"] == 0
    assert describe_model(REPO).name == "mixture"


def test_the_files_have_the_tables_of_the_whole_ones(hub):
    with loading.open_tables(REPO) as folder:
        local = hf.read_tensors(folder / "model.safetensors")
        assert (folder / "model.safetensors").stat().st_size > 500_000
    complete = hf.read_tensors(hub.files / "model.safetensors")
    assert {name: x[2:] for name, x in local.items()} == {name: x[2:] for name, x in complete.items()}
    assert not folder.exists()


def test_complete_files_are_used(hub):
    """A quantised repository needs its tensors, and one in the cache needs no server."""
    fields = json.loads((hub.files / "config.json").read_text())
    (hub.files / "config.json").write_text(json.dumps(fields | {"quantization_config": {"quant_method": "mxfp4"}}))
    with loading.open_tables(REPO) as folder:
        assert folder.name == COMMIT
    size = (hub.files / "model.safetensors").stat().st_size
    assert hub.sent["model.safetensors"] == size
    with loading.open_tables(REPO) as again:
        assert again == folder and hub.sent["model.safetensors"] == size


def test_heads_in_pytorch_format_are_found(hub, capsys):
    """The first tensors of Medusa's file, which is no safetensors file."""
    torch = pytest.importorskip("torch")
    for file in hub.files.iterdir():
        file.unlink()
    (hub.files / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    parts = {f"{head}.0.linear.{leaf}": torch.ones(*shape) for head in range(2) for leaf, shape in SHAPES.items()}
    torch.save(parts | {f"{head}.1.weight": torch.ones(384, 64) for head in range(2)}, hub.files / "medusa_lm_head.pt")
    with pytest.raises(SystemExit) as stop:
        main(["inspect", REPO, "--target", str(FOLDER), "--json"])
    output = capsys.readouterr()
    assert stop.value.code == 0 and json.loads(output.out)["kind"] == "medusa", output.err


def test_an_unknown_repository_is_one_sentence(hub, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["inspect", "org/unknown"])
    errors = capsys.readouterr().err
    assert stop.value.code == 2 and "Traceback" not in errors
    assert '"org/unknown" is not a local file or folder and could not be downloaded' in errors
