"""Compiled programs kept whole: found again by another process, for the same job alone, and they give the same text."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.experimental.compilation_cache import compilation_cache
from toy import tiny_llama

import specjax
from specjax import drafters
from specjax.drafters import autoregressive, prompt_lookup
from specjax.engine.prepare import Settings, prepare
from specjax.files.sizes import GIB
from specjax.persistence import program_cache as kept_module
from specjax.persistence import program_files, program_key, xla_cache
from specjax.persistence.program_cache import ProgramCache
from specjax.serving import admission
from specjax.serving import batch as serve_module

PROMPTS = [[1, 2, 3, 1, 2], [4, 5, 4]]


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


def job_of(target, drafter=None, prompts=PROMPTS, **settings):
    return prepare(
        target, drafter or prompt_lookup(num_tokens=3), prompts, Settings(**settings), key=0, max_new_tokens=20
    )


def text(target, programs=None, **settings):
    rows = [[], []]
    steps = specjax.stream(
        target, prompt_lookup(num_tokens=3), PROMPTS, key=3, max_new_tokens=20, programs=programs, **settings
    )
    for step in steps:
        for row, new in zip(rows, step.tokens, strict=True):
            row += new
    return rows


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8}], ids=["greedy", "sampled"])
def test_the_second_asks_for_nothing_and_says_the_same(target, tmp_path, settings, monkeypatch):
    first = ProgramCache(tmp_path)
    expected = text(target, **settings)
    assert text(target, first, **settings) == expected and first.hit is False
    assert text(target, first, **settings) == expected and first.hit is True, "in the same process"
    monkeypatch.setattr(kept_module.run, "start", None)  # whatever would be traced now fails
    monkeypatch.setattr(kept_module.run, "step", None)
    other = ProgramCache(tmp_path)
    assert text(target, other, **settings) == expected and other.hit is True


@contextlib.contextmanager
def whole_after(plain, monkeypatch):
    """Whole steps are there after so many plain ones. Gives how often they were asked for."""
    polls = []
    with monkeypatch.context() as patch:
        patch.setattr(Future, "done", lambda self: polls.append(0) or len(polls) > plain)
        yield polls


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8}], ids=["greedy", "sampled"])
def test_plain_steps_come_first_and_the_text_is_the_same(target, tmp_path, settings, monkeypatch):
    """However many of the steps are plain ones, of programs that are compiled and of those that are read."""
    expected = text(target, None, capacity=64, **settings)
    for plain in (0, 3, 99):
        programs = ProgramCache(tmp_path / str(plain), plain_first=True)
        with whole_after(plain, monkeypatch) as polls:
            assert text(target, programs, capacity=64, **settings) == expected and polls and programs.hit is False
        programs.finish()
        again = ProgramCache(tmp_path / str(plain), plain_first=True)
        with whole_after(plain, monkeypatch) as polls:
            assert text(target, again, capacity=64, **settings) == expected and polls and again.hit is True
        other = ProgramCache(tmp_path / str(plain))
        with whole_after(99, monkeypatch) as polls:
            assert text(target, other, capacity=64, **settings) == expected and other.hit is True
        assert not polls, "nobody asked for plain steps"


@pytest.mark.parametrize("is_stored", [False, True])
def test_who_measures_can_wait_for_the_wider_passes(target, tmp_path, is_stored, monkeypatch):
    if is_stored:
        writer = ProgramCache(tmp_path, plain_first=True)
        writer.programs(job_of(target))
        writer.finish()
    read = kept_module._deserialize_step
    monkeypatch.setattr(kept_module, "_deserialize_step", lambda stored: time.sleep(0.5) or read(stored))
    programs = ProgramCache(tmp_path, plain_first=True)
    step = programs.programs(job_of(target)).step
    assert programs.hit is is_stored and not step.full.done()
    programs.finish()
    assert step.full.done()


def test_wider_passes_that_cannot_be_read_are_compiled(target, tmp_path, monkeypatch):
    first = ProgramCache(tmp_path, plain_first=True)
    expected = text(target, first)
    first.finish()
    read, count = kept_module._deserialize, []

    def broken(stored):
        count.append(0)
        if len(count) == 3:
            raise OSError("no")
        return read(stored)

    monkeypatch.setattr(kept_module, "_deserialize", broken)
    again = ProgramCache(tmp_path, plain_first=True)
    with whole_after(2, monkeypatch):
        assert text(target, again) == expected and again.hit is True and len(count) == 3


def test_plain_steps_draft_nothing(target):
    job = job_of(target)
    step = kept_module.plain_step(job)(kept_module.run.start.lower(job)).compile()
    state, parts = kept_module.run.start(job), dataclasses.replace(job.parts, plain=True)
    drafted = 0
    for _ in range(6):
        _, info, _ = kept_module.run.step(job.parts, jax.tree.map(jnp.copy, state))
        drafted += int(info.drafted.sum())
        state, info, _ = step(parts, state)
        assert not info.drafted.any() and (info.emitted == 1).all()
    assert drafted, "the whole step would have"


def test_where_texts_would_differ_no_step_is_plain(target, monkeypatch):
    lossy = job_of(target, temperature=0.8, verifier=specjax.verifiers.typical(0.2, 0.4))
    rounded = job_of(jax.tree.map(lambda x: x.astype(jnp.bfloat16), target))
    for job in (lossy, rounded, job_of(target, autoregressive())):
        assert kept_module.plain_step(job) is None
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert kept_module.plain_step(job_of(target)) is not None
    with jax.default_matmul_precision("bfloat16"):  # in which it then multiplies float32
        assert kept_module.plain_step(job_of(target)) is None


def served(target, drafter, programs=None):
    texts = {}
    requests = [specjax.Request(prompt, key, temperature=key % 2) for key, prompt in enumerate([*PROMPTS, [6, 1, 6]])]
    for news in specjax.serve(
        target, drafter, requests, slots=2, longest_prompt=8, max_new_tokens=9, programs=programs
    ):
        texts[news.request] = texts.get(news.request, []) + news.tokens
    return texts


def test_requests_too(target, tmp_path, monkeypatch):
    """Programs of requests are stored with a drafter that remembers, whose parameters are from then on those of its
    last text."""
    first, drafter = ProgramCache(tmp_path), drafters.token_recycling(64, num_nodes=4)
    tokens = served(target, drafter, first)  # first: XLA cannot write down a sort that has run already
    expected = served(target, drafter)
    assert tokens == expected and first.hit is False
    for name in ("_empty", "_end", "step"):
        monkeypatch.setattr(serve_module, name, None)
    for name in ("begin", "enter", "read", "take_chunk", "put_chunk"):
        monkeypatch.setattr(admission, name, None)
    broken = serve_module.SERVING._replace(traced=admission.ServePrograms(*[None] * 8))
    monkeypatch.setattr(serve_module, "SERVING", broken)
    other = ProgramCache(tmp_path)
    assert served(target, drafter, other) == expected and other.hit is True


def test_the_state_is_written_in_its_place(target, tmp_path):
    job = job_of(target)
    ProgramCache(tmp_path).programs(job)
    programs = ProgramCache(tmp_path).programs(job)
    state = programs.start(job)
    programs.step(job.parts, state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.cache))


def test_other_jobs_have_other_programs(target):
    lookup = prompt_lookup(num_tokens=3)
    same = [job_of(target), job_of(target, prompts=[[7, 7, 7, 7], [1]]), job_of(tiny_llama(seed=5))]
    same.append(job_of(target, eos=[3, 4]))
    variants = [
        job_of(target, prompt_lookup(num_tokens=2)),
        job_of(target, autoregressive()),
        job_of(target, temperature=0.5),
        job_of(target, eos=[*range(9)]),
        job_of(target, prompts=[PROMPTS[0]]),
        job_of(target, lookup, controller=specjax.controllers.parsing.parse("bass")),
    ]
    names = [program_key.digest_arguments(job) for job in same]
    assert len(set(names)) == 1, "parameters, prompts, keys and eos ids are data"
    assert len({names[0], *map(program_key.digest_arguments, variants)}) == 1 + len(variants)


def test_what_a_function_closes_over_counts():
    def scaled(by):
        return jax.jit(lambda x: x * by)

    of = lambda by: program_key.digest_value(_in_specjax(scaled(by)))
    assert of(2.0) == of(2.0) != of(3.0)
    assert of(np.arange(3)) == of(np.arange(3)) != of(np.arange(3) + 1)
    assert of(frozenset("abcdef")) == of(frozenset("fedcba")) != of(frozenset("abc"))
    with pytest.raises(program_key.UnknownValueError):
        program_key.digest_value(scaled(2.0))  # code of a user: nobody says which release of it that is
    with pytest.raises(program_key.UnknownValueError):
        of(object())


def _in_specjax(function):
    function.__wrapped__.__module__ = "specjax.somewhere"
    return function


def test_a_user_s_own_drafter_is_compiled_as_ever(target, tmp_path):
    drafter = prompt_lookup(num_tokens=3).replace(observe=lambda params, state, context, tree, verdict, output: ())
    programs = ProgramCache(tmp_path)
    assert programs.programs(job_of(target, drafter)) is kept_module.TRACED and programs.hit is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-7], lambda data: b"", lambda data: data[:40] + b"x" + data[41:]]
)
def test_a_damaged_file_is_made_again(target, tmp_path, damage):
    job = job_of(target)
    ProgramCache(tmp_path).programs(job)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    again = ProgramCache(tmp_path)
    again.programs(job)
    assert again.hit is False
    repaired = ProgramCache(tmp_path)
    repaired.programs(job)
    assert repaired.hit is True


def test_what_lies_in_the_cache_of_xla_is_compiled_for_good(target, tmp_path):
    """On CPU, a program that was read there would be kept without its code."""
    folder, enough = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    settings = jax.config.values[folder], jax.config.values[enough]
    jax.config.update(folder, str(tmp_path / "xla"))
    jax.config.update(enough, 0.0)
    compilation_cache.reset_cache()
    try:
        job = job_of(target, prompt_lookup(num_tokens=1))
        kept_module.TRACED.step(job.parts, kept_module.TRACED.start(job))
        written = list((tmp_path / "xla").iterdir())
        ProgramCache(tmp_path / "kept").programs(job)
        again = ProgramCache(tmp_path / "kept")
        again.programs(job)
        assert again.hit is True and written and set(written) >= set((tmp_path / "xla").iterdir())
    finally:
        jax.config.update(folder, settings[0])
        jax.config.update(enough, settings[1])
        compilation_cache.reset_cache()


def test_what_was_not_used_for_longest_goes_and_files_of_others_stay(target, tmp_path):
    """Older and larger files stay too, those of another suffix, folders and links of the name of programs."""
    ProgramCache(tmp_path).programs(job_of(target))
    (old,) = tmp_path.iterdir()
    size = old.stat().st_size
    os.utime(old, (1, 1))
    names = ("thesis", "a" * 64, "a" * 64 + ".last", f"{'b' * 63}{program_files.PROGRAMS}")
    for name in names:
        (tmp_path / name).write_bytes(bytes(2 * size))
        os.utime(tmp_path / name, (0, 0))
    folder, link = (tmp_path / (letter * 64 + program_files.PROGRAMS) for letter in "cd")
    folder.mkdir()
    link.symlink_to(tmp_path / "thesis")
    ProgramCache(tmp_path, gib=1.5 * size / GIB).programs(job_of(target, temperature=0.5))
    assert not old.exists() and {*names, folder.name, link.name} < {path.name for path in tmp_path.iterdir()}
    assert len(list(tmp_path.iterdir())) == len(names) + 3


class Harm:
    """A pickle that runs code when it is read."""

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def harmful(folder, name, harm):
    """Write a file of programs whose digest is right and that creates the folder `harm` when it is read."""
    Harm.place = harm
    content = pickle.dumps(Harm())
    path = folder / f"{name}{program_files.PROGRAMS}"
    path.write_bytes(program_files._digest(name, content) + content)
    return path


def of_nobody(path):
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder, file: folder.chmod(0o777),
        lambda folder, file: folder.chmod(0o770),
        lambda folder, file: file.chmod(0o666),
        lambda folder, file: folder.parent.chmod(0o777),
        lambda folder, file: of_nobody(folder),
        lambda folder, file: of_nobody(folder.parent),
        lambda folder, file: of_nobody(file),
        lambda folder, file: file.rename(folder / "x") and file.symlink_to(folder / "x"),
    ],
)
@pytest.mark.filterwarnings("ignore:compiled programs are not stored")
def test_programs_that_others_can_change_are_not_run(spoil, tmp_path):
    folder, harm = tmp_path / "parent" / "programs", tmp_path / "harm"
    folder.mkdir(parents=True, mode=0o700)
    file = harmful(folder, "a" * 64, harm)
    spoil(folder, file)
    assert program_files.ProgramFolder(folder, 1.0).read("a" * 64) is None and not harm.exists()


def test_the_same_files_are_read_in_an_own_folder(tmp_path):
    """Otherwise the test above proves nothing. A file does not serve under another name."""
    file = harmful(tmp_path, "a" * 64, tmp_path / "harm")
    file.rename(tmp_path / f"{'b' * 64}{program_files.PROGRAMS}")
    folder = program_files.ProgramFolder(tmp_path, 1.0)
    assert folder.read("b" * 64) is None and not (tmp_path / "harm").exists()
    harmful(tmp_path, "a" * 64, tmp_path / "harm")
    assert folder.read("a" * 64) is None and (tmp_path / "harm").exists()


def test_a_folder_of_others_is_not_used_and_a_warning_gives_the_reason(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    files = program_files.ProgramFolder(folder, 1.0)
    with pytest.warns(UserWarning, match=r"not stored: other users can write to .*open; run chmod 700 on it"):
        files.write("a" * 64, program_files.StoredPrograms([]))
    files.write_last("a" * 64, "b")
    assert not list(folder.iterdir())


def test_new_folders_are_of_this_user_alone_and_the_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    files = program_files.ProgramFolder("~/cache/programs", 1.0)
    assert files.read("a" * 64) is None and not list(tmp_path.iterdir())
    files.write("a" * 64, program_files.StoredPrograms([]))
    assert files.read("a" * 64) == program_files.StoredPrograms([])
    folder = tmp_path / "cache" / "programs"
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]


def test_threads_leave_the_cache_of_xla_as_it_was():
    """The first to enter ends first; in between it is off, and at the end it is on again."""
    setting = lambda: jax.config.values[xla_cache.SETTING]
    assert setting()
    entered, ended = threading.Event(), threading.Event()

    def first():
        with xla_cache.without_xla_cache():
            entered.set()
            ended.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait(10)
    with xla_cache.without_xla_cache():
        ended.set()
        thread.join(10)
        assert not setting()
    assert setting()


@pytest.mark.slow
def test_another_process_finds_them_where_it_expects_them(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import sys, jax, specjax
        from toy import tiny_llama
        from specjax.engine import run
        kept = specjax.ProgramCache(sys.argv[1])
        kept.expect("a command")
        target = tiny_llama()
        steps = specjax.stream(target, "prompt_lookup", [[1, 2, 3, 1, 2]], key=0, max_new_tokens=12, programs=kept)
        print(kept.hit, run.start._cache_size(), [token for step in steps for token in step.tokens[0]])
        """)
    )
    path = os.pathsep.join(filter(None, [os.path.dirname(toy.__file__), *sys.path]))
    runs = [
        subprocess.run(
            [sys.executable, script, tmp_path / "kept"], capture_output=True, text=True, check=True,
            env=os.environ | {"PYTHONPATH": path},
        ).stdout
        for _ in range(2)
    ]  # fmt: skip
    (first, _, text), (second, traced, again) = (run.split(maxsplit=2) for run in runs)
    assert (first, second) == ("False", "True") and traced == "0" and text == again
