"""The caches of the command line are those of this user alone."""

import os

import jax
import pytest

from specjax.cli.runs import environment
from specjax.files.atomic import cache_folder
from specjax.planning import report_cache

FLAGS = {"no_cache": False, "prompt": "a"}


@pytest.fixture
def xla_folder(monkeypatch):
    """The folder of XLA's cache, which a test may set. Another test of this process may have set it."""
    setting, folders = "jax_compilation_cache_dir", []
    update, previous = jax.config.update, jax.config.values["jax_compilation_cache_dir"]
    update(setting, None)
    monkeypatch.setattr(jax.config, "update", lambda name, value: folders.append(value) if name == setting else None)
    yield folders
    monkeypatch.setattr(jax.config, "update", update)
    update(setting, previous)


@pytest.fixture(autouse=True)
def new_notes(monkeypatch):
    monkeypatch.setattr(environment, "_print_once", environment.print_error)


def test_new_folders_are_private(tmp_path, monkeypatch, xla_folder):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    environment.use_compilation_cache(True)
    assert environment.open_program_cache(FLAGS) is not None
    folder = tmp_path / "cache" / "specjax"
    assert xla_folder == [str(folder / "compiled")]
    for path in (folder, folder / "compiled", folder / "programs", tmp_path / "cache"):
        assert path.stat().st_mode & 0o777 == 0o700


def foreign(path):
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda base: base.chmod(0o777), "because they can write to"),
        (foreign, "because they can write to"),
        (lambda base: (base / "specjax").mkdir(mode=0o777) or (base / "specjax").chmod(0o777), "can write to"),
        (lambda base: (base / "specjax" / "programs").mkdir(parents=True) or foreign(base / "specjax"), "can write to"),
    ],
)
def test_folders_of_others_are_left_alone(spoil, words, tmp_path, monkeypatch, xla_folder, capsys):
    base = tmp_path / "base"
    base.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    spoil(base)
    files = sorted(base.rglob("*"))
    environment.use_compilation_cache(True)
    assert environment.open_program_cache(FLAGS) is None and not xla_folder
    assert sorted(base.rglob("*")) == files
    notes = capsys.readouterr().err.splitlines()
    assert notes and all("specjax: compiled programs are not stored" in note and words in note for note in notes)


def test_a_relative_folder_is_ignored(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert cache_folder().is_absolute()


def test_reports_that_others_can_change_or_that_are_nested_too_deeply_are_not_read(tmp_path, monkeypatch):
    file = tmp_path / "report.json"
    monkeypatch.setattr(report_cache, "_file", lambda *key: file)
    file.write_text("[" * 100_000)
    assert report_cache.load(None, "step", None) is None
