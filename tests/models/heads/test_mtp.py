"""Modules for multi-token prediction against oracles of each family's own decoder layer."""

from __future__ import annotations

from dataclasses import replace

import mtp_oracles as m
import numpy as np
import pytest
from head_oracles import params_of, shapes_of_target
from head_oracles import target as tiny_target
from head_runs import features_of, said_of
from heads import config_of, tiny_head
from tiers import those
from toy import tiny_llama

from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.kinds import KINDS
from specjax.models.latent.sizes import LatentSizes
from specjax.models.loading.heads import read_head, recognise

TARGET = tiny_target(num_layers=2)
OF_QWEN = MixtureSizes(8, 16, Routing(3, normalized=True), shared_width=24, shared_gate=True)
EXPERTS = {
    "qwen3_next_moe": OF_QWEN, "qwen3_5_moe": OF_QWEN,
    "glm_moe": MixtureSizes(
        8, 16, Routing(3, "sigmoid", True, 1e-20, 1.5, group_score="two_best"), shared_width=16, correction=True,
        dense_layers=(0,),
    ),
    "deepseek_v3": MixtureSizes(
        8, 16, Routing(3, "sigmoid", True, 1e-20, 2.5, 4, 2, "two_best"), shared_width=16, correction=True,
    ),
}  # fmt: skip
LATENT = LatentSizes(16, 4, 8, 12, 24)
OF_DEEPSEEK = {"latent": LATENT, "num_heads": 4, "head_dim": LATENT.cached, "rotary_dim": 4}
"""Experts of targets, and so of their modules, by family."""


def against(oracle: m.Oracle, head: DraftHead, draft=m.DRAFT) -> float:
    """Return the largest difference of the logits."""
    logits, features = m.run_head(head, TARGET, m.TEXT, draft)
    oracle.share_norm(params_of("norm", TARGET))
    expected = oracle.logits(features, params_of("embed", TARGET), params_of("head", TARGET), draft=draft)
    return float(np.abs(np.asarray(logits) - expected).max())


def changed(head: DraftHead, **changes) -> DraftHead:
    return head.replace(head=KINDS["mtp"].head(replace(head.head.config, **changes)))


@pytest.mark.parametrize("name", those({"glm_moe", "mimo", "qwen3_5_moe"}, sorted(m.FAMILIES.keys() - {"gguf"})))
def test_logits_equal_the_family_s_own_layer(name, tmp_path):
    family = m.FAMILIES[name]
    oracle = m.Oracle(family)
    folder = m.write_module(tmp_path, family, oracle)
    assert recognise(folder) == ("mtp", family.dialect)
    changes = OF_DEEPSEEK if name == "deepseek_v3" else {}
    loaded = read_head(folder, shapes_of_target(num_layers=2, experts=EXPERTS.get(name), **changes))
    assert loaded.head.head.config.hidden == family.hidden
    assert against(oracle, loaded.head) < 2e-4
    for changes in (
        {"hidden_first": not family.hidden_first},
        {"chained": "raw" if family.chained == "normed" else "normed"},
    ):
        assert against(oracle, changed(loaded.head, **changes)) > 0.1, f"{changes} must show"


def test_a_module_of_ernie_has_the_final_norm_of_its_target(tmp_path):
    """Baidu's training norms the output of each module like that of the model, and chains what lies before the norm."""
    family = m.FAMILIES["ernie"]
    loaded = read_head(m.write_module(tmp_path, family, m.Oracle(family, modules=2)), TARGET)
    config = loaded.head.head.config
    assert (config.hidden, config.chained, config.final_norm) == ("raw", "raw", True) and not loaded.assumed
    for module in loaded.head.params["modules"].values():
        np.testing.assert_array_equal(module["norm"]["weight"], params_of("norm", TARGET))


def test_a_module_of_exaone_is_not_read_as_one_of_qwen(tmp_path):
    family = m.FAMILIES["qwen3_5"]
    assert recognise(m.write_module(tmp_path, family, m.Oracle(family), model_type="exaone_moe")) is None


@pytest.mark.parametrize("chained", those({"normed"}, ["normed", "raw", "target"]))
def test_separate_modules_stay_at_their_states_and_read_later_ids(chained, tmp_path):
    family = m.FAMILIES["glm"]._replace(chained=chained)
    oracle = m.Oracle(family, modules=3)
    loaded = read_head(m.write_module(tmp_path, family, oracle), TARGET)
    assert loaded.head.head.max_depth == loaded.flags["modules"] == 3
    head = changed(loaded.head, chained=chained)
    assert against(oracle, head, m.DRAFT[:2]) < 2e-4
    assert against(oracle, changed(head, chained="raw" if chained == "normed" else "normed"), m.DRAFT[:2]) > 0.1


def test_the_first_embedding_is_zero_if_asked():
    """Row 0 alone differs, as in vLLM's modules, so drafts of a long text hardly do."""
    config = config_of("mtp", tiny_llama())
    zero = DraftHead(KINDS["mtp"].head(replace(config, zero_first=True)), tiny_head("mtp", tiny_llama()).params)
    features = features_of(tiny_llama())
    apart = said_of(zero, tiny_llama(), features) - said_of(tiny_head("mtp", tiny_llama()), tiny_llama(), features)
    assert np.abs(apart).max((1, 2)).min() > 1e-3
