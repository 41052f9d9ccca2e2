"""Saved on one mesh, restored on another; a decode that is interrupted ends with the same tokens."""

from __future__ import annotations

import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import Hosts
from toy import markov, tiny_llama

import specjax
from specjax import UsageError, parallel, persistence
from specjax.drafters import autoregressive, prompt_lookup, token_recycling
from specjax.persistence import fingerprint
from specjax.persistence.running import Running
from specjax.types import DecodeState

PROMPTS = [[1, 2, 0, 1, 2, 0, 1], [2], [0, 0, 0], [1, 2]]
OPTIONS = {"key": jax.random.key(0), "max_new_tokens": 24, "temperature": 0.8}


def spread(data, model):
    return parallel.shard(tiny_llama(layers=1, num_heads=8, num_kv_heads=4), parallel.mesh(data, model))


def run(target, drafter, folder, stop=None, every=4, **changes):
    """(text of each row, the steps); `stop`: leave after so many."""
    checkpoint = folder and persistence.Checkpoints(folder, every)
    rows, steps = [[] for _ in PROMPTS], []
    for step in specjax.stream(target, drafter, PROMPTS, checkpoint=checkpoint, **{**OPTIONS, **changes}):
        steps.append(step)
        for row, new in zip(rows, step.tokens, strict=True):
            row += new
        if len(steps) == stop:
            break
    return rows, steps


def test_parameters_of_four_devices_on_eight(tmp_path):
    four, eight = spread(1, 4), spread(2, 4)
    persistence.save(tmp_path / "model", {"params": four.params, "key": jax.random.key(3)})
    shapes = parallel.abstract_target(four.model.config, parallel.mesh(2, 4)).params
    restored = persistence.restore(tmp_path / "model", {"params": shapes, "key": jax.random.key(0)})
    for ours, wanted in zip(jax.tree.leaves(restored["params"]), jax.tree.leaves(eight.params), strict=True):
        np.testing.assert_array_equal(ours, wanted)
        assert ours.sharding == wanted.sharding
    assert restored["key"] == jax.random.key(3)


def test_other_parameters_are_refused(tmp_path):
    with pytest.raises(UsageError, match="there is no checkpoint in"):
        persistence.restore(tmp_path / "nothing", {"x": np.zeros(2)})
    persistence.save(tmp_path / "model", {"x": jax.numpy.zeros(3)})
    with pytest.raises(UsageError, match=r"\['x'\] is float32\[3\], not float32\[2\]"):
        persistence.restore(tmp_path / "model", {"x": jax.numpy.zeros(2)})
    with pytest.raises(UsageError, match="is of another model"):
        persistence.restore(tmp_path / "model", {"y": jax.numpy.zeros(3)})


def test_what_is_not_a_checkpoint_stays(tmp_path):
    like, file, other = {"x": jax.numpy.zeros(2)}, tmp_path / "file", tmp_path / "other"
    file.write_text("mine")
    other.mkdir()
    (other / "thesis").write_text("mine")
    with pytest.raises(UsageError, match="contains other files than a checkpoint"):
        persistence.save(other, like)
    for folder in (file, file / "below"):
        with pytest.raises(UsageError, match="cannot be written"):
            persistence.save(folder, like)
        with pytest.raises(UsageError, match="cannot be written"):
            Running(persistence.Checkpoints(folder), {})
    with pytest.raises(UsageError, match="there is no checkpoint in"):
        persistence.restore(file, like)
    assert file.read_text() == (other / "thesis").read_text() == "mine"
    persistence.save(tmp_path / "new", like)
    persistence.save(tmp_path / "new", {"y": like["x"]})
    persistence.restore(tmp_path / "new", {"y": like["x"]})


def test_a_step_without_its_metadata(tmp_path):
    (tmp_path / "3").mkdir()
    with pytest.raises(UsageError, match=r"step 3 in .* is not a complete checkpoint of stream; remove that step"):
        run(markov(), prompt_lookup(2), tmp_path)
    with pytest.raises(UsageError, match="do not store log-probabilities"):
        run(markov(), prompt_lookup(2), tmp_path / "new", logprobs=True)


def test_an_interrupted_stream_goes_on_on_another_mesh(tmp_path):
    """A drafter with a memory; 4 devices, then 8; then the text of the finished run alone."""
    drafter = token_recycling(64, num_nodes=7)
    uninterrupted, steps = run(spread(1, 4), drafter, None)
    run(spread(1, 4), drafter, tmp_path / "run", stop=6)
    rows, resumed = run(spread(2, 4), drafter, tmp_path / "run")
    assert rows == uninterrupted
    assert resumed[0].earlier is not None and len(resumed) == 1 + len(steps) - 4
    assert int(resumed[0].earlier.target_passes.max()) == 4
    passes = resumed[0].earlier.target_passes + sum(step.info.active for step in resumed[1:])
    np.testing.assert_array_equal(passes, sum(step.info.active for step in steps))
    rows, again = run(spread(2, 4), drafter, tmp_path / "run")
    assert rows == uninterrupted and len(again) == 1


def test_plain_decoding_whose_sums_have_no_depths_goes_on(tmp_path):
    uninterrupted, _ = run(markov(), autoregressive(), None)
    run(markov(), autoregressive(), tmp_path, stop=6)
    assert run(markov(), autoregressive(), tmp_path)[0] == uninterrupted


