"""`specjax bench` on a tiny model."""

from __future__ import annotations

import json

import jax
import pytest
from compiled import compiled_programs

from specjax.bench import measure, near_ties
from specjax.bench.near_ties import Difference
from specjax.cli.commands import bench as command
from specjax.cli.options.prompts import Prompt
from specjax.cli.output import files, progress
from specjax.errors import UsageError

KEYS = {
    "method",
    "guarantee",
    "tokens",
    "tokens_per_second",
    "baseline_tokens_per_second",
    "speedup",
    "identical",
    "block_efficiency",
    "mean_accepted",
    "acceptance_by_depth",
    "target_passes",
    "compile_seconds",
    "peak_memory_bytes",
}
PROMPTS = [
    {"question_id": 81, "category": "writing", "turns": ["abcabcabc", "more"]},
    {"question_id": 82, "category": "coding", "turns": ["xyzxyz"]},
    {"question_id": 1, "category": "qa", "turns": ["what is it?"]},
]
SHORT = ("--max-new-tokens", 6, "--repeats", 1)


@pytest.fixture
def prompts(tmp_path):
    return write(tmp_path / "prompts.jsonl", *map(json.dumps, PROMPTS))


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n")
    return path


def watch_compilation(monkeypatch) -> list[list[str]]:
    """The names of the programs compiled in each decoding run from now on, whatever other tests have compiled."""
    jax.clear_caches()
    by_run, honest = [], measure.run_decode

    def watched(task):
        with compiled_programs() as compiled:
            run = honest(task)
        by_run.append(compiled)
        return run

    monkeypatch.setattr(measure, "run_decode", watched)
    return by_run


def test_table_plot_and_json(cli, prompts, tmp_path, monkeypatch):
    by_run = watch_compilation(monkeypatch)
    out = tmp_path / "out.json"
    methods = ("--method", "prompt_lookup", "--method", "autoregressive")
    result = cli("bench", prompts, *methods, *SHORT, "--repeats", 2, "--out", out)
    # Three methods to compile, of which two are one program; then three prompts, of which each has an untimed run too.
    assert [any(name in ("run", "jit(run)", "jit_run") for name in names) for names in by_run] == [
        True,
        True,
        False,
    ] + [False] * 27
    assert result.code == 0, result.err
    assert all(word in result.out for word in ("mt_bench", "qa", "overall", "prompt_lookup", "autoregressive"))
    document = json.loads(out.read_text())
    assert set(document["tasks"]) == {"mt_bench", "qa"}
    for records in (document["overall"], *document["tasks"].values()):
        assert set(records) == {"prompt_lookup", "autoregressive"}
        for record in records.values():
            assert set(record) >= KEYS
            assert record["identical"] is True and record["speedup"] > 0 and record["compile_seconds"] >= 0
    parts = [records["prompt_lookup"]["tokens"] for records in document["tasks"].values()]
    assert document["overall"]["prompt_lookup"]["tokens"] == sum(parts) > 0
    assert document["machine"]["cpu_count"] and document["date"] and document["dtype"] == "float32"
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.png", "prompts.jsonl"]


def test_the_untimed_run_does_not_count(cli, prompts, tmp_path, monkeypatch):
    honest, count = measure.run_decode, iter(range(100))
    monkeypatch.setattr(
        measure, "run_decode", lambda *arguments: honest(*arguments)._replace(seconds=float(next(count)))
    )
    document = json.loads(
        cli("bench", prompts, *SHORT, "--limit", 1, "--repeats", 1, "--json", "--out", tmp_path / "x").out
    )
    # Numbers of the runs: 0 and 1 compile. Of each prompt the first two are untimed; then auto is run 4 and run 9.
    assert document["overall"]["auto"]["seconds"] == 4 + 9


def test_a_run_that_is_stopped_leaves_what_it_measured(cli, prompts, tmp_path, monkeypatch):
    honest, count = measure.run_decode, iter(range(100))

    def stopped(*arguments):
        if next(count) == 2 + 2 * 4 + 1:  # two compile, two prompts run; the third has begun
            raise KeyboardInterrupt
        return honest(*arguments)

    monkeypatch.setattr(measure, "run_decode", stopped)
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    result = cli("bench", prompts, *SHORT, "--out", tmp_path / "out.json")
    assert result.code == 130 and "2 of 3 prompts that are finished" in result.err and "Traceback" not in result.err
    assert "1 of 3 prompts, " in result.err
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["left"] == 1 and set(document["tasks"]) == {"mt_bench"} and len(document["prompts"]) == 2
    assert document["overall"]["auto"]["tokens"] == 12 and document["overall"]["auto"]["compile_seconds"] >= 0


@pytest.mark.parametrize(("temperature", "messages"), [(0, 1), (1, 0)])
def test_a_lossy_rule_that_is_none_at_temperature_0_is_told(cli, prompts, tmp_path, temperature, messages):
    """Before anything is loaded: here there is nothing."""
    options = ("--verifier", "rollback", "--temperature", temperature, "--target", tmp_path / "none")
    result = cli("bench", prompts, *SHORT, "--out", tmp_path / "out.json", *options)
    assert result.err.count("the text is the greedy one; add --temperature 1") == messages and result.code == 2


