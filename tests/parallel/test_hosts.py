"""Two and four real processes decode the text of one process, and end together."""

from __future__ import annotations

import json
import threading
import time

import jax
import numpy as np
import pytest
import safetensors.numpy
from heads import OF_OTHER_TARGETS
from host_worker import OPTIONS, arrays, cli, drafter_of
from processes import Hosts, free_port
from tiers import exhaustive, those
from toy import tiny_llama

import specjax
from specjax import parallel, training
from specjax.catalog import of_kind
from specjax.parallel import hosts

ADDRESS = ("ADDRESS", "COUNT", "HOST")
FLAGS = ("--distributed", "--coordinator", "ADDRESS", "--num-processes", "COUNT", "--process-id", "HOST")
DENOISERS = {name for name, row in of_kind("drafter").items() if "denoiser" in row.needs}
SHORT = ("--max-new-tokens", "8", "--temperature", "0.7", "--method", "prompt_lookup")


def alone(name):
    rows, keys = arrays()
    return specjax.decode(tiny_llama(), drafter_of(name), rows, key=keys, **OPTIONS).to_lists()


@pytest.mark.parametrize(
    ("count", "names"),
    [
        (2, ("prompt_lookup",)),
        exhaustive(4, ("token_recycling",)),
        exhaustive(2, sorted(set(of_kind("drafter")) - OF_OTHER_TARGETS - DENOISERS)),
        exhaustive(2, sorted(DENOISERS)),
    ],
)
def test_texts_are_those_of_one_process(count, names):
    """Seven rows are split over the devices of all hosts; every host gets them all."""
    with Hosts(count, "methods", *ADDRESS, *names) as running:
        ended = running.wait(timeout=240 + 90 * len(names))
    assert [process.code for process in ended] == [0] * count, ended
    actual = [[line for line in process.out.splitlines() if line.startswith("{")] for process in ended]
    assert all(lines == actual[0] for lines in actual)
    assert "call specjax.parallel.gather(result) on every host" in ended[0].out
    records = [json.loads(line) for line in actual[0]]
    assert [record["name"] for record in records] == list(names)
    for record in records:
        assert record["texts"][:7] == alone(record["name"])
        assert record["texts"][7] == record["texts"][0]  # the copy that fills the batch
        assert record["streamed"] in (None, record["texts"])


@pytest.mark.exhaustive
def test_two_hosts_train_what_one_trains(tmp_path):
    """Losses and head are the same. The checkpoint is one run of both, which is found again."""
    from training_runs import head_of, recipe, target, texts

    losses = []
    alone = training.train(
        target(), head_of("eagle3"), texts(), recipe=recipe(), held_out=texts(), epochs=4, rows=4, length=32,
        evaluate_every=2, on_progress=lambda progress: losses.append(progress.loss),
    )  # fmt: skip
    measured = training.measure_acceptance(target(), alone, texts(), depths=3, rows=4, length=32)
    for reports in (losses, []):  # the second run finds the finished one
        with Hosts(2, "training", *ADDRESS, str(tmp_path), "4") as running:
            ended = running.wait()
        assert [process.code for process in ended] == [0, 0], ended
        for process in ended:
            [actual] = [json.loads(line) for line in process.out.splitlines() if line.startswith("{")]
            np.testing.assert_allclose(actual["losses"], reports, rtol=1e-5)
            assert actual["served"] == list(measured)


