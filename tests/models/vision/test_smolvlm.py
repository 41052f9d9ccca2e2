"""SmolVLM and Idefics3 beside `transformers`: logits of prompts with images, greedy texts, and drafts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from image_models import IMAGE, TEXT, TOWER, padded_logits, random_tiles, sharpen, write_tokenizer

import specjax
from specjax import UsageError
from specjax.engine.run import run
from specjax.models import PromptImages, images
from specjax.models.vision.connectors import join_blocks
from specjax.types import Context

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

NAMES = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}
VECTORS = 9  # of a tile: 6 x 6 patches in blocks of 2 x 2


@functools.cache
def saved(kind, folder):
    """Return a model of transformers with sharp random weights, saved to a folder."""
    config = getattr(transformers, f"{NAMES[kind]}Config")(
        text_config=TEXT, vision_config=TOWER, scale_factor=2, image_token_id=IMAGE, pad_token_id=0,
        tie_word_embeddings=kind == "smolvlm",
    )  # fmt: skip
    model = getattr(transformers, f"{NAMES[kind]}ForConditionalGeneration")(config).eval()
    sharpen(model)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


@pytest.fixture(scope="module", params=list(NAMES))
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = saved(request.param, folder)
    target, _ = specjax.load(str(folder))
    return model, target


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smolvlm")
    saved("smolvlm", folder)
    return specjax.load(str(folder))[0]


def partial(count):
    """Return tiles of which the last one has 13 rows and 22 columns of pixels."""
    mask = np.ones((count, 24, 24), bool)
    mask[-1, 13:] = mask[-1, :, 22:] = False
    return PromptImages(random_tiles(count) * mask[:, None], mask)


PROMPTS = [
    [5, 6, *[IMAGE] * VECTORS, 7, *[IMAGE] * VECTORS, *[IMAGE] * VECTORS, 8, 9, 10],
    [11, *[IMAGE] * VECTORS, 12, 13, 5, 6],
]
TILES = [partial(3), PromptImages(random_tiles(1, seed=1))]


def their_inputs(prompt, entry):
    mask = np.ones((*entry.pixels.shape[:1], 24, 24), bool) if entry.mask is None else entry.mask
    return {
        "input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long),
        "pixel_values": torch.tensor(entry.pixels)[None], "pixel_attention_mask": torch.tensor(mask)[None],
    }  # fmt: skip


def their_logits(model, prompt, entry):
    with torch.no_grad():
        return model(**their_inputs(prompt, entry)).logits[0].numpy()


def test_logits_are_those_of_transformers(pair, request):
    """Two rows have different numbers of tiles, one of them a partial image. Chunks of 7 cut images in two."""
    model, target = pair
    chunk = {"smolvlm": 7, "idefics3": 40}[request.node.callspec.params["pair"]]
    ours = padded_logits(target, PROMPTS, images(target, PROMPTS, TILES), chunk)
    for row, (prompt, entry) in enumerate(zip(PROMPTS, TILES, strict=True)):
        np.testing.assert_allclose(ours[row, : len(prompt)], their_logits(model, prompt, entry), atol=2e-4, rtol=0)


def test_greedy_texts_are_those_of_transformers(pair, request):
    model, target = pair
    method = {"smolvlm": "auto", "idefics3": "prompt_lookup"}[request.node.callspec.params["pair"]]
    ours = specjax.decode(
        target, method, PROMPTS, key=0, inputs=images(target, PROMPTS, TILES), max_new_tokens=24
    ).to_lists()
    for prompt, entry, text in zip(PROMPTS, TILES, ours, strict=True):
        theirs = model.generate(**their_inputs(prompt, entry), max_new_tokens=24, do_sample=False, eos_token_id=None)
        assert text == theirs[0, len(prompt) :].tolist()


def test_blocks_of_neighbours_are_joined_in_rows():
    joined = np.asarray(join_blocks(jnp.arange(16.0)[:, None], 4, 2))
    assert joined.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


@pytest.fixture(scope="module")
def plain(smolvlm):
    """Return the texts of plain decoding."""
    inputs = images(smolvlm, PROMPTS, TILES)
    return specjax.decode(smolvlm, "autoregressive", PROMPTS, key=0, inputs=inputs, max_new_tokens=20).to_lists()


def test_passes_with_fewer_layers_write_the_text_of_plain_decoding(smolvlm, plain):
    """Drafts skip layers, and each prompt has two samples."""
    drafter = specjax.drafters.swift(smolvlm, layers=(0, 1))
    result = specjax.decode(
        smolvlm, drafter, PROMPTS, key=0, inputs=images(smolvlm, PROMPTS, TILES), max_new_tokens=20,
        samples_per_prompt=2,
    )  # fmt: skip
    assert result.to_lists() == [text for text in plain for _ in range(2)]


def test_a_draft_model_reads_the_same_images(smolvlm, plain):
    """A draft model equal to the target has all its tokens accepted, which needs the images."""
    inputs = images(smolvlm, PROMPTS, TILES)
    result = specjax.decode(smolvlm, smolvlm, PROMPTS, key=0, inputs=inputs, max_new_tokens=20)
    assert result.to_lists() == plain
    np.testing.assert_array_equal(result.stats.accepted, 20 - np.asarray(result.stats.target_passes))


def test_other_images_of_a_shape_compile_nothing(smolvlm, plain):
    """Trees write the text of plain decoding. Other images have other texts, and up to four tiles share a shape."""
    decode = lambda entries: specjax.decode(
        smolvlm, "token_recycling", PROMPTS, key=0, inputs=images(smolvlm, PROMPTS, entries), max_new_tokens=20
    ).to_lists()
    first = decode(TILES)
    count = run._cache_size()
    second = decode([PromptImages(random_tiles(3, seed=5)), PromptImages(random_tiles(1, seed=6))])
    assert run._cache_size() == count
    assert first == plain
    assert first[0] != second[0] and first[1] != second[1]


def test_prompts_without_images(smolvlm, plain):
    """The model is a text model without inputs, and a row without tiles has the text that it has there."""
    text = [5, 6, 7, 8]
    alone = specjax.decode(smolvlm, "prompt_lookup", [text], key=0, max_new_tokens=12).to_lists()
    inputs = images(smolvlm, [PROMPTS[1], text], [TILES[1], None])
    rows = specjax.decode(smolvlm, "prompt_lookup", [PROMPTS[1], text], key=0, inputs=inputs, max_new_tokens=12)
    assert rows.to_lists()[1] == alone[0]
    assert rows.to_lists()[0] == plain[1][:12]


def test_a_server_reads_images(smolvlm, plain):
    """Rows of one slot enter one after another; the second request has fewer tiles."""
    padded = [images(smolvlm, [p], [t], num_tiles=4) for p, t in zip(PROMPTS, TILES, strict=True)]
    requests = [
        specjax.Request(p, n, inputs=jax.tree.map(lambda x: x[0], entry))
        for n, (p, entry) in enumerate(zip(PROMPTS, padded, strict=True))
    ]
    texts = {0: [], 1: []}
    for served in specjax.serve(
        smolvlm, "suffix", requests, slots=1, longest_prompt=64, max_new_tokens=20, inputs=requests[0].inputs
    ):
        assert served.error is None
        texts[served.request] += served.tokens
    assert list(texts.values()) == plain


def drafts_of(target, drafter, prompt):
    """Return the drafted tokens after a prompt that ends with placeholders."""
    context = Context(jnp.array([prompt]), jnp.array([len(prompt)]), target=target)
    state = drafter.init(drafter.params, context)
    tree, _ = drafter.propose(drafter.params, jax.random.key(0)[None], state, context, jnp.array([7]))
    return np.asarray(tree.tokens[0])[np.asarray(tree.valid[0])][1:].tolist()


def test_auto_copies_no_placeholders(smolvlm):
    """The copies end before placeholders."""
    drafter = specjax.drafters.auto(71, widths=(1, 8, 16), costs=(1.0, 1.0, 1.0))
    drafts = functools.partial(drafts_of, smolvlm, drafter)
    assert IMAGE not in drafts([5, 6, *[IMAGE] * VECTORS])
    assert {7, 8} <= set(drafts([5, 6, 7, 8, 5, 6]))
    copied = drafts([5, 6, 7, IMAGE, IMAGE, 8, 5, 6])
    assert 7 in copied and IMAGE not in copied


@pytest.mark.parametrize("costs", [(1.0, 1.0), (1.0, 9.0)])
def test_prompts_that_end_with_an_image(smolvlm, costs):
    """The last placeholder is the root of the first tree, also if `auto` drafts nothing."""
    prompts, tiles = [[5, 6, *[IMAGE] * VECTORS], [*[IMAGE] * 2 * VECTORS]], [random_tiles(1), random_tiles(2)]
    inputs, options = images(smolvlm, prompts, tiles), {"key": 0, "max_new_tokens": 8}
    plain = specjax.decode(smolvlm, "autoregressive", prompts, inputs=inputs, **options)
    auto = specjax.drafters.auto(71, widths=(1, 8), costs=costs)
    ours = specjax.decode(smolvlm, auto, prompts, inputs=inputs, **options)
    assert ours.to_lists() == plain.to_lists()
    context = Context(jnp.array([prompts[0]]), jnp.array([len(prompts[0])]), target=smolvlm)
    tree, _ = auto.propose((), jax.random.key(0)[None], auto.init((), context), context, jnp.array([7]))
    assert int(tree.tokens[0, 0]) == IMAGE and bool(tree.valid[0, 0])


def test_lookups_never_copy_placeholders(smolvlm):
    """A run of placeholders matches nothing, and a copied chain ends before the first one. Text is still copied."""
    from specjax.drafters import prompt_lookup, suffix

    run = [5, 6, *[IMAGE] * VECTORS]
    for drafter in (prompt_lookup(), suffix()):
        assert drafts_of(smolvlm, drafter, run) == []
        assert drafts_of(smolvlm, drafter, [5, 6, 7, IMAGE, IMAGE, 8, 5, 6]) == [7]
        assert drafts_of(smolvlm, drafter, [5, 6, 7, 8, 5, 6]) == [7, 8, 5, 6]


def test_what_it_refuses(smolvlm):
    with pytest.raises(UsageError, match=r"prompt 0 has 8 placeholders .* and 1 tiles of 9 vectors"):
        images(smolvlm, [[IMAGE] * 8], [random_tiles(1)])
    with pytest.raises(UsageError, match=r"the shape \[1, 3, 20, 24\], which must be \[tiles, 3, 24, 24\]"):
        images(smolvlm, [[IMAGE] * 9], [random_tiles(1)[:, :, :20]])
    with pytest.raises(UsageError, match="num_tiles must be a whole number of at least 3"):
        images(smolvlm, PROMPTS, TILES, num_tiles=2)
    with pytest.raises(UsageError, match="tiles for 1 prompts, but 2 prompts"):
        images(smolvlm, PROMPTS, TILES[:1])
    with pytest.raises(UsageError, match=r"prompt 1 has the placeholder 59 of an image at place 1, but there are no"):
        specjax.decode(smolvlm, "prompt_lookup", [[5], PROMPTS[1]], key=0, max_new_tokens=2)
    [served] = specjax.serve(
        smolvlm, "prompt_lookup", [specjax.Request(PROMPTS[1], 0)], slots=1, longest_prompt=64, max_new_tokens=2
    )
    assert served.finish_reason == "refused" and "the placeholder 59 of an image" in served.error
    with pytest.raises(UsageError, match=r"must be images; pass inputs=specjax.models.images"):
        specjax.decode(smolvlm, "prompt_lookup", [[5]], key=0, inputs=jnp.ones((1, 2)), max_new_tokens=2)
    with pytest.raises(UsageError, match=r"model with images .* does not support same_bits yet"):
        specjax.models.make_model(dataclasses.replace(smolvlm.model.config, same_bits=True, dtype="bfloat16"))


def test_a_draft_model_with_another_tower_is_refused(smolvlm):
    config = smolvlm.model.config
    other = dataclasses.replace(config, connector=dataclasses.replace(config.connector, shuffle=3))
    draft = specjax.Target(specjax.models.make_model(other), specjax.models.init_params(other, jax.random.key(0)))
    inputs = images(smolvlm, PROMPTS, TILES)
    with pytest.raises(UsageError, match=r"as 4 vectors each, and these have 3 x 24 x 24 and 9; choose a draft model"):
        specjax.decode(smolvlm, draft, PROMPTS, key=0, inputs=inputs, max_new_tokens=2)


def test_costs_count_the_parameters_of_a_pass(smolvlm):
    parts = smolvlm.params.keys() - smolvlm.pass_params.keys()
    assert parts == {"tower", "connector"}


def test_saved_and_quantised_models(smolvlm, tmp_path):
    """A saved model has the same parameters. In a quantised one the tower stays as it is."""
    specjax.save_model(tmp_path / "copy", smolvlm)
    write_tokenizer(tmp_path / "copy")
    copy, _ = specjax.load(str(tmp_path / "copy"))
    assert copy.model.config == dataclasses.replace(smolvlm.model.config, name=copy.model.config.name)
    jax.tree.map(np.testing.assert_array_equal, smolvlm.params, copy.params)
    quantized, _ = specjax.load(str(tmp_path / "copy"), quantize="int8")
    jax.tree.map(np.testing.assert_array_equal, smolvlm.params["tower"], quantized.params["tower"])
    inputs = images(smolvlm, PROMPTS, TILES)
    ours, rounded = (padded_logits(target, PROMPTS, inputs, 64) for target in (smolvlm, quantized))
    assert 0 < np.abs(ours - rounded).max() < 0.3 * np.abs(ours).max()