def test_a_checkpoint_of_another_run_is_refused(tmp_path, monkeypatch):
    target = markov()
    run(target, prompt_lookup(2), tmp_path, stop=6, max_new_tokens=24)
    for words, changes in (
        ("settings", {"temperature": 0.7}),
        ("random keys", {"key": jax.random.key(1)}),
        ("settings", {"max_new_tokens": 23}),
    ):
        with pytest.raises(UsageError, match=f"is of another run, which differs in {words}; repeat that run, or give"):
            run(target, prompt_lookup(2), tmp_path, **changes)
    with pytest.raises(UsageError, match="differs in drafter"):
        run(target, prompt_lookup(3), tmp_path)
    with pytest.raises(UsageError, match="differs in target"):
        run(markov(np.roll(np.asarray(target.params), 1, 1)), prompt_lookup(2), tmp_path)
    monkeypatch.setattr(f"{__name__}.PROMPTS", [[1], *PROMPTS[1:]])
    with pytest.raises(UsageError, match="differs in prompts"):
        run(target, prompt_lookup(2), tmp_path)
    with pytest.raises(UsageError, match="every must be at least 1 step, not 0"):
        run(target, prompt_lookup(2), tmp_path, every=0)


def test_fingerprints_do_not_depend_on_the_mesh_or_the_process():
    unsharded = tiny_llama(layers=1, num_heads=8, num_kv_heads=4)
    assert (
        fingerprint.digest_model(unsharded)
        == fingerprint.digest_model(spread(2, 4))
        != fingerprint.digest_model(tiny_llama())
    )
    assert fingerprint.digest_model(tiny_llama()) != fingerprint.digest_model(tiny_llama(seed=1))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny_llama().params)
    assert fingerprint.digest_weights(half) == fingerprint.digest_weights(tiny_llama().params)
    assert fingerprint.digest_weights(half) != fingerprint.digest_weights(tiny_llama(seed=1).params)
    assert " at 0x" not in repr(fingerprint.describe(token_recycling(64)))
    settings = [fingerprint.describe(prompt_lookup(n)) for n in (2, 3)]
    assert settings[0] != settings[1] and settings[0] == fingerprint.describe(prompt_lookup(2))


def test_a_torn_checkpoint_is_not_seen(tmp_path):
    drafter = prompt_lookup(2)
    uninterrupted, _ = run(markov(), drafter, None)
    run(markov(), drafter, tmp_path, stop=6)
    torn = tmp_path / "9.orbax-checkpoint-tmp" / "text"
    torn.mkdir(parents=True)
    (torn / "manifest.ocdbt").write_bytes(b"half")
    assert run(markov(), drafter, tmp_path)[0] == uninterrupted


def test_killed_while_it_writes(tmp_path):
    """The folder of a process that was killed while it wrote holds a whole checkpoint."""
    with Hosts(1, "save_for_ever", tmp_path) as running:
        running.wait_for(0, "saved 5")
        running.kill(0)
    assert os.listdir(tmp_path)
    rows = np.zeros((4,), np.int32)
    where = lambda x: jax.device_put(x, jax.devices()[0])
    tokens, cache = np.zeros((4, 8), np.int32), np.zeros((1 << 20,), np.int32)
    state = where(DecodeState(tokens, rows, rows < 0, rows, rows, cache, (), (), rows < 0))
    step, state, stats = Running(persistence.Checkpoints(tmp_path, 1), {"prompts": "a"}).resume(state, where(rows))
    assert step >= 3
    assert all((leaf == step).all() for leaf in (state.tokens, state.length, state.cache, stats))


@pytest.mark.exhaustive
def test_generate_continues_on_two_hosts(tmp_path):
    """Killed in the middle; started again, both hosts go on, and host 0 prints the whole text once."""
    flags = ("--distributed", "--coordinator", "ADDRESS", "--num-processes", "COUNT", "--process-id", "HOST")
    command = ("cli", "generate", "abcabcabc", "--max-new-tokens", "400", "--method", "prompt_lookup", "--json")
    mesh = ("--data", "2", "--model", "2", "--heartbeat", "6")
    folder = tmp_path / "run"
    checkpointing = ("--checkpoint", folder, "--checkpoint-every", "5")
    with Hosts(1, *command) as one:
        [single] = one.wait()
    with Hosts(2, *command, *flags, *mesh, *checkpointing) as two:
        while not list(pathlib.Path(folder).glob("batch-00000/[0-9]*[0-9]")):
            assert all(process.poll() is None for process in two.processes), two.read(0, "err")
        two.kill(1)
        ended = two.wait()
    assert ended[0].code != 0 and ended[0].out == ""
    with Hosts(2, *command, *flags, *mesh, *checkpointing) as two:
        first, second = two.wait()
    assert (first.code, second.code) == (0, 0), (first.err, second.err)
    assert "continuing after" in first.err
    ours, wanted = json.loads(first.out), json.loads(single.out)
    assert ours["results"] == wanted["results"] and second.out == ""


def test_orbax_is_not_imported_with_specjax():
    import subprocess
    import sys

    code = "import specjax, sys; sys.exit(any(name.startswith('orbax') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
