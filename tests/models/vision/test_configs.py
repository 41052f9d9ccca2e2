"""Configurations of models with images that omit fields have the defaults of transformers."""

import numpy as np
import pytest
from image_models import TEXT, TOWER

from specjax import UsageError
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.families.unread_fields import describe_unread
from specjax.models.loading.families.vision import gemma3_vision, idefics, llava, qwen2_5_vl, qwen2_vl, qwen3_vl

transformers = pytest.importorskip("transformers")

SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}}
TOWER_OF_GRIDS = {"depth": 1, "embed_dim": 24, "num_heads": 3}


def parsed(family, fields):
    return family.config_from_hf(ConfigFields(fields, "config.json"), dtype="float32", name="tiny")


@pytest.mark.parametrize("kind", ["smolvlm", "idefics3"])
def test_sparse_configs_of_idefics(kind):
    fields = {"model_type": kind, "text_config": TEXT, "vision_config": TOWER, "image_token_id": 59}
    ours, theirs = parsed(idefics, fields), transformers.AutoConfig.for_model(**fields)
    assert ours.norm_eps == theirs.text_config.rms_norm_eps
    assert ours.connector.shuffle == theirs.scale_factor
    assert ours.tower.norm_eps == theirs.vision_config.layer_norm_eps
    assert ours.tied == theirs.tie_word_embeddings


@pytest.mark.parametrize("tower", [{}, {"hidden_size": 24, "num_attention_heads": 3}])
def test_sparse_configs_of_llava(tower):
    fields = {"model_type": "llava", "text_config": TEXT | {"vocab_size": 32_064}, "vision_config": tower}
    theirs = transformers.AutoConfig.for_model(**{name: value for name, value in fields.items() if value})
    ours, vision = parsed(llava, fields), theirs.vision_config
    assert ours.norm_eps == theirs.text_config.rms_norm_eps and ours.image_token == theirs.image_token_id
    sizes = ours.tower
    assert (sizes.width, sizes.image_size, sizes.patch_size) == (
        vision.hidden_size, vision.image_size, vision.patch_size
    )  # fmt: skip
    assert (sizes.mlp_width, sizes.norm_eps) == (vision.intermediate_size, vision.layer_norm_eps)
    assert sizes.num_layers + sizes.spare_layers == vision.num_hidden_layers
    assert sizes.num_layers == vision.num_hidden_layers + 1 + theirs.vision_feature_layer


@pytest.mark.parametrize("tower", [{}, TOWER | {"image_size": 64}])
def test_sparse_configs_of_gemma3(tower):
    text = {"vocab_size": 262_208, "hidden_size": 16, "num_hidden_layers": 1, "model_type": "gemma3_text"}
    fields = {"text_config": text, "vision_config": {"model_type": "siglip_vision_model", **tower}}
    fields |= {} if tower else {"mm_tokens_per_image": 49}
    ours, theirs = parsed(gemma3_vision, {"model_type": "gemma3"} | fields), transformers.Gemma3Config(**fields)
    vision = theirs.vision_config
    assert ours.vectors_per_tile == theirs.mm_tokens_per_image
    assert (ours.image_token, *ours.borders) == (theirs.image_token_id, theirs.boi_token_id, theirs.eoi_token_id)
    assert (ours.tower.width, ours.tower.num_layers, ours.tower.mlp_width, ours.tower.image_size) == (
        vision.hidden_size, vision.num_hidden_layers, vision.intermediate_size, vision.image_size
    )  # fmt: skip
    assert ours.tower.norm_eps == vision.layer_norm_eps and ours.scales_embedding and ours.tied
    wrong = fields | {"mm_tokens_per_image": 25}
    with pytest.raises(UsageError, match="has mm_tokens_per_image 25, which must be the square of a number that"):
        parsed(gemma3_vision, {"model_type": "gemma3"} | wrong)


def test_sparse_configs_of_qwen2_vl():
    text = {name: TEXT[name] for name in TEXT if name not in ("model_type", "head_dim")} | SECTIONS
    fields = {"text_config": text, "vision_config": TOWER_OF_GRIDS, "image_token_id": 59}
    ours, theirs = parsed(qwen2_vl, {"model_type": "qwen2_vl"} | fields), transformers.Qwen2VLConfig(**fields)
    assert ours.norm_eps == theirs.text_config.rms_norm_eps
    vision = theirs.vision_config
    assert (ours.tower.patch_size, ours.tower.merge, ours.tower.frames, ours.tower.mlp_width) == (
        vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size,
        int(vision.embed_dim * vision.mlp_ratio),
    )  # fmt: skip


