"""Qwen2.5-VL and Qwen3-VL beside `transformers`: windows, DeepStack, and interleaved positions on three axes."""

import dataclasses
import functools
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from image_heads import head_of
from image_models import IMAGE, padded_logits, write_tokenizer
from PIL import Image
from qwen_models import KINDS, PROMPTS, TILES, class_of, make_folder, patches_of, their_inputs, their_logits
from safetensors.numpy import load_file, save_file

import specjax
from specjax import UsageError, adaptive, drafters
from specjax.models import images, load_image_processor
from specjax.models.vision import grid_tower
from specjax.models.vision.memory import ImageMemory
from specjax.models.vision.windows import attend_in_windows
from specjax.server.images import ImageReader

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


only_deep = pytest.mark.parametrize("qwen", ["qwen3_vl"], indirect=True, scope="module")
"""The vectors of Qwen2.5-VL have the form of Qwen2-VL's."""


class Loaded(NamedTuple):
    kind: str
    module: object  # of transformers
    target: object
    folder: object


@pytest.fixture(scope="module", params=KINDS)
def qwen(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    module = make_folder(request.param, folder)
    return Loaded(request.param, module, specjax.load(str(folder))[0], folder)


def test_logits_are_those_of_transformers(qwen):
    """The rows have two images, one and none. Chunks cut images in two."""
    ours = padded_logits(qwen.target, PROMPTS, images(qwen.target, PROMPTS, TILES), 5)
    for row, (prompt, entry) in enumerate(zip(PROMPTS, TILES, strict=True)):
        theirs = their_logits(qwen.module, prompt, entry)
        np.testing.assert_allclose(ours[row, : len(prompt)], theirs, atol=3e-4, rtol=0)


@pytest.fixture(scope="module")
def texts(qwen):
    """Return the greedy texts of transformers."""
    return [greedy(qwen, prompt, entry) for prompt, entry in zip(PROMPTS, TILES, strict=True)]


def greedy(qwen, prompt, entry, count=12):
    qwen.module.model.rope_deltas = None  # that of an earlier prompt would shift a text without images
    ids = qwen.module.generate(
        **their_inputs(prompt, entry), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return ids[0, len(prompt) :].tolist()


def decode(qwen, drafter):
    inputs = images(qwen.target, PROMPTS, TILES)
    return specjax.decode(qwen.target, drafter, PROMPTS, key=0, inputs=inputs, max_new_tokens=12).to_lists()


def test_texts_are_those_of_transformers(qwen, texts):
    """Lookups and trees leave the texts of all rows as they are."""
    assert decode(qwen, {"qwen2_5_vl": "prompt_lookup", "qwen3_vl": "token_recycling"}[qwen.kind]) == texts


@only_deep
def test_draft_heads(qwen, texts):
    """A head reads the vectors of the last layer of the tower."""
    assert decode(qwen, head_of("msd", qwen.target)) == texts


@only_deep
@pytest.mark.parametrize("method", ["swift", "early_exit", "easyspec"])
def test_drafts_of_a_part_of_the_layers(qwen, texts, method):
    """Layers that are skipped, left out or read together leave out the vectors that are added after them."""
    drafter = {
        "swift": functools.partial(drafters.swift, num_tokens=4, layers=(0, 1)),
        "early_exit": functools.partial(drafters.early_exit, exit_layer=2, num_tokens=3),
        "easyspec": functools.partial(drafters.easyspec, num_tokens=3, group=2),
    }[method]
    assert decode(qwen, drafter(qwen.target)) == texts


@only_deep
def test_policies_of_depth(qwen, texts):
    """A policy that skips no layer keeps the texts, and all policies are exact with drafts."""
    inputs = images(qwen.target, PROMPTS, TILES)

    def write(policy, method):
        skipping = adaptive.skip_layers(qwen.target, policy)
        return specjax.decode(skipping, method, PROMPTS, key=0, inputs=inputs, max_new_tokens=12).to_lists()

    assert write(adaptive.skip_decode(1.0), "prompt_lookup") == texts
    early = adaptive.skip_decode(max_layers=2, min_layers=2)
    assert write(early, "prompt_lookup") == write(early, "autoregressive") != texts


def inject_error(monkeypatch, name):
    """Return changes of the config with one error, after patching modules."""
    if name == "order of windows is not undone":
        monkeypatch.setattr(grid_tower, "undo_order", lambda x, order: x)
    if name == "no windows":
        return {"full_layers": (0, 1, 2)}
    if name == "no DeepStack":
        monkeypatch.setattr(ImageMemory, "additions", lambda self, positions: [])
    if name == "the table of positions is not stretched":
        original = grid_tower.stretch_table
        corner = lambda table, rows, columns, grid: original(table, rows, columns, jnp.array([5, 5]))
        monkeypatch.setattr(grid_tower, "stretch_table", corner)
    return {}


ERRORS = {
    "qwen2_5_vl": ("order of windows is not undone", "no windows"),
    "qwen3_vl": ("no DeepStack", "the table of positions is not stretched", "axes in blocks"),
}


def test_errors_in_the_model_change_the_logits(qwen, monkeypatch):
    prompt, entry = [5, *[IMAGE] * 15, 6, 7], patches_of([[1, 10, 6]], 3)
    theirs = their_logits(qwen.module, prompt, entry)
    for name in (None, *ERRORS[qwen.kind]):
        with monkeypatch.context() as patch:
            changes, config = inject_error(patch, name), qwen.target.model.config
            config = dataclasses.replace(
                config, name=f"{name}", tower=dataclasses.replace(config.tower, **changes),
                interleaved=config.interleaved and name != "axes in blocks",
            )  # fmt: skip
            target = specjax.Target(specjax.models.make_model(config), qwen.target.params)
            ours = padded_logits(target, [prompt], images(target, [prompt], [entry]), len(prompt))[0]
        assert (np.abs(ours - theirs).max() > 0.01) == (name is not None), name


@pytest.mark.parametrize("size", [16, 36, 1000])
def test_windows_of_any_size(size):
    """Chunks that do not have the size of a window divide the patches too."""
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 256, 2, 4)).astype(np.float32)
    windows = np.sort(np.repeat(np.arange(256), rng.integers(1, min(size, 256) + 1, 256))[:256])
    scores = np.where(windows[:, None] == windows, np.einsum("thd,shd->hts", q, k) / 2, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(attend_in_windows(q, k, v, jnp.asarray(windows), size), expected, atol=1e-5)


def test_images_of_other_sizes_compile_nothing(qwen):
    read, sizes = jax.jit(qwen.target.model.init_cache, static_argnums=(2, 3)), []
    for grid in ([1, 4, 6], [1, 2, 16], [1, 16, 16]):
        prompt = [[IMAGE] * (grid[1] * grid[2] // 4)]
        read(qwen.target.params, images(qwen.target, prompt, [patches_of([grid], 0)]), 1, 80)
        sizes.append(read._cache_size())
    assert len(set(sizes)) == 1


def assert_same(copy, target):
    assert copy.model.config == dataclasses.replace(target.model.config, name=copy.model.config.name)
    jax.tree.map(np.testing.assert_array_equal, copy.params, target.params)


def test_files_with_the_form_of_earlier_versions(qwen, tmp_path):
    """Published files have the old form of rotary settings, and those of Qwen2.5-VL other names of tensors too."""
    fields = json.loads((qwen.folder / "config.json").read_text())
    text = fields.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    tensors = load_file(qwen.folder / "model.safetensors")
    if qwen.kind == "qwen2_5_vl":
        text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        old = lambda name: name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        tensors = {old(name): x for name, x in tensors.items()}
    else:
        text = {"text_config": text}
    (tmp_path / "config.json").write_text(json.dumps({**text, **fields}))
    save_file(tensors, tmp_path / "model.safetensors")
    write_tokenizer(tmp_path)
    assert_same(specjax.load(str(tmp_path))[0], qwen.target)


def test_a_saved_model_loads_here_and_in_transformers(qwen, tmp_path):
    specjax.save_model(tmp_path, qwen.target)
    write_tokenizer(tmp_path)
    assert_same(specjax.load(str(tmp_path))[0], qwen.target)
    copy = class_of(qwen.kind).from_pretrained(tmp_path)
    theirs = [their_logits(model, PROMPTS[0], TILES[0]) for model in (copy.eval(), qwen.module)]
    np.testing.assert_array_equal(*theirs)


@pytest.fixture(scope="module")
def reader(qwen, tmp_path_factory):
    """Return the images of a server, of at most 272 patches each, and two pictures."""
    folder = tmp_path_factory.mktemp("pictures")
    settings = {
        "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 4096},
    }  # fmt: skip
    (qwen.folder / "preprocessor_config.json").write_text(json.dumps(settings))
    rng = np.random.default_rng(0)
    for name, shape in (("wide.png", (15, 33, 3)), ("high.png", (60, 20, 3))):
        Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(folder / name)
    tokenizer = specjax.load(str(qwen.folder))[1]
    processor = load_image_processor(qwen.folder, qwen.target, tokenizer)
    return ImageReader(qwen.target, processor, 2, 272), [folder / "wide.png", folder / "high.png"]


def test_ids_and_pixels_are_those_of_transformers(qwen, reader):
    images_of, files = reader
    ids, tiles = images_of.processor.chat("w5 w6", files)
    backend = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(qwen.folder / "tokenizer.json"), unk_token="<unk>"
    )
    base = transformers.Qwen3VLProcessor if qwen.kind == "qwen3_vl" else transformers.Qwen2_5_VLProcessor

    class OfImages(base):
        """The processor of transformers without that of videos, which needs torchvision."""

        def __init__(self, image_processor, tokenizer):
            self.image_token, self.image_token_id = "<image>", IMAGE
            self.video_token, self.video_token_id = "<video>", -1
            transformers.ProcessorMixin.__init__(self, image_processor, tokenizer)

    text = "user:<image><image> w5 w6<end_of_utterance> assistant:"
    pictures = [Image.open(file).convert("RGB") for file in files]
    expected = OfImages(images_of.processor.process, backend)(text=[text], images=pictures, return_tensors="np")
    assert ids == expected["input_ids"][0].tolist()
    np.testing.assert_array_equal(tiles.patches, expected["pixel_values"])
    np.testing.assert_array_equal(tiles.grids, expected["image_grid_thw"])


@only_deep
def test_a_server_reads_images(qwen, reader):
    """Requests with two images, one and none have the texts of transformers."""
    images_of, files = reader
    text = {"type": "text", "text": "w5"}  # transformers needs a text between images
    turns = lambda count: [{"role": "user", "content": [*[{"type": "image"}, text] * count, text]}]
    counts = 2, 1, 0
    chats = [images_of.read(turns(n), [file.read_bytes() for file in files[:n]], {}) for n in counts]
    requests = [specjax.Request(ids, 0, inputs=inputs) for ids, inputs in chats]
    texts = {number: [] for number in range(3)}
    for served in specjax.serve(
        qwen.target, "suffix", requests, slots=2, longest_prompt=160, max_new_tokens=8, inputs=images_of.blank
    ):
        assert served.error is None
        texts[served.request] += served.tokens
    pairs = [images_of.processor.chat(turns(n), files[:n]) for n in counts]
    assert list(texts.values()) == [greedy(qwen, *pair, count=8) for pair in pairs]


def test_videos_are_refused(reader):
    turn = {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "w5"}]}
    with pytest.raises(UsageError, match="has a part of type video, which no model of specjax reads"):
        reader[0].processor.chat([turn], [])
