"""Every option of a method, on the command line: --set, --tree, --draft-stop, --verifier, --source, --datastore."""

from __future__ import annotations

import functools
import json

import jax
import pytest

import specjax
from specjax import decoders, drafters
from specjax.catalog.inputs import missing_inputs
from specjax.cli.options.drafter_flags import DraftFiles, FlagValue, read_method_options, resolve_defaults
from specjax.cli.options.groups import DraftOptions
from specjax.cli.runs.session import Session
from specjax.trees import parse, parse_paths

SHORT = ("--max-new-tokens", 8)
PLAN = {
    "choices": [
        {"side": "schedule", "paths": [[0], [1], [0, 0]], "spec": "2x1"},
        {"side": "roofline", "paths": [[0], [0, 0], [0, 0, 0]], "spec": "1x1x1"},
    ]
}


@pytest.fixture
def generate(cli):
    """`generate(*flags)` gives the JSON document of a short run beside plain decoding."""

    def run(*flags, beside=("--compare",)):
        result = cli("generate", "abcabcabc", *SHORT, *beside, "--json", *flags)
        assert result.code == 0, result.err
        return json.loads(result.out)

    return run


@pytest.fixture
def store(cli, tmp_path):
    (tmp_path / "corpus.txt").write_text("abcabcabd. abc once more, and abcabc again")
    assert cli("datastore", "build", tmp_path / "corpus.txt", "--out", tmp_path / "store").code == 0
    return tmp_path / "store"


def test_a_draft_model_drafts_as_deep_as_pays_unless_it_is_said(generate):
    assert len(generate("--draft", "draft")["acceptance_by_depth"]) == 7
    assert len(generate("--draft", "draft", "--num-draft-tokens", 3)["acceptance_by_depth"]) == 3
    model = DraftFiles("model")
    resolve = lambda method=None, files=model, **flags: resolve_defaults(method, files, DraftOptions(**flags))
    method, controller, named = resolve()
    assert (method, controller, named["--num-draft-tokens"]) == ("two_model", "goodput", 7)
    for flags in (
        {"method": "two_model"}, {"tree": "2x1"}, {"settings": ["num_tokens=2"]}, {"files": DraftFiles()},
        {"files": DraftFiles("head", "eagle")}, {"controller": "fixed:2"},
    ):  # fmt: skip
        _, controller, named = resolve(**flags)
        assert controller == flags.get("controller") and named["--num-draft-tokens"] is None


@pytest.mark.parametrize(
    ("method", "settings", "depth"),
    [
        ("jacobi", ("window=3", "initial=repeat", "stride=2"), 3),
        ("two_model", ("lag=3", "num_tokens=2", "stop=confidence:0.1"), 2),
        ("hierarchical", ("inner=suffix:2,min_match=1", "min_tokens=2"), 4),
        ("suffix", ("num_tokens=3", "fallback=token_recycling:4"), 3),
        ("triforce", ("budget=32", "pays_from=0", "min_tokens=2", "num_inner=2"), 4),
        ("rapid", ("score=attention", "num_tokens=3", "budget=40", "chunk=8", "query=8"), 3),
        ("choice", ("several=prompt_lookup:3+suffix", "num_nodes=2", "depths=1,2"), 3),
        ("stand", ("tree=2x1", "read_prompt=no"), 2),
    ],
)
def test_options_are_set(generate, method, settings, depth):
    """The statistics have as many depths as the draft can have."""
    draft = ("--draft", "draft") if "draft" in specjax.METHODS[method].needs else ()
    flags = [part for setting in settings for part in ("--set", setting)]
    document = generate("--method", method, *draft, *flags)
    assert document["identical"] is True and len(document["acceptance_by_depth"]) == depth


