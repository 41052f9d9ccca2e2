"""Qwen2-VL beside `transformers`: images of any size, and positions on three axes."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from image_models import IMAGE, TEXT, padded_logits, sharpen, write_tokenizer
from PIL import Image
from safetensors.numpy import load_file, save_file

import specjax
from specjax import UsageError
from specjax.cli import main
from specjax.models import PromptPatches, images, load_image_processor

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

FEATURES = 3 * 2 * 4 * 4
SIZES = [[[1, 4, 6], [1, 2, 8]], [[1, 6, 2]]]  # frames, rows and columns of patches of each row's images


def patches_of(grids, seed):
    count = sum(h * w for _, h, w in grids)
    rng = np.random.default_rng(seed)
    return PromptPatches(rng.normal(size=(count, FEATURES)).astype(np.float32), np.array(grids))


TILES = [patches_of(grids, seed) for seed, grids in enumerate(SIZES)]
PROMPTS = [[5, 6, *[IMAGE] * 6, 7, 8, *[IMAGE] * 4, 9, 10], [11, *[IMAGE] * 3, 12, 13, 5]]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen2_vl")
    text = TEXT | {
        "model_type": "qwen2_vl_text",
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]},
    }
    text.pop("head_dim")
    tower = {
        "depth": 2, "embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2, "num_heads": 3, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=tower, image_token_id=IMAGE, video_token_id=60, vision_start_token_id=61,
        vision_end_token_id=62,
    )  # fmt: skip
    model = transformers.Qwen2VLForConditionalGeneration(config).eval()
    sharpen(model)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model, specjax.load(str(folder))[0], folder


def their_inputs(prompt, entry):
    ids = torch.tensor([prompt])
    return {
        "input_ids": ids, "pixel_values": torch.tensor(entry.patches), "image_grid_thw": torch.tensor(entry.grids),
        "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE).int(),
    }  # fmt: skip


def test_logits_are_those_of_transformers(qwen):
    """Chunks cut images in two. The text after an image has smaller rotary positions than places."""
    model, target, _ = qwen
    ours = padded_logits(target, PROMPTS, images(target, PROMPTS, TILES), 5)
    for row, (prompt, entry) in enumerate(zip(PROMPTS, TILES, strict=True)):
        with torch.no_grad():
            theirs = model(**their_inputs(prompt, entry)).logits[0].numpy()
        np.testing.assert_allclose(ours[row, : len(prompt)], theirs, atol=3e-4, rtol=0)


def test_greedy_texts_are_those_of_transformers(qwen):
    """Trees have positions on one axis, because text has the same on all three."""
    model, target, _ = qwen
    inputs = images(target, PROMPTS, TILES)
    texts = specjax.decode(target, "token_recycling", PROMPTS, key=0, inputs=inputs, max_new_tokens=16).to_lists()
    for prompt, entry, text in zip(PROMPTS, TILES, texts, strict=True):
        theirs = model.generate(**their_inputs(prompt, entry), max_new_tokens=16, do_sample=False, eos_token_id=None)
        assert text == theirs[0, len(prompt) :].tolist()


def test_files_with_the_form_of_earlier_versions(qwen, tmp_path):
    """The published files have the fields of the text model beside the others, and other names of tensors."""
    _, target, folder = qwen
    fields = json.loads((folder / "config.json").read_text())
    text = fields.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    (tmp_path / "config.json").write_text(json.dumps({**text, **fields}))
    tensors = load_file(folder / "model.safetensors")
    old = lambda name: name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
    save_file({old(name): x for name, x in tensors.items()}, tmp_path / "model.safetensors")
    write_tokenizer(tmp_path)
    copy, _ = specjax.load(str(tmp_path))
    ours, theirs = (padded_logits(m, PROMPTS, images(m, PROMPTS, TILES), 64) for m in (copy, target))
    np.testing.assert_array_equal(ours, theirs)


def test_a_saved_model_has_the_same_parameters(qwen, tmp_path):
    _, target, _ = qwen
    specjax.save_model(tmp_path, target)
    write_tokenizer(tmp_path)
    copy, _ = specjax.load(str(tmp_path))
    ours, theirs = (padded_logits(m, PROMPTS, images(m, PROMPTS, TILES), 64) for m in (copy, target))
    np.testing.assert_array_equal(ours, theirs)


def test_what_it_refuses(qwen):
    _, target, _ = qwen
    call = {"key": 0, "inputs": images(target, PROMPTS, TILES), "max_new_tokens": 4}
    with pytest.raises(UsageError, match=r"prompt 0 has .* vectors for other places; pass the prompts"):
        specjax.decode(target, "autoregressive", [[5, *PROMPTS[0]], *PROMPTS[1:]], **call)
    with pytest.raises(UsageError, match=r"prompt 0 has 5 placeholders .* and images of \[6, 4\] vectors"):
        images(target, [[IMAGE] * 5], TILES[:1])
    for grid in ([[1, 3, 2]], [[1, 1, 2]], [[1, 2, 0]]):
        half = PromptPatches(np.zeros((np.prod(grid), FEATURES), np.float32), np.array(grid))
        with pytest.raises(UsageError, match="rows and columns that are multiples of 2"):
            images(target, [[IMAGE]], [half])
    video = PromptPatches(np.zeros((8, FEATURES), np.float32), np.array([[2, 2, 2]]))
    with pytest.raises(UsageError, match="must be one frame each with 96 numbers per patch"):
        images(target, [[IMAGE] * 2], [video])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": 8}, "reads patches of 384 numbers in blocks of 2 x 2, and these have 96 numbers"),
        ({"merge": 3}, "in blocks of 3 x 3, and these have 96 numbers and 4 patches per block"),
    ],
)
def test_a_draft_model_with_another_tower_is_refused(qwen, changes, message):
    _, target, _ = qwen
    config = target.model.config
    other = dataclasses.replace(config, tower=dataclasses.replace(config.tower, **changes))
    draft = specjax.Target(specjax.models.make_model(other), specjax.models.init_params(other, jax.random.key(0)))
    with pytest.raises(UsageError, match=message):
        specjax.decode(target, draft, PROMPTS, key=0, inputs=images(target, PROMPTS, TILES), max_new_tokens=2)


def test_a_row_without_images_has_the_text_that_it_has_alone(qwen):
    """The rotary positions of text alone are its places. Prompts may also be all images, side by side."""
    _, target, _ = qwen
    prompts = [[5, 6, 7, 8], PROMPTS[0], [*[IMAGE] * 10]]
    inputs = images(target, prompts, [None, TILES[0], TILES[0]])
    rows = specjax.decode(target, "auto", prompts, key=0, inputs=inputs, max_new_tokens=10).to_lists()
    alone = specjax.decode(target, "autoregressive", prompts[:1], key=0, max_new_tokens=10).to_lists()
    assert rows[0] == alone[0]
    for row in (1, 2):
        one = images(target, [prompts[row]], [TILES[0]])
        text = specjax.decode(target, "autoregressive", [prompts[row]], key=0, inputs=one, max_new_tokens=10)
        assert rows[row] == text.to_lists()[0]


def test_a_server_reads_images_of_several_sizes(qwen):
    """An image of 272 patches needs more room than those of the other request."""
    _, target, _ = qwen
    large = patches_of([[1, 4, 68]], 5)
    prompts, tiles = [PROMPTS[0], [5, *[IMAGE] * 68, 6]], [TILES[0], large]
    of_one = lambda prompt, entry: images(target, [prompt], [entry], num_tiles=2, num_patches=272)
    requests = [
        specjax.Request(prompt, 0, inputs=jax.tree.map(lambda x: x[0], of_one(prompt, entry)))
        for prompt, entry in zip(prompts, tiles, strict=True)
    ]
    texts = {0: [], 1: []}
    for served in specjax.serve(
        target, "suffix", requests, slots=2, longest_prompt=80, max_new_tokens=8, inputs=requests[0].inputs
    ):
        assert served.error is None
        texts[served.request] += served.tokens
    inputs = images(target, prompts, tiles)
    plain = specjax.decode(target, "autoregressive", prompts, key=0, inputs=inputs, max_new_tokens=8)
    assert list(texts.values()) == plain.to_lists()
    with pytest.raises(UsageError, match="num_patches must be a whole number of at least 272"):
        images(target, prompts[1:], [large], num_patches=256)


def test_images_on_the_command_line(qwen, tmp_path, capsys):
    """The image processor of transformers cuts pictures of two sizes into patches."""
    _, target, _ = qwen
    specjax.save_model(tmp_path, target)
    write_tokenizer(tmp_path)
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 4096},
    }  # fmt: skip
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    Image.new("RGB", (33, 15), "red").save(tmp_path / "wide.png")
    flags = ["--target", str(tmp_path), "--image", str(tmp_path / "wide.png"), "--method", "suffix", "--json"]
    with pytest.raises(SystemExit) as end:
        main(["generate", "w5", *flags, "--max-new-tokens", "8"])
    document = json.loads(capsys.readouterr().out)
    copy, tokenizer = specjax.load(str(tmp_path))
    settings = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 8}, "crop_size": 8}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(UsageError, match="returns no image_grid_thw, so it is that of another model"):
        load_image_processor(tmp_path / "other", copy, tokenizer).chat("w5", [tmp_path / "wide.png"])
    ids, tiles = load_image_processor(tmp_path, copy, tokenizer).chat("w5", [tmp_path / "wide.png"])
    assert ids.count(IMAGE) == tiles.grids.prod() // 4
    plain = specjax.decode(copy, "autoregressive", [ids], key=0, inputs=images(copy, [ids], [tiles]), max_new_tokens=8)
    assert not end.value.code and document["results"][0]["token_ids"] == plain.to_lists()[0]
