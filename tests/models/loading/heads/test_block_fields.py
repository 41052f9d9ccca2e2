"""Configs of block drafters in the spellings of all writers, and statements that contradict each other."""

from __future__ import annotations

import json
from pathlib import Path

import dialects as d
import jax
import numpy as np
import pytest
from head_oracles import target
from heads import tiny_head
from safetensors.numpy import load_file

from specjax import UsageError
from specjax.models.loading.heads import load_head, read_head, save_head


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """`files(kind, layout)`: config.json and tensors of a tiny head without any statement about its slots."""
    stored: dict = {}

    def read(kind: str, layout: str = "zlab"):
        if (kind, layout) not in stored:
            folder = tmp_path_factory.mktemp(f"{kind}-{layout}")
            save_head(folder, tiny_head(kind, target()), layout=layout, target=target())
            config = json.loads((folder / "config.json").read_text())
            for name in (
                "sample_from_anchor",
                "sliding_window_non_causal",
                "layer_types",
                "sliding_window",
                "confidence_temperatures",
            ):
                config.pop(name, None)
                config.get("transformer_layer_config", {}).pop(name, None)
            stored[kind, layout] = config, load_file(folder / "model.safetensors")
        config, arrays = stored[kind, layout]
        return json.loads(json.dumps(config)), dict(arrays)

    return read


def loaded(folder: Path, config: dict, arrays: dict, inner: dict | None = None, **changes):
    """Read a head whose config has these changes at the top level and in `dflash_config`."""
    config = config | changes
    if inner is not None:
        config["dflash_config"] = config.get("dflash_config", {}) | inner
    folder = d.write(folder, {name: value for name, value in config.items() if value is not None}, arrays)
    return read_head(folder, target())


ANCHORS = [
    ("dspark", "speculators", {}, None, False),  # before July 2026
    ("dspark", "speculators", {"sample_from_anchor": True}, None, True),
    ("dspark", "speculators", {"dspark_bonus_anchor": False}, None, True),
    ("dspark", "zlab", {}, None, True),  # SpecForge
    ("dspark", "zlab", {}, {"query_zero_predicts_next": False}, False),
    ("dspark", "zlab", {"dspark_bonus_anchor": True}, {"sample_from_anchor": False}, False),
    ("dflash", "zlab", {}, None, False),
    ("dflash", "zlab", {}, {"query_zero_predicts_next": True}, True),
    ("dflash", "speculators", {}, None, False),
    ("domino", "zlab", {}, None, False),
    ("domino", "zlab", {}, {"shift_label": True}, True),
]


@pytest.mark.parametrize(("kind", "layout", "changes", "inner", "expected"), ANCHORS)
def test_the_slot_of_the_root(kind, layout, changes, inner, expected, files, tmp_path):
    head = loaded(tmp_path, *files(kind, layout), inner, **changes)
    assert head.flags["from_anchor"] is expected
    is_open = not changes and not inner and kind != "dflash"
    assert head.assumed == (("from_anchor",) if is_open else ())
    assert any("has no sample_from_anchor; assumed" in note for note in head.notes) == is_open


def test_flat_files_are_deepspecs_only_if_their_class_is(files, tmp_path):
    """The root's slot drafts in all blocks of DeepSpec, and in none of a flat DFlash of others."""
    config, arrays = files("dflash")
    flat = config | config.pop("dflash_config") | {"dflash_config": None}
    assert not loaded(tmp_path / "zlab", flat, arrays).flags["from_anchor"]
    deepspec = loaded(tmp_path / "deepspec", flat, arrays, architectures=["Qwen3DSparkModel"], markov_rank=0)
    assert deepspec.flags["from_anchor"] and deepspec.dialect == "deepspec"


def test_contradictions_are_named_and_settled_by_a_setting(files, tmp_path):
    config, arrays = files("dspark")
    changes = {"sample_from_anchor": True, "dspark_bonus_anchor": True}
    message = "has sample_from_anchor true and dspark_bonus_anchor true, which contradict each other; set from_anchor"
    with pytest.raises(UsageError, match=message):
        loaded(tmp_path, config, arrays, **changes)
    assert not read_head(tmp_path, target(), settings={"from_anchor": False}).flags["from_anchor"]
    with pytest.raises(UsageError, match="has is_causal true and causal false, which contradict"):
        loaded(tmp_path, config, arrays, {"causal": False}, is_causal=True)
    both = loaded(tmp_path, config, arrays, {"block_size": 3}, block_size=4)
    assert both.flags["block_size"] == 3 and "has block_size 4, and in dflash_config 3, which is used" in both.notes[0]


SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}
ATTENTION = [
    ({}, {}, (), "windowed"),
    (SLIDING, {}, (None, 3), "windowed"),
    (SLIDING | {"is_causal": False}, {}, (None, 3), "no"),
    (SLIDING | {"is_causal": True}, {}, (None, 3), "all"),
    (SLIDING, {"causal": False}, (None, 3), "no"),
    (SLIDING, {"swa_window_size": 2}, (None, 2), "windowed"),
    ({}, {"causal": True}, (), "all"),
    ({}, {"causal_head": True}, (), "all"),  # JetSpec
    ({}, {"use_swa": True, "swa_window_size": 4}, (4, 4), "no"),  # MiMo
    ({"sliding_window": 5}, {"use_swa": True, "sliding_window_non_causal": True}, (5, 5), "no"),
    (SLIDING, {"use_swa": True}, (None, 3), "windowed"),
    ({"layer_types": ["full_attention"] * 2}, {"use_swa": True, "swa_window_size": 4, "causal": True}, (4, 4), "all"),
    ({"sliding_window": 5}, {"use_swa": False}, (), "windowed"),
    # Qwen3's class derives layer_types from these. Other layers than the first ones are windowed.
    ({"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}, {}, (None, 5), "windowed"),
    ({"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0}, {"causal": False}, (5, 5), "no"),
    ({"sliding_window": 5, "use_sliding_window": False, "max_window_layers": 0}, {}, (), "windowed"),
    ({"sliding_window": 5, "use_sliding_window": True}, {}, (), "windowed"),  # only layers from the 28th on
]


@pytest.mark.parametrize(("changes", "inner", "windows", "causal"), ATTENTION)
def test_windows_and_causality(changes, inner, windows, causal, files, tmp_path):
    head = loaded(tmp_path, *files("dflash"), inner, **changes)
    assert (head.flags["windows"], head.flags["causal"]) == (windows, causal) and not head.unread


def test_windows_without_a_size_and_unknown_kinds_are_refused(files, tmp_path):
    config, arrays = files("dflash")
    with pytest.raises(UsageError, match="lacks the field sliding_window"):
        loaded(tmp_path, config, arrays, {"use_swa": True})
    derived = {"use_sliding_window": True, "max_window_layers": 0}
    with pytest.raises(UsageError, match="lacks the field sliding_window"):
        loaded(tmp_path, config, arrays, **derived)
    null = d.write(tmp_path / "null", config | derived | {"sliding_window": None}, arrays)
    assert read_head(null, target()).flags["windows"] == (), "Qwen3 has no window then"
    with pytest.raises(UsageError, match="has 1 layer_types, but num_hidden_layers is 2"):
        loaded(tmp_path, config, arrays, layer_types=["full_attention"])
    with pytest.raises(UsageError, match='has "chunked_attention" among its layer_types'):
        loaded(tmp_path, config, arrays, layer_types=["full_attention", "chunked_attention"])


@pytest.mark.parametrize("nested", [True, False])
def test_factors_on_embeddings_and_logits(nested, files, tmp_path):
    fields = {
        "output_multiplier": 0.5,
        "final_logit_softcapping": 20.0,
        "input_embedding_scale": 2.0,
        "logit_scale": 0.25,
    }
    head = loaded(tmp_path, *files("dflash"), **({"inner": fields} if nested else fields))
    config = head.head.head.config
    assert (config.logit_scale, config.softcap, config.embedding_scale, config.capped_scale) == (0.5, 20.0, 2.0, 0.25)
    save_head(tmp_path / "again", head.head, layout="zlab")
    assert load_head(tmp_path / "again", target()).head is head.head.head
    plain = loaded(tmp_path / "plain", *files("dflash"), fields | {"final_logit_softcapping": 0.0})
    assert (plain.flags["logit_scale"], plain.flags["softcap"], plain.flags["capped_scale"]) == (0.125, None, 1.0)


def test_the_target_does_not_cap_twice(files, tmp_path):
    config, arrays = files("dflash")
    folder = d.write(tmp_path, config | {"final_logit_softcapping": 30.0}, arrays)
    capped = target(logit_softcap=30.0)
    assert read_head(folder, capped).flags["softcap"] is None
    assert read_head(folder, target(logit_softcap=20.0)).flags["softcap"] == 30.0


def test_tapped_layers_by_all_names(files, tmp_path):
    config, arrays = files("dflash")
    streams = [i + 1 for i in config["dflash_config"]["target_layer_ids"]]
    ids = [i - 1 for i in streams]
    inner = {"mask_token_id": config["dflash_config"]["mask_token_id"]}
    for place, changes in enumerate(
        (
            {"dflash_config": inner | {"layer_ids": ids}}, {"dflash_config": inner, "dspark_target_layer_ids": ids},
            {"dflash_config": inner, "eagle_aux_hidden_state_layer_ids": streams},
            {"dflash_config": inner | {"target_layer_ids": ids}, "eagle_aux_hidden_state_layer_ids": streams},
        )
    ):  # fmt: skip
        head = loaded(tmp_path / str(place), config, arrays, **changes)
        assert head.flags["taps"] == tuple(streams) and not head.notes
    other = loaded(tmp_path / "other", config, arrays, eagle_aux_hidden_state_layer_ids=[0, *streams[1:]])
    assert "in dflash_config.target_layer_ids" in other.notes[0]


def test_fields_without_tensors_that_specjax_does_not_compute(files, tmp_path):
    config, arrays = files("dflash")
    for name, value in {"attention_value_scale": 0.612, "attention_sink_bias": True}.items():
        with pytest.raises(UsageError, match=rf"has dflash_config\.{name} .*, which specjax does not support"):
            loaded(tmp_path, config, arrays, {name: value})
    assert loaded(tmp_path, config, arrays, {"attention_sink_bias": False}, is_neox_style=True)
    with pytest.raises(UsageError, match="has is_neox_style False"):
        loaded(tmp_path, config, arrays, is_neox_style=False)


@pytest.mark.parametrize("form", ["vector", "row", "dict"])
def test_an_embedding_of_the_mask_alone(form, files, tmp_path):
    """The writer saves a row of its table, which is a view into all of it."""
    torch = pytest.importorskip("torch")
    config, arrays = files("dflash")
    config["dflash_config"].pop("mask_token_id")
    table = torch.from_numpy(np.random.default_rng(0).normal(size=(5, d.D)).astype(np.float32))
    contents = {"vector": table[3], "row": table[3:4], "dict": {"mask_token_id": 70, "embedding": table[3]}}[form]
    d.write(tmp_path, config, arrays)
    torch.save(contents, tmp_path / "mask_embedding.pt")
    head = read_head(tmp_path, target())
    assert head.flags["mask_embedding"] is True
    np.testing.assert_array_equal(head.head.params["mask_embedding"], table[3])
    save_head(tmp_path / "again", head.head, layout="zlab")
    again = load_head(tmp_path / "again", target())
    jax.tree.map(np.testing.assert_array_equal, again.params, head.head.params)
    torch.save(table[:, :3].contiguous(), tmp_path / "mask_embedding.pt")
    with pytest.raises(UsageError, match="mask_embedding"):
        read_head(tmp_path, target())


def test_assistants_leave_the_vocabulary_to_the_target(files, tmp_path):
    config, arrays = files("dflash")
    flat = config | config.pop("dflash_config") | {"dflash_config": None, "vocab_size": None}
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    head = loaded(tmp_path, flat, {names.get(name, name): x for name, x in arrays.items()}, model_type="muse_assistant")
    assert head.kind == "dflash" and not head.flags["from_anchor"]


def test_real_configs_leave_no_field_unread(files, tmp_path):
    """The fields are those of published heads by z-lab, MiMo, SpecForge and JetSpec."""
    config, arrays = files("dflash")
    published = {
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "use_sliding_window": False, "max_window_layers": 2,
        "layer_types": ["full_attention"] * 2, "num_target_layers": 6, "is_causal": False, "block_size": 4,
    }  # fmt: skip
    inner = {
        "block_size": 4, "causal_head": False, "num_anchors": 512, "loss_decay_gamma": 7.0, "use_swa": True,
        "swa_window_size": 3, "output_multiplier": 0.5, "final_logit_softcapping": 20.0, "mask_token": "<|MASK|>",
        "layer_ids": config["dflash_config"]["target_layer_ids"],
    }  # fmt: skip
    head = loaded(tmp_path, config, arrays, inner, **published)
    assert head.unread == () and head.notes == ()
    (other,) = loaded(tmp_path, config, arrays, inner | {"new_rule": 3}, **published).unread
    assert "dflash_config.new_rule" in other


def test_a_block_without_a_size_is_assumed_with_a_note(files, tmp_path):
    config, arrays = files("dflash")
    head = loaded(tmp_path, config, arrays, block_size=None)
    assert head.flags["block_size"] == 16 and head.assumed == ("block_size",)
    assert "has no block_size; assumed 16 (--head-set block_size=... overrides it)" in head.notes[0]
    changed = read_head(tmp_path, target(), settings={"block_size": 4})
    assert changed.flags["block_size"] == 4 and not changed.notes