@pytest.mark.parametrize(
    ("tree", "nodes", "depth"),
    [
        ("sequoia:.6,.2,.1:7x2", 6, 2),
        ("top:medusa:.6,.2/.5,.1:3", 3, 2),
        ("plan.json", 3, 2),
        ("plan.json:roofline", 3, 3),
        ("paths.json", 4, 2),
    ],
)
def test_trees(generate, tmp_path, monkeypatch, tree, nodes, depth):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    (tmp_path / "paths.json").write_text("[[0], [1], [0, 0], [1, 0]]")
    document = generate("--draft", "draft", "--tree", tree)
    assert document["identical"] is True and len(document["acceptance_by_depth"]) == depth
    assert parse(tree).num_nodes == nodes + 1 and document["drafted"] <= nodes * document["target_passes"]
    assert document["drafted"] > (nodes - 1) * (document["target_passes"] - 2)  # all but where the text ends


def test_trees_of_methods_without_a_draft_model(generate):
    document = generate("--method", "token_recycling", "--tree", "2x1x1")
    assert document["identical"] is True and len(document["acceptance_by_depth"]) == 3
    document = generate("--method", "swift", "--tree", "2x1", "--set", "layers=0", "--set", "stop=0")
    assert document["identical"] is True and len(document["acceptance_by_depth"]) == 2


def test_rules_with_parameters(generate):
    verified = functools.partial(generate, "--draft", "draft", "--verifier", beside=())
    sampled = ("--temperature", 1, "--tree")
    assert verified("multipath_block:3", *sampled, "paths:3x2")["guarantee"] == "distribution"
    assert verified("sequoia", *sampled, "uniform:2x2")["guarantee"] == "distribution"
    sharp = verified("typical:epsilon=1.5,delta=1000")
    assert sharp["guarantee"] == "distribution" and sharp["accepted"] == 0  # no token passes such a threshold
    bild = verified("rollback:sample=yes", "--temperature", 1, "--tree", "bild:4,fallback=0.3")
    assert bild["guarantee"] == "lossy" and bild["drafted"] <= 4 * bild["target_passes"]
    assert verified("rollback:99", "--temperature", 1)["accepted"] > 0


def test_a_text_to_be_edited(generate, refused, tmp_path):
    (tmp_path / "draft.txt").write_text("a text to be edited, quite long")
    report = generate("--method", "input_guided", "--source", tmp_path / "draft.txt", "--set", "num_tokens=4")
    assert report["identical"] is True and report["drafted"] >= 4  # the first round copies its beginning
    run = ("generate", "abc", *SHORT)
    assert "--source does not apply to method suffix" in refused(*run, "--method", "suffix", "--source", "x")
    assert "cannot read nowhere.txt" in refused(*run, "--method", "input_guided", "--source", "nowhere.txt")
    (tmp_path / "empty.txt").write_text(" \n")
    assert "is empty" in refused(*run, "--method", "input_guided", "--source", tmp_path / "empty.txt")
    words = refused(*run, "--method", "input_guided", "--source", tmp_path / "draft.txt", "--batch-size", 2)
    assert "remove --batch-size 2" in words


@pytest.mark.parametrize(
    ("method", "flags"),
    [
        ("aded", ("--set", "buckets=64")),
        ("rasd", ("--draft", "draft", "--tree", "top:2x1")),
        ("rasd", ("--draft", "draft", "--tree", "top:2x1", "--set", "retrieval=rest:4,depth=2")),
    ],
)
def test_corpora(generate, store, method, flags):
    document = generate("--raw", "--method", method, "--datastore", store, *flags)
    assert document["identical"] is True and document["drafted"] > 0 and document["datastore"]["tokens"] > 40


