"""Janus beside transformers: text and images of one model, whose vocabulary contains the codes behind the text."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chunked_logits import logits_in_chunks
from image_models import TEXT, TOWER, sharpen, write_tokenizer
from safetensors.numpy import load_file
from toy import tiny_llama

import specjax
from specjax import Target, UsageError, decode, processors, trees
from specjax.drafters import autoregressive, jacobi, two_model
from specjax.models import guided, janus_pixels, make_model, unconditional
from specjax.models.image_tokens.janus import JanusDecoder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TEXT_VOCAB, CODES, COUNT, PAD, BOS, BEGIN, END = 71, 19, 9, 0, 1, 60, 61
PROMPTS = [[BOS, 5, 9, 2, 7, BEGIN], [BOS, 33, BEGIN]]
VQ = {
    "base_channels": 32, "channel_multiplier": [1, 2], "num_res_blocks": 1, "latent_channels": 8, "embed_dim": 8,
    "num_embeddings": CODES, "projection_dim": 32, "image_token_embed_dim": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def janus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("janus")
    tower = {name: size for name, size in TOWER.items() if name != "intermediate_size"}
    config = transformers.JanusConfig(
        text_config=TEXT, vision_config=tower | {"num_image_tokens": COUNT, "projection_dim": 32}, vq_config=VQ,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.JanusForConditionalGeneration(config).eval()
    sharpen(model)
    model.save_pretrained(folder)
    model.generation_config.update(bos_token_id=BOS, pad_token_id=PAD)
    model.generation_config.generation_kwargs = {"boi_token_id": BEGIN}
    write_tokenizer(folder)
    return model, folder, specjax.load(str(folder))[0]


def phases():
    return processors.image_phases(range(TEXT_VOCAB, TEXT_VOCAB + CODES), BEGIN, END, COUNT)


def null_prompts():
    """Return the prompts with padding in place of all tokens but the first and the last."""
    return [[token if token in (BOS, BEGIN) else PAD for token in prompt] for prompt in PROMPTS]


@functools.cache
def their_logits(model, text):
    """Return the logits [T, text + codes] of tokens of both kinds."""
    with torch.no_grad():
        rows = [
            model.get_input_embeddings()(torch.tensor([token])) if token < TEXT_VOCAB
            else model.prepare_embeddings_for_image_generation(torch.tensor([token - TEXT_VOCAB]))
            for token in text
        ]  # fmt: skip
        hidden = model.model.language_model(inputs_embeds=torch.cat(rows)[None]).last_hidden_state[0]
        return torch.cat([model.lm_head(hidden), model.model.generation_head(hidden)], -1).numpy()


@functools.cache
def their_image(model, row, scale):
    """Return the codes that `generate` of transformers writes."""
    ids = torch.tensor([PROMPTS[row]])
    codes = model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_mode="image", do_sample=False, guidance_scale=scale
    )
    return (codes[0] + TEXT_VOCAB).tolist()


def test_logits_of_texts_with_codes(janus):
    model, _, target = janus
    text = np.random.default_rng(0).integers(0, TEXT_VOCAB + CODES, 30).tolist()
    ours = logits_in_chunks(target, [text], None, 16)[0]
    np.testing.assert_allclose(ours, their_logits(model, tuple(text)), atol=4e-4)
    assert target.model.config.codes == range(TEXT_VOCAB, TEXT_VOCAB + CODES)


def test_greedy_texts_are_those_of_transformers(janus):
    """A text without an image has no codes."""
    model, _, target = janus
    prompt = [BOS, 5, 9, 2]
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)[0].tolist()
    ours = decode(target, "suffix", [prompt], key=0, max_new_tokens=12, processors=[phases()])
    assert BEGIN not in theirs and ours.to_lists()[0] == theirs[len(prompt) :]


DRAFTERS = {
    "plain": autoregressive,
    "SJD": lambda: jacobi(TEXT_VOCAB + CODES, window=4, ids=(TEXT_VOCAB, TEXT_VOCAB + CODES)),
    "tree": lambda: two_model(
        guided(tiny_llama(seed=1, vocab=TEXT_VOCAB + CODES), 2.0), tree=trees.parse("top:3x2x1")
    ),
}  # fmt: skip


def image(drafter, target, count=COUNT):
    return decode(
        guided(target, 5.0), drafter, PROMPTS, key=0, max_new_tokens=count, inputs=unconditional(null_prompts()),
        processors=[phases(), processors.ban([BEGIN])],
    ).to_lists()  # fmt: skip


@pytest.mark.parametrize("name", DRAFTERS)
def test_guided_images_are_those_of_generate(janus, name):
    """Two images in one batch, with prompts of different lengths."""
    model, _, target = janus
    expected = [their_image(model, row, 5.0) for row in range(2)]
    assert image(DRAFTERS[name](), target) == expected
    assert expected != [their_image(model, row, 1.01) for row in range(2)]


def test_after_the_codes_comes_the_end_and_then_text(janus):
    _, _, target = janus
    for text in image(DRAFTERS["SJD"](), target, COUNT + 4):
        assert all(token >= TEXT_VOCAB for token in text[:COUNT])
        assert text[COUNT] == END and all(token < TEXT_VOCAB for token in text[COUNT:])


def test_images_without_the_head_of_the_text(janus):
    model, _, target = janus
    config = dataclasses.replace(target.model.config, writes_text=False)
    images_only = Target(make_model(config), target.params)
    assert image(DRAFTERS["SJD"](), images_only) == [their_image(model, row, 5.0) for row in range(2)]
    logits = logits_in_chunks(images_only, [PROMPTS[0]], None, 16)
    assert np.isneginf(logits[..., :TEXT_VOCAB]).all()


def test_codes_by_the_embedding_of_the_text_fail(janus, monkeypatch):
    """A mutant lets codes enter by rows of the text's table."""
    model, _, target = janus
    monkeypatch.setattr(JanusDecoder, "_vectors", lambda self, tokens: self.embed(tokens % TEXT_VOCAB))
    mutant = Target(make_model(dataclasses.replace(target.model.config, name="mutant")), target.params)
    assert image(autoregressive(), mutant) != [their_image(model, row, 5.0) for row in range(2)]


