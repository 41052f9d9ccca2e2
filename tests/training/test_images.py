"""Training of heads on prompts with images: batches, rounds, and the folder of responses."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from image_heads import PROMPTS, head_of, vision_target
from image_models import random_tiles

import specjax
from specjax import UsageError
from specjax.drafters import head_drafter
from specjax.models import init_params, make_model
from specjax.models.vision.memory import PromptImages, images
from specjax.training import TrainingText, recipe_of, train
from specjax.training.data.conversation_files import read_text_file
from specjax.training.data.conversations import pictures_of
from specjax.training.data.packing import pack
from specjax.training.loop.schedule import ScheduleOptions, draw_rising, image_share, make_schedule
from specjax.training.measure.acceptance_eval import measure_acceptance
from specjax.training.objectives.draft_models import OnPolicy, resample_responses
from specjax.training.objectives.trainables import build_objective
from specjax.types import Target


def texts_of(target, count=6):
    """Return prompts with images and a response of random tokens, and one text without an image."""
    rng = np.random.default_rng(0)
    texts = []
    for i in range(count):
        prompt = PROMPTS[i % 3]
        tiles = [PromptImages(random_tiles(2 - i % 3, seed=i)) if i % 3 < 2 else None]
        tokens = (*prompt, *map(int, rng.integers(3, 50, 12)))
        texts.append(TrainingText(tokens, len(prompt), inputs=images(target, [prompt], tiles, num_tiles=4)))
    return texts


def test_texts_with_inputs_have_rows_of_their_own():
    texts = texts_of(vision_target())
    batches = pack(texts, 4, 48)
    assert len(batches) == 2
    assert batches[0].inputs.places.shape == (4, 36)
    np.testing.assert_array_equal(batches[1].inputs.places[1], texts[5].inputs.places[0])
    assert not np.asarray(batches[1].loss_mask[2:]).any()
    other = texts[0]._replace(
        inputs=images(vision_target(), [PROMPTS[0]], [PromptImages(random_tiles(2))], num_tiles=8)
    )
    with pytest.raises(UsageError, match="equal num_tiles"):
        pack([texts[0], other], 4, 48)
    with pytest.raises(UsageError, match="equal num_tiles"):
        make_schedule([texts[0], other], ScheduleOptions(1, 1, 48, 0))


def test_texts_with_and_without_inputs_share_no_batch():
    texts = texts_of(vision_target())
    plain = texts[2]._replace(inputs=None)
    assert [batch.inputs is None for batch in pack([texts[0], plain], 1, 96)] == [False, True]
    with pytest.raises(UsageError, match="some training texts have inputs and others have none"):
        pack([texts[0], plain], 2, 96)


def test_a_schedule_copies_inputs_of_one_batch_at_a_time():
    texts = texts_of(vision_target())
    schedule = make_schedule(texts, ScheduleOptions(3, 4, 48, 0))
    assert all(batch.inputs.shape == (4,) for epoch in schedule.epochs for batch in epoch)
    order = np.random.default_rng([0, 2]).permutation(len(texts))
    expected = pack([texts[i] for i in order], 4, 48)
    batches = [batch.packed for batch in schedule.iterate_from(0, 0) if batch.epoch == 2]
    for batch, packed in zip(batches, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, batch, packed)


def test_a_draft_model_of_text_learns_from_prompts_with_images():
    target = vision_target()
    config = specjax.models.LlamaConfig(71, 16, 1, 2, 2, 8, 24, max_positions=256)
    draft = Target(make_model(config), init_params(config, jax.random.key(2)))
    texts = texts_of(target)
    result = train(target, draft, texts, epochs=1, rows=2, length=48, replace_batch=OnPolicy((0,), 0.5))
    assert np.any(np.asarray(result.params["embed"]["weight"]) != np.asarray(draft.params["embed"]["weight"]))
    packed = pack(texts, 2, 48)[0]
    sampled = resample_responses(draft, packed, jax.random.key(0), eos=(0,))
    assert sampled.inputs is packed.inputs


def test_conversations_with_parts_that_are_no_images():
    assert pictures_of([{"role": "assistant", "tool_calls": []}, {"role": "user", "content": ["text"]}]) == []
    with pytest.raises(UsageError, match="has no path"):
        pictures_of([{"role": "user", "content": [{"type": "image"}]}])


@pytest.mark.parametrize("kind", ["msd", "flash", "specvlm"])
def test_heads_learn_responses_to_images(kind):
    target = vision_target()
    texts = texts_of(target)
    head = head_of(kind, target)
    recipe = recipe_of(kind, noise=0.0, learning_rate=3e-3, rising_images=False)
    first = measure_acceptance(target, head, texts, depths=2, rows=2, length=48)
    losses = []
    result = train(
        target, head, texts, recipe=recipe, epochs=8, rows=2, length=48,
        on_progress=lambda progress: losses.append(progress.loss),
    )  # fmt: skip
    assert losses[-1] < 0.7 * losses[0]
    is_new = jax.tree.map(lambda a, b: bool(np.any(np.asarray(a) != np.asarray(b))), head.params, result.params)
    if kind == "specvlm":
        assert is_new["compressor"]["gate_up"]["weight"]
    if kind == "flash":
        assert is_new["queries"]["weight"]
    last = measure_acceptance(target, result, texts, depths=2, rows=2, length=48)
    assert last.tokens == first.tokens


def test_rounds_draft_what_decoding_drafts():
    """The logits of a round in training are those of the head in decoding, after the same prompt."""
    target = vision_target()
    for kind in ("msd", "flash", "specvlm"):
        head = head_of(kind, target)
        prompt, tiles = PROMPTS[1], [PromptImages(random_tiles(1, seed=3))]
        inputs = images(target, [prompt], tiles)
        drafter = head_drafter(head, 2)
        result = specjax.decode(target, drafter, [prompt], key=0, max_new_tokens=20, inputs=inputs)
        tokens = result.to_lists()[0]
        text = TrainingText((*prompt, *tokens), len(prompt), inputs=inputs)
        counts = measure_acceptance(target, head, [text], depths=2, rows=1, length=len(text.tokens))
        assert build_objective(head).taps is None
        # The first token comes from the prompt alone, and a last draft may pass the end of the text.
        assert abs(counts.passes - int(result.stats.target_passes.sum())) <= 2


def test_images_become_more_frequent():
    assert [image_share(epoch / 40) for epoch in (0, 20, 30, 40)] == [0, 0, 0.5, 1]
    has_image = np.arange(400) % 2 == 0
    order = np.random.default_rng(0).permutation(400)
    draws = [draw_rising(np.random.default_rng(1), order, has_image, share, share) for share in (0.0, 0.5, 0.75, 1.0)]
    shares = [has_image[texts].mean() for texts in draws]
    assert shares[0] == shares[1] == 0 and shares[3] == 1 and abs(shares[2] - 0.5) < 0.1
    assert np.unique(draws[3][:200]).size == 200
    one_kind = draw_rising(np.random.default_rng(1), order, np.ones(400, bool), 0.0, 0.1)
    np.testing.assert_array_equal(one_kind, order)


def test_a_schedule_without_images_is_unchanged():
    texts = [text._replace(inputs=None) for text in texts_of(vision_target())]
    plain, rising = (make_schedule(texts, ScheduleOptions(2, 2, 48, 0, rising=token)) for token in (None, 999))
    for one, other in zip(plain.epochs, rising.epochs, strict=True):
        assert all(jnp.array_equal(a.tokens, b.tokens) for a, b in zip(one, other, strict=True))


def test_files_with_images(tmp_path):
    file = tmp_path / "prompts.jsonl"
    parts = [{"type": "image", "path": "a.png"}, {"type": "text", "text": "What is it?"}]
    lines = [
        {"prompt": "What is it?", "images": ["a.png"]},
        {"messages": [{"role": "user", "content": parts}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "no image"}]}]},
        {"conversations": [{"from": "human", "value": "What <image>is<image>"}], "images": ["a.png", "b.png"]},
        {"conversations": [{"from": "human", "value": "<image>is it?"}], "image": "a.png"},
        {"prompt": "What?", "images": [3]},
        {"prompt": "What?<image>", "images": ["a.png", "b.png"]},
        {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    read = read_text_file(file)
    expected = [{"role": "user", "content": [{"type": "image", "path": str(tmp_path / "a.png")}, parts[1]]}]
    image, other = ({"type": "image", "path": str(tmp_path / name)} for name in ("a.png", "b.png"))
    words = lambda text: {"type": "text", "text": text}
    marked = [{"role": "user", "content": [words("What "), image, words("is"), other]}]
    assert read.sources[:3] == [expected, expected, "no image"]
    assert read.sources[3:] == [marked, [{"role": "user", "content": [image, words("is it?")]}]]
    assert [entry.error for entry in read.bad] == [
        '"images" is no list of paths',
        "the text has 1 times <image> for 2 images",
        'a message has a part of type "audio", and only text and images with a path can be read',
    ]
