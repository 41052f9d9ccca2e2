"""Completion in a shell: commands, flags and what stands behind them."""

import os
import subprocess
import sys

import pytest

from specjax.cli.options import completion


@pytest.mark.parametrize(
    ("words", "at", "completions"),
    COMPLETED := [
        ("specjax gener", 1, {"generate"}),
        ("specjax co", 1, {"compare-verifiers", "compile"}),
        ("specjax generate --tempe", 2, {"--temperature"}),
        ("specjax datastore b", 2, {"build"}),
        ("specjax generate --method token_", 3, {"token_recycling"}),
        ("specjax generate --method spec_", 3, {"spec_reason"}),
        ("specjax chat --method fast_dllm", 3, set()),
        ("specjax bench --method fast_dllm_", 3, {"fast_dllm_pp", "fast_dllm_v2"}),
        ("specjax train --method two", 3, {"two_model"}),
        ("specjax methods token_", 2, {"token_recycling"}),
        ("specjax explain --verifier typ", 3, {"typical"}),
        ("specjax generate --tree beam", 3, {"beam:"}),
        ("specjax generate --controller by", 3, {"by_batch"}),
        ("specjax generate --target smol", 3, {"smollm2-135m"}),
        ("specjax generate --draft smol", 3, {"smollm2-135m", "smollm2-135m-eagle3", "smollm2-135m-p-eagle"}),
        ("specjax plan --target llama3_7", 3, {"llama3_70b"}),
        ("specjax generate --method lookahead --set gu", 5, {"guesses="}),
        ("specjax generate --method lookahead --set seed_pool=y", 5, {"seed_pool=yes"}),
        ("specjax bench --method lookahead --method auto --set lookahead.gu", 7, {"lookahead.guesses="}),
        # as bash asks: `=` is a word, and what is completed stands behind it
        ("specjax generate --method lookahead --set seed_pool =", 6, {"yes", "no"}),
        ("specjax generate 'a = \"b\"' --method lookahead --set seed_pool = y", 8, {"yes"}),
        ("specjax generate --method lookahead --set = seed_pool = y", 8, {"yes"}),
        ("specjax generate --method = token_", 4, {"token_recycling"}),
        ("specjax generate --method = lookahead --set gu", 6, {"guesses="}),
        ("specjax generate --set a = 1 --meth", 6, {"--method"}),
    ],
    ids=[f"{words}-{at}-found{number}" for number, (words, at, _) in enumerate(COMPLETED)],
)
def test_words_are_completed(cli, monkeypatch, words, at, completions):
    monkeypatch.setenv("_SPECJAX_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(at))
    assert set(cli().out.split()) == completions


def test_a_prompt_without_quotes_is_told(refused):
    assert "put a text of several words in quotes" in refused("generate", "why", "not")


def test_a_shell_is_told_how_to_ask(cli, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # tests run below shells of every name
    shown = cli("--show-completion", "bash")
    assert shown.code == 0 and "_SPECJAX_COMPLETE=complete_bash" in shown.out


def test_models_that_come_along_are_called_as_their_loaders_call_them():
    from specjax.models import loading
    from specjax.models.loading.heads import shipped

    assert (completion.DEMO, completion.HEADS) == (loading.DEMO, shipped.NAMES)


def test_a_shell_need_not_wait_for_jax():
    variables = {"_SPECJAX_COMPLETE": "complete_bash", "COMP_WORDS": "specjax generate --method tok", "COMP_CWORD": "3"}
    code = """
import atexit, sys
atexit.register(lambda: print("jax" in sys.modules, "numpy" in sys.modules))
from specjax.cli import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | variables
    )
    assert done.stdout.split() == ["token_recycling", "False", "False"]
