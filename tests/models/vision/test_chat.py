"""`specjax chat` with images: the tiny model of scenes answers about them, also in later turns."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest

import specjax
from specjax.cli import main
from specjax.models import images, load_image_processor

pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

FOLDER = Path(__file__).parents[2] / "data" / "scenes"
QUESTION = "describe the scene ."
CONTEXT = 100


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return images of a red and a blue square, in a corner each."""
    folder = tmp_path_factory.mktemp("pictures")
    for name, colour, corner in (("red.png", (205, 40, 45), 3), ("blue.png", (40, 70, 205), 51)):
        pixels = np.full((64, 64, 3), 235, np.uint8)
        pixels[corner : corner + 11, corner : corner + 11] = colour
        Image.fromarray(pixels).save(folder / name)
    return folder / "red.png", folder / "blue.png"


@pytest.fixture
def chat(monkeypatch, capsys):
    """Return a function that runs the command with these lines on stdin, and returns its lines and its errors."""
    monkeypatch.setenv("COLUMNS", "300")

    def run(lines, *arguments):
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
        flags = "--target", FOLDER, "--dtype", "float32", "--no-cache", "--max-new-tokens", 12, "--context", CONTEXT
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in ("chat", "--method", "prompt_lookup", *flags, *arguments)])
        captured = capsys.readouterr()
        return end.value.code, captured.out.splitlines(), captured.err

    return run


def answer(turns, pictures):
    """Return the answer of plain decoding to messages of these parts."""
    target, tokenizer = specjax.load(FOLDER, dtype="float32")
    ids, tiles = load_image_processor(FOLDER, target, tokenizer).chat(turns, pictures)
    inputs = None if tiles is None else images(target, [ids], [tiles])
    result = specjax.decode(
        target, "autoregressive", [ids], key=0, inputs=inputs, max_new_tokens=12, eos=tokenizer.eos
    )  # fmt: skip
    return tokenizer.decode([i for i in result.to_lists()[0] if i not in tokenizer.eos])


def question(count):
    return {"role": "user", "content": [*[{"type": "image"}] * count, {"type": "text", "text": QUESTION}]}


def test_images_stay_in_the_conversation(chat, files):
    """The second question is about the image of the first one. The third has another, and /undo forgets it."""
    red, blue = files
    turns, expected = [], []
    for count, pictures in ((1, [red]), (0, [red]), (1, [red, blue])):
        turns.append({"role": "user", "content": QUESTION} if count == 0 else question(count))
        expected.append(answer(turns, pictures))
        turns.append({"role": "assistant", "content": expected[-1]})
    code, texts, _ = chat(
        [f"/image {red}", QUESTION, QUESTION, f'/image "{blue}"', QUESTION, "/undo", f"/image {blue}", QUESTION]
    )
    assert code == 0 and texts == [*expected, expected[-1]]
    assert "red" in expected[0]


def test_a_bad_file_loses_nothing(chat, files, tmp_path):
    """Images before and after it belong to the message. A message that is too long gives its images to the next."""
    red, blue = files
    bad = tmp_path / "text.png"
    bad.write_text("no image")
    expected = answer([question(2)], [red, blue])
    code, texts, errors = chat(
        [f"/image {tmp_path / 'none.png'}", f"/image {bad}", f"/image {blue}", "so " * 90, QUESTION, "/help"],
        "--image", red,
    )  # fmt: skip
    assert code == 0 and texts == [expected]
    assert errors.count("give a file such as a PNG or JPEG") == 2 and "Traceback" not in errors
    assert "(the next message has 2 images)" in errors and "/image FILE" in errors


def test_paths_of_images(chat, files, tmp_path):
    """Spaces can be as they are, quoted or escaped. A home folder that does not exist is no file."""
    red, _ = files
    spaced = tmp_path / "my red.png"
    spaced.write_bytes(red.read_bytes())
    names = f"{spaced}", f"'{spaced}'", str(spaced).replace(" ", "\\ "), "~nobody-of-this-name/red.png"
    code, texts, errors = chat(f"/image {name}" for name in names)
    assert code == 0 and texts == [] and "Traceback" not in errors
    assert "(the next message has 3 images)" in errors and errors.count("cannot be read as an image") == 1


def test_images_that_are_removed(chat, files):
    """/image without a file removes those of the next message, and /clear removes all."""
    red, blue = files
    code, texts, errors = chat(
        ["/image", f"/image {blue}", "/clear", QUESTION, "/clear", f"/image {blue}", QUESTION], "--image", red
    )
    assert code == 0 and texts == [answer([question(0)], []), answer([question(1)], [blue])]
    assert "(the next message has no images)" in errors


def test_the_first_images_must_be_readable(chat, tmp_path):
    code, _, errors = chat([], "--image", tmp_path / "none.png")
    assert code == 2 and errors.splitlines()[-1].startswith("specjax: --image: ") and "none.png" in errors
