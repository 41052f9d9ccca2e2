"""Runs that end otherwise than they should: Ctrl-C, and a disk that is full. In processes of their own."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from quick_compile import flags

from specjax.cli import Interrupts
from specjax.cli.options import prompts
from specjax.cli.output import files
from specjax.errors import UsageError


@pytest.fixture(autouse=True)
def interruptible():
    """Restore Python's handler of SIGINT, also where the tests were started in the background with the signal
    ignored."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


TESTS = Path(__file__).parents[1]
WORKER = """
import resource, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the tests were started from
sys.path[:0] = sys.argv[1:3]
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
from conftest import CONFIG, ByteTokenizer, make_target
import specjax
from specjax.models import loading
specjax.load = lambda source=None, **options: (make_target(seed=int(source == "draft")), ByteTokenizer())
loading.load_tokenizer = lambda source=None: ByteTokenizer()
print("ready", file=sys.stderr, flush=True)
sys.argv[:] = ["specjax", *sys.argv[4:]]
specjax.cli.main()
"""


class Command:
    """`specjax ARGUMENTS` over the tiny models, still running."""

    def __init__(self, folder: Path, *arguments, stdout=None, largest: int = -1):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags(devices=1), "SPECJAX_NO_CACHE": "1",
            "XDG_CACHE_HOME": str(folder),
        }  # fmt: skip
        self.files = {name: folder / f"std{name}" for name in ("out", "err")}
        command = [sys.executable, "-c", WORKER, str(TESTS / "cli"), str(TESTS / "lib"), str(largest)]
        with open(stdout or self.files["out"], "wb") as out, open(self.files["err"], "wb") as err:
            self.process = subprocess.Popen(
                [*command, *map(str, arguments)], stdout=out, stderr=err, env=environment, cwd=folder
            )

    def read(self, name: str) -> str:
        return self.files[name].read_text(errors="replace")

    def wait_for(self, holds) -> None:
        deadline = time.monotonic() + 200
        while not holds():
            assert self.process.poll() is None, self.read("err")
            assert time.monotonic() < deadline, self.read("out") + self.read("err")
            time.sleep(0.02)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> tuple[int, str]:
        """Exit code, and the one line that says why."""
        code = self.process.wait(200)
        err = self.read("err")
        assert "Traceback" not in err and "Exception ignored" not in err, err
        lines = [line for line in err.splitlines() if line.startswith("specjax: ")]
        assert len(lines) == 1, err
        return code, lines[0]


def prompt_file(folder: Path, count: int) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"question_id": i, "turns": [f"abc{i}"]}) + "\n" for i in range(count)))
    return file


def test_generate_interrupted_keeps_what_was_done(tmp_path):
    options = ("--batch-file", prompt_file(tmp_path, 5000), "--max-new-tokens", 24, "--method", "autoregressive")
    command = Command(tmp_path, "generate", *options, "--json")
    command.wait_for(lambda: " of 5000 prompts, " in command.read("err"))
    command.interrupt()
    code, line = command.end()
    document = json.loads(command.read("out"))
    done = len(document["results"])
    assert code == 130 and 0 < done < 5000 and document["left"] == 5000 - done
    assert line == f"specjax: interrupted; stdout has the {done} of 5000 prompts that are finished"
    assert all(len(entry["token_ids"]) == 24 or entry["finish_reason"] == "eos" for entry in document["results"])


def test_bench_interrupted_keeps_what_was_done(tmp_path):
    out = tmp_path / "bench.json"
    options = ("--method", "prompt_lookup", "--max-new-tokens", 24, "--repeats", 1, "--out", out)
    command = Command(tmp_path, "bench", prompt_file(tmp_path, 2000), *options)
    command.wait_for(out.exists)
    command.interrupt()
    code, line = command.end()
    document = json.loads(out.read_text())
    done = 2000 - document["left"]
    assert code == 130 and 0 < done < 2000
    assert line == f"specjax: interrupted; {out} has the {done} of 2000 prompts that are finished"
    assert {path.name for path in tmp_path.glob("*bench*")} == {"bench.json"}, "nothing half-written is left"


