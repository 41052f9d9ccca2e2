"""Heads of every kind are written and read back bit by bit, in each of their layouts."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from head_oracles import shapes_of_target, target
from heads import OF_OTHER_TARGETS, config_of, numbered_head
from safetensors.numpy import load_file

from specjax import UsageError, save_head
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.kinds import KINDS, abstract_head
from specjax.models.loading.heads import load_head, read_head, recognise
from specjax.models.loading.heads.registry import format_of
from specjax.models.loading.heads.writing import NO_TENSORS, stored_name


def shapes(config):
    """Return the shapes without the target's own parts."""
    layer = getattr(config, "layer", None)
    plain = config if layer is None else replace(config, layer=replace(layer, tied=False, name="", cache_bits=False))
    return replace(plain, vocab_size=target().model.vocab_size) if hasattr(config, "vocab_size") else plain


def same(loaded: DraftHead, expected: DraftHead) -> None:
    assert loaded.head.kind == expected.head.kind
    assert shapes(loaded.head.config) == shapes(expected.head.config)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, expected.params)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - OF_OTHER_TARGETS))
def test_every_kind_is_read_back_bit_by_bit(kind, tmp_path):
    head = numbered_head(kind, target())
    save_head(tmp_path, head, target=target())
    kind_of, dialect = recognise(tmp_path)
    assert kind_of == kind and dialect in format_of(kind).layouts
    actual = read_head(tmp_path, target())
    assert not actual.notes and not actual.unused and not actual.unread
    same(actual.head, head)