@pytest.mark.exhaustive
def test_a_loop_reads_the_corpus(generate, store):
    """Superposed decoding counts n-grams in the datastore, as in Python. Many drafts begin with its tokens."""
    flags = ("--set", "drafts=200", "--set", "candidates=200", "--temperature", 5)
    document = generate("--raw", "--method", "superposed_decoding", "--datastore", store, *flags, beside=())
    (target, tokenizer), corpus = specjax.load(), specjax.retrieval.datastore.open_datastore(store).to_device()
    options = {"drafts": 200, "candidates": 200, "temperature": 5, "max_new_tokens": SHORT[1], "eos": tokenizer.eos}
    wanted = decoders.superposed(target, [tokenizer.encode("abcabcabc")], corpus=corpus, **options)
    alone = decoders.superposed(target, [tokenizer.encode("abcabcabc")], **options)
    assert document["results"][0]["token_ids"] == wanted.to_lists()[0] != alone.to_lists()[0]


def test_a_corpus_is_what_the_table_starts_with(store):
    opened = specjax.retrieval.datastore.open_datastore(store)
    (text,) = opened.documents()
    assert bytes(t - 3 for t in text.tolist()).decode() == "abcabcabd. abc once more, and abcabc again"
    target, _ = specjax.load()
    drafter = specjax.make_drafter("aded", target, datastore=opened, buckets=64)
    wanted = drafters.corpus_table([text.tolist()], buckets=64)
    assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, (drafter.params, wanted)), strict=True))


def test_drafters_inside_of_others_read_the_corpus(store):
    (target, _), (draft, _) = specjax.load(), specjax.load("draft")
    opened = specjax.retrieval.datastore.open_datastore(store)
    index = opened.to_device().tokens
    drafter = specjax.make_drafter("choice", target, several="suffix:2+rest", num_nodes=3, datastore=opened)
    of_suffix, of_rest = drafter.params.several
    assert (of_suffix.corpus.tokens == index).all() and (of_rest.tokens == index).all() and drafter.num_nodes == 4
    drafter = specjax.make_drafter("hierarchical", target, draft, inner="rest:3,depth=2", datastore=opened)
    assert (drafter.params[1].tokens == index).all()
    drafter = specjax.make_drafter("suffix", target, fallback="rest:3,depth=2", datastore=opened)
    assert (
        sum(leaf.shape == index.shape and bool((leaf == index).all()) for leaf in jax.tree.leaves(drafter.params)) == 2
    )
    drafter = specjax.make_drafter("hierarchical", target, draft, datastore=opened)  # prompt lookup has no use for it
    assert drafter == specjax.make_drafter("hierarchical", target, draft)


