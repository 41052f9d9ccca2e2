"""The catalogue: it has every method, imports no JAX, and agrees with the factories."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import re
import subprocess
import sys
from typing import get_args

import pytest

import specjax
from specjax import METHODS, UsageError, adaptive, compression, controllers, decoders, drafters, trees, verifiers
from specjax.catalog import OF_FILES, PARAMETERS, REQUIRED, of_kind, shared
from specjax.catalog.collection import PLACES, find_package, read_rows
from specjax.catalog.forms import controller_forms, stop_forms, tree_forms
from specjax.catalog.method import Guarantee, Kind, Setting
from specjax.catalog.options import read_call
from specjax.catalog.rules import rule_summaries
from specjax.collaborate import methods as collaborations
from specjax.diffusion import drafters as denoising
from specjax.diffusion import methods as procedures
from specjax.diffusion.rules.quota import MEASURES
from specjax.models.heads.kinds import KINDS
from specjax.verifiers.parsing import parse_rule

PAGE = (pathlib.Path(__file__).parents[2] / "docs/methods.md").read_text()
IN_PYTHON = {
    "auto": {"dtype", "platform"},  # the command line reads them from the target and the devices
    "choice": {"dtype", "platform", "bandit"},
    "jacobi": {"forced"},
    "nar_block": {"params"},
    "ppd": {"platform"},
    "triforce": {"inner"},  # the command line builds it from the draft model
}
"""Parameters that no option sets, because no text can express them."""
NEED_OF = {
    "costs": "costs", "index": "datastore", "corpus": "datastore", "source": "source", "fill": "fill", "draft": "draft",
    "head": "head", "max_accepted": None,
    "denoiser": "denoiser", "middle": "draft", "target": None, "vocab_size": None,
}  # fmt: skip
"""The need that provides a parameter of a factory; None: the target provides it."""
NO_METHODS = {
    "account", "composed", "head_schedule", "layer_files", "loop_setup", "making", "middle_chain", "node_classes",
    "noisy_ranks", "settings", "widths", "exits", "fitting", "m2r2", "measure", "optimise", "parsing", "parts",
    "compact_model", "draft_tokens",
}  # fmt: skip
"""Files of the folders that hold parts of several methods, or training."""
OF_EVERY_LOOP = {
    "prompts", "key", "max_new_tokens", "top_k", "top_p", "eos", "capacity", "lengths", "condition", "tokens",
    "missing", "devices", "inputs",
}  # fmt: skip


def signature_of(row) -> dict:
    """Return the defaults of all named parameters: of the public function, and of the factory that the row names."""
    parameters = {}
    if row.kind == "drafter" and row.factory != "head_drafter":
        public = denoising if "denoiser" in row.needs else drafters
        parameters |= inspect.signature(getattr(public, row.name)).parameters
    parameters |= inspect.signature(row.load()).parameters
    several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {
        name: REQUIRED if p.default is p.empty else p.default for name, p in parameters.items() if p.kind not in several
    }


@pytest.mark.parametrize(
    "name", [name for name in METHODS if METHODS[name].kind in ("drafter", "decoder")]
)  # the others: tests/diffusion/test_methods.py, tests/collaborate/test_methods.py
def test_options_and_defaults_are_those_of_the_factory(name):
    row, signature = METHODS[name], signature_of(METHODS[name])
    declared = {option.name: option.default for option in row.options}
    assert len(declared) == len(row.options)
    if row.factory == "head_drafter":  # it reads the defaults from the row
        assert declared.keys() <= signature.keys()
    else:
        assert declared == {option: signature[option] for option in declared}
    undeclared = set(signature) - set(declared) - {"target", "draft", "datastore"} - IN_PYTHON.get(name, set())
    if row.factory == "head_drafter":
        undeclared -= {"costs", "platform"}  # read by `ddtree:auto` and the stop condition `budget` only
    if row.kind == "decoder":
        assert set(row.settings) == signature.keys() & set(get_args(Setting))
        undeclared -= OF_EVERY_LOOP | ({"temperature"} - set(declared)) | {"model"}
    assert undeclared <= set(NEED_OF) | {"inner", "retrieval", "fallback"}, undeclared
    assert all(NEED_OF[other] is None or row.uses(NEED_OF[other]) for other in undeclared)
    assert set(row.cpu_options) <= set(declared)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_rules_are_those_of_their_factories(name):
    signature = inspect.signature(getattr(verifiers, name)).parameters
    assert [option.name for option in PARAMETERS[name]] == list(signature)
    for option in PARAMETERS[name]:
        assert option.default == (
            REQUIRED if signature[option.name].default is inspect.Parameter.empty else signature[option.name].default
        )


def test_every_method_has_a_row():
    public = {
        "drafter": {*drafters.__all__, *denoising.__all__, *KINDS} - {"corpus_table", "head_drafter"},
        "decoder": {name for name in decoders.__all__ if name.islower()} - {"blank_prompts", "load_any_order"},
        "diffusion": set(procedures.__all__),
        "collaboration": {name for name in collaborations.__all__ if name.islower()},
    }
    for kind, names in public.items():
        assert {row.name if kind == "drafter" else row.load().__name__ for row in of_kind(kind).values()} == names, kind
    assert all(row.load() is getattr(adaptive, name) for name, row in of_kind("adaptive").items())
    assert all(row.load() is getattr(compression, name) for name, row in of_kind("compression").items())
    assert {name for kind in get_args(Kind) for name in of_kind(kind)} == set(METHODS)
    for name, row in METHODS.items():
        assert name == row.name and row.summary and all(option.help and option.form for option in row.options)
        assert row.guarantee in get_args(Guarantee)
        assert row.kind == "diffusion" or row.guarantee in ("distribution", "greedy", "lossy")


def method_files():
    for place in PLACES:
        root = find_package(place.package) / place.path
        for file in [root] if root.suffix == ".py" else sorted(root.glob("*.py")):
            yield place, file


def test_every_file_of_a_method_has_a_row():
    for place, file in method_files():
        if place.package != "models" and file.stem not in NO_METHODS | {"__init__"}:
            assert read_rows(file), file


def test_rows_read_from_source_are_the_constants_of_the_modules():
    for place, file in method_files():
        rows = read_rows(file)
        if rows:
            package = f"specjax.{place.package}.{place.path.removesuffix('.py')}".rstrip(".")
            name = package if place.path.endswith(".py") else f"{package}.{file.stem}"
            module = importlib.import_module(name)
            constants = [module.METHOD] if hasattr(module, "METHOD") else list(module.METHODS)
            assert rows == constants, file
            assert all(METHODS[row.name]._replace(module=row.module) == row for row in rows)


def test_listing_the_methods_imports_no_jax():
    code = """
