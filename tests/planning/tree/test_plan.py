"""The choice among drafts, with times of programs that are given instead of compiled."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from tiers import those

from specjax import UsageError, planning
from specjax.catalog import METHODS
from specjax.cli import main
from specjax.costs.tokens import expected_tokens
from specjax.models.heads.kinds import KINDS, TRAINABLE, abstract_head
from specjax.planning.inputs.model_configs import load_config
from specjax.planning.records import ProgramReport
from specjax.planning.reports.tables import show_plan
from specjax.planning.tree import mesh
from specjax.planning.tree import plan as plan_module

SECONDS = {"llama3-8b": 4e-3, "llama3-1b": 0.8e-3, "smollm2-135m": 0.6e-3, "qwen3.5-0.8b": 2e-3}
WIDE = {1: 1.0, 2: 1.01, 4: 1.02, 8: 1.03, 16: 1.05, 32: 1.08, 64: 1.12}


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """The names of the programs that a plan compiles; their times come from a table."""
    names = []

    def compile_programs(work, cache, notify, *, only, rename, nodes):
        names.append(rename["step"])
        seconds = SECONDS[work.target.name] * WIDE[nodes]
        both = {"schedule": seconds, "roofline": 0.5 * seconds}
        return [ProgramReport(rename["step"], True, seconds=both, flops=1e9, moved_bytes=1e9)]

    for module in (mesh, plan_module):
        monkeypatch.setattr(module, "compile_programs", compile_programs)
    return names


def by_name(result):
    return {row.name: row for row in result.drafts}


def test_the_fastest_draft_comes_first_and_each_has_the_source_of_its_acceptance(compiled):
    result = planning.plan("llama3_8b", "h200:1", draft="llama3_1b", head="eagle3", widths=(1, 4, 8))
    rates = [row.tokens_per_second["schedule"] for row in result.drafts]
    assert rates == sorted(rates, reverse=True) and result.best is result.drafts[0]
    rows = by_name(result)
    assert set(rows) == {
        "autoregressive", "prompt_lookup", "suffix", "token_recycling", "llama3_1b", "eagle3"
    }  # fmt: skip
    assert rows["autoregressive"].tokens_per_second["schedule"] == pytest.approx(250)
    assert all(
        row.acceptance_source == METHODS[row.method].acceptance.source for row in result.drafts if row.acceptance
    )
    assert compiled == ["verify 1", "verify 4", "verify 8", "draft llama3_1b"]
    json.dumps(result.to_json(), allow_nan=False)


def test_seconds_per_token_are_those_of_the_draft_and_of_the_pass():
    """A chain of 3 by hand: its passes of the draft model and one target pass, for 1 + a + a^2 + a^3 tokens."""
    result = planning.plan("llama3_8b", "h200:1", draft="llama3_1b", acceptance=[0.8], widths=(1, 4), batch=3)
    row = by_name(result)["llama3_1b"]
    seconds = 3 * 0.8e-3 + 4e-3 * 1.02
    assert row.choice().paths == ((0,), (0, 0), (0, 0, 0)) and row.acceptance_source == "given"
    assert row.tokens_per_second["schedule"] == pytest.approx(3 * (1 + 0.8 + 0.8**2 + 0.8**3) / seconds)
    assert row.tokens_per_second["roofline"] == pytest.approx(2 * row.tokens_per_second["schedule"])
    assert row.flags == "--draft llama3_1b --tree 1x1x1"


def test_a_better_acceptance_changes_the_order():
    common = dict(draft="llama3_1b", head="eagle3", widths=(1, 4, 8))
    worse = planning.plan("llama3_8b", "h200:1", acceptance={"eagle3": [0.2], "llama3_1b": ".9"}, **common)
    assert worse.best.name == "llama3_1b"
    assert by_name(worse)["eagle3"].acceptance == (0.2,)
    copied = planning.plan("llama3_8b", "h200:1", acceptance={"prompt_lookup": [0.95, 0.01]}, **common)
    assert copied.best.name == "prompt_lookup" and copied.best.acceptance == (0.95,), "a chain has no siblings"
    assert copied.best.flags == "--method prompt_lookup --num-draft-tokens 7"
    assert copied.choices == by_name(copied)["eagle3"].choices, "--tree FILE.json is that of the fastest given draft"


def test_a_slow_draft_model_is_not_used():
    result = planning.plan("smollm2_135m", "h200:1", draft="smollm2_135m", acceptance=[0.9], widths=(1, 4, 8))
    row = by_name(result)["smollm2_135m"]
    assert row.choice().spec is None and row.flags == "--method autoregressive"
    plain = by_name(result)["autoregressive"]
    assert row.tokens_per_second == plain.tokens_per_second and result.drafts.index(plain) < result.drafts.index(row)


def test_an_acceptance_alone_is_that_of_a_draft_without_cost():
    result = planning.plan("llama3_8b", "h200:1", acceptance=".6,.2,.1", widths=(1, 8))
    row = by_name(result)["given acceptance"]
    assert row.choice().num_nodes == 8 and result.choices == row.choices
    assert row.choice().tokens == pytest.approx(expected_tokens(row.choice().paths, (0.6, 0.2, 0.1)))


def test_the_module_of_the_target_is_compared_with_an_acceptance_and_named_without():
    give = lambda **more: planning.plan("qwen3_5_0_8b", "h200:1", widths=(1, 8), **more)
    result = give(acceptance=".7,.1")
    row = by_name(result)["native"]
    assert not any("--acceptance" in note for note in result.notes)
    assert (row.method, row.acceptance, row.is_given) == ("mtp", (0.7, 0.1), True)
    assert by_name(give(acceptance={"native": [0.7, 0.1]}))["native"] == row
    assert by_name(give(acceptance=".7,.1", draft="native"))["native"] == row
    bare = give()
    assert "native" not in by_name(bare) and "--acceptance native=.6,.2" in bare.notes[0]
    shown = Console(file=io.StringIO(), width=160)
    show_plan(bare, shown)
    assert bare.notes[0] in shown.file.getvalue()


@pytest.mark.parametrize(("batch", "context"), [(1, 1024), (8, 32768)])
def test_the_context_from_which_drafts_over_a_part_of_the_cache_pay(batch, context):
    """Llama 3 8B has 16.06 GB of weights in bfloat16 and caches 131,072 bytes per token."""
    result = planning.plan("llama3_8b", "h200:1", widths=(1, 8), batch=batch, context=context)
    tokens = -(-16_060_522_496 // (4 * 131_072 * batch))
    assert result.notes == (
        f"drafts over a part of the cache (sparse_cache and triforce) pay from about {tokens:,} cached tokens per row "
        f"on; this plan has {context:,}",
    )
    shown = Console(file=io.StringIO(), width=160)
    show_plan(result, shown)
    assert result.notes[0] in shown.file.getvalue()


def test_several_devices_and_recurrent_models_have_no_drafts_over_a_part_of_the_cache():
    assert planning.plan("llama3_8b", "h200:2", widths=(1, 8), model=2).notes == ()
    assert not any("cached tokens" in note for note in planning.plan("qwen3_5_0_8b", "h200:1", widths=(1, 8)).notes)


HEADS = sorted(TRAINABLE)


@pytest.mark.parametrize("kind", those(("medusa", "eagle3", "ppd"), HEADS))
def test_every_head_has_a_cost_and_its_depth(kind):
    give = lambda **more: planning.plan("smollm2_135m", "v5e:1x1", head=kind, widths=(1, 8), model=1, **more)
    if METHODS[kind].option("tree") is None:
        with pytest.raises(UsageError, match=f"--head {kind}: .* trees of its own; use specjax compile"):
            give()
        return
    if METHODS[kind].acceptance is None:
        with pytest.raises(UsageError, match=f"no typical acceptance for {kind}; give it with --acceptance {kind}="):
            give()
    choice = by_name(give(acceptance={kind: [0.9, 0.05]}))[kind].choice()
    free = by_name(planning.plan("smollm2_135m", "v5e:1x1", acceptance=[0.9, 0.05], widths=(1, 8), model=1))
    assert 1 <= choice.speedup < free["given acceptance"].choice().speedup, "a head costs something"
    head = KINDS[kind].of_target(load_config("smollm2_135m", "bfloat16", "--target", "tpu"))
    assert choice.depth <= (abstract_head(kind, head).head.max_depth or 7)


def test_the_table_and_the_command_line(capsys):
    args = ["plan", "--target", "llama3_8b", "--topology", "h200:1", "--widths", "1,4", "--draft", "llama3_1b"]
    with pytest.raises(SystemExit) as stop:
        main([*args, "--head", "eagle3", "--acceptance", "llama3_1b=.5,.1", "--acceptance", "eagle3=.7", "--json"])
    assert not stop.value.code
    document = json.loads(capsys.readouterr().out)
    options = dict(draft=["llama3_1b"], head=["eagle3"], acceptance={"llama3_1b": ".5,.1", "eagle3": ".7"})
    result = planning.plan("llama3_8b", "h200:1", widths=(1, 4), **options)
    assert document["drafts"] == json.loads(json.dumps(result.to_json()))["drafts"]
    shown = Console(file=io.StringIO(), width=160)
    show_plan(result, shown)
    text = shown.file.getvalue()
    for row in result.drafts:
        assert row.flags in text and row.acceptance_source in text
    assert "assumed" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"acceptance": {"nothing": [0.5]}}, '"nothing" is not a draft of this plan; choose one of .*prompt_lookup'),
        ({"method": "stand"}, "no typical acceptance for stand"),
        ({"method": "easyspec"}, "--method easyspec: a plan has --draft for models"),
        ({"method": "nothing"}, "nothing"),
        ({"draft": "smollm2_135m"}, "vocabulary"),
        ({"head": "nothing"}, "--head"),
        ({"num_draft_tokens": 3}, "chooses the tree, and has no num_draft_tokens"),
        ({"acceptance": [0.9, 0.3]}, "--acceptance"),
    ],
)
def test_bad_drafts(changes, words):
    with pytest.raises(UsageError, match=words):
        planning.plan("llama3_8b", "h200:1", **changes)


def test_several_acceptances_need_names(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--target", "llama3_8b", "--topology", "h200:1", "--acceptance", ".5", "--acceptance", ".6"])
    assert stop.value.code == 2 and "NAME=.6,.2" in capsys.readouterr().err