def test_sparse_configs_of_qwen2_5_vl():
    text = {name: TEXT[name] for name in TEXT if name not in ("model_type", "head_dim")} | SECTIONS
    fields = {"text_config": text, "vision_config": {"num_heads": 4}, "image_token_id": 59}
    ours = parsed(qwen2_5_vl, {"model_type": "qwen2_5_vl"} | fields)
    theirs = transformers.Qwen2_5_VLConfig(**fields)
    vision, sizes = theirs.vision_config, ours.tower
    assert ours.norm_eps == theirs.text_config.rms_norm_eps
    assert (sizes.width, sizes.mlp_width, sizes.num_layers) == (
        vision.hidden_size, vision.intermediate_size, vision.depth
    )  # fmt: skip
    assert sizes.full_layers == tuple(vision.fullatt_block_indexes) and sizes.activation == vision.hidden_act
    assert sizes.window * sizes.patch_size == vision.window_size


def test_sparse_configs_of_qwen3_vl():
    text = {name: TEXT[name] for name in TEXT if name not in ("model_type", "head_dim", "num_key_value_heads")}
    text |= {"num_attention_heads": 32, "hidden_size": 32}
    fields = {"text_config": text, "vision_config": {"num_heads": 4}, "image_token_id": 59}
    with pytest.raises(UsageError, match="has 3 deepstack_visual_indexes, which must be at most the 2 layers"):
        parsed(qwen3_vl, {"model_type": "qwen3_vl"} | fields)
    text["num_hidden_layers"] = 3
    ours, theirs = parsed(qwen3_vl, {"model_type": "qwen3_vl"} | fields), transformers.Qwen3VLConfig(**fields)
    vision, sizes = theirs.vision_config, ours.tower
    assert (ours.norm_eps, ours.head_dim, ours.num_kv_heads, ours.rope_base) == (
        theirs.text_config.rms_norm_eps, theirs.text_config.head_dim, theirs.text_config.num_key_value_heads,
        theirs.text_config.rope_parameters["rope_theta"],
    )  # fmt: skip
    assert (sizes.width, sizes.mlp_width, sizes.num_layers, sizes.table_side**2) == (
        vision.hidden_size, vision.intermediate_size, vision.depth, vision.num_position_embeddings
    )  # fmt: skip
    assert sizes.deep_layers == tuple(vision.deepstack_visual_indexes) and sizes.patch_bias
    axes = ours.frequency_axes  # of 64 frequencies
    assert axes[:7].tolist() == [0, 1, 2, 0, 1, 2, 0] and not axes[60:].any()
    assert np.bincount(axes).tolist() == [24, 20, 20]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (qwen2_5_vl, {"window_size": 20}, "vision_config.window_size 20, which must be at least 28"),
        (qwen2_5_vl, {"fullatt_block_indexes": [1, 0]}, r"indexes \[1, 0\], which must be layers in ascending order"),
        (qwen3_vl, {"num_position_embeddings": 20}, "num_position_embeddings 20, which must be a square number"),
        (qwen3_vl, {"deepstack_visual_indexes": [2]}, r"indexes \[2\], which must be layers .* below depth, 2"),
        (qwen2_5_vl, {"num_heads": 5}, "hidden_size 24, which must be a multiple of four times num_heads, 5"),
    ],
)
def test_towers_of_qwen_that_are_refused(family, changes, message):
    (kind,) = family.HF_TYPES
    tower = {"depth": 2, "hidden_size": 24, "num_heads": 3} | changes
    rope = SECTIONS["rope_parameters"] | {"mrope_section": [2, 1, 1]}
    fields = {"model_type": kind, "text_config": TEXT | {"rope_parameters": rope}, "vision_config": tower}
    with pytest.raises(UsageError, match=message):
        parsed(family, fields | {"image_token_id": 59})