import sys
from specjax.catalog import METHODS, find_drafter
assert len(METHODS) > 90 and find_drafter("suffix").option("fallback").parse("rest:16") == "rest:16"
import specjax.cli.app, specjax.catalog.forms, specjax.catalog.rules
specjax.catalog.forms.tree_forms(), specjax.catalog.rules.rule_summaries()
print(*{"jax", "numpy", "flax"} & set(sys.modules))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_texts_read_from_source_are_those_of_the_modules():
    assert tree_forms() == trees.FORMS and stop_forms() == trees.stops.FORMS
    assert controller_forms() == controllers.FORMS
    accepted = {**verifiers.VERIFIERS, **{name: verifiers.rules_with_arrays()[name] for name in OF_FILES}}
    assert {name: rule.summary for name, rule in accepted.items()}.items() <= rule_summaries().items()
    assert shared.RANKING.type == tuple(MEASURES)


@pytest.mark.parametrize("name", METHODS)
def test_a_default_reads_as_it_is_written(name):
    for option in METHODS[name].options:
        if option.default in (None, REQUIRED):
            continue
        if isinstance(option.default, bool):
            assert option.type == "yes_or_no" and option.parse("yes" if option.default else "no") is option.default
        elif isinstance(option.default, tuple):
            assert option.type == "integers" and option.parse(",".join(map(str, option.default))) == option.default
        elif option.type == "stop":
            assert isinstance(option.default, str) and option.parse(option.default)
        elif option.name != "tree":
            read = option.parse(str(option.default))
            assert read == option.default and type(read) is type(option.default)


def test_the_page_of_methods_names_every_row_and_its_papers():
    table = PAGE[PAGE.index("| method") :].split("\n\n")[0].splitlines()
    for name, row in METHODS.items():
        lines = [line for line in table if f"`{name}`" in line]
        assert lines, name
        for number in re.findall(r"\d{4}\.\d{5}", row.paper):
            if not row.paper.startswith("our combination") and name != "choice":
                assert any(number in line for line in lines), (name, number)


def test_nobody_inspects_signatures():
    """Only the option groups of the command line do, whose fields become the parameters that Typer reads."""
    folder = pathlib.Path(specjax.__file__).parent
    assert [path.name for path in folder.rglob("*.py") if "inspect.signature" in path.read_text()] == ["groups.py"]


def test_calls_by_place_and_by_name():
    options = PARAMETERS["typical"]
    assert read_call("typical", options) == {}
    assert read_call("typical:0.2,0.4", options) == {"epsilon": 0.2, "delta": 0.4}
    assert read_call("typical:0.2,delta=0.4", options) == {"epsilon": 0.2, "delta": 0.4}
    for bad, words in (
        ("typical:0.2,0.4,1", "takes epsilon=X, delta=X, each once"),
        ("typical:0.2,epsilon=1", "each once"),
        ("typical:alpha=1", "takes epsilon=X"),
        ("typical:high", 'epsilon must be a number, not "high"'),
    ):
        with pytest.raises(UsageError, match=words):
            read_call(bad, options)


def test_rules_by_text():
    assert parse_rule("typical") is verifiers.VERIFIERS["typical"]
    assert parse_rule("multipath_block:3") is verifiers.multipath_block(paths=3)
    assert parse_rule("multipath_block:3").name == "multipath_block(3)"
    assert parse_rule("top_beta:1,tau=0") is verifiers.top_beta(beta=1, tau=0.0)
    for bad, words in (
        ("typicall", r'unknown rule "typicall"; choose one of greedy, .*, multipath_block:N'),
        ("standard:2", 'rule "standard" takes no parameters'),
        ("multipath_block:0", "multipath_block: paths must be at least 1"),
        ("typical:-1", "typical: epsilon must be at least 0"),
        ("top_beta:0", "beta must be at least 1"),
    ):
        with pytest.raises(UsageError, match=words):
            parse_rule(bad)