def test_one_command_trains_on_two_hosts(tmp_path, monkeypatch, capsys):
    """Only one host writes; the responses, the head and the card are those of one process."""
    file = tmp_path / "prompts.txt"
    file.write_text("ab\nthe cat\none two\nx y z\nhello\nwhy not\n")
    small = ("--max-new-tokens", "8", "--held-out", "2", "--rows", "4", "--length", "32", "--batch-size", "4")
    command = ("train", "--prompts", str(file), "--draft-vocab", "16", *small, "--json")
    together, alone = tmp_path / "together", tmp_path / "alone"
    split = ("--data", "4", "--model", "1")
    with Hosts(2, "cli", *command, "--out", str(together), *FLAGS, *split) as running:
        monkeypatch.setattr(specjax, "load", specjax.load)
        with pytest.raises(SystemExit) as single:
            cli(*command, "--out", str(alone))
        first, second = running.wait()
    assert (single.value.code, first.code, second.code) == (0, 0, 0), (first.err, second.err)
    assert second.out == "" and "answering" not in second.err
    expected, actual = json.loads(capsys.readouterr().out), json.loads(first.out)
    assert {name: actual[name] for name in ("answers", "served")} == {
        name: expected[name] for name in ("answers", "served")
    }
    written = [
        sorted(path.read_text().splitlines() for path in (out / "answers").iterdir()) for out in (together, alone)
    ]
    assert sorted(map(sorted, written[0])) == sorted(map(sorted, written[1]))
    heads = [safetensors.numpy.load_file(out / "model.safetensors") for out in (together, alone)]
    assert heads[0].keys() == heads[1].keys()
    apart = np.concatenate([np.ravel(np.abs(heads[0][name].astype(float) - value)) for name, value in heads[1].items()])
    # AdamW's first step goes by the sign of a derivative, whatever its size: that of some is a matter of rounding.
    assert np.mean(apart > 1e-4) < 0.01 and apart.max() < 0.004


@pytest.mark.exhaustive
def test_two_hosts_go_on_from_a_head_and_share_states(tmp_path):
    """`generate` accepts it too; texts that differ from host to host are refused."""
    file = tmp_path / "prompts.txt"
    file.write_text("ab\nthe cat\none two\nx y z\nhello\nwhy not\n")
    flags = ("--max-new-tokens", "8", "--held-out", "2", "--rows", "4", "--length", "32", "--batch-size", "4")
    states = ("--keep-states", "1", "--states", str(tmp_path / "states"))
    command = ("train", "--prompts", str(file), *flags, *FLAGS, "--data", "4", "--model", "1")
    head, tuned = str(tmp_path / "head"), str(tmp_path / "tuned")
    for more in (("--out", head, *states), ("--out", tuned, "--draft", head, *states)):
        with Hosts(2, "cli", *command, *more) as running:
            ended = running.wait()
        assert [process.code for process in ended] == [0, 0], ended
    served = ("generate", "--batch-file", str(file), "--batch-size", "4", "--draft", tuned, "--max-new-tokens", "6")
    with Hosts(2, "cli", *served, *FLAGS, "--data", "4", "--model", "1") as running:
        ended = running.wait()
    assert [process.code for process in ended] == [0, 0], ended

    def own_texts(host):
        path = tmp_path / f"texts{host}.txt"
        path.write_text(f"one two three four {host}\n" * 4)
        return ("--texts", str(path))

    other = (*command, "--out", str(tmp_path / "other"))
    with Hosts(2, "cli", *other, per_host=own_texts) as running:
        ended = running.wait()
    assert [process.code for process in ended] == [2, 2], ended
    with Hosts(2, "cli", *command, "--rows", "3", "--out", str(tmp_path / "three")) as running:
        ended = running.wait()
    assert [process.code for process in ended] == [2, 2], ended
    assert "--rows 3 cannot be split over --data 4" in ended[0].err and "answering" not in ended[0].err


@pytest.mark.parametrize("victim", those((1,), (0, 1)))
def test_a_dead_host_ends_the_other(victim):
    """The survivor ends within 20 s with heartbeats of 6 s, with a message that gives the reason."""
    with Hosts(2, "rounds", *ADDRESS) as running:
        running.wait_for(1 - victim, "round 2")
        running.kill(victim)
        start = time.monotonic()
        survivor = running.wait(timeout=60)[1 - victim]
    assert time.monotonic() - start < 20
    assert survivor.code not in (0, None)
    # JAX's own words or, where a collective notices first, those of gloo. What the network said differs by the moment.
    assert any(words in survivor.err for words in ("the JAX distributed service detected", "Gloo")), survivor.err
    if victim == 1:
        assert "host 1 has been silent for" in survivor.err or "Gloo" in survivor.err


