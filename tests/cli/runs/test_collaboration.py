"""`specjax generate` of texts that several models or samples write."""

import dataclasses
import inspect
import json
import sys

import jax
import numpy as np
import pytest
from tiers import exhaustive

import specjax
from specjax.bench import measure
from specjax.catalog import of_kind
from specjax.catalog.inputs import missing_inputs
from specjax.cli.options.groups import GenerateSampling
from specjax.cli.options.processing import ProcessingOptions
from specjax.cli.runs.collaboration import checks
from specjax.cli.runs.collaboration.run import Collaboration
from specjax.cli.runs.collaboration.words import word_arguments
from specjax.collaborate import TextResult
from specjax.collaborate.results import mark_failures
from specjax.models.loading.decision_heads import save_judge

SHORT = ("--max-new-tokens", 12)
SERVED = [name for name, row in of_kind("collaboration").items() if not missing_inputs(row)]


def test_json_says_who_wrote_which_token(cli):
    options = ("--method", "entropy_adaptive", "--draft", "draft", "--set", "tau=0.3", "--set", "min_tokens=2", *SHORT)
    document = json.loads(cli("generate", "hello", *options, "--json").out)
    (entry,) = document["results"]
    target, tokenizer = specjax.load()
    draft, _ = specjax.load("draft")
    prompts = [tokenizer.chat("hello")]
    direct = specjax.collaborate.methods.entropy_adaptive(
        draft, target, prompts, key=measure.row_keys(0, [0]), max_new_tokens=12, eos=2, tau=0.3, min_tokens=2
    )
    count = int(direct.lengths[0])
    assert entry["token_ids"] == direct.to_lists()[0] and entry["authors"] == direct.authors[0, :count].tolist()
    assert {*entry["authors"]} == {0, 1}
    assert document["passes"] == direct.passes[0].tolist() == entry["passes"]
    assert document["share_of_target"] == float(direct.share(1)[0]) and document["left"] == 0
    assert document["options"] == {"tau": 0.3, "min_tokens": 2} and document["guarantee"] == "lossy"