def test_mixtures_of_codes(janus):
    """A mixture is the weighted sum of the vectors of its tokens."""
    _, _, target = janus
    ids = jnp.array([[[3, TEXT_VOCAB + 2]]])
    weights = jnp.array([[[0.25, 0.75]]])
    embed = lambda tokens: jax.jit(target.model.embed)(target.params, tokens)
    alone = embed(ids[:, 0])
    mixed = embed(specjax.types.Mixture(ids, weights))
    np.testing.assert_allclose(mixed[0, 0], 0.25 * alone[0, 0] + 0.75 * alone[0, 1], atol=1e-5)


def test_pixels_are_those_of_transformers(janus):
    """The decoder has a change of channels, attention and upsampling."""
    model, folder, _ = janus
    tensors, side = load_file(folder / "model.safetensors"), TOWER["image_size"] // TOWER["patch_size"]
    codes = np.random.default_rng(3).integers(0, CODES, (2, side**2))
    with torch.no_grad():
        theirs = model.decode_image_tokens(torch.tensor(codes)).numpy()
    np.testing.assert_allclose(janus_pixels(tensors, codes), theirs, atol=2e-3 * np.abs(theirs).max())
    assert not np.allclose(janus_pixels(tensors, codes[:, ::-1]), theirs, atol=0.1 * np.abs(theirs).max())
    wide = janus_pixels(tensors, codes[:, :12], columns=4)
    assert wide.shape == (2, 2 * 3, 2 * 4, 3)
    for bad, columns, message in (
        (codes[:, :5], None, r"codes must be \[images, rows x columns\], not \[2, 5\] with 2 columns"),
        (codes + TEXT_VOCAB, None, "codes must be from 0 to 18; subtract the first token of the codes"),
        ([*codes.tolist()[:1], [1]], None, r"not \[0\] with 0 columns"), (3, None, r"not \[\] with 0 columns"),
        (codes + 0.5, None, "codes must be whole numbers, not float64"), (codes, -6, "columns must be a whole number"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            janus_pixels(tensors, bad, columns=columns)
    with pytest.raises(UsageError, match="give the tensors of a Janus model"):
        janus_pixels({}, codes)
    part = {name: x for name, x in tensors.items() if "decoder.mid" not in name}
    with pytest.raises(
        UsageError, match=r"decoder\.mid\..* is not in the checkpoint; give the tensors of all its files"
    ):
        janus_pixels(part, codes)


def test_what_is_refused(janus, tmp_path):
    _, folder, target = janus
    with pytest.raises(UsageError, match="parts of its files for images are not loaded"):
        specjax.save_model(tmp_path, target)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    fields = json.loads((tmp_path / "config.json").read_text())
    for changes, message in (
        ({"projection_dim": 48}, "projection_dim 48, which must be the hidden_size 32"),
        ({"num_hidden_layers": 3}, "an aligner of 3 layers"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields | {"vq_config": fields["vq_config"] | changes}))
        with pytest.raises(UsageError, match=message):
            specjax.load(str(tmp_path))