def test_several_methods_each_with_its_own(cli, refused, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"category": "qa", "turns": ["abcabcabc"]}\n')
    run = ("bench", tmp_path / "prompts.jsonl", "--max-new-tokens", 6, "--repeats", 1, "--out", tmp_path / "out.json")
    both = ("--method", "jacobi", "--method", "suffix")
    result = cli(*run, *both, "--set", "jacobi.window=2", "--set", "suffix.num_tokens=5", "--json")
    overall = json.loads(result.out)["overall"]
    assert {name: len(entry["acceptance_by_depth"]) for name, entry in overall.items()} == {"jacobi": 2, "suffix": 5}
    assert "write --set jacobi.window=2" in refused(*run, *both, "--set", "window=2")
    words = refused(*run, *both, "--set", "lookahead.window=2")
    assert "lookahead is not a method of this run; choose one of jacobi, suffix" in words
    assert "--set jacobi.window must be a whole number" in refused(*run, *both, "--set", "jacobi.window=x")
    words = refused(*run, *both, "--num-draft-tokens", 3)
    assert "--num-draft-tokens does not apply to method jacobi" in words


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--stop", "confidence:0.4"],
            "--stop is no flag; write --draft-stop confidence:0.4",
        ),
        (["--stop", "###"], "--stop is no flag; stop strings are --stop-string"),
        (["--method", "pearl"], "method pearl needs a draft model; add --draft MODEL"),
        (["--method", "nar_block"], "cannot load the inputs of nar_block; call specjax.drafters.nar_block in Python"),
        (["--set", "group"], '--set must be NAME=VALUE, such as group=3, not "group"'),
        (["--set", "=3"], "--set must be NAME=VALUE"),
        (["--set", "windows=3"], 'method auto has no option "windows"; its options are widths, num_recycled, head'),
        (["--method", "autoregressive", "--set", "x=3"], "it has no options; remove the flag"),
        (["--method", "jacobi", "--set", "window=wide"], '--set window must be a whole number, not "wide"'),
        (["--method", "jacobi", "--set", "window=0"], "--set window must be at least 1, not 0"),
        (["--method", "jacobi", "--set", "initial=left"], "--set initial must be one of random, repeat, sample"),
        (["--method", "jacobi", "--set", "window=2", "--set", "window=3"], "--set window sets window already"),
        (["--method", "jacobi", "--set", "ids=1,2,3"], '--set ids must be two whole numbers joined by a comma, not "1'),
        (["--method", "swift", "--set", "stop=nan"], '--set stop must be a number, not "nan"'),
        (["--method", "auto", "--set", "num_recycled=0"], "--set num_recycled: num_nodes must be from 1 to 80, not 0"),
        (["--set", "num_recycled=0", "--set", "widths=1,2"], "--method auto: num_nodes must be from 1 to 80, not 0"),
        (["--method", "stand", "--set", "read_prompt=maybe"], '--set read_prompt must be yes or no, not "maybe"'),
        (["--method", "suffix", "--set", "fallback=two_model"], 'two_model" cannot be used inside another drafter'),
        (["--method", "suffix", "--set", "fallback=jacobi"], "--set fallback must be a drafter without randomness"),
        (["--method", "suffix", "--set", "fallback=rest"], "rest needs a datastore"),
        (["--method", "suffix", "--set", "fallback=aded:depth=x"], "--set fallback: depth must be a whole number"),
        (["--method", "suffix", "--set", "num_tokens=2", "--num-draft-tokens", "3"], "--num-draft-tokens sets"),
        (["--method", "suffix", "--tree", "2x1"], "--tree does not apply to method suffix, only to rasd"),
        (["--method", "suffix", "--tree", "2x1"], "others; remove it, or choose one with --method"),
        (["--draft", "draft", "--tree", "2x1", "--num-draft-tokens", "3"], "both set the size of the draft"),
        (
            ["--draft", "draft", "--tree", "2x1", "--set", "num_tokens=3"],
            "--tree and --set num_tokens both set the size",
        ),
        (
            ["--draft", "draft", "--set", "tree=2x1", "--num-draft-tokens", "3"],
            "--set tree and --num-draft-tokens both",
        ),
        (["--draft", "draft", "--num-draft-tokens", "1000000000"], "--num-draft-tokens must be at most 4096, not 1000"),
        (["--draft", "draft", "--tree", "nowhere.json"], "--tree: cannot read nowhere.json"),
        (["--draft", "draft", "--tree", "sequoia:.9,.9:8"], "--tree: acceptance must be probabilities"),
        (["--draft", "draft", "--tree", "[[0, 0]]"], "--tree: the tree has the path [0, 0] without [0]; add it"),
        (["--draft", "draft", "--method", "rasd", "--tree", "2x1"], "--tree must be grown without randomness"),
        (
            ["--draft", "draft", "--draft-stop", "trained:0.3"],
            "trained:0.3 needs a trained acceptance head, and two_model has none; add --set acceptance=FOLDER",
        ),
        (["--verifier", "typical:high"], '--verifier: epsilon must be a number, not "high"'),
        (["--verifier", "typical:nan"], '--verifier: epsilon must be a number, not "nan"'),
        (
            ["--verifier", "lantern"],
            '--verifier: rule "lantern" takes arrays; create it with specjax.verifiers.lantern in',
        ),
        (["--verifier", "judge"], '--verifier: "judge" lacks file, file of the judge head\'s weight and bias'),
        (
            ["--verifier", "judge:no.pt"],
            '--verifier: file: there is no file "no.pt" of a judge\'s weight and bias; `sp',
        ),
        (["--verifier", "standard:3"], '--verifier: rule "standard" takes no parameters'),
        (["--draft", "draft", "--tree", "9" * 5000 + "x2"], "--tree: "),
        (["--controller", "fixed:" + "9" * 5000], "--controller: "),
        (["--method", "jacobi", "--set", "window=2147483648"], "--set window must be a whole number below 2**31"),
        (["--method", "choice", "--set", "depths=1," + "9" * 20], "--set depths must be"),
        (["--controller", "fixed:9999999999"], "is not a controller"),
        (["--costs", "deep.json"], "--costs: deep.json is not valid JSON (nested too deep)"),
    ],
)
def test_bad_flags(refused, tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep.json").write_text(100_000 * "[")
    assert words in refused("generate", "abc", *SHORT, *flags)


def test_a_plan_that_drafts_nothing(refused, tmp_path):
    plan = {"choices": [{"side": "schedule", "paths": [], "spec": None}]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    run = ("generate", "abc", *SHORT, "--draft", "draft", "--tree")
    assert "the schedule choice drafts no tokens; leave the tree out" in refused(*run, tmp_path / "plan.json")
    assert 'has no choice "clock"' in refused(*run, f"{tmp_path / 'plan.json'}:clock")
    (tmp_path / "plan.json").write_text('{"widths": []}')
    assert "contains neither rank paths nor a plan" in refused(*run, tmp_path / "plan.json")


@pytest.mark.parametrize(
    "name", [name for name, row in specjax.METHODS.items() if row.kind == "drafter" and not missing_inputs(row)]
)
def test_every_option_can_be_written(name):
    """A value of each kind is read as what the factory takes."""
    row = specjax.METHODS[name]
    texts = {
        "N": "3",
        "X": "0.5",
        "yes|no": "yes",
        "N,N,...": "1,3",
        "N,N": "1,3",
        "TREE": "2x1",
        "SHAPE": "2x1",
        "NAME": "suffix",
        "X,X,.../X,...": ".6,.2/.4",
    }
    values = {
        "N": 3,
        "X": 0.5,
        "yes|no": True,
        "N,N,...": (1, 3),
        "N,N": (1, 3),
        "X,X,.../X,...": ((0.6, 0.2), (0.4,)),
        "TREE": parse("2x1"),
        "SHAPE": parse_paths("2x1"),
    }
    for option in row.options:
        if option.form == "FOLDER":  # read where it is written: test_heads.py
            continue
        text = texts.get(option.form, option.type[-1] if isinstance(option.type, tuple) else "confidence:0.5")
        text = "unified:2" if option.type == "depth" else text  # a name of another table
        flags = [f"{option.name}={text}"]
        draft = "draft" if row.needs & {"draft", "head", "denoiser"} else None
        datastore = "store" if "datastore" in row.needs else None
        head = name if "head" in row.needs else None
        files = DraftFiles(draft, head, datastore)
        options = read_method_options([name], files, DraftOptions(settings=flags), {}).options[name]
        assert set(options) == {option.name} and isinstance(options[option.name], FlagValue)
        assert options[option.name].flag == f"--set {option.name}"
        assert options[option.name].value == values.get(option.form, options[option.name].value)


def test_a_session_makes_a_drafter_with_the_options_of_the_machine_beneath():
    target, tokenizer = specjax.load()
    session = Session(target, tokenizer, None, "float32", 0.0)
    assert session.drafter("lookahead") is specjax.make_drafter("lookahead", target, ngram=4, window=3, guesses=2)
    flags = DraftOptions(settings=["window=5"])
    options = read_method_options(["lookahead"], DraftFiles(), flags, {})
    wanted = specjax.make_drafter("lookahead", target, ngram=4, window=5, guesses=2)
    assert session.drafter("lookahead", options) == wanted