def test_the_tuned_model_of_a_proxy(cli, refused):
    """The command gives what the call gives, with the cost of all three models; another vocabulary is refused."""
    command = ("generate", "hello", "--method", "fs_gen", "--draft", "draft", "--set", "form=proxy", *SHORT)
    gate = ("--set", "gate=threshold", "--set", "threshold=0.95")
    result = cli(*command, *gate, "--set", "tuned=target", "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    (target, tokenizer), (draft, _) = specjax.load(), specjax.load("draft")
    direct = specjax.collaborate.methods.fs_gen(
        draft, target, [tokenizer.chat("hello")], key=measure.row_keys(0, [0]), max_new_tokens=12, eos=2,
        form="proxy", tuned=target, gate="threshold", threshold=0.95,
    )  # fmt: skip
    (entry,) = document["results"]
    assert entry["token_ids"] == direct.to_lists()[0] and document["passes"] == direct.passes[0].tolist()
    assert {*entry["authors"]} == {1, 2} and len(document["models"]) == 3 and document["options"]["tuned"] == "target"
    assert document["share_of_target"] == float(direct.share(1)[0])
    assert "--set tuned: its vocabulary differs from the target's" in refused(*command, "--set", "tuned=odd")
    words = 'tuned is the tuned small model of form="proxy", not of "large"; leave it out'
    assert words in refused(*command[:-3], "form=large", *SHORT, "--set", "tuned=target")


@pytest.mark.parametrize("name", ["spec_reason", "momentum"])
def test_a_table_of_costs(cli, name):
    draft = ("--draft", "draft") if of_kind("collaboration")[name].needs else ()
    out = cli("generate", "hello", "--method", name, *draft, *SHORT).out
    assert f"{name} (guarantee: lossy)" in out and "passes of tiny" in out and "compilation included" in out
    assert ("written by the target" in out) == ("mean score" in out) == ("steps by target" in out) == bool(draft)
    assert "greedy" in out


def test_the_target_alone_beside_it(cli):
    document = json.loads(
        cli("generate", "hello", "--method", "first_finish", "--set", "samples=2", *SHORT, "--compare", "--json").out
    )
    assert document["baseline_tokens_per_second"] > 0 and not document["seconds_include_compilation"]


TEMPERATURES = {
    "cntp": 0.8, "first_finish": 1.0, "anchored": 1.0, "power_smc": 0.25, "reward_smc": 1.0, "a_star": 1.0
}  # fmt: skip
"""Defaults of methods that sample; that of power_smc is 1 / alpha. The others are greedy."""


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("temperature", [None, 0.0, 0.5])
def test_a_temperature_is_obeyed_or_refused_and_recorded(
    monkeypatch, cli, refused, reward_folder, name, temperature
):  # fmt: skip
    """The function gets what the flag says; without it, its own default; what it used is in the document."""
    row, calls = of_kind("collaboration")[name], []

    def spy(*models, **arguments):
        calls.append(arguments)
        count = len(models) + bool({"reward", "router"} & arguments.keys())
        one, each = np.ones((1, 1), np.int32), np.ones((1, count), np.int32)
        return TextResult(7 * one, one[0], one[0] < 0, (), authors=one - 1, passes=each, read=each)

    spy.__signature__ = inspect.signature(row.make)
    monkeypatch.setattr(sys.modules[row.module], name, spy)
    draft = ("--draft", "draft") if row.needs & {"draft", "safe"} else ()
    flag = () if temperature is None else ("--temperature", temperature)
    scorer = next((word for word in ("router", "reward") if row.option(word)), None)
    model = ("--set", f"{scorer}={reward_folder}") if scorer else ()
    command = ("generate", "hello", "--method", name, *draft, *model, *flag, *SHORT, "--json")
    sampled = dict.fromkeys(("cntp", "first_finish", "anchored", "reward_smc", "a_star"), 0.0)
    wrong = ({"momentum": 0.5, "power_smc": temperature} | sampled).get(name)
    if temperature is not None and wrong == temperature:
        assert "--temperature" in refused(*command) and not calls
        return
    used = json.loads(cli(*command).out)["settings"]["temperature"]
    assert used == (TEMPERATURES.get(name, 0.0) if temperature is None else temperature)
    assert [arguments.get("temperature") for arguments in calls] == [temperature]


def test_the_nucleus_of_a_method_is_used_and_a_flag_replaces_it():
    used = lambda **flags: checks.check_options("cntp", {}, GenerateSampling(**flags), ProcessingOptions())
    assert (used().top_p, used().temperature) == (0.9, 0.8) and used(top_p=1.0).top_p == 1.0
    assert checks.describe_sampling(used(min_p=0.1)) == "temperature 0.8, top-p 0.9, min-p 0.1"


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("cntp", ("--set", "n_max=0"), "--set n_max must be at least n_min, 1, not 0"),
        ("momentum", ("--top-k", 3), "--top-k would change the token that this method chooses"),
        ("momentum", ("--ban", "5", "--regex", "a+"), "--ban and --regex would change the token"),
        ("anchored", ("--draft", "draft", "--logit-bias", "5=2"), "--logit-bias would change a distribution"),
        ("power_smc", ("--top-p", 0.9), "--top-p leaves no mass where p^alpha has some"),
        ("power_smc", ("--set", "alpha=0.5"), "--set alpha must be at least 1, not 0.5"),
        ("fs_gen", ("--draft", "draft", "--set", "form=proxy"), '--set tuned=FOLDER is needed for form="proxy"'),
        ("spec_reason", ("--draft", "draft", "--set", "max_step_tokens=0"), "--set max_step_tokens must be at least 1"),
        ("foreal", ("--draft", "draft", "--set", "p=1.5"), "--set p must be from 0 to 1, not 1.5"),
        ("entropy_adaptive", ("--draft", "draft", "--set", "window=0"), "--set window must be at least 1"),
        ("cntp", ("--checkpoint", "gs://bucket/texts"), "choose another one"),
        ("cntp", ("--top-p", 0), "--top-p must be above 0"),
    ],
)
def test_refusals_come_before_a_model_is_loaded(monkeypatch, refused, name, flags, words):
    def load(*arguments, **options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(specjax, "load", load, raising=False)
    assert words in refused("generate", "hello", "--method", name, *flags, *SHORT)


def test_the_log_is_in_the_document(cli):
    command = ("generate", "hello", "--method", "spec_reason", "--draft", "draft", "--set", "threshold=0.5")
    command += ("--set", "steps=a|\\n", "--max-new-tokens", 24)
    document = json.loads(cli(*command, "--json").out)
    (entry,) = document["results"]
    steps = entry["log"]["logged_steps"]
    assert len(steps) == entry["log"]["steps"] and sum(step["tokens"] for step in steps) == entry["tokens"]
    assert all(step["author"] == (step["score"] < 0.5) for step in steps)
    assert document["log"]["steps"] == entry["log"]["steps"] and document["log"]["mean_score"] is not None


def test_words_of_a_file_judge_the_steps(monkeypatch, cli, refused, tmp_path):
    path, calls = tmp_path / "judge.txt", []
    path.write_text("Is it true?\n---\nIts worth is ")
    _, tokenizer = specjax.load()
    ids = tokenizer.encode

    def spy(*models, **arguments):
        calls.append(arguments)
        raise specjax.UsageError("that is all")

    spy.__signature__ = inspect.signature(of_kind("collaboration")["spec_reason"].make)
    monkeypatch.setattr(sys.modules[of_kind("collaboration")["spec_reason"].module], "spec_reason", spy)
    command = ("generate", "hello", "--method", "spec_reason", "--draft", "draft", *SHORT)
    words = ("--set", f"judging={path}", "--set", "steps=\\n|;", "--set", "answer=\\boxed{|Answer:")
    assert "that is all" in refused(*command, *words, "--set", "drafter=two_model:num_tokens=3")
    (arguments,) = calls
    assert arguments["judging"] == [1, *ids("Is it true?"), 1, *ids("Its worth is ")]
    assert arguments["digits"] == [ids(str(digit))[0] for digit in range(10)]
    counter, end = arguments["answer"], arguments["segmenter"].following
    assert counter.completed.max() == 1 and counter.following.shape[0] == 1 + len("boxed{answer:") + 2 - 1
    assert [int(end[0, ids(letter)[0]]) for letter in ("\n", ";", "n")] == [len(end), len(end), 0]
    assert arguments["drafter"].num_nodes == 4
    assert refused(*command, *words, "--raw") and calls[1]["judging"] == ids("\nIs it true?\nIts worth is ")


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("spec_reason", ("--draft", "draft", "--set", "judging=nowhere.txt"), "cannot read nowhere.txt"),
        ("spec_reason", ("--draft", "draft", "--set", "steps="), "--set steps must be texts joined by |"),
        ("cntp", ("--set", "judging=a.txt"), 'cntp has no option "judging"; its options are n_min'),
        ("cntp", ("--set", "drafter=two_model"), "--set drafter=two_model needs a smaller model; add --draft MODEL"),
        ("cntp", ("--set", "drafter=eagle3"), '"eagle3" cannot draft in texts of several models or samples'),
        ("cntp", ("--draft", "draft"), "remove --draft, or add --set drafter=two_model"),
        ("momentum", ("--set", "drafter=two_model"), 'momentum has no option "drafter"'),
    ],
)
def test_words_that_do_not_fit_are_refused_before_a_model_is_loaded(monkeypatch, refused, name, flags, words):
    monkeypatch.setattr(specjax, "load", lambda *arguments, **options: pytest.fail("loaded"), raising=False)
    assert words in refused("generate", "hello", "--method", name, *flags, *SHORT)


