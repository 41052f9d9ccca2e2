"""The card's tests of LoRA-Drop (B5). Its layers are not stacked: some have caches of their own."""

import functools

import depths
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_llama

from specjax import Target, UsageError, adaptive, drafters
from specjax.adaptive.lora_drop import droppable
from specjax.engine.prefill import prefill

LAYERS, EVERY = 5, 3


def target() -> Target:
    return tiny_llama(layers=LAYERS)


def of(every: int) -> adaptive.DepthPolicy:
    """Return a policy whose corrections are random, of low rank and not zero."""
    down, up = (
        jax.random.normal(jax.random.key(seed), shape) * 0.1
        for seed, shape in ((5, (LAYERS, 4, depths.WIDTH)), (6, (LAYERS, depths.WIDTH, 4)))
    )
    return adaptive.lora_drop(adaptive.Corrections(down, up), every=every)


@functools.cache
def dropped():
    return adaptive.skip_layers(target(), of(EVERY))


@functools.cache
def text():
    return depths.texts(dropped())


def test_every_token_in_full_is_the_whole_model():
    model = adaptive.skip_layers(target(), of(1))
    assert depths.texts(model) == depths.texts(target()) != text()


def test_speculation_changes_no_text():
    """Passes in which some tokens run a layer, and others stand on what those gave."""
    assert depths.texts(dropped(), drafters.prompt_lookup(5, min_ngram=1)) == text()


def test_one_reading_is_the_decoding():
    reading, counts = depths.read_again(dropped(), text())
    tokens = [row[count].tolist() for row, count in zip(np.asarray(reading.likeliest), counts, strict=True)]
    assert tokens == text()
    ran = np.asarray(reading.ran.attention)[0][counts[0]]
    which = droppable(LAYERS)
    assert ran[:, [layer for layer in range(LAYERS) if layer not in which]].all()
    assert ran[1:, which].all(1).tolist() == [t % EVERY == 0 for t in range(len(ran) - 1)]
    assert ran[1:, which].any(1).tolist() == ran[1:, which].all(1).tolist()


def test_keys_of_droppable_layers():
    """After 16 tokens at k = 4: those of the prompt but the last, that one, and four more."""
    model = adaptive.skip_layers(target(), of(4))
    prompt = depths.PROMPTS[0]
    tokens = jnp.asarray([prompt + list(range(16)) + [0] * 128])
    length = jnp.array([len(prompt)])
    cache = model.model.start_cache(model.params, None, length, 300)
    cache = prefill(model.model, model.params, cache, tokens, length + 16)
    assert cache.base.length.tolist() == [len(prompt) + 16]
    assert cache.sparse_length.tolist() == [len(prompt) + 4]


def test_zeros_repeat_what_the_layer_gave_last():
    blank = adaptive.blank_corrections(target(), jax.random.key(0))
    model = adaptive.skip_layers(target(), adaptive.lora_drop(blank, every=2))
    prompt = depths.PROMPTS[0]
    tokens = jnp.asarray([[*prompt, 7, 8, 9]])
    size = tokens.shape[1]
    output, pending = model.model.forward(
        model.params, tokens, model.model.start_cache(model.params, None, jnp.array([len(prompt)]), 64),
        positions=jnp.arange(size)[None], mask=jnp.tril(jnp.ones((1, size, size), bool)), taps=(4,),
    )  # fmt: skip
    refresh, repeated, other = np.asarray(output.taps[0][0, -3:])  # behind layer 3, which can be dropped
    np.testing.assert_array_equal(refresh, repeated)
    assert not np.allclose(refresh, other)
    np.testing.assert_array_equal(pending.ran.mlp[0, -3:, 3], [True, False, True])


def test_corrections_learn_with_the_target_frozen():
    answers = depths.texts(target())
    rows = [prompt + answer for prompt, answer in zip(depths.PROMPTS, answers, strict=True)]
    size = max(map(len, rows))
    tokens = jnp.asarray([row + [0] * (size - len(row)) for row in rows])
    prompt, length = (jnp.asarray(list(map(len, texts))) for texts in (depths.PROMPTS, rows))
    depth = adaptive.lora_drop(adaptive.blank_corrections(target(), jax.random.key(1)), every=2)
    fitted, losses = adaptive.fit(target(), depth, tokens, prompt, length, steps=40, learning_rate=3e-3)
    assert losses[-1] < 0.7 * losses[0]
    up = np.asarray(fitted.params.up)
    assert up[list(droppable(LAYERS))].any((1, 2)).all() and not up[[0, 4]].any()


def test_what_does_not_fit():
    with pytest.raises(UsageError, match="load the model with stacked=False"):
        adaptive.skip_layers(tiny_llama(layers=LAYERS, stacked=True), of(EVERY))
    with pytest.raises(UsageError, match="corrections must be down"):
        adaptive.lora_drop(adaptive.Corrections(jnp.zeros((8, 4, 32)), jnp.zeros((8, 4, 32))))
    with pytest.raises(UsageError, match="lora_drop learns from the prompt and cannot draft"):
        drafters.thinned(target(), of(EVERY))
    with pytest.raises(UsageError, match="cannot draft trees level by level"):
        depths.texts(target(), drafters.two_model(dropped(), 3))