@pytest.mark.parametrize(("family", "interleaved"), [(qwen2_vl, True), (qwen3_vl, False)])
def test_other_orders_of_the_axes_are_refused(family, interleaved):
    (kind,) = family.HF_TYPES
    rope = SECTIONS["rope_parameters"] | {"mrope_interleaved": interleaved}
    text = TEXT | {"num_hidden_layers": 3, "rope_parameters": rope}
    fields = {"model_type": kind, "text_config": text, "vision_config": {}, "image_token_id": 59}
    with pytest.raises(UsageError, match=f"mrope_interleaved {str(interleaved).lower()}, which no Qwen"):
        parsed(family, fields)


TEXT_OF_QWEN2_5_VL = {
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584,
    "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 128000, "max_window_layers": 28,
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 152064,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}  # fmt: skip
PUBLISHED = {
    "qwen2_5_vl": TEXT_OF_QWEN2_5_VL | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_start_token_id": 151652,
        "vision_end_token_id": 151653, "vision_token_id": 151654, "image_token_id": 151655, "video_token_id": 151656,
        "vision_config": {
            "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
            "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
            "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
    },
    "qwen3_vl": {
        "architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 151655, "video_token_id": 151656,
        "vision_start_token_id": 151652, "vision_end_token_id": 151653, "tie_word_embeddings": True,
        "text_config": {
            "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16",
            "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560,
            "initializer_range": 0.02, "intermediate_size": 9728, "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text", "num_attention_heads": 32, "num_hidden_layers": 36,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_theta": 5000000, "tie_word_embeddings": True,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "use_cache": True, "vocab_size": 151936,
        },
        "vision_config": {
            "deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1024, "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4096,
            "model_type": "qwen3_vl", "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 2560,
            "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
    },
}  # fmt: skip
"""The fields of Qwen2.5-VL-7B and Qwen3-VL-4B, in the form of the published files."""


@pytest.mark.parametrize(("family", "window", "sections"), [(qwen2_5_vl, 8, (16, 24, 24)), (qwen3_vl, 0, (24, 20, 20))])
def test_published_configs_are_read_without_a_word(family, window, sections):
    (kind,) = family.HF_TYPES
    fields = ConfigFields({"model_type": kind} | PUBLISHED[kind], "config.json")
    config = family.config_from_hf(fields, dtype="bfloat16", name="released", stacked=True)
    assert not describe_unread(fields)
    assert (config.tower.window, config.sections, config.head_dim) == (window, sections, 128)
    assert config.stacked == (kind == "qwen2_5_vl")
    again = family.config_from_hf(
        ConfigFields(family.config_to_hf(config), ""), dtype="bfloat16", name="released", stacked=config.stacked
    )
    assert again == config


def test_a_longer_text_of_qwen2_vl_is_saved():
    """YaRN and the three axes are in one object."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 100.0}
    text = {name: TEXT[name] for name in TEXT if name != "model_type"}
    text |= {"rope_parameters": rope | {"mrope_section": [1, 1, 2]}}
    config = parsed(qwen2_vl, {"text_config": text, "vision_config": TOWER_OF_GRIDS, "image_token_id": 59})
    assert config.rope_scaling.kind == "yarn" and config.sections == (1, 1, 2)
    assert parsed(qwen2_vl, qwen2_vl.config_to_hf(config)) == config


@pytest.mark.parametrize(
    ("family", "kind", "changes", "message"),
    [
        (idefics, "smolvlm", {}, "lacks image_token_id, whose default is 128257, outside of the vocabulary of 71"),
        (idefics, "idefics3", {"image_token_id": 71}, "has image_token_id 71, outside of the vocabulary of 71"),
        (llava, "llava", {"image_token_index": 32_000}, "has image_token_index 32000, outside of the vocabulary"),
        (qwen2_vl, "qwen2_vl", {}, "lacks image_token_id, whose default is 151655"),
    ],
)
def test_placeholders_are_in_the_vocabulary(family, kind, changes, message):
    of_grids = {"text_config": TEXT | SECTIONS, "vision_config": TOWER_OF_GRIDS}
    fields = of_grids if family is qwen2_vl else {"text_config": TEXT, "vision_config": TOWER}
    with pytest.raises(UsageError, match=message):
        parsed(family, {"model_type": kind} | fields | changes)
