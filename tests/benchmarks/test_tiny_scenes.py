"""The tiny trained model in the form of SmolVLM that comes with the tests: it looks at its images."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_scenes
from toy_tasks import scenes

import specjax
from specjax.models import load_image_processor

pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

FOLDER = Path(__file__).parents[1] / "data" / "scenes"
KINDS = "describe", "read", "row"
COUNT, SEED = 8, tiny_scenes.HELD_OUT + 5


@functools.cache
def shipped():
    target, tokenizer = specjax.load(FOLDER, dtype="float32")
    return target, load_image_processor(FOLDER, target, tokenizer)


def test_the_files_are_small_and_their_model_is_that_of_the_benchmark():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 1_200_000
    target, processor = shipped()
    shapes = jax.eval_shape(tiny_scenes.untrained, 0).params
    assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(lambda x: x.shape, target.params)
    assert processor.tokenizer.vocab == tiny_scenes.VOCABULARY


def test_a_prompt_is_that_of_the_training():
    """A training row begins with the ids and the pixels of the prompt of its first question."""
    batch, processor = tiny_scenes.draw_batch(2, np.random.default_rng(0), 0.0), shipped()[1]
    row, pixels = batch.tokens[1].tolist(), batch.pixels[1]
    first = row[batch.branches[1].tolist().index(1) : row.index(tiny_scenes.tokenizer().eos[0])]
    ids, tiles = processor.chat(tiny_scenes.tokenizer().decode(first), [Image.fromarray(pixels)])
    assert ids == row[: len(ids)] and batch.is_answer[1].tolist().index(True) == len(ids) - 1
    assert batch.positions[1].tolist()[: len(ids)] == [*range(len(ids))]
    np.testing.assert_allclose(tiles.pixels[0], pixels.transpose(2, 0, 1) / 127.5 - 1, atol=1e-6)


def test_the_vocabulary_has_all_words():
    rng = np.random.default_rng(0)
    for _ in range(100):
        scene = scenes.make_scene(rng)
        for kind in (*scenes.IMAGE_KINDS, *scenes.TEXT_KINDS):
            question = scenes.ask(kind, scene, rng)
            assert {*question.text.split(), *question.answer.split()} <= {*scenes.WORDS}
            assert tiny_scenes.tokenizer().decode(tiny_scenes.encode(question.answer)) == question.answer


def test_answers_follow_the_image_and_drafts_change_nothing():
    ask = functools.partial(tiny_scenes.answer, *shipped(), KINDS, COUNT, SEED)
    plain, result = ask(), ask(method="prompt_lookup")
    assert plain.right > 0.8
    assert result.texts == plain.texts
    assert result.tokens_per_pass > 1.1
    assert ask("other").right <= 2 / COUNT


def test_questions_without_an_image():
    assert tiny_scenes.answer(*shipped(), [*scenes.TEXT_KINDS], 6, SEED, "none").right >= 5 / 6


def test_files_of_prompts_have_paths_of_their_images(tmp_path):
    tiny_scenes.write_prompts(tmp_path, 4, 7, ["describe", "spell"])
    lines = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    contents = [line["messages"][0]["content"] for line in lines]
    assert [[part["type"] for part in content] for content in contents] == [["image", "text"], ["text"]] * 2
    processor = shipped()[1]
    for line, content in zip(lines, contents, strict=True):
        files = [tmp_path / part["path"] for part in content if part["type"] == "image"]
        assert processor.chat(line["messages"], files)[0] == processor.chat(content[-1]["text"], files)[0]
    tiny_scenes.write_prompts(tmp_path / "more", 4, 8, ["describe"])
    assert (tmp_path / "more" / "scene_000.png").read_bytes() != (tmp_path / "scene_000.png").read_bytes()
