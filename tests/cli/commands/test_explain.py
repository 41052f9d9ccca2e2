"""`specjax explain`: a run told round by round."""

import json
import struct

import pytest

SHORT = ("--max-new-tokens", 24)


def test_it_is_the_text_of_generate(cli):
    ours = json.loads(cli("explain", "ababab", "--method", "prompt_lookup", *SHORT, "--json").out)
    theirs = json.loads(cli("generate", "ababab", "--method", "prompt_lookup", *SHORT, "--json").out)
    [result] = theirs["results"]
    assert [token for one in ours["rounds"] for token in one["added"]] == result["token_ids"]
    assert ours["passes"] == result["target_passes"] == len(ours["rounds"]) and ours["tokens"] == result["tokens"]
    assert ours["tokens_per_cost"] == pytest.approx(ours["tokens"] / sum(one["cost"] for one in ours["rounds"]))
    assert all(len(one["tokens"]) == len(one["parents"]) == len(one["chances"]) for one in ours["rounds"])


def test_sampled_it_has_generates_key(cli):
    flags = ("--temperature", 0.9, "--seed", 4, "--method", "prompt_lookup", *SHORT, "--json")
    ours, theirs = (json.loads(cli(command, "ababab", *flags).out) for command in ("explain", "generate"))
    assert [token for one in ours["rounds"] for token in one["added"]] == theirs["results"][0]["token_ids"]


def test_a_lossy_text_is_called_so(cli):
    flags = ("hello", "--method", "prompt_lookup", "--verifier", "typical", *SHORT)
    result = cli("explain", *flags, "--temperature", 1)
    assert result.out.splitlines()[-1] == "lossy: the text may differ from the target's own text"
    result = cli("explain", *flags, "--json", "--min-p", 0.1)
    document = json.loads(result.out)
    assert document["guarantee"] == "distribution" and document["settings"]["min_p"] == 0.1
    assert "the text is the greedy one" in " ".join(result.err.split())


def test_rounds_are_told(cli, tmp_path):
    picture = tmp_path / "run.png"
    result = cli("explain", "ababab", "--method", "token_recycling", *SHORT, "--out", picture)
    assert result.code == 0, result.err
    assert "accepted; cost of the pass" in result.out and "└ " in result.out
    assert "24 tokens in" in result.out and "times the speed of plain decoding" in result.out
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG") and struct.unpack(">I", content[16:20])[0] > 500
    assert "with the tree of step" in " ".join(result.err.split())


def test_plain_rounds_share_a_line(cli):
    lines = cli("explain", "hello", "--method", "autoregressive", *SHORT).out.splitlines()
    assert lines[0].split()[0] == "1-24" and "no draft" in lines[0] and len(lines) == 3


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--out", "run.pdf"], "--out must end in .png, not run.pdf"),
        (["--raw", "--system", "be brief"], "--system needs the chat template, and --raw leaves the template out"),
        (["--round", 2], "--round selects the tree that --out draws; add --out"),
        (["--method", "nothing"], '"nothing"'),
        (["--method", "spec_reason"], "spec_reason"),
        (["--max-new-tokens", 100000], "over the model's capacity"),
    ],
)
def test_bad_input(refused, flags, words):
    assert words in refused("explain", "hello", *flags)


def test_a_round_that_there_is_not(refused, tmp_path):
    flags = "--method", "autoregressive", *SHORT, "--out", tmp_path / "run.png", "--round", 99
    assert "--round must be at most 24" in refused("explain", "hello", *flags)
    assert not list(tmp_path.iterdir())


def test_a_prompt_is_needed(refused):
    assert "PROMPT is missing" in refused("explain")