@pytest.mark.exhaustive
@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_on_one_host_ends_the_other(failing):
    with Hosts(2, "rounds", *ADDRESS, str(failing)) as running:
        ended = running.wait(timeout=120)
    assert ended[failing].code == 1 and "Traceback" in ended[failing].err
    other = ended[1 - failing]
    assert other.code == hosts.EXIT_OTHER_HOST_FAILED
    assert f"host {failing} failed: ValueError: this host has no room left" in other.err


@pytest.mark.exhaustive
def test_sys_exit_on_one_host_ends_the_other():
    with Hosts(2, "rounds", *ADDRESS, "exit 1") as running:
        first, second = running.wait(timeout=120)
    assert second.code == 5 and "Traceback" not in second.err
    assert first.code == hosts.EXIT_OTHER_HOST_FAILED
    assert "host 1 failed: its program ended with sys.exit(5)" in first.err


@pytest.mark.exhaustive
def test_an_exit_that_one_host_catches_ends_the_other():
    with Hosts(2, "rounds", *ADDRESS, "caught 1") as running:
        first, second = running.wait(timeout=120)
    assert first.code == hosts.EXIT_OTHER_HOST_FAILED and second.code not in (0, None)
    assert "host 1 failed: its program called sys.exit(5), and has neither ended nor continued since" in first.err


@pytest.mark.exhaustive
def test_library_calls_compare_hosts_and_serve_waits_for_the_slowest():
    with Hosts(2, "library", *ADDRESS) as running:
        ended = running.wait(timeout=240)
    assert [process.code for process in ended] == [0, 0], ended
    first, second = ([line for line in process.out.splitlines() if "[Gloo]" not in line] for process in ended)
    assert first == second
    same = "of host 1 differ from those of host 0; start all hosts with the same command, files and versions"
    prompts, keys, text, served, requests = first
    assert (prompts, keys, requests) == tuple(
        f"refused: the {x} {same}" for x in ("prompts", "random keys", "requests")
    )
    target = tiny_llama(layers=1)
    alone = lambda prompt, key, count: specjax.decode(target, None, [prompt], key=key, max_new_tokens=count).to_lists()
    assert text == f"text: {alone([1, 2], 0, 4)}"
    assert json.loads(served.removeprefix("served: ")) == {str(n): alone([1, 2, n], n, 6)[0] for n in range(4)}


class Coordinator:
    """The client of a coordination service, which may not answer."""

    def __init__(self):
        self.values, self.calls, self.is_silent = {}, [], False

    def key_value_set(self, key, value, allow_overwrite):
        self.calls.append(key)
        if self.is_silent:
            raise RuntimeError("DEADLINE_EXCEEDED")
        self.values[key] = value

    def key_value_delete(self, key):
        self.calls.append(key)
        del self.values[key]

    def key_value_dir_get(self, folder):
        self.calls.append(folder)
        return [(key, value) for key, value in self.values.items() if key.startswith(folder)]