@pytest.mark.parametrize(
    ("name", "flags"),
    [("first_finish", ("--set", "samples=2")), exhaustive("spec_reason", ("--draft", "draft"))],
)
def test_a_drafter_inside_changes_no_greedy_text(cli, name, flags):
    command = ("generate", "hello hello", "--method", name, *flags, "--json", "--max-new-tokens", 20)
    command += ("--set", "threshold=9") if name == "spec_reason" else ("--temperature", 0.01)
    plain, inside = (json.loads(cli(*command, *more).out) for more in ((), ("--set", "drafter=prompt_lookup")))
    assert inside["results"][0]["token_ids"] == plain["results"][0]["token_ids"]
    assert inside["options"]["drafter"] == "prompt_lookup" and inside["tokens_read"] != plain["tokens_read"]


def test_a_prompt_that_fails_is_reported_and_the_others_have_their_texts(monkeypatch, cli, prompts):
    """A failure costs no other prompt its text, in a batch with others and in a batch of its own."""
    row = of_kind("collaboration")["cntp"]

    def some_fail(target, rows, **arguments):
        tokens = np.full((len(rows), 4), 70, np.int32)
        count = np.full((len(rows),), 4, np.int32)
        each = np.ones((len(rows), 1), np.int32)
        done = TextResult(tokens, count, count < 0, (), authors=tokens * 0, passes=each, read=each)
        return mark_failures(done, {"no luck": np.array([bytes(i - 3 for i in r[1:4]) == b"two" for r in rows])})

    some_fail.__signature__ = inspect.signature(row.make)
    monkeypatch.setattr(sys.modules[row.module], "cntp", some_fail)
    for size in (1, 3):
        done = cli("generate", "--batch-file", prompts, "--method", "cntp", "--batch-size", size, *SHORT, "--json")
        document = json.loads(done.out)
        assert [entry["finish_reason"] for entry in document["results"]] == ["length", "failed", "length"]
        assert document["errors"] == [{"line": 2, "error": "no luck"}] and document["tokens"] == 8
        assert done.code == 2 and "line 2: no luck" in done.err


