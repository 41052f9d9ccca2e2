"""LLaVA-OneVision beside `transformers`: grids of tiles without their padding, and ends of rows."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from image_models import IMAGE, TEXT, TOWER, padded_logits, sharpen, write_tokenizer

import specjax
from specjax import UsageError
from specjax.models import images, load_image_processor
from specjax.models.vision import anyres

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

SIDE = 6  # patches in a row of a tile
TILE = 26  # pixels in a row of a tile, of which the last two are in no patch, like six of the 384 of published models
POINTS = [[TILE * rows, TILE * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]
SETTINGS = {
    "image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": TILE, "width": TILE}, "resample": 3,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_grid_pinpoints": POINTS, "do_pad": True,
}  # fmt: skip
SHAPES = {
    "wide.png": (40, 70), "tall.png": (71, 31), "large.png": (90, 80), "small.png": (10, 12), "line.png": (1, 300),
}  # fmt: skip


@pytest.fixture(scope="module")
def onevision(tmp_path_factory):
    """Return a model of transformers, its folder with images, and the target with its processor."""
    folder, rng = tmp_path_factory.mktemp("onevision"), np.random.default_rng(0)
    config = transformers.LlavaOnevisionConfig(
        text_config=TEXT | {"model_type": "qwen2"},
        vision_config=TOWER | {"model_type": "siglip_vision_model", "image_size": TILE}, image_token_index=IMAGE,
        video_token_index=58, image_grid_pinpoints=POINTS, vision_aspect_ratio="anyres_max_2",
    )  # fmt: skip
    model = transformers.LlavaOnevisionForConditionalGeneration(config).eval()
    sharpen(model)
    with torch.no_grad():
        model.model.image_newline.normal_(std=0.3)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    for name, shape in SHAPES.items():
        Image.fromarray(rng.integers(0, 256, (*shape, 3), np.uint8)).save(folder / name)
    target, tokenizer = specjax.load(str(folder))
    return model, folder, target, load_image_processor(folder, target, tokenizer)


class TheirProcessor(transformers.LlavaOnevisionProcessor):
    """The processor of transformers without that of videos, which needs torchvision."""

    def __init__(self, image_processor, tokenizer):
        self.num_image_tokens, self.vision_feature_select_strategy = SIDE**2, "full"
        self.vision_aspect_ratio = "anyres_max_2"
        self.image_token, self.image_token_id = "<image>", IMAGE
        self.video_token, self.video_token_id = "<video>", -1
        transformers.ProcessorMixin.__init__(self, image_processor, tokenizer)


def their_prompt(onevision, names, words):
    """Return the inputs of a prompt from the processor of transformers."""
    _, folder, _, processor = onevision
    backend = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), unk_token="<unk>")
    theirs = TheirProcessor(processor.process, backend)
    text = f"user:{'<image>' * len(names)} {words}<end_of_utterance> assistant:"
    pictures = [Image.open(folder / name).convert("RGB") for name in names]
    return theirs(text=text, images=[pictures] if names else None, return_tensors="pt")


CASES = ["wide.png"], ["tall.png"], ["large.png"], ["small.png"], ["line.png"], ["wide.png", "small.png"], []


def test_ids_logits_and_texts_are_those_of_transformers(onevision):
    """An image alone has a grid of tiles, which is resized unless it is small. Two images are one tile each.

    A line of pixels leaves no row of its grid.
    """
    model, folder, target, processor = onevision
    ours = [processor.chat("w5 w6", [folder / name for name in names]) for names in CASES]
    prompts, tiles = [ids for ids, _ in ours], [entry for _, entry in ours]
    inputs = images(target, prompts, tiles)
    logits = padded_logits(target, prompts, inputs, 90)
    options = {"key": 0, "inputs": inputs, "max_new_tokens": 12}
    texts = specjax.decode(target, "prompt_lookup", prompts, **options).to_lists()
    assert specjax.decode(target, "token_recycling", prompts, **options).to_lists() == texts
    for row, names in enumerate(CASES):
        theirs = their_prompt(onevision, names, "w5 w6")
        assert prompts[row] == theirs["input_ids"][0].tolist()
        if names:
            pixels = theirs["pixel_values"].numpy()
            np.testing.assert_array_equal(tiles[row].pixels, pixels.reshape(-1, *pixels.shape[2:]))
        with torch.no_grad():
            expected = model(**theirs).logits[0].numpy()
        np.testing.assert_allclose(logits[row, : len(prompts[row])], expected, atol=5e-4, rtol=0)
        greedy = model.generate(**theirs, max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert texts[row] == greedy[0, len(prompts[row]) :].tolist()


def test_what_the_logits_depend_on(onevision, monkeypatch):
    """Mutants: padding that is kept, no resizing, and rows without ends."""
    _, folder, target, processor = onevision
    [prompt, tiles] = processor.chat("w5 w6", [folder / "large.png"])
    logits = lambda entry: padded_logits(target, [prompt], images(target, [prompt], [entry]), 200)
    right = logits(tiles)
    nearest = tiles.samples._replace(weights=np.eye(4, dtype=np.float32)[tiles.samples.weights.argmax(-1)])
    assert np.abs(logits(tiles._replace(samples=nearest)) - right).max() > 0.01
    sources = np.where(tiles.samples.sources == anyres.ROW_END, 0, tiles.samples.sources)
    assert np.abs(logits(tiles._replace(samples=tiles.samples._replace(sources=sources))) - right).max() > 0.01
    monkeypatch.setattr(anyres, "_without_padding", lambda line, length: line)
    wrong = processor.chat("w5 w6", [folder / "tall.png"])[0]
    assert len(wrong) != their_prompt(onevision, ["tall.png"], "w5 w6")["input_ids"].shape[1]


def test_grids_show_most_of_an_image():
    sizes = [(rows, columns) for rows in (1, 2, 3) for columns in (1, 2, 3)]
    for height, width in (*SHAPES.values(), (24, 24), (25, 24), (100, 10), (7, 100), (48, 48), (3, 5)):
        ours = anyres.best_grid(height, width, TILE, sizes)
        theirs = transformers.image_processing_utils.select_best_resolution((height, width), POINTS)
        assert tuple(TILE * side for side in ours) == theirs


def test_what_it_refuses(onevision, tmp_path):
    _, folder, target, processor = onevision
    ids, tiles = processor.chat("w5", [folder / "wide.png"])
    with pytest.raises(UsageError, match="a message has a part of type video"):
        processor.chat([{"role": "user", "content": [{"type": "video"}]}], [])
    with pytest.raises(UsageError, match=r"placeholders .token 59. and images of \d+ vectors in all"):
        images(target, [ids[:-20]], [tiles])
    with pytest.raises(UsageError, match="encode it with the image processor of the model"):
        images(target, [ids], [tiles.pixels])
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SETTINGS | {"image_grid_pinpoints": [[TILE, TILE]]}))
    other = load_image_processor(tmp_path, target, processor.tokenizer)
    with pytest.raises(UsageError, match=r"returns \[1, 2\] tiles, and its config.json needs \[1, \d\]; download"):
        other.chat("w5", [folder / "wide.png"])
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    fields = json.loads((folder / "config.json").read_text())
    for changes, message in (
        ({"image_grid_pinpoints": [[TILE, 25]]}, "image_grid_pinpoints that are not heights and widths in multiples"),
        ({"vision_aspect_ratio": "square"}, "vision_aspect_ratio .square., which specjax does not support"),
        ({"vision_feature_select_strategy": "default"}, "does not support .only full"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields | changes))
        with pytest.raises(UsageError, match=message):
            specjax.load(str(tmp_path))


def test_saved_models(onevision, tmp_path):
    _, folder, target, _ = onevision
    specjax.save_model(tmp_path, target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    copy, _ = specjax.load(str(tmp_path))
    assert copy.model.config == dataclasses.replace(target.model.config, name=copy.model.config.name)
    jax.tree.map(np.testing.assert_array_equal, target.params, copy.params)
