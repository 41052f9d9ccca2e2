"""Qwen3.5 against the classes of transformers."""

import pytest
from hybrid_models import SIZES, qwen3_5, transformers
from safetensors import safe_open


@pytest.mark.parametrize("stacked", [False, True])
def test_logits(check_parity, stacked):
    config, *_ = check_parity(qwen3_5, stacked=stacked)
    assert config.period == 4 and config.rotary_dim == 4 and [kind.attends for kind in config.kinds] == [0, 0, 0, 1]


def with_images():
    """Return a model that reads images too."""
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
        "num_position_embeddings": 16,
    }  # fmt: skip
    text = transformers.Qwen3_5TextConfig(**SIZES, tie_word_embeddings=True)
    config = transformers.Qwen3_5Config(
        text_config=text.to_dict(), vision_config=vision, image_token_id=60, video_token_id=61,
        vision_start_token_id=62, vision_end_token_id=63, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.Qwen3_5ForConditionalGeneration(config)


def test_the_text_model_of_a_file_that_reads_images_too(check_parity, tmp_path):
    config, *_ = check_parity(with_images)
    assert config.tied and config.model_type == "qwen3_5_text"
    with safe_open(tmp_path / "model.safetensors", "numpy") as file:
        names = list(file.keys())
    assert any("visual" in name for name in names) and any("language_model" in name for name in names)
