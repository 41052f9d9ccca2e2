"""Prompts with images: their ids beside `transformers`, the command line, and errors."""

import json

import numpy as np
import pytest
from image_models import IMAGE, TEXT, TOWER, sharpen, write_processor, write_tokenizer

import specjax
from specjax import UsageError
from specjax.cli import main
from specjax.cli.options.prompts import Pictures, encode, read
from specjax.models import images, load_image_processor
from specjax.models.loading import load_tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("idefics3")
    config = transformers.Idefics3Config(
        text_config=TEXT, vision_config=TOWER, scale_factor=2, image_token_id=IMAGE, tie_word_embeddings=True
    )
    model = transformers.Idefics3ForConditionalGeneration(config).eval()
    sharpen(model)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    write_processor(folder)
    rng = np.random.default_rng(0)
    for name, shape in (("wide.png", (20, 40, 3)), ("square.png", (30, 30, 3))):
        Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(folder / name)
    return folder


@pytest.fixture(scope="module")
def loaded(folder):
    target, tokenizer = specjax.load(str(folder))
    return target, tokenizer, load_image_processor(folder, target, tokenizer)


def test_ids_and_pixels_are_those_of_transformers(folder, loaded):
    """An image of 1 x 2 tiles and one of 2 x 2, each followed by the complete image."""
    files = [folder / "wide.png", folder / "square.png"]
    ids, tiles = loaded[2].chat("w5 w6", files)
    backend = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), unk_token="<unk>")
    theirs = transformers.Idefics3Processor(loaded[2].process, backend, image_seq_len=9)
    text = "user:<image><image> w5 w6<end_of_utterance> assistant:"
    expected = theirs(text=text, images=[[Image.open(file).convert("RGB") for file in files]], return_tensors="np")
    assert ids == expected["input_ids"][0].tolist()
    assert ids.count(IMAGE) == 8 * 9 and len(tiles.pixels) == 8
    np.testing.assert_array_equal(tiles.pixels, expected["pixel_values"][0])


def test_other_forms_of_a_prompt(folder, loaded, tmp_path):
    """Messages place images themselves, raw texts name the placeholder, and pictures can be open images."""
    _, tokenizer, processor = loaded
    picture = Image.open(folder / "wide.png")
    turn = lambda *content: {"role": "user", "content": list(content)}
    text = lambda words: {"type": "text", "text": words}
    ids, _ = processor.chat([turn(text("w5"), {"type": "image"}, text("w6"))], [picture])
    assert ids.count(IMAGE) == 3 * 9 and ids[2:4] == [5, 60] and ids[-5:-3] == [60, 6]
    assert processor.raw("w5 <image> w6", [picture])[0] == ids[2:-3]
    assert processor.raw("w6", [picture])[0] == ids[3:-3]
    assert processor.chat("w5", [])[0] == tokenizer.chat([turn(text("w5"))])
    assert processor.raw("w5", []) == (tokenizer.encode("w5"), None)
    with pytest.raises(UsageError, match=r"has 1 times the placeholder .<image>. for 2 images"):
        processor.raw("w5 <image>", [picture] * 2)


def test_the_command_line_reads_images(folder, loaded, capsys):
    target, _, processor = loaded
    files = ["--image", str(folder / "wide.png"), "--image", str(folder / "square.png")]
    flags = ["--target", str(folder), "--method", "suffix", "--no-cache"]
    with pytest.raises(SystemExit) as end:
        main(["generate", "w5 w6", *flags, *files, "--max-new-tokens", "12", "--compare", "--json"])
    document = json.loads(capsys.readouterr().out)
    ids, tiles = processor.chat("w5 w6", [folder / "wide.png", folder / "square.png"])
    inputs = images(target, [ids], [tiles])
    plain = specjax.decode(target, "autoregressive", [ids], key=0, inputs=inputs, max_new_tokens=12)
    assert not end.value.code and document["identical"]
    assert document["results"][0]["token_ids"] == plain.to_lists()[0]