def test_a_model_that_returns_no_numbers_fails_by_the_name_of_its_parameter(monkeypatch, cli):
    plain = specjax.load

    def broken(*arguments, **options):
        target, tokenizer = plain(*arguments, **options)
        return dataclasses.replace(target, params=jax.tree.map(lambda x: x * np.nan, target.params)), tokenizer

    monkeypatch.setattr(specjax, "load", broken, raising=False)
    done = cli("generate", "hello", "--method", "momentum", "--max-new-tokens", 2, "--json")
    document = json.loads(done.out)
    assert done.code == 2 and document["results"][0]["finish_reason"] == "failed" and document["tokens"] == 0
    (error,) = [entry["error"] for entry in document["errors"]]
    assert "the model tiny returns NaN or Inf, because its parameter" in error


def test_what_can_be_served():
    assert {"spec_reason", "speculative_thinking", "foreal", "entropy_adaptive", "fs_gen", "anchored"} <= {*SERVED}
    assert {"first_finish", "cntp", "power_smc", "momentum"} <= {*SERVED}


@pytest.mark.parametrize("name", SERVED)
def test_words_are_what_the_method_takes(name):
    """A method that takes words receives the tokens that its function has parameters for."""
    _, tokenizer = specjax.load()
    arguments = word_arguments(name, tokenizer, 259)
    assert set(arguments) <= set(inspect.signature(of_kind("collaboration")[name].make).parameters)
    row = of_kind("collaboration")[name]
    assert ("segmenter" in row.needs) == bool({"segmenter", "punctuation"} & set(arguments))
    assert ("judging" in row.needs) == ("digits" in arguments)


@pytest.mark.parametrize(
    ("name", "word"), [("arbitrage", "router"), exhaustive("a_star", "reward"), exhaustive("reward_smc", "reward")]
)
def test_a_reward_model_of_a_folder(cli, refused, reward_folder, tmp_path, name, word):
    """The texts are those of Python with the same model; its passes are counted beside those of the writers."""
    draft = ("--draft", "draft") if name == "arbitrage" else ()
    options = {"reward_smc": {"particles": 4, "block": 4}, "a_star": {"k": 2, "budget": 4}}.get(name, {})
    flags = [flag for key, value in options.items() for flag in ("--set", f"{key}={value}")]
    command = ("generate", "hello", "--method", name, *draft, *flags, *SHORT, "--json")
    document = json.loads(cli(*command, "--set", f"{word}={reward_folder}").out)
    target, tokenizer = specjax.load()
    models = [specjax.load("draft")[0], target] if draft else [target]
    reward, _ = specjax.collaborate.load_reward(reward_folder)
    segmenter = {} if name == "reward_smc" else {"segmenter": word_arguments(name, tokenizer, 259)["segmenter"]}
    direct = of_kind("collaboration")[name].make(
        *models, [tokenizer.chat("hello")], key=measure.row_keys(0, [0]), max_new_tokens=12, eos=2, **options,
        **segmenter, **{word: reward},
    )  # fmt: skip
    assert document["results"][0]["token_ids"] == direct.to_lists()[0]
    assert document["passes"] == direct.passes[0].tolist() and len(document["models"]) == len(models) + 1
    assert document["options"][word] == str(reward_folder)
    path = tmp_path / "head.safetensors"
    save_judge(path, np.zeros(32, np.float32))
    blank = ("--set", f"{word}={reward_folder}", "--set", f"{word}_head={path}")
    assert json.loads(cli(*command, *blank).out)["options"][f"{word}_head"] == str(path)
    assert f"--set {word}: " in refused(*command, "--set", f"{word}={tmp_path}")
    assert f"--set {word}_link must be one of" in refused(*command, "--set", f"{word}_link=tanh")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "reward_smc"], "--set reward=FOLDER is needed, a model of collaborate.reward_of"),
        (["--method", "arbitrage", "--draft", "draft"], "--set router=FOLDER is needed, a model"),
        (["--method", "a_star", "--set", "reward_link=exp"], "--set reward=FOLDER is needed"),
        (["--method", "spec_reason"], "method spec_reason needs a smaller model; add --draft MODEL"),
        (["--method", "anchored"], "method anchored needs a safe model; add --draft MODEL"),
        (["--method", "cntp", "--draft", "draft"], "method cntp uses one model only; remove --draft"),
        (["--method", "cntp", "--tree", "2x1"], "--tree does not apply to texts that several models"),
        (["--method", "cntp", "--adapt", "calm"], "--adapt does not apply to texts that several models"),
        (["--method", "cntp", "--set", "trials=3"], 'method cntp has no option "trials"'),
        (["--method", "power_smc", "--temperature", "1"], "temperature"),
        (["--method", "fs_gen", "--draft", "odd"], "vocabular"),
    ],
)
def test_what_does_not_fit(refused, arguments, words):
    assert words in refused("generate", "hello", *arguments, *SHORT)