VARIANTS = {
    "hydra without a prefix layer": ("hydra", {"layer": None}, None),
    "an MLP speculator of one table": ("mlp_speculator", {"tied": True}, "ibm"),
    "that of speculators": ("mlp_speculator", {"centred": True, "norm_eps": 1e-5, "taps": (6,)}, "speculators"),
    "that of speculators, of normed states": ("mlp_speculator", {"centred": True, "norm_eps": 1e-5}, "speculators"),
    "a ReDrafter that adds": ("redrafter", {"has_weights": False, "exit_width": 40}, "apple"),
    "one prompt": ("ppd", {"num_prompts": 1, "copies": 1}, "peft"),
    "a Falcon of pairs": ("falcon", {"carries": False, "bias": False, "embeds": True, "vocab_size": 64}, None),
    "Clover with a table": ("clover", {"embeds": True, "vocab_size": 64}, None),
    "an EAGLE with norms": ("eagle", {"norms": True, "vocab_size": 64}, None),
    "EAGLE-3 with a head of low rank": ("eagle3", {"head_rank": 4}, "speculators"),
    "P-EAGLE with a head of low rank": ("p_eagle", {"own_head": True, "head_rank": 4}, None),
    "FSPAD": ("eagle", {"sampler": True, "split": True, "vocab_size": 64}, None),
    "Domino with a head of its own": ("domino", {"own_head": True, "embeds": True, "pure_prefix": 2}, "zlab"),
    "DSpark as z-lab would": ("dspark", {"markov": "gated"}, "zlab"),
    "DFlash 2 as z-lab would": ("dflash2", {"logit_scale": 0.5, "softcap": 30.0}, "zlab"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_what_kinds_can_be_is_in_their_files(name, tmp_path):
    kind, changes, layout = VARIANTS[name]
    head = numbered_head(kind, target(), **changes)
    save_head(tmp_path, head, layout=layout, target=target())
    actual = read_head(tmp_path, target())
    assert not actual.unread
    same(actual.head, head)


WITHOUT_LAYERS = ("hidden_transfer", "m2r2", "medusa", "mlp_speculator", "ppd", "redrafter")
LAYERED = [kind for kind in KINDS if kind not in {*WITHOUT_LAYERS, *OF_OTHER_TARGETS}]


@pytest.mark.parametrize("kind", LAYERED)
def test_every_parameter_of_a_layer_has_a_name_in_files(kind):
    """This includes layers like those of Qwen2 and Qwen3."""
    config = config_of(kind, target())
    layer = replace(config.layer, qk_norm=True, qkv_bias=True)
    params = abstract_head(kind, replace(config, layer=layer)).params
    paths = [".".join(str(k.key) for k in keys) for keys, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    names = [stored_name(format_of(kind).table, path) for path in paths if path not in NO_TENSORS]
    assert len(set(names)) == len(names)


def test_the_words_of_authors_who_pickle(tmp_path):
    """Names and fields are those of the authors; only the container differs."""
    expected = {
        "hydra": ({"hydra_num_heads": 3, "hydra_num_layers": 2, "hydra_head_arch": "prefix-mlp"},
                  {"hydra_mlp.0.1.res_connection.weight", "hydra_mlp.2.3.linear.bias", "hydra_lm_head.1.1.weight"}),
        "redrafter": ({"model_type": "recurrent_drafting_drafter", "num_draft_layers": 1, "rnn": True},
                      {"rnn_u.bias", "lm_head.0.linear.weight", "lm_head.1.weight"}),
        "mlp_speculator": ({"n_predict": 3, "inner_dim": 16, "scale_input": True},
                           {"speculator.emb.2.weight", "speculator.proj.0.weight", "speculator.ln.1.bias"}),
        "ppd": ({"num_special_tokens": 3, "virtual_tokens_per_special_token": 2}, {"prompt_embeddings"}),
        "domino": ({"projector_type": "domino", "gru_hidden_dim": 5}, {"prefix_gru.weight_hh_l0"}),
    }  # fmt: skip
    for kind, (fields, names) in expected.items():
        save_head(tmp_path / kind, numbered_head(kind, target()))
        outputs = json.loads((tmp_path / kind / "config.json").read_text())
        assert {name: outputs[name] for name in fields} == fields
        assert names <= load_file(tmp_path / kind / "model.safetensors").keys()


def test_what_no_layout_has_words_for_is_refused(tmp_path):
    for kind, changes, message in (
        ("mlp_speculator", {"centred": True}, "subtract the mean and have the epsilon 1e-06, which the layout ibm"),
        ("mlp_speculator", {"taps": (6,)}, "stream before the final norm, which the layout ibm does not"),
        ("clover", {"version": 1}, r"without 2\) has no published layout"),
    ):
        with pytest.raises(UsageError, match=message):
            save_head(tmp_path / kind, numbered_head(kind, target(), **changes))
        assert not (tmp_path / kind).exists()
    with pytest.raises(UsageError, match="the layout speculators has no causal blocks"):
        save_head(tmp_path, numbered_head("dflash", target(), causal="all"), layout="speculators")
    with pytest.raises(UsageError, match="the layout safeailab has no norm_taps and several layers and head of low"):
        save_head(tmp_path, numbered_head("eagle3", target(), head_rank=4), layout="safeailab")


def test_heads_that_are_not_in_the_file_are_not_made(tmp_path):
    """A layout for ten thousand heads would take a minute to list the missing ones."""
    save_head(tmp_path, numbered_head("mlp_speculator", target()))
    outputs = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(outputs | {"n_predict": 10_000}))
    with pytest.raises(UsageError, match=r"has n_predict 10000, and .* has 3 heads"):
        load_head(tmp_path, target())


def test_transfers_that_do_not_fit(tmp_path):
    save_head(tmp_path, numbered_head("hidden_transfer", target()))
    with pytest.raises(UsageError, match="transfers of width 32, and the width of the target tiny is 16"):
        load_head(tmp_path, shapes_of_target(width=16))
    with pytest.raises(UsageError, match="transfers after layer 6 of the target, and tiny has 2 layers"):
        load_head(tmp_path, shapes_of_target(num_layers=2))
    (tmp_path / "config.json").write_text(json.dumps({"behind": [1]}))
    with pytest.raises(UsageError, match=r"has 3 transfers, and .* lists the layers of 1 in behind"):
        load_head(tmp_path, target())
