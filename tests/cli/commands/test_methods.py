"""`specjax methods`."""

from __future__ import annotations

import json
import pathlib
import re

import numpy as np

import specjax
from specjax import adaptive, controllers, trees, verifiers
from specjax.catalog.inputs import missing_inputs
from specjax.cli.options import completion, drafter_flags
from specjax.cli.runs import selection, session
from specjax.cli.runs.collaboration import checks
from specjax.cli.runs.loops import infilling


def test_all_methods_with_what_they_are(cli):
    listed = {row["name"]: row for row in json.loads(cli("methods", "--json").out)}
    assert list(listed) == list(specjax.METHODS)
    assert listed["pearl"]["kind"] == "decoder" and listed["two_model"]["needs"] == ["draft"]
    assert {"name": "lag", "form": "N", "required": False, "default": 2}.items() <= listed["two_model"]["options"][
        3
    ].items()
    out = cli("methods").out
    assert all(word in out for word in ("prompt_lookup", "distribution", "own decoding loop", "any_subset"))


def test_the_options_of_one(cli, refused):
    out = cli("methods", "jacobi").out
    assert all(word in out for word in ("window", "random|repeat|sample", "stride", "arXiv 2410.01699"))
    assert json.loads(cli("methods", "pearl_in_one_program", "--json").out)["options"][0]["required"] is True
    assert "specjax.decoders.superposed" in cli("methods", "superposed_decoding").out
    assert "on CPU: ngram=4, window=3, guesses=2" in cli("methods", "lookahead").out
    words = refused("methods", "jacobi", "--rules", "--all")
    assert "--rules and --all list values that apply to all methods; leave METHOD jacobi out" in words
    assert 'METHOD: unknown method "minerva"; choose one of auto' in refused("methods", "minerva")


def test_commands_are_named_for_methods_that_they_run(cli, refused, monkeypatch, tmp_path):
    """Every command passes all checks up to the loading of the models, and other methods have their reason."""

    def stop(*arguments, **options):
        raise specjax.UsageError("the models are loaded")

    loaders = ("load", specjax), ("load_denoiser", specjax), ("open_datastore", session), ("load_any_order", infilling)
    for name, module in loaders:
        monkeypatch.setattr(module, name, stop)
    adaptive.save_probes(tmp_path / "probes.safetensors", adaptive.Probes(np.zeros((1, 4)), np.zeros(1)))
    adaptive.save_routers(tmp_path / "routers.safetensors", adaptive.Routers(np.zeros((1, 4)), np.zeros(1)))
    low_rank = adaptive.Corrections(np.zeros((1, 2, 4)), np.zeros((1, 4, 2)))
    adaptive.save_corrections(tmp_path / "corrections.safetensors", low_rank)
    listed = json.loads(cli("methods", "--json").out)
    assert [row["name"] for row in listed] == list(specjax.METHODS)
    for row in listed:
        name, command, method = row["name"], row["command"], specjax.METHODS[row["name"]]
        assert bool(command) == any(name in completion.section(kind) for kind in completion.KINDS), name
        if command is None:
            assert missing_inputs(method), name
            continue
        head = method.head_kind if "head" in method.needs else None
        for module in (drafter_flags, selection, checks):
            monkeypatch.setattr(module, "find_head_kind", lambda *arguments, head=head: head)
        words = re.sub(
            r"(probes|routers|corrections)=FILE", lambda match: f"{match[1]}={tmp_path / match[1]}.safetensors", command
        )
        words = words.replace("=N", "=1").replace("=X,X,.../X,...", "=.6,.2").replace("MODEL", "draft")
        assert "the models are loaded" in refused(*words.split()[1:]), command
    without = {name for name, row in specjax.METHODS.items() if missing_inputs(row)}
    assert without >= {"continuous", "nar_block"} and not without & {"pearl", "lud", "first", "dynamax", "lora_drop"}
    assert "specjax generate PROMPT --method anchored --draft MODEL" in cli("methods", "anchored").out
    assert "the command line cannot provide its continuous" in cli("methods", "continuous").out