def refusal(capsys, *arguments, prompt=("w5",)):
    """Return the last line of a command that ends with a wrong flag."""
    with pytest.raises(SystemExit) as end:
        main(["generate", *prompt, "--max-new-tokens", "2", *arguments])
    assert end.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_what_the_command_line_refuses(folder, capsys):
    flags = "--target", str(folder)
    error = refusal(capsys, *flags, "--image", str(folder / "none.png"))
    assert error == f"specjax: --image: there is no file {folder / 'none.png'}; check the path"
    assert "there is no file xxx" in refusal(capsys, *flags, "--image", "x" * 5000)
    error = refusal(capsys, *flags, "--image", str(folder / "config.json"))
    assert "give a file such as a PNG or JPEG" in error
    error = refusal(capsys, "--image", str(folder / "wide.png"))
    assert error.startswith("specjax: --image: the model smollm2-135m reads no images")
    error = refusal(capsys, *flags, "--image", str(folder / "wide.png"), "--method", "pearl")
    assert "--image" in error
    error = refusal(capsys, *flags, "--image", str(folder / "wide.png"), "--compress", "specpc")
    assert error == "specjax: --compress would drop parts of images; remove it, or --image"


def test_lines_of_a_file_have_their_own_images(folder, loaded, tmp_path, capsys):
    """The pictures of --image come first. A line whose image is missing or no image is named, and the others run."""
    target, tokenizer, processor = loaded
    file, wide, square = folder / "prompts.jsonl", folder / "wide.png", folder / "square.png"
    lines = [
        {"prompt": "w5", "images": ["wide.png"]}, {"prompt": "w6", "images": [str(square), "wide.png"]},
        {"prompt": "w7"}, {"prompt": "w8", "images": ["none.png"]}, {"prompt": "w8", "images": ["config.json"]},
        {"prompt": "w8", "images": "wide.png"}, {"prompt": "w8", "images": ["x" * 5000]},
        {"prompt": "w8", "images": ["\0"]}, {"prompt": "w8", "images": 0},
    ]  # fmt: skip
    file.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--target", str(folder), "--method", "autoregressive", "--no-cache", "--max-new-tokens", "6", "--json"]
    with pytest.raises(SystemExit) as end:
        main(["generate", "--batch-file", str(file), "--batch-size", "2", *flags])
    assert end.value.code == 2
    document = json.loads(capsys.readouterr().out)
    pictures = {"w5": [wide], "w6": [square, wide], "w7": []}
    prompts, tiles = zip(*(processor.chat(text, files) for text, files in pictures.items()), strict=True)
    call = {"key": 0, "inputs": images(target, prompts, tiles), "max_new_tokens": 6}
    expected = specjax.decode(target, "autoregressive", prompts, **call).to_lists()
    assert [result["token_ids"] for result in document["results"]] == expected
    errors = {bad["line"]: bad["error"] for bad in document["errors"]}
    assert sorted(errors) == [4, 5, 6, 7, 8, 9] and errors[4].startswith("there is no image")
    assert "PNG or JPEG" in errors[5] and errors[6] == errors[9] == 'the field "images" must be a list of files'
    lines = read(file, "--batch-file", reads_images=True)[0]
    rows, _ = encode(lines, tokenizer, 400, 6, pictures=Pictures([square], processor))
    for row, (text, files) in zip(rows, pictures.items(), strict=True):
        ids, tiles = processor.chat(text, [square, *files])
        assert row.ids == ids and np.array_equal(row.tiles.pixels, tiles.pixels)
    for more in (["--method", "pearl", "--draft", str(folder)], ["--compress", "specpc"]):
        assert "images" in refusal(capsys, *flags[:2], "--batch-file", str(file), *more, prompt=[])


def test_speckv_is_refused(loaded):
    with pytest.raises(UsageError, match="reads images, which speckv would drop parts of"):
        specjax.compression.speckv(loaded[0], None, 6)


def test_a_prompt_with_a_placeholder_needs_an_image(folder, capsys):
    with pytest.raises(SystemExit) as end:
        main(["generate", "w5 <image>", "--raw", "--target", str(folder), "--max-new-tokens", "2"])
    assert end.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == (
        "specjax: a prompt has the placeholder 59 of an image; add --image FILE, or remove the placeholder"
    )