def recorded(monkeypatch) -> tuple[list, list, list]:
    """Return the warnings and exit codes of the monitors of hosts, and the clock [seconds] that they read."""
    outputs, clock, codes = [], [0.0], []
    monkeypatch.setattr(hosts, "_print_warning", outputs.append)
    monkeypatch.setattr(hosts.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(hosts.os, "_exit", codes.append)
    monkeypatch.setattr(hosts, "_ended", threading.Event())
    return outputs, clock, codes


def test_a_call_that_fails_once_does_not_end_the_watch(monkeypatch):
    """It warns only about a coordinator that stays silent, and still ends the host when another one fails."""
    outputs, clock, codes = recorded(monkeypatch)
    client = Coordinator()
    watch = hosts._FailureMonitor(client, 1, heartbeat=6)
    watch.grace = 0
    for clock[0], client.is_silent in ((1, True), (2, False), (3, True)):
        watch.poll()
    assert not outputs and watch.count
    for clock[0] in (4, 5, 6, 7):
        watch.poll()
    assert len(outputs) == 1 and "no longer responds" in outputs[0]
    client.is_silent = False
    client.values["specjax/hosts/failed/0"] = "no room"
    clock[0] = 8
    watch.poll()
    assert codes == [hosts.EXIT_OTHER_HOST_FAILED] and outputs[1:] == ["host 0 failed: no room"]


def test_an_exit_that_is_caught_on_one_host_ends_the_others(monkeypatch):
    """The others wait for a heartbeat, because the host may continue, or all hosts may have caught the same exit."""
    outputs, clock, codes = recorded(monkeypatch)
    client = Coordinator()
    watches = [hosts._FailureMonitor(client, number, heartbeat=6) for number in (1, 2)]
    exits = {1: None, 2: None}

    def poll(until):
        while clock[0] < until:
            clock[0] += 1
            for number, watch in zip(exits, watches, strict=True):
                watch.grace = 0
                monkeypatch.setattr(hosts, "_exit_code", exits[number])
                watch.poll()

    exits[1] = 3
    poll(5)
    exits[1] = None  # it goes on
    poll(20)
    assert not codes and "specjax/hosts/failed/exit-1" not in client.values
    exits = {1: 3, 2: 3}
    poll(40)
    assert not codes, "both have caught it"
    exits = {1: 3, 2: None}
    poll(50)
    assert codes == [hosts.EXIT_OTHER_HOST_FAILED]
    assert outputs == ["host 1 failed: its program called sys.exit(3), and has neither ended nor continued since"]


def test_the_calls_of_many_hosts_grow_with_their_number(monkeypatch):
    """Only host 0 reads the heartbeats; all hosts read the failures, of which there are none."""
    clock = [0.0]
    monkeypatch.setattr(hosts.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(hosts, "_ended", threading.Event())
    client = Coordinator()
    for number in range(20):
        hosts._FailureMonitor(client, number, heartbeat=30).poll()
    assert sum(call.endswith("alive") for call in client.calls) == 1
    assert len(client.calls) == 20 + 20 + 1
    watch, client.calls = hosts._FailureMonitor(client, 0, heartbeat=30), []
    for clock[0] in range(1, 31):
        watch.poll()
    assert sum(call.endswith("alive") for call in client.calls) == 6


def test_the_code_of_sys_exit_is_stored_until_the_program_goes_on(monkeypatch):
    monkeypatch.setattr(hosts, "_exit_code", None)
    for status, code in ((0, None), (None, None), (3, 3), ("reason", 1), (True, 1), (-1, 255), (256, None)):
        with pytest.raises(SystemExit) as error:
            hosts._record_exit(status)
        assert error.value.code == status and hosts._exit_code == code
    with pytest.raises(SystemExit):
        hosts._record_exit(3)
    parallel.check_same(1, "numbers")
    assert hosts._exit_code is None


def test_generate_on_two_hosts(tmp_path, monkeypatch, capsys):
    """Host 0 prints the output of one process; the other host is silent."""
    file = tmp_path / "prompts.txt"
    file.write_text("abcabcabc\nhello\nxyz\n")
    command = ("generate", "--batch-file", str(file), "--batch-size", "3", *SHORT, "--json")
    with Hosts(2, "cli", *command, *FLAGS, "--data", "4", "--model", "1") as running:
        monkeypatch.setattr(specjax, "load", specjax.load)  # the worker's replaces it
        with pytest.raises(SystemExit) as single:
            cli(*command)
        first, second = running.wait()
    assert (single.value.code, first.code, second.code) == (0, 0, 0), (first.err, second.err)
    assert second.out == "" and "loaded" not in second.err
    expected, actual = json.loads(capsys.readouterr().out), json.loads(first.out)
    assert actual["results"] == expected["results"] and len(actual["results"]) == 3
    assert actual["machine"]["hosts"] == 2 and actual["target_passes"] == expected["target_passes"]


def test_hosts_with_different_prompts_say_so():
    with Hosts(2, "cli", "generate", *SHORT, *FLAGS, per_host=lambda host: (f"prompt {host}",)) as running:
        ended = running.wait()
    for process in ended:
        assert process.code == 2, process
        assert "of host 1 differ from those of host 0; start all hosts with the same" in process.err
        assert process.out == ""


@pytest.mark.exhaustive  # as with different prompts
def test_hosts_with_different_versions_say_so():
    versions = "of_version", "VERSION"
    with Hosts(2, *versions, "generate", "abc", *SHORT, *FLAGS, names=lambda host: {"VERSION": f"0.{host}"}) as running:
        ended = running.wait()
    for process in ended:
        assert process.code == 2, process
        assert "the versions of specjax or jax of host 1 differ from those of host 0" in process.err


@pytest.mark.exhaustive  # as in the middle of a decode
def test_a_host_that_fails_ends_the_others():
    with Hosts(2, "cli", "generate", "abc", *SHORT, *FLAGS, "--target", "missing") as running:
        first, second = running.wait()
    assert second.code == 2 and "specjax: --target: there is no such file on this host" in second.err
    assert first.code == hosts.EXIT_OTHER_HOST_FAILED
    assert "specjax: host 1 failed: --target: there is no such file on this host" in first.err


@pytest.mark.parametrize(("host", "words"), [exhaustive(1, "did not answer within 3 s"), (0, "waited 3 s")])
def test_nobody_else_comes(host, words):
    port = free_port()
    arguments = ("--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--process-id", str(host))
    start = time.monotonic()
    with Hosts(1, "cli", "generate", "abc", "--distributed", *arguments, "--connect-timeout", "3") as running:
        [ended] = running.wait(timeout=90)
    assert ended.code == 2 and words in ended.err and "Traceback" not in ended.err
    assert time.monotonic() - start < 60  # nearly all of it imports


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("somewhere", 2, 0), 'coordinator must be HOST:PORT, not "somewhere"'),
        (("h:1", 0, 0), "num_processes must be at least 1"),
        (("h:1", 2, -1), "process_id must be at least 0"),
        (("h:1", 2, 2), "process_id must be below num_processes, from 0 to 1, not 2"),
    ],
)
def test_settings_that_do_not_fit(arguments, words):
    with pytest.raises(specjax.UsageError, match=words):
        parallel.initialize(*arguments, timeout=1)


def test_a_host_that_finished_is_not_silent(monkeypatch):
    outputs, clock = [], [0.0]
    monkeypatch.setattr(hosts, "_print_warning", outputs.append)
    monkeypatch.setattr(hosts.time, "monotonic", lambda: clock[0])
    watch = hosts._FailureMonitor(None, 0, heartbeat=6)
    for clock[0] in (1.0, 9.0):
        watch.check_hosts({"0": "1", "1": "finished", "2": "5"}, {})
    assert len(outputs) == 1 and outputs[0].startswith("host 2 has been silent for 8 s")


def test_copies_of_the_first_row_do_not_change_the_keys():
    key = jax.random.key(0)
    _, keys = parallel.spread_rows(parallel.mesh(2, 1), np.ones((3, 2)), np.ones(3), key)
    assert [bool(keys[b] == jax.random.fold_in(key, b % 3)) for b in range(4)] == [True] * 4


def test_without_other_hosts_nothing_is_compared():
    parallel.check_same(object(), "objects")
    assert not hosts.is_distributed()
