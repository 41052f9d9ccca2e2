"""Tiny folders of Qwen2.5-VL and Qwen3-VL with random weights, and prompts with images of several sizes."""

import numpy as np
from image_models import IMAGE, TEXT, sharpen, write_tokenizer

from specjax.models import PromptPatches

KINDS = "qwen2_5_vl", "qwen3_vl"
FEATURES = 3 * 2 * 4 * 4
IDS = {"image_token_id": IMAGE, "video_token_id": 60, "vision_start_token_id": 61, "vision_end_token_id": 62}
TOWER = {
    "depth": 3, "hidden_size": 24, "out_hidden_size": 32, "intermediate_size": 40, "num_heads": 3, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 100.0}
SIZES = [[[1, 4, 6], [1, 10, 6]], [[1, 6, 2]]]  # frames, rows and columns of patches of each row's images
PROMPTS = [
    [5, 6, *[IMAGE] * 6, 7, 8, *[IMAGE] * 15, 9, 10], [11, *[IMAGE] * 3, 12, 13, 5], [5, 6, 7, 8, 5, 6],
]  # fmt: skip


def fields_of(kind):
    """Return the fields of a config. Windows have 4 x 4 patches, and tables of positions 5 x 5."""
    if kind == "qwen2_5_vl":
        text = TEXT | {"model_type": "qwen2_5_vl_text", "rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}}
        text.pop("head_dim")
        tower = TOWER | {"window_size": 16, "fullatt_block_indexes": [1]}
    else:
        rope = ROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
        text = TEXT | {"model_type": "qwen3_vl_text", "num_hidden_layers": 3, "rope_parameters": rope}
        tower = TOWER | {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1]}
    return {"text_config": text, "vision_config": tower, **IDS}


def class_of(kind):
    """Return the class of transformers."""
    import transformers

    name = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[kind]
    return getattr(transformers, f"{name}ForConditionalGeneration")


def make_folder(kind, folder):
    """Write a model with its tokenizer, and return the module of transformers."""
    model_class = class_of(kind)
    model = model_class(model_class.config_class(**fields_of(kind))).eval()
    sharpen(model)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def patches_of(grids, seed):
    """Return random patches of images with these grids."""
    count = sum(h * w for _, h, w in grids)
    rng = np.random.default_rng(seed)
    return PromptPatches(rng.normal(size=(count, FEATURES)).astype(np.float32), np.array(grids))


TILES = [*(patches_of(grids, seed) for seed, grids in enumerate(SIZES)), None]


def their_inputs(prompt, entry):
    """Return the inputs of transformers for a prompt."""
    import torch

    ids = torch.tensor([prompt])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE).int()}
    if entry is None:
        return inputs
    return inputs | {"pixel_values": torch.tensor(entry.patches), "image_grid_thw": torch.tensor(entry.grids)}


def their_logits(model, prompt, entry):
    """Return the logits of transformers for a prompt."""
    import torch

    with torch.no_grad():
        return model(**their_inputs(prompt, entry)).logits[0].numpy()
