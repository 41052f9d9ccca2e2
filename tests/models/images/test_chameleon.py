"""Chameleon beside transformers: logits, greedy texts, images by phases, and guidance."""

import dataclasses
import functools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from image_models import sharpen, write_tokenizer
from toy import tiny_llama_alike

import specjax
from specjax import UsageError, decode, processors, trees
from specjax.drafters import autoregressive, jacobi, two_model
from specjax.errors import CheckpointWarning
from specjax.models import code_tokens, guided, make_model, unconditional
from specjax.models.layers import HeadLayerNorm

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB, COUNT, BEGIN, END, PLACEHOLDER = 64, 6, 41, 40, 42
CODES = {code: 39 - (7 * code) % 13 for code in range(13)}
"""The token of each code: 27 to 39, in another order than that of the codes."""
NAMES = {f"IMGIMG{''.join('ABCDEFGHIJ'[int(digit)] for digit in str(code))}Z": token for code, token in CODES.items()}
PROMPTS = [[5, 9, 2, 7, BEGIN], [3, 8, BEGIN]]
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "vocabulary_map": {**NAMES, "<image>": PLACEHOLDER},
}  # fmt: skip
VQ = {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "embed_dim": 8, "latent_channels": 8}


@pytest.fixture(scope="module")
def chameleons(tmp_path_factory):
    """Return a function: for the size of a model, that of transformers, its folder, and the loaded target."""

    @functools.cache
    def make(size):
        folder = tmp_path_factory.mktemp("chameleon")
        config = transformers.ChameleonConfig(**SHAPE, swin_norm=size == "34B", vq_config=VQ | {"num_embeddings": 13})
        model = transformers.ChameleonForConditionalGeneration(config).eval()
        sharpen(model)
        model.save_pretrained(folder)
        write_tokenizer(folder)
        with warnings.catch_warnings():  # no field is reported as unread
            warnings.simplefilter("error", CheckpointWarning)
            return model, folder, specjax.load(str(folder))[0]

    return make


@pytest.fixture
def chameleon(chameleons):
    return chameleons("7B")


def their_logits(model, text):
    """Return the logits [T, V] of all tokens. The class of transformers hides those of codes."""
    with torch.no_grad():
        return model.lm_head(model.model(input_ids=torch.tensor([text])).last_hidden_state)[0].numpy()


def read(target, text):
    """Return the logits of a text that the target reads in one pass."""
    model, size = target.model, len(text)
    cache = model.init_cache(target.params, None, 1, 128)
    path, mask = jnp.arange(size)[None], jnp.tril(jnp.ones((1, size, size), bool))
    return jax.jit(model.forward)(target.params, jnp.asarray([text]), cache, positions=path, mask=mask)[0].logits[0]


@functools.cache
def phases():
    return processors.image_phases(CODES.values(), BEGIN, END, COUNT)


def their_image(model, prompt, scale=1.0, null=(BEGIN,)):
    """Return the greedy tokens of an image: COUNT codes and the end, by two passes over complete texts per token."""
    image = []
    for place in range(COUNT + 1):
        c, u = (their_logits(model, [*start, *image])[-1] for start in (prompt, null))
        logits = u + scale * (c - u)
        allowed = [*CODES.values()] if place < COUNT else [END]
        image.append(max(allowed, key=lambda token: logits[token]))
    return image


@pytest.mark.parametrize("size", ["7B", "34B"])
def test_logits_and_greedy_texts_are_those_of_transformers(chameleons, size):
    """Text has no codes, so the greedy text is that of `generate`. The 34B model has norms after the sublayers."""
    model, _, target = chameleons(size)
    text = np.random.default_rng(0).integers(3, VOCAB, 23).tolist()
    np.testing.assert_allclose(read(target, text), their_logits(model, text), atol=3e-4)
    prompt = text[:6] if BEGIN not in text[:6] else [5, 6, 7]
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)[0].tolist()
    bans = [*CODES.values()]
    ours = decode(target, "suffix", [prompt], key=0, max_new_tokens=12, processors=[processors.ban(bans)])
    assert ours.to_lists()[0] == theirs[len(prompt) :]