FEW = ("--method", "entropy_adaptive", "--draft", "draft", "--batch-size", 2, *SHORT, "--json")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\ntwo\nthree\n")
    return path


def same(document):
    return {name: value for name, value in document.items() if name not in ("date", "speedup") and "second" not in name}


@pytest.mark.parametrize("compare", [(), ("--compare",)])
def test_a_killed_run_goes_on_behind_its_last_batch(cli, prompts, tmp_path, monkeypatch, compare):
    command = ("generate", "--batch-file", prompts, *FEW, *compare)
    uninterrupted = json.loads(cli(*command).out)
    folder, written, batches = tmp_path / "kept", Collaboration._write, []

    def killed(self, group, log):
        batches.append([row.ordinal for row in group])
        if 2 in batches[-1]:
            raise KeyboardInterrupt
        return written(self, group, log)

    monkeypatch.setattr(Collaboration, "_write", killed)
    ended = cli(*command, "--checkpoint", folder)
    assert ended.code == 130 and json.loads(ended.out)["left"] == 1
    assert [path.name for path in folder.iterdir()] == ["batch-00000.json"]
    batches.clear()
    monkeypatch.setattr(Collaboration, "_write", lambda *arguments: batches.append(0) or written(*arguments))
    again = json.loads(cli(*command, "--checkpoint", folder).out)
    assert same(again) == same(uninterrupted) and len(batches) == 1
    assert bool(again["baseline_tokens_per_second"]) == bool(compare)
    batches.clear()
    assert same(json.loads(cli(*command, "--checkpoint", folder).out)) == same(uninterrupted) and not batches


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--seed", 1), "differs in settings;"),
        (("--logit-bias", "5=3"), "differs in settings;"),
        (("--set", "tau=0.1"), "differs in settings;"),
        (("--raw",), "differs in prompts;"),
        (("--target", "draft"), "differs in target;"),
    ],
)
def test_the_texts_of_another_run_are_not_taken(cli, refused, prompts, tmp_path, flags, words):
    command = ("generate", "--batch-file", prompts, *FEW, "--logit-bias", "5=2", "--checkpoint", tmp_path / "kept")
    assert cli(*command).code == 0
    assert words in refused(*command, *flags)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"run": 3, "batch": 4}', '{"run": {}, "batch": []}'])
def test_damaged_batches_are_refused(cli, refused, prompts, tmp_path, content):
    command = ("generate", "--batch-file", prompts, *FEW, "--checkpoint", tmp_path / "kept")
    assert cli(*command).code == 0
    (tmp_path / "kept" / "batch-00001.json").write_text(content)
    assert "kept" in refused(*command)


@pytest.mark.parametrize("token", [-1, 10**6, "a", None, [5]])
def test_tokens_that_are_none_are_refused(cli, refused, prompts, tmp_path, token):
    command = ("generate", "--batch-file", prompts, *FEW, "--checkpoint", tmp_path / "kept")
    assert cli(*command).code == 0
    path = tmp_path / "kept" / "batch-00001.json"
    document = json.loads(path.read_text())
    document["batch"][0][0][0][0] = token
    path.write_text(json.dumps(document))
    assert "batch 1 in" in refused(*command)


def test_where_batches_cannot_be_kept(refused, tmp_path):
    (tmp_path / "file").write_text("")
    assert "choose another folder" in refused("generate", "hello", *FEW, "--checkpoint", tmp_path / "file")
    assert "choose another one" in refused("generate", "hello", *FEW, "--checkpoint", "gs://bucket/kept")
