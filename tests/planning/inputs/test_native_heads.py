"""Modules for multi-token prediction as drafts of a plan. Only shapes are made, and nothing is compiled."""

from __future__ import annotations

import mtp_oracles
import pytest

from specjax import UsageError
from specjax.cli import main
from specjax.models import abstract_params
from specjax.models.heads.kinds import abstract_head
from specjax.models.storage import num_bytes
from specjax.planning.description.model import describe_model
from specjax.planning.tree.drafts import draft_cost, find_candidates, flags_of
from specjax.planning.workload import make_workload

NATIVE = {"target": "qwen3_5_0_8b", "topology": "v5e:1x1", "draft": "native"}


def test_native_is_the_module_of_the_release():
    work = make_workload(**NATIVE, tree="4x2x1")
    assert (work.method, work.draft, work.tree) == ("mtp", None, "4x2x1")
    assert (work.head.layer.width, work.head.layer.mlp_width, work.head.layer.num_layers) == (1024, 3584, 1)
    chain = make_workload(**NATIVE, num_draft_tokens=3)
    assert (chain.head, chain.num_draft_tokens) == (work.head, 3)
    assert chain.plain.head is None


def test_a_target_with_a_module_drafts_with_it_by_default(tmp_path):
    """A config and `--method autoregressive` are plain."""
    default = make_workload(NATIVE["target"], NATIVE["topology"])
    assert default == make_workload(**NATIVE) == make_workload(NATIVE["target"], NATIVE["topology"], method="mtp")
    for changes in ({"method": "autoregressive"}, {"target": default.target}, {"target": "lfm2_1_2b"}):
        plain = make_workload(**{"target": NATIVE["target"], "topology": NATIVE["topology"]} | changes)
        assert (plain.method, plain.head) == ("autoregressive", None)
    folder, _, _ = mtp_oracles.write_checkpoint(tmp_path, "qwen3_5")
    stored = make_workload(folder, "v5e:1x1", context=8, max_new_tokens=8)
    assert stored.method == "mtp" and stored.head.layer.width == stored.target.width
    assert stored.plain.target == stored.target and stored.plain.head is None


def test_the_module_of_a_mixture_has_experts():
    """Qwen3-Next's module is an attention layer with the experts of the others."""
    work = make_workload("qwen3_next_80b", "v5e:4x4", draft="native", expert=16)
    assert work.head.layer.experts == work.target.experts and work.head.layer.attention_gate
    description = describe_model("qwen3_next_80b").module
    experts = 3 * 512 * 2048 * (512 + 1) + 2048 * (512 + 1)  # with the shared MLP, its gate and the router
    attention = 2048 * (3 * 4096 + 2 * 512) + 2 * 256
    assert description.parameters == experts + attention + 2 * 2048 * 2048 + 5 * 2048
    assert description.drafts_by_default and description.dialect == "qwen3_5"


def test_settings_of_compile_are_those_of_the_default(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["compile", "--target", NATIVE["target"], "--topology", "v5e:1x1", "--set", "nothing=1"])
    assert stop.value.code == 2 and "mtp" in capsys.readouterr().err


def test_its_cost_is_that_of_its_stored_bytes():
    work = make_workload(**NATIVE)
    (one,) = [one for one in find_candidates({"native": work}, {"native": (0.6, 0.2)}) if one.name == "native"]
    cost = draft_cost(one, work)
    share = num_bytes(abstract_head("mtp", work.head).params) / num_bytes(abstract_params(work.target))
    assert share < cost.first < 1  # the output layer, which belongs to the target, is read too
    assert flags_of(one, "4x2x1", 3) == "--draft native --method mtp --tree 4x2x1"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": "smollm2_135m"}, "no multi-token-prediction module"),
        ({"target": "lfm2_1_2b"}, "no multi-token-prediction module"),
        ({"head": "eagle3"}, "leave one out"),
        ({"method": "two_model"}, "two_model"),
    ],
)
def test_refusals(changes, words):
    with pytest.raises(UsageError, match=words):
        make_workload(**NATIVE | changes)


@pytest.mark.parametrize("command", ["compile", "plan"])
def test_a_target_without_a_module_has_exit_code_2(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--target", "smollm2_135m", "--draft", "native", "--topology", "v5e:1x1"])
    errors = capsys.readouterr().err
    assert stop.value.code == 2
    assert "--draft native: smollm2" in errors and "Traceback" not in errors
