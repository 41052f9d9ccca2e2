"""Images of Lumina-mGPT: forced tokens by count, and the law of guided images by enumeration."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import chi_square

from specjax import Target, UsageError, decode, trees
from specjax.drafters import autoregressive, jacobi, two_model
from specjax.models import guided, init_params, make_model, unconditional
from specjax.models.image_tokens.chameleon import ChameleonConfig
from specjax.processors import LuminaTokens, forced_tokens, lumina_layout

TINY = LuminaTokens(start=3, size=4, newline=6, end=7, codes=(1, 3))
VOCAB, SCALE, TEMPERATURE = 8, 2.5, 3.0
PROMPTS = [[0, 2, 1], [1]]


@functools.cache
def layout():
    """Return the layout of 2 x 2 codes: seven tokens with 16 possible images."""
    return lumina_layout(32, 32, TINY)


@functools.cache
def target(seed=0):
    config = ChameleonConfig(
        vocab_size=VOCAB, width=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_width=24, tied=False
    )
    params = jax.tree.map(lambda x: x * 3 if x.ndim > 1 else x, init_params(config, jax.random.key(seed)))
    return Target(make_model(config), params)


def token_by_count(count, rows, columns):
    """Return the forced token after `count` tokens of an image, or None for a code, as the published code counts."""
    if (count + 1) % (columns + 1) == 0:
        return "newline"
    return "end" if count + 1 == (columns + 1) * rows + 1 else None


def test_layout_of_published_sizes():
    tokens = {None: -1, "newline": 8803, "end": 8196}
    for height, width in ((768, 768), (512, 1024)):
        ours = lumina_layout(height, width)
        rows, columns = height // 16, width // 16
        assert ours.start == (8197, 8804 + height // 32, 8804 + width // 32)
        assert ours.num_tokens == rows * (columns + 1) + 1
        expected = tuple(tokens[token_by_count(count, rows, columns)] for count in range(ours.num_tokens))
        assert forced_tokens(ours.processor) == expected
    sets = np.flatnonzero(np.asarray(ours.processor.params.is_allowed[0]))
    assert (sets[0], sets[-1], len(sets)) == (4, 8195, 8192)
    for width in (500, "wide", None, float("nan"), [512], -32):
        with pytest.raises(UsageError, match="width must be a multiple of 32 pixels, not "):
            lumina_layout(512, width)
    assert lumina_layout(512.0, 512).start == lumina_layout(512, 512).start


@functools.cache
def images():
    """Return all images int[16, 7]."""
    codes = range(*TINY.codes)
    return np.array([[a, b, 6, c, d, 6, 7] for a, b, c, d in itertools.product(codes, repeat=4)])


def chances(start, scale=SCALE, first=0, temperature=TEMPERATURE):
    """Return the law [16] of images after a prompt, by two passes over each complete text."""
    model, params, count = target().model, target().params, images().shape[1]

    def logits_after(prompt):
        texts = jnp.asarray([[*prompt, *image] for image in images()])
        size = texts.shape[1]
        path = jnp.broadcast_to(jnp.arange(size), texts.shape)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (len(texts), size, size))
        cache = model.init_cache(params, None, len(texts), 128)
        logits = jax.jit(model.forward)(params, texts, cache, positions=path, mask=mask)[0].logits
        return np.asarray(logits[:, len(prompt) - 1 : -1], np.float64)

    c, u = logits_after(start), logits_after(layout().start)
    scale = np.where(np.arange(count) >= first, scale, 1.0)[:, None]
    logits = (u + scale * (c - u)) / temperature
    of_code = [place for place in range(count) if token_by_count(place, 2, 2) is None]
    logits = logits[:, of_code, TINY.codes[0] : TINY.codes[1]]
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    index_of_code = images()[:, of_code] - TINY.codes[0]
    return np.take_along_axis(p, index_of_code[..., None], 2)[..., 0].prod(1)


DRAFTERS = {
    "plain": autoregressive,
    "SJD": lambda: jacobi(VOCAB, window=3, ids=TINY.codes, forced=forced_tokens(layout().processor)),
    "SJD without forced drafts": lambda: jacobi(VOCAB, window=3),
    "tree": lambda: two_model(guided(target(1), 1.5), tree=trees.parse("3x2")),
}


def decoded(drafter, of=None, prompts=PROMPTS, **options):
    prompts = [[*prompt, *layout().start] for prompt in prompts]
    return decode(
        of or guided(target(), SCALE), drafter, prompts, key=jax.random.key(3), max_new_tokens=layout().num_tokens,
        processors=[layout().processor], inputs=unconditional([layout().start] * len(prompts)), **options,
    )  # fmt: skip


def counts(drafter, **options):
    """Return how often each of the 16 images follows the first prompt."""
    texts = decoded(
        drafter, prompts=PROMPTS[:1], temperature=TEMPERATURE, samples_per_prompt=2000, **options
    ).to_lists()
    index = {tuple(image): number for number, image in enumerate(images().tolist())}
    return np.bincount([index[tuple(text)] for text in texts], minlength=16)


@pytest.mark.parametrize("name", ["SJD", "tree"])
def test_law_of_images_by_enumeration(name):
    law = chances([*PROMPTS[0], *layout().start])
    assert chi_square(counts(DRAFTERS[name]()), law) > 1e-3


def test_guidance_from_a_later_token_fails():
    """A mutant guides no image. Its law differs from that of the enumeration."""
    law = chances([*PROMPTS[0], *layout().start])
    mutant = counts(DRAFTERS["SJD"](), of=guided(target(), 1.0))
    assert chi_square(mutant, law) < 1e-6


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_images_have_forced_tokens(name):
    """Each greedy image is the best code of each place after the codes before it."""
    for prompt, image in zip(PROMPTS, decoded(DRAFTERS[name]()).to_lists(), strict=True):
        law = chances([*prompt, *layout().start], temperature=1e-3)
        assert image == images()[law.argmax()].tolist()


def test_forced_tokens_take_no_passes():
    """Each newline joins the pass of a code, even when no draft of a code is right."""
    alike = lambda drafter: decoded(drafter, of=guided(target(), SCALE))
    forced = jacobi(VOCAB, window=1, ids=(0, 1), forced=forced_tokens(layout().processor))
    assert int(alike(forced).stats.target_passes.max()) < int(alike(autoregressive()).stats.target_passes.max())