@pytest.mark.slow
def test_datastore_build_interrupted_goes_on(tmp_path):
    pytest.importorskip("pydivsufsort")
    text, out = tmp_path / "corpus.txt", tmp_path / "store"
    text.write_text("the cat sat on the mat. " * 40_000)
    options = ("datastore", "build", text, "--out", out, "--shard-tokens", 2000)
    command = Command(tmp_path, *options)
    part = tmp_path / ".store.part"
    command.wait_for(lambda: len(json.loads(read(part / "meta.json") or '{"shards": []}')["shards"]) > 1)
    command.interrupt()
    assert command.end() == (130, "specjax: interrupted; run the same command to continue")
    assert not out.exists() and part.exists()
    again = Command(tmp_path, *options)
    assert again.process.wait(200) == 0, again.read("err")
    assert "resuming an interrupted build" in again.read("err") and out.exists()


def read(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:
        return ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("methods", "--all"),
        ("compare-verifiers", "prompts.jsonl", "--draft", "draft", "--limit", 300),
        ("plan", "--target", "smollm2_135m", "--topology", "v5e:2x2", "--acceptance", ".6"),
        ("compile", "--target", "llama3_8b", "--topology", "v5e:2x4"),
    ],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.exhaustive
@pytest.mark.parametrize("seconds", [0.3, 3.0])
def test_every_command_ends_in_one_line(tmp_path, arguments, seconds):
    """Wherever it is: `methods` may have ended before."""
    prompt_file(tmp_path, 300)
    command = Command(tmp_path, *arguments)
    command.wait_for(lambda: "ready" in command.read("err"))
    time.sleep(seconds)
    command.interrupt()
    if command.process.wait(200) == 0:
        assert arguments[0] == "methods"
    else:
        assert command.end() == (130, "specjax: interrupted")


