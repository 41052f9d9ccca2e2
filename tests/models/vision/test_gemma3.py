"""Gemma 3 with images beside `transformers`: vectors of an image see each other, in all layers and over chunks."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import tokenizers
from image_models import IMAGE, TOWER, padded_logits, random_tiles, sharpen, write_tokenizer
from safetensors.numpy import load_file, save_file

import specjax
from specjax import UsageError
from specjax.models import Gemma3Config, images, load_image_processor
from specjax.models.vision import model as vision_model
from specjax.models.vision.config import VisionLanguageConfig
from specjax.models.vision.memory import ImageMemory

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

VECTORS = 9  # 6 x 6 patches, of which 2 x 2 are averaged
START, END = 60, 61
TEXT = {
    "vocab_size": 71, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "query_pre_attn_scalar": 8,
    "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
SETTINGS = {
    "image_processor_type": "Gemma3ImageProcessor", "size": {"height": 24, "width": 24}, "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3, "resample": 2, "do_pan_and_scan": False, "do_resize": True, "do_rescale": True,
    "do_normalize": True, "rescale_factor": 1 / 255,
}  # fmt: skip
LINES = ["\n" * count for count in (1, 2, 3, 4)]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in "
    "m['content'] %}{% if part['type'] == 'image' %}<fake_token_around_image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}assistant\n{% endif %}"
)

VECTORS_OF_IMAGE = [START, *[IMAGE] * VECTORS, END]
LONG = np.random.default_rng(3).integers(3, IMAGE, 122).tolist()
PROMPTS = [
    [*LONG, *VECTORS_OF_IMAGE, 7, 8],  # a chunk of the engine ends within the image
    [5, *VECTORS_OF_IMAGE, 7, 8, *VECTORS_OF_IMAGE, 9],
    [11, 12, 13, 14],
    [5, 6, *[IMAGE] * VECTORS],  # the last vector is the root of the first tree, and does not see its other nodes
]
TILES = [random_tiles(1), random_tiles(2, seed=1), None, random_tiles(1, seed=4)]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma")
    config = transformers.Gemma3Config(
        text_config=TEXT, vision_config=TOWER | {"model_type": "siglip_vision_model"}, mm_tokens_per_image=VECTORS,
        image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END,
    )  # fmt: skip
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    sharpen(model)
    model.save_pretrained(folder)
    write_tokenizer(folder, TEMPLATE)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "removed")
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in LINES])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return model, folder, specjax.load(str(folder))[0]


def their_inputs(prompt, pixels):
    ids = torch.tensor([prompt])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": (ids == IMAGE).long()}
    return inputs if pixels is None else inputs | {"pixel_values": torch.tensor(pixels)}


def their_logits(model, prompt, pixels):
    with torch.no_grad():
        return model(**their_inputs(prompt, pixels)).logits[0].numpy()


def errors(gemma, chunk, rows=(0, 1, 2, 3)):
    """Return the largest difference of the logits of each prompt, which is read in chunks."""
    model, _, target = gemma
    prompts, tiles = [PROMPTS[row] for row in rows], [TILES[row] for row in rows]
    ours = padded_logits(target, prompts, images(target, prompts, tiles), chunk)
    return [
        float(np.abs(ours[row, : len(prompt)] - their_logits(model, prompt, pixels)).max())
        for row, (prompt, pixels) in enumerate(zip(prompts, tiles, strict=True))
    ]


@pytest.mark.parametrize("chunk", [5, 200])
def test_logits_are_those_of_transformers(gemma, chunk):
    """Chunks of 5 cut each image, also in two places."""
    assert max(errors(gemma, chunk)) < 5e-4


def test_what_the_logits_depend_on(gemma, monkeypatch):
    """Mutants: images that are causal, chunks without the rest of an image, and vectors scaled like embeddings."""
    causal = lambda mask, *others: vision_model.texts.traced_mask(mask)
    short = lambda run, x, positions, mask, *others: run(vision_model.Stream(x), positions=positions, mask=mask)
    put, scale = ImageMemory.put, 32**0.5
    scaled = lambda memory, x, positions: put(memory._replace(vectors=memory.vectors * scale), x, positions)
    mutants = (
        (vision_model, "with_images", causal, 40),
        (vision_model, "look_ahead", short, 5),
        (ImageMemory, "put", scaled, 40),
    )
    for place, name, mutant, chunk in mutants:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, mutant)
            assert errors(gemma, chunk, [1])[0] > 0.01, name


@pytest.fixture(scope="module")
def texts(gemma):
    """Return the greedy texts of transformers."""
    return [
        gemma[0]
        .generate(**their_inputs(prompt, pixels), max_new_tokens=12, do_sample=False, eos_token_id=None)[
            0, len(prompt) :
        ]
        .tolist()
        for prompt, pixels in zip(PROMPTS, TILES, strict=True)
    ]


@pytest.mark.parametrize("method", ["prompt_lookup", "token_recycling"])
def test_greedy_texts_are_those_of_transformers(gemma, texts, method):
    inputs = images(gemma[2], PROMPTS, TILES)
    result = specjax.decode(gemma[2], method, PROMPTS, key=0, inputs=inputs, max_new_tokens=12)
    assert result.to_lists() == texts


@pytest.mark.parametrize("selection", ["snapkv", "sinks"])
def test_drafts_over_a_part_of_the_cache(gemma, texts, selection):
    """The small cache has the selected tokens of the text, and no vectors of images."""
    drafter = specjax.drafters.sparse_cache(gemma[2], budget=40, pays_from=0, selection=selection)
    inputs = images(gemma[2], PROMPTS, TILES)
    result = specjax.decode(gemma[2], drafter, PROMPTS, key=0, inputs=inputs, max_new_tokens=12)
    assert result.to_lists() == texts and np.asarray(result.stats.drafted > 0).all()


def test_depth_policies_read_texts_only(gemma, texts):
    skipping = specjax.adaptive.skip_layers(gemma[2], specjax.adaptive.skip_decode(1.0))
    decode = functools.partial(specjax.decode, skipping, "prompt_lookup", key=0, max_new_tokens=12)
    assert decode([PROMPTS[2]]).to_lists() == [texts[2]]
    with pytest.raises(UsageError, match="cannot read images, because their vectors see later ones"):
        decode(PROMPTS, inputs=images(gemma[2], PROMPTS, TILES))


def test_a_server_reads_images(gemma, texts):
    """Rows enter one after another, in chunks."""
    target = gemma[2]
    padded = [images(target, [p], [t], num_tiles=4) for p, t in zip(PROMPTS, TILES, strict=True)]
    requests = [
        specjax.Request(p, n, inputs=jax.tree.map(lambda x: x[0], entry))
        for n, (p, entry) in enumerate(zip(PROMPTS, padded, strict=True))
    ]
    written = {n: [] for n in range(len(PROMPTS))}
    for served in specjax.serve(
        target, "suffix", requests, slots=2, longest_prompt=192, max_new_tokens=12, inputs=requests[0].inputs
    ):
        assert served.error is None
        written[served.request] += served.tokens
    assert list(written.values()) == texts


def test_images_are_in_one_piece(gemma):
    with pytest.raises(UsageError, match="the placeholders of an image in prompt 0 have other tokens between them"):
        images(gemma[2], [[5, *[IMAGE] * 4, 6, *[IMAGE] * 5]], [random_tiles(1)])


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for name, shape in (("wide.png", (20, 70, 3)), ("square.png", (30, 30, 3))):
        Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(folder / name)
    return [folder / "wide.png", folder / "square.png"]


def test_ids_and_pixels_are_those_of_transformers(gemma, pictures):
    """Line breaks before an image are one token with those of the image."""
    _, folder, target = gemma
    _, tokenizer = specjax.load(str(folder))
    processor = load_image_processor(folder, target, tokenizer)
    part = lambda text: {"type": "text", "text": text}
    content = [{"type": "image"}, part("w5 \n"), {"type": "image"}, part("w6")]
    ids, tiles = processor.chat([{"role": "user", "content": content}], pictures)
    backend = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), unk_token="<unk>")
    backend.boi_token, backend.boi_token_id, backend.eoi_token = "<fake_token_around_image>", START, "<global-img>"
    backend.image_token, backend.image_token_id = "<image>", IMAGE
    theirs = transformers.Gemma3Processor(processor.process, backend, image_seq_length=VECTORS)
    text = "user\n{0}w5 \n{0}w6<end_of_utterance>\nassistant\n".format("<fake_token_around_image>")
    expected = theirs(text=text, images=[[Image.open(f).convert("RGB") for f in pictures]], return_tensors="np")
    assert ids == expected["input_ids"][0].tolist()
    assert {"\n" * 3, "\n" * 2} <= {tokenizer.vocab[i] for i in ids}
    np.testing.assert_array_equal(tiles.pixels, expected["pixel_values"])
    raw, _ = processor.raw("w5 <fake_token_around_image> w6", pictures[:1])
    assert raw.count(IMAGE) == VECTORS and raw.count(START) == 1
    assert processor.raw("w5", pictures)[0].count(IMAGE) == 2 * VECTORS


def test_crops_are_refused(gemma, pictures, tmp_path):
    _, folder, target = gemma
    changes = {
        "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 4, "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }  # fmt: skip
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SETTINGS | changes))
    processor = load_image_processor(tmp_path, target, specjax.load(str(folder))[1])
    with pytest.raises(UsageError, match=r"cuts images into crops, .* set do_pan_and_scan to false"):
        processor.chat("w5", pictures)


def test_texts_of_the_text_model(gemma, tmp_path):
    """Texts alone are those of the text model, which files without a tower are."""
    _, folder, target = gemma
    text, _ = specjax.load(str(folder), images=False)
    assert isinstance(target.model.config, VisionLanguageConfig) and isinstance(text.model.config, Gemma3Config)
    decode = lambda target: specjax.decode(target, "suffix", [[5, 6, 7, 8]], key=0, max_new_tokens=12).to_lists()
    assert decode(target) == decode(text)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    remaining = {name: x for name, x in tensors.items() if "vision_tower" not in name and "projector" not in name}
    save_file(remaining, tmp_path / "model.safetensors")
    alone, _ = specjax.load(str(tmp_path))
    assert alone.model.config == dataclasses.replace(text.model.config, name=alone.model.config.name)


def test_saved_models(gemma, tmp_path):
    _, folder, target = gemma
    specjax.save_model(tmp_path, target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    copy, _ = specjax.load(str(tmp_path))
    assert copy.model.config == dataclasses.replace(target.model.config, name=copy.model.config.name)
    jax.tree.map(np.testing.assert_array_equal, target.params, copy.params)


def test_on_a_mesh(gemma, texts):
    """Eight devices in two parts of rows and four of heads, of which two have the same key/value head."""
    _, folder, target = gemma
    split = specjax.load(str(folder), mesh=specjax.mesh(2, 4))[0]
    assert isinstance(split.model.config, VisionLanguageConfig)
    inputs = images(target, PROMPTS, TILES)
    result = specjax.decode(split, "prompt_lookup", PROMPTS, key=0, inputs=inputs, max_new_tokens=12)
    assert result.to_lists() == [text[:12] for text in texts]
