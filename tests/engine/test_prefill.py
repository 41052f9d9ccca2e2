"""Prefill in wide chunks, as on TPUs, and in narrow ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_llama

from specjax import decode, drafters
from specjax.engine import prefill
from specjax.engine.prefill import CHUNK, count_chunks, wide_chunk


def test_chunks_by_platform_and_batch():
    for platform in ("tpu", "gpu"):
        assert [wide_chunk(batch, platform) for batch in (1, 2, 3, 4, 64)] == [512, 256, 128, 128, 128]
    assert {wide_chunk(batch, "cpu") for batch in (1, 64)} == {CHUNK}
    assert wide_chunk(1) == CHUNK  # these tests run on a CPU


@pytest.mark.parametrize("longest", [0, 1, 127, 128, 385, 512, 600, 1023, 4096])
def test_the_last_chunk_exceeds_the_prompt_by_less_than_a_narrow_one(longest):
    """Buffers have as many free slots for every size of chunks."""
    for wide in (128, 256, 512):
        num_wide, num_narrow = count_chunks(longest, wide)
        read = num_wide * wide * (wide > CHUNK) + num_narrow * CHUNK
        assert longest <= read < longest + CHUNK
        assert num_narrow < max(wide // CHUNK, 2) or wide == CHUNK


def test_texts_do_not_depend_on_the_chunks(monkeypatch):
    """On prompts of several chunks, with a cache that has no slots to spare."""
    rng, target = np.random.default_rng(0), tiny_llama()
    prompts = [rng.integers(1, 60, length).tolist() for length in (target.model.max_positions - 20, 5)]
    widths = []
    forward = target.model.forward

    def watched(params, tokens, *arguments, **options):
        widths.append(tokens.shape[1])
        return forward(params, tokens, *arguments, **options)

    target = type(target)(target.model._replace(forward=watched), target.params)
    run = lambda: decode(target, drafters.prompt_lookup(), prompts, key=jax.random.key(0), max_new_tokens=12)
    narrow = run().to_lists()
    assert max(widths) == CHUNK
    jax.clear_caches()
    monkeypatch.setattr(prefill.platforms, "of_program", lambda: "tpu")
    widths.clear()
    assert run().to_lists() == narrow
    assert max(widths) == 256
    jax.clear_caches()


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_a_buffer_that_is_smaller_than_a_wide_chunk_is_read_in_narrow_ones(platform, monkeypatch):
    """A short prompt with a short answer, in one row, where a wide chunk has 512 tokens."""
    assert wide_chunk(1, platform, CHUNK * 2) == CHUNK
    assert wide_chunk(1, platform, 512) == 512
    target = tiny_llama(layers=1)
    monkeypatch.setattr(prefill.platforms, "of_program", lambda: platform)
    jax.clear_caches()
    result = decode(target, drafters.autoregressive(), [[5, 9, 2]], key=jax.random.key(0), max_new_tokens=4)
    assert len(result.to_lists()[0]) == 4
    jax.clear_caches()


def test_every_token_is_read_once():
    """The chunks of a loop by numbers: each token in order, whatever the sizes."""

    def read(start, size, text):
        return jax.lax.dynamic_update_slice(text, start + jnp.arange(size), (start,))

    for longest in (0, 5, 130, 700):
        text = prefill.in_chunks(read, jnp.full(1024, -1), jnp.int32(longest), 256, 128)
        assert text[:longest].tolist() == list(range(longest))
