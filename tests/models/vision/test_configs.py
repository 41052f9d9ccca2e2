"""Configurations of models with images that omit fields have the defaults of transformers."""

import pytest
from image_models import TEXT, TOWER

from specjax import UsageError
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.families.vision import idefics, llava, qwen2_vl

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