def test_norms_of_whole_heads_fail(chameleon, monkeypatch):
    """A mutant gives all heads the weights of the first one."""
    model, _, target = chameleon
    call = HeadLayerNorm.__call__
    monkeypatch.setattr(HeadLayerNorm, "__call__", lambda self, x: call(self, x.at[:, :, 1:].set(x[:, :, :1])))
    mutant = make_model(dataclasses.replace(target.model.config, name="mutant"))
    assert not np.allclose(
        read(specjax.Target(mutant, target.params), [5, 6, 7]), their_logits(model, [5, 6, 7]), atol=1e-2
    )


DRAFTERS = {
    "plain": autoregressive,
    "SJD": lambda: jacobi(VOCAB, window=4, ids=(27, 40)),
    "tree": lambda: two_model(guided(tiny_llama_alike(), 2.0), tree=trees.parse("top:3x2x1")),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_guided_images_are_those_of_two_passes(chameleon, name):
    """Two images with prompts of different lengths, whose unconditional rows contain the image only."""
    model, _, target = chameleon
    result = decode(
        guided(target, 2.0), DRAFTERS[name](), PROMPTS, key=0, max_new_tokens=COUNT + 1,
        inputs=unconditional([[BEGIN]] * 2), processors=[phases()],
    )  # fmt: skip
    expected = [their_image(model, prompt, 2.0) for prompt in PROMPTS]
    assert result.to_lists() == expected
    assert expected != [their_image(model, prompt) for prompt in PROMPTS]


def test_an_image_inside_of_a_text(chameleon):
    """The model begins an image itself. Before and after it, no code is written."""
    model, _, target = chameleon
    text, prompt = [], [5, 9, 2]
    for place in range(COUNT + 6):
        logits = their_logits(model, [*prompt, *text])[-1]
        if place == 2:  # a forced begin
            text.append(BEGIN)
            continue
        in_image, is_end = 3 <= place < 3 + COUNT, place == 3 + COUNT
        allowed = [END] if is_end else [t for t in range(VOCAB) if (t in CODES.values()) == in_image and t != BEGIN]
        text.append(max(allowed, key=lambda token: logits[token]))
    free = [t for t in range(VOCAB) if t != BEGIN]
    begins = processors.by_place([free, [BEGIN]], [0, 0, 1] + [0] * (COUNT + 3))
    for drafter in (autoregressive(), jacobi(VOCAB, window=5)):
        ours = decode(
            target, drafter, [prompt], key=0, max_new_tokens=len(text), processors=[begins, phases()]
        ).to_lists()[0]
        assert ours == text


def test_the_class_of_lumina_is_read(chameleon, tmp_path):
    """The files of Lumina-mGPT name a class of its trainer, and have three more fields."""
    _, folder, target = chameleon
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    fields = json.loads((tmp_path / "config.json").read_text())
    fields |= {"architectures": ["ChameleonXLLMXForConditionalGeneration"], "z_loss_weight": 1e-5}
    fields |= {"mask_image_logits": False, "dropout": 0.05}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with warnings.catch_warnings():  # no field is reported as unread
        warnings.simplefilter("error", CheckpointWarning)
        loaded = specjax.load(str(tmp_path))[0]
    jax.tree.map(np.testing.assert_array_equal, loaded.params, target.params)


def test_tokens_of_codes():
    assert code_tokens(SHAPE["vocabulary_map"]).tolist() == list(CODES.values())
    with pytest.raises(UsageError, match="has 0 codes, which must be numbered from 0"):
        code_tokens({"a": 3})
    with pytest.raises(UsageError, match=r"has ids by name, not \[\]; give vocabulary_map"):
        code_tokens([])


def test_what_the_files_of_images_are_not(chameleon, tmp_path):
    _, folder, target = chameleon
    with pytest.raises(UsageError, match="parts of its files for images are not loaded"):
        specjax.save_model(tmp_path, target)
    with pytest.raises(UsageError, match="reads no images; leave them out"):
        specjax.models.images(target, PROMPTS, [None, None])
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"attention_bias": True}))
    with pytest.raises(UsageError, match="sets attention_bias"):
        specjax.load(str(tmp_path))
