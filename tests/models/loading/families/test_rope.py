"""Settings that a config leaves out, has twice or has under another name, as transformers reads them."""

import json

import pytest

from specjax.errors import UsageError
from specjax.models.loading.families import llama
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.families.gemma import gemma3
from specjax.models.loading.families.unread_fields import describe_unread
from specjax.models.loading.formats.hf import parse_config

SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 96, "vocab_size": 128, "head_dim": 16,
}  # fmt: skip


def parsed(config: dict):
    fields = ConfigFields(json.loads(json.dumps(config)), "config.json")
    result = parse_config(fields, dtype="float32", name="tiny")[0]
    assert not describe_unread(fields)
    return result


def written(kind: str, **changes) -> dict:
    """Return a config with every field, as transformers completes a sparse one."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoConfig.for_model(kind, **changes).to_dict()


TEXT_KINDS = [
    kind for kind in (*llama.HF_TYPES, *gemma3.HF_TYPES) if kind not in ("mistral3", "gemma3", "mimo", "llada2_moe")
]


@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_what_a_config_leaves_out_is_the_default_of_its_class(kind):
    """`num_attention_heads` is changed too, because some classes derive other fields from it and some do not."""
    for changes in ({}, {"num_attention_heads": 64}, {"num_hidden_layers": 3}):
        assert parsed({"model_type": kind, **changes}) == parsed(written(kind, **changes))


@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_the_text_part_of_a_multimodal_config_leaves_out_too(kind):
    text = {"num_hidden_layers": 3}
    if kind == "mistral3":
        text["model_type"] = "mistral"
    expected = parsed(written(kind, text_config=text))
    assert parsed({"model_type": kind, "text_config": text, "tie_word_embeddings": expected.tied}) == expected


def test_a_null_is_no_absent_field():
    assert parsed({"model_type": "mistral", **SIZES, "num_key_value_heads": None}).num_kv_heads == 4
    assert parsed({"model_type": "mistral", **SIZES, "sliding_window": None}).window is None


@pytest.mark.parametrize("old", [False, True])
def test_yarn_lengthens_texts_and_needs_no_original_length(old):
    yarn = {"type" if old else "rope_type": "yarn", "factor": 4.0}
    rope = {"rope_theta": 1e6, "rope_scaling": yarn} if old else {"rope_parameters": yarn | {"rope_theta": 1e6}}
    base = {"model_type": "qwen2", **SIZES, "max_position_embeddings": 64, **rope}
    config = parsed(base)
    assert config.rope_scaling.original_positions == 64 and config.max_positions == 256
    yarn["original_max_position_embeddings"] = 48
    (rope["rope_scaling"] if old else rope["rope_parameters"]).update(yarn)
    assert parsed(base).max_positions == 192
    assert parsed(base | {"max_position_embeddings": 400}).max_positions == 400  # a config that counts it already
    assert parsed(base | {"original_max_position_embeddings": 32}).rope_scaling.original_positions == 32


def test_the_original_length_outside_of_the_settings_is_that_of_transformers():
    transformers = pytest.importorskip("transformers")
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 48}
    config = {"max_position_embeddings": 64, "original_max_position_embeddings": 32, "rope_parameters": yarn}
    theirs = transformers.AutoConfig.for_model("llama", **json.loads(json.dumps(config)))
    theirs.standardize_rope_params()
    ours = parsed({"model_type": "llama", **SIZES, **config})
    assert ours.rope_scaling.original_positions == theirs.rope_parameters["original_max_position_embeddings"] == 32


@pytest.mark.parametrize("name", ["max_sequence_length", "seq_length", "n_positions", "model_max_length"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_other_names_of_the_length(kind, name):
    assert parsed({"model_type": kind, **SIZES, name: 77}).max_positions == 77
    both = {"model_type": kind, **SIZES, name: 77, "max_position_embeddings": 99}
    assert parsed(both).max_positions == 99


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
TWICE = {
    "another block": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": YARN}, "rope_"),
    "another factor": ({"rope_parameters": YARN, "rope_scaling": YARN | {"factor": 2.0}}, "with different settings"),
    "another base": ({"rope_theta": 1e4, "rope_parameters": YARN | {"rope_theta": 1e6}}, "has rope_theta 10000 and "),
    "another part": (
        {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
        "has partial_rotary_factor 0.5 and rope_parameters.partial_rotary_factor 1,",
    ),
    "another type": ({"rope_scaling": YARN | {"type": "linear"}}, 'rope_type "yarn" and rope_scaling.type "linear"'),
}  # fmt: skip


@pytest.mark.parametrize("name", TWICE)
def test_settings_that_a_config_has_twice_are_refused_if_they_differ(name):
    fields, words = TWICE[name]
    with pytest.raises(UsageError, match=words):
        parsed({"model_type": "llama", **SIZES, "max_position_embeddings": 64, **fields})


def test_settings_that_a_config_has_twice_may_be_equal():
    base = {"model_type": "llama", **SIZES, "max_position_embeddings": 64, "rope_theta": 1e6}
    once = parsed(base | {"rope_scaling": YARN})
    assert (
        parsed(base | {"rope_scaling": YARN | {"type": "yarn"}, "rope_parameters": YARN | {"rope_theta": 1e6}}) == once
    )
    assert parsed(base | {"rope_parameters": {"rope_type": "default"}, "rope_scaling": None}).rope_scaling is None


@pytest.mark.parametrize("kind", ["gemma3_text", "olmo3"])
def test_flat_settings_of_a_family_with_two_kinds_of_layers_are_refused(kind):
    flat = {"rope_type": "default", "rope_theta": 1e6}
    with pytest.raises(UsageError, match="has rope_parameters without full_attention and sliding_attention"):
        parsed({"model_type": kind, **SIZES, "rope_parameters": flat})