def test_json_on_stdout_and_limit(cli, prompts, tmp_path):
    result = cli("bench", prompts, *SHORT, "--limit", 1, "--out", tmp_path / "out.json", "--json")
    document = json.loads(result.out)
    assert document["overall"]["auto"]["prompts"] == 2
    assert document == json.loads((tmp_path / "out.json").read_text())
    assert [group["lines"] for group in document["prompts"]] == [[1], [3]]


def test_refuses_outputs_that_differ(cli, prompts, tmp_path, monkeypatch):
    honest = measure.run_decode

    def wrong(task):
        run = honest(task)
        if task.drafter.max_depth and task.rows[0][1] == ord("w") + 3:  # the task qa
            run.tokens[0][2] = (run.tokens[0][2] + 1) % 259
        return run

    monkeypatch.setattr(measure, "run_decode", wrong)
    out = tmp_path / "out.json"
    result = cli("bench", prompts, *SHORT, "--out", out)
    assert result.code == 1 and "no speed is reported for auto" in result.err and "refused" in result.out
    assert "line 3 (qa), first at new token 2" in result.err
    document = json.loads(out.read_text())
    assert document["tasks"]["mt_bench"]["auto"]["identical"] is True
    for record in (document["tasks"]["qa"]["auto"], document["overall"]["auto"]):
        assert record["identical"] is False and record["speedup"] is None

    def near_tie(*arguments):
        difference = honest_difference(*arguments)
        return difference and Difference(
            difference.position, difference.token, difference.plain_token, 1e-5, 1e-5, 1e-4, True
        )

    honest_difference = near_ties.find_difference
    monkeypatch.setattr(near_ties, "find_difference", near_tie)
    result = cli("bench", prompts, *SHORT, "--out", out)
    assert result.code == 0 and "near-tie" in result.err
    record = json.loads(out.read_text())["overall"]["auto"]
    assert record["identical"] is False and record["speedup"] > 0


def test_bad_lines_and_long_prompts(cli, tmp_path):
    good, long = json.dumps(PROMPTS[0]), json.dumps({"category": "rag", "turns": ["long " * 200]})
    file = write(tmp_path / "prompts.jsonl", good, "{oops", long, '{"category": "qa"}', '["list"]')
    out = tmp_path / "out.json"
    result = cli("bench", file, *SHORT, "--out", out)
    assert result.code == 2 and "Traceback" not in result.err
    assert "line 2: not valid JSON" in result.err and 'line 4: no text: it needs the field "turns"' in result.err
    assert "skipped: " in result.err and "line 3" in result.err
    document = json.loads(out.read_text())
    assert [entry["line"] for entry in document["errors"]] == [2, 4, 5]
    assert [entry["line"] for entry in document["skipped"]] == [3]
    assert document["overall"]["auto"]["prompts"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "magic"], "--method"),
        (["--method", "two_model"], "--draft"),
        (["--grid", "tau=0.5,0.7"], "--grid needs a diffusion model"),
        (["--draft-stop", "entropy:1"], "--draft-stop"),
        (["--controller", "fixed:0.5"], "--controller"),
        (["--limit", 0], "--limit"),
        (["--offset", 99], "--offset"),
        (["--repeats", 0], "--repeats"),
        (["--temperature", -0.5], "--temperature"),
        (["--top-p", 2], "--top-p"),
        (["--max-new-tokens", 9999], "capacity"),
        (["--target", "nowhere"], "--target"),
        (["--method", "two_model", "--draft", "odd"], "first at id 7"),
        (["--out", "no/such/folder/out.json"], "--out"),
    ],
)
def test_bad_input_leaves_no_file(refused, prompts, tmp_path, arguments, words):
    out = () if "--out" in arguments else ("--out", tmp_path / "out.json")
    assert words in refused("bench", prompts, *arguments, *out)
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_bad_prompt_files(refused, tmp_path):
    assert "PROMPTS" in refused("bench", tmp_path / "nowhere.jsonl")
    assert "contains no prompts" in refused("bench", write(tmp_path / "empty.jsonl", ""))
    assert "line 1" in refused("bench", write(tmp_path / "bad.jsonl", "{", "}"))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    assert "UTF-8" in refused("bench", tmp_path / "bytes.jsonl")


def test_first_per_task():
    lines = [Prompt(str(i), i, task) for i, task in enumerate("aabab")]
    assert [line.line for line in command.first_per_task(lines, 0, 1)] == [0, 2]
    assert [line.line for line in command.first_per_task(lines, 1, 1)] == [1, 4]
    assert command.first_per_task(lines, 0, None) == lines


def test_files_are_whole_or_absent(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(UsageError, match="No space left"):
        files.write_atomically(path, fail)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    files.write_atomically(path, lambda file: file.write(b"new"))
    assert path.read_text() == "new"