def test_trees_controllers_and_sampling(cli):
    assert [row["form"] for row in json.loads(cli("methods", "--controllers", "--json").out)] == list(controllers.FORMS)
    assert [row["form"] for row in json.loads(cli("methods", "--sampling", "--json").out)] == ["speculative", "coupled"]
    both = json.loads(cli("methods", "--trees", "--json").out)
    assert {name: [row["form"] for row in rows] for name, rows in both.items()} == {
        "trees": list(trees.FORMS), "stops": list(trees.stops.FORMS)
    }  # fmt: skip
    out = cli("methods", "--trees", "--controllers", "--sampling").out
    assert all(word in out for word in ("sequoia:", "plan --json", "confidence:P", "goodput", "same noise"))
    everything = json.loads(cli("methods", "--all", "--json").out)
    assert list(everything) == ["methods", "rules", "trees", "stops", "controllers", "sampling"]


def test_rules_say_their_parameters(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out = " ".join(cli("methods", "--rules").out.split())
    assert "rapid:ETA,ALPHA,RESIDUAL,SAMPLE, judge:FILE,THRESHOLD." in out
    assert "multipath_block:PATHS, typical:EPSILON,DELTA, rollback:ALPHA,SAMPLE,KEEP_ARGMAX" in out
    assert (
        "In Python only, where they take arrays (specjax.verifiers): lantern, lantern++, grouped, grouped_static" in out
    )


def test_presets_of_lossy_rules(cli, refused, monkeypatch):
    """The flags of each preset are valid, and its calls build a lossy rule."""

    def stop(*arguments, **options):
        raise specjax.UsageError("the models are loaded")

    monkeypatch.setattr(specjax, "load", stop)
    monkeypatch.setenv("COLUMNS", "300")
    out, rows = cli("methods", "--rules").out, json.loads(cli("methods", "--rules", "--json").out)
    presets = {row["name"]: row["presets"] for row in rows if row["presets"]}
    assert set(presets) == {"rollback", "lantern", "lantern++", "grouped"}
    for preset in (preset for rule in presets.values() for preset in rule):
        assert preset in out
        _, _, setting = preset.partition(": ")
        if setting.startswith("--"):
            assert "the models are loaded" in refused("generate", "x", "--draft", "draft", *setting.split()), preset
        else:
            call, nearest = setting.partition(", with")[0], np.zeros((3, 2), np.int32)
            assert eval(call, {"verifiers": verifiers, "nearest": nearest}).guarantee == "lossy"


def test_rules_and_how_far_the_lossy_ones_are_from_the_target(cli, monkeypatch):
    """Every acceptance rule of the package, and none that is lossy without its distance."""
    monkeypatch.setenv("COLUMNS", "200")
    not_rules = {"greedy", "exact_verifier", "init_judge", "nearest_codes", "rules_with_arrays"}
    public = {name for name in verifiers.__all__ if name.islower()} - not_rules
    listed = {entry["name"]: entry for entry in json.loads(cli("methods", "--rules", "--json").out)}
    assert public <= {name.partition("(")[0] for name in listed} and "lantern++" in listed
    lossy = {name for name, entry in listed.items() if entry["guarantee"] == "lossy"}
    of_text = {"typical", "rollback", "judge", "grouped", "grouped_static", "top_beta", "rapid"}
    assert lossy == of_text | {"lantern", "lantern++"}  # the last two are of images
    table = cli("methods", "--rules").out
    for name, entry in listed.items():
        row = next(line for line in table.splitlines() if name in line.split())
        assert (entry["distance"] is not None and entry["setting"] != "") == (name in lossy)
        assert (f"lossy (TV {entry['distance']:g})" in row) if name in lossy else ("TV" not in row)
    page = (pathlib.Path(__file__).parents[3] / "docs/rules.md").read_text()
    row = next(line for line in page.splitlines() if "| **lossy** |" in line)
    assert all(f"`{name}`" in row and f"{listed[name]['distance']:g}" in row for name in lossy)