def test_a_second_interrupt_does_not_wait():
    code = (
        "import os, signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from specjax.cli import Interrupts\n"
        "with Interrupts():\n try:\n  os.kill(os.getpid(), signal.SIGINT)\n"
        " except KeyboardInterrupt:\n  os.kill(os.getpid(), signal.SIGINT)\n  time.sleep(60)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert run.returncode == 130 and run.stderr == "specjax: interrupted twice\n"


IMPORTING = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from specjax.cli import main
main(sys.argv[2:])
"""


DECODING = ("generate", "abc", "--target", "nowhere")


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("specjax.cli.output.console", ("methods",)),
        ("typer", ("methods",)),
        ("jax", DECODING),
        ("numpy._core._multiarray_umath", DECODING),
    ],
)
def test_interrupted_while_it_starts(module, command):
    arguments = [sys.executable, "-c", IMPORTING, module, *command]
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=100)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "specjax: interrupted\n")


def test_an_interrupt_that_is_dropped_comes_again():
    """An interrupt that Python ignores because a callback raised it is raised again."""

    class Callback:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    with Interrupts() as interrupts:
        Callback()
        with pytest.raises(KeyboardInterrupt):
            time.sleep(60)
    assert interrupts.received


def test_interrupts_that_a_library_changed(cli, monkeypatch):
    from specjax.cli.commands import methods

    def broken(section):
        signal.raise_signal(signal.SIGINT)

    def changed(section):
        try:
            broken(section)
        except KeyboardInterrupt:
            raise RuntimeError("a callback failed") from None

    for rows in (broken, changed):
        monkeypatch.setattr(methods, "_section", rows)
        result = cli("methods")
        assert result.code == 130 and result.err.strip() == "specjax: interrupted"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupts_of_others_are_left_alone():
    old = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, old)


# A full disk.


def test_a_device_is_not_replaced(refused, tmp_path):
    status = os.stat("/dev/full")
    file = prompt_file(tmp_path, 1)
    sentence = refused("bench", file, "--out", "/dev/full")
    assert sentence == "specjax: --out: /dev/full is a device, which would be replaced; name a file"
    assert "is a device" in refused("compare-verifiers", file, "--draft", "draft", "--save-record", "/dev/full")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode) and os.stat("/dev/full").st_rdev == status.st_rdev


@pytest.mark.parametrize(
    "arguments", [("methods",), pytest.param(("generate", "abc", "--max-new-tokens", "4"), marks=pytest.mark.slow)]
)
def test_stdout_on_a_full_disk(tmp_path, arguments):
    command = Command(tmp_path, *arguments, stdout="/dev/full")
    assert command.end() == (
        2, "specjax: cannot write the output (No space left on device); free some space and run it again"
    )  # fmt: skip


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_were_closed_before_the_start(closed):
    command = f"{sys.executable} -m specjax.cli"
    for arguments, code in (("--version", 0), ("no-such-command", 2)):
        run = subprocess.run(["sh", "-c", f"{command} {arguments} {closed}"], capture_output=True, text=True)
        assert run.returncode == code and "Traceback" not in run.stderr, run


def test_a_prompt_from_a_closed_or_endless_stdin(refused, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert "the PROMPT is empty" in refused("generate", "-")
    with open("/dev/zero") as endless:
        monkeypatch.setattr(sys, "stdin", endless)
        monkeypatch.setattr(prompts, "MAX_TEXT_BYTES", 1 << 20)
        assert "the PROMPT on stdin has more than 1,048,576 characters" in refused("generate", "-")


@pytest.mark.parametrize("name", ["a" * 300, "/proc/bench.json", "none/x.json"])
def test_names_that_cannot_be_written(refused, tmp_path, name):
    """Seen before anything is decoded, by root too."""
    sentence = refused("bench", prompt_file(tmp_path, 1), "--target", "none", "--out", name)
    assert sentence.startswith("specjax: --out: "), sentence


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(13, "Permission denied", "somewhere"), "cannot use somewhere (Permission denied)"),
        (MemoryError("Unable to allocate 9 TiB"), "out of memory: Unable to allocate 9 TiB;"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "out of memory: RESOURCE_EXHAUSTED:"),
    ],
)
def test_what_the_machine_does_not_grant(refused, monkeypatch, error, words):
    from specjax.cli.commands import methods

    def rows(section):
        raise error

    monkeypatch.setattr(methods, "_section", rows)
    assert refused("methods").startswith(f"specjax: {words}")


def test_a_good_file_stays(tmp_path):
    """A limit on the size of files stands for a disk that fills up."""
    out = tmp_path / "bench.json"
    out.write_text('{"good": true}')
    options = ("--method", "prompt_lookup", "--max-new-tokens", 24, "--repeats", 1, "--out", out)
    command = Command(tmp_path, "bench", prompt_file(tmp_path, 40), *options, largest=4000)
    code, line = command.end()
    assert code == 2
    assert line == f"specjax: cannot write {out} (File too large); free some space or choose another path"
    assert set(json.loads(out.read_text())) >= {"good"} or json.loads(out.read_text())["left"] > 0, "whole, of a prompt"
    assert {path.name for path in tmp_path.glob("*bench*")} == {"bench.json"}


@pytest.mark.slow
def test_a_datastore_on_a_full_disk(tmp_path):
    pytest.importorskip("pydivsufsort")
    text, out = tmp_path / "corpus.txt", tmp_path / "store"
    text.write_text("the cat sat on the mat. " * 4000)
    options = ("datastore", "build", text, "--out", out, "--shard-tokens", 2000)
    code, line = Command(tmp_path, *options, largest=100_000).end()
    assert code == 2
    assert line == (
        f"specjax: --out: cannot write {out} (File too large); free some space, and run the same command to continue"
    )
    assert not out.exists()
    again = Command(tmp_path, *options)
    assert again.process.wait(200) == 0 and "resuming an interrupted build" in again.read("err"), again.read("err")


def test_files_are_whole_or_as_they_were(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"good")

    def fail(file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(UsageError, match=f"cannot write {path} \\(No space left on device\\)"):
        files.write_atomically(path, fail)
    assert path.read_bytes() == b"good" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(UsageError, match="No such file"):
        files.write_atomically(tmp_path / "gone" / "file", fail)


def test_it_does_not_wait_for_programs_that_nobody_needs(tmp_path):
    """The process ends although programs are still read beside a text that has ended."""
    code = """
import sys, time
from specjax import cli
import specjax.cli.app as app
from specjax.persistence import program_cache

def run(arguments):
    program_cache._start_thread(lambda: time.sleep(600), program_cache.READING)
    print("the text")
    return 0

app.run = run
cli.main()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout, run.stderr) == (0, "the text\n", "")