def test_other_prompts_than_those_of_the_images_are_refused(folder, loaded):
    """The images would be read at other places, or not at all."""
    target, _, processor = loaded
    ids, tiles = processor.chat("w5", [folder / "square.png"])
    prompts, message = [ids, [5, 6]], "pass the prompts that specjax.models.images was called with"
    inputs = images(target, prompts, [tiles, None])
    call = {"key": 0, "inputs": inputs, "max_new_tokens": 4}
    assert specjax.decode(target, "autoregressive", prompts, **call).tokens.shape == (2, 4)
    for row, prompts in [(0, [[5, 6], ids]), (0, [[5, *ids], [5, 6]]), (0, [[5], [6]]), (1, [ids, [5, IMAGE]])]:
        with pytest.raises(UsageError, match=rf"prompt {row} has \d+ placeholders .* {message}"):
            specjax.decode(target, "autoregressive", prompts, **call)


def test_image_processors_of_other_forms(folder, loaded, tmp_path):
    """A processor without padding returns no mask. That of another model takes other arguments."""
    target, tokenizer, processor = loaded
    write_processor(tmp_path, do_pad=False)
    ids, tiles = load_image_processor(tmp_path, target, tokenizer).chat("w5", [folder / "wide.png"])
    expected_ids, expected = processor.chat("w5", [folder / "wide.png"])
    assert ids == expected_ids and tiles.mask is None
    np.testing.assert_array_equal(tiles.pixels, expected.pixels)
    write_processor(tmp_path, image_processor_type="CLIPImageProcessor", size={"shortest_edge": 24}, crop_size=24)
    with pytest.raises(
        UsageError, match=r"fails .*return_row_col_info.*; use another picture, or check its preprocessor_config"
    ):
        load_image_processor(tmp_path, target, tokenizer).chat("w5", [folder / "wide.png"])


def test_folders_without_an_image_processor(folder, loaded, tmp_path):
    target, tokenizer, _ = loaded
    with pytest.raises(UsageError, match="has no image processor that transformers loads"):
        load_image_processor(tmp_path, target, tokenizer)
    write_processor(tmp_path, size={"longest_edge": 44}, do_image_splitting=False, max_image_size={"longest_edge": 20})
    ids, tiles = load_image_processor(tmp_path, target, tokenizer).chat("w5", [folder / "wide.png"])
    with pytest.raises(UsageError, match=r"have the shape \[1, 3, 20, 20\], which must be \[tiles, 3, 24, 24\]"):
        images(target, [ids], [tiles])


SMOL = (
    "{% for m in messages %}{{ m['role'] }}:{% for part in m['content'] %}{% if part['type'] == 'text' %}"
    " {{ part['text'] }}{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}<end_of_utterance>{% endfor %}"
)


def test_a_template_that_reads_parts_alone_keeps_strings(tmp_path):
    """SmolVLM's and LLaVA's templates loop over the parts of a message, and would drop the letters of a string."""
    write_tokenizer(tmp_path, SMOL)
    tokenizer = load_tokenizer(str(tmp_path))
    turns = [("system", "w9"), ("user", "w3 w4"), ("assistant", "w5"), ("user", "w6")]
    strings = [{"role": role, "content": text} for role, text in turns]
    parts = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
    assert tokenizer.chat(strings) == tokenizer.chat(parts)
    assert {3, 4, 5, 6, 9} <= {*tokenizer.chat(strings)}
    assert tokenizer.chat("w3") == tokenizer.chat([{"role": "user", "content": [{"type": "text", "text": "w3"}]}])
    mixed = [strings[0], {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "w3"}]}]
    assert {3, 9, IMAGE} <= {*tokenizer.chat(mixed)}
    spelled = tokenizer.chat([{"role": "user", "content": "w3 <image> w4"}])
    assert IMAGE not in spelled and {3, 4} <= {*spelled}
