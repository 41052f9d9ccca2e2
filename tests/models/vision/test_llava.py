"""LLaVA-1.5 beside `transformers`: a CLIP tower without its last layer, and files of two versions."""

import json

import numpy as np
import pytest
from image_models import IMAGE, TEXT, TOWER, padded_logits, random_tiles, sharpen, write_tokenizer
from safetensors.numpy import load_file, save_file

import specjax
from specjax import UsageError
from specjax.models import images

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VECTORS = 36
PROMPTS = [[5, *[IMAGE] * VECTORS, 7, 8, *[IMAGE] * VECTORS, 9], [11, 12, *[IMAGE] * VECTORS, 5]]
TILES = [random_tiles(2), random_tiles(1, seed=1)]


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    config = transformers.LlavaConfig(
        text_config=TEXT, vision_config=TOWER | {"model_type": "clip_vision_model", "num_hidden_layers": 3},
        image_token_index=IMAGE, image_seq_length=VECTORS,
    )  # fmt: skip
    model = transformers.LlavaForConditionalGeneration(config).eval()
    sharpen(model)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model, folder, specjax.load(str(folder))[0]


def their_logits(model, prompt, pixels):
    ids = torch.tensor([prompt])
    with torch.no_grad():
        return model(input_ids=ids, pixel_values=torch.tensor(pixels), attention_mask=torch.ones_like(ids)).logits[0]


def test_logits_and_greedy_texts_are_those_of_transformers(llava):
    model, _, target = llava
    inputs = images(target, PROMPTS, TILES)
    ours = padded_logits(target, PROMPTS, inputs, 50)
    texts = specjax.decode(target, "suffix", PROMPTS, key=0, inputs=inputs, max_new_tokens=12).to_lists()
    for row, (prompt, pixels) in enumerate(zip(PROMPTS, TILES, strict=True)):
        theirs = their_logits(model, prompt, pixels).numpy()
        np.testing.assert_allclose(ours[row, : len(prompt)], theirs, atol=3e-4, rtol=0)
        greedy = model.generate(
            torch.tensor([prompt]), pixel_values=torch.tensor(pixels), max_new_tokens=12, do_sample=False,
            eos_token_id=None,
        )  # fmt: skip
        assert texts[row] == greedy[0, len(prompt) :].tolist()


def test_files_with_the_names_of_earlier_versions(llava, tmp_path):
    """The published files have other prefixes, and ids of positions that nothing reads."""
    _, folder, target = llava
    prefixes = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
    old = lambda name: next((new + name.removeprefix(p) for p, new in prefixes.items() if name.startswith(p)), name)
    tensors = {old(name): x for name, x in load_file(folder / "model.safetensors").items()}
    plain = {}
    for name, x in tensors.items():
        name = name.removeprefix("model.") if "vision_tower" in name or "projector" in name else name
        if name.startswith("vision_tower.") and not name.startswith("vision_tower.vision_model."):
            name = name.replace("vision_tower.", "vision_tower.vision_model.", 1)
        plain[name] = x
    assert "vision_tower.vision_model.pre_layrnorm.weight" in plain
    plain["vision_tower.vision_model.embeddings.position_ids"] = np.arange(37, dtype=np.float32)[None]
    save_file(plain, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    copy = specjax.load(str(tmp_path))[0]
    inputs = images(target, PROMPTS, TILES)
    ours, theirs = (padded_logits(model, PROMPTS, inputs, 128) for model in (copy, target))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_feature_layer": [-2, -1]}, "must be one layer of the 3 of its tower"),
        ({"vision_feature_select_strategy": "full"}, "does not support .only default"),
        ({"vision_config": TOWER | {"model_type": "siglip_vision_model"}}, "image tower .* .only CLIP"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act"),
    ],
)
def test_other_towers_are_refused(llava, tmp_path, changes, message):
    for file in llava[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | changes))
    with pytest.raises(UsageError, match=message):
        specjax.load(str(tmp_path))
