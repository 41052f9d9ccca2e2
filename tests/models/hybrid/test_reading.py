"""Long texts in chunks, against recurrences in float64 and against the form for trees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.hybrid.ancestry import Ancestry
from specjax.models.hybrid.reading import CHUNK, TokenInputs, read_nodes, read_pass, read_text

ROWS, COUNT, GROUPS, HEADS, KEY, VALUE = 2, 2 * CHUNK + 20, 2, 4, 8, 6


@functools.cache
def example() -> tuple[TokenInputs, np.ndarray]:
    """Return inputs with weak and strong decays, and a state."""
    rng = np.random.default_rng(0)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    query, key = (unit(rng.normal(size=(ROWS, COUNT, GROUPS, KEY))) for _ in "qk")
    decay = -(10.0 ** rng.uniform(-4, 1, (ROWS, COUNT, HEADS)))
    beta = rng.uniform(size=(ROWS, COUNT, HEADS))
    tokens = TokenInputs(query, key, rng.normal(size=(ROWS, COUNT, HEADS, VALUE)), decay, beta)
    return tokens, rng.normal(size=(ROWS, HEADS, KEY, VALUE))


def token_by_token(tokens: TokenInputs, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the outputs and the vectors u of the definition."""
    outputs, updates = [], []
    per_head = lambda x: np.repeat(x, HEADS // GROUPS, 1)
    for i in range(COUNT):
        query, key, value = per_head(tokens.query[:, i]), per_head(tokens.key[:, i]), tokens.value[:, i]
        state = np.exp(tokens.decay[:, i])[..., None, None] * state
        u = value
        if tokens.beta is not None:
            u = tokens.beta[:, i, :, None] * (value - np.einsum("bhdv,bhd->bhv", state, key))
        state = state + key[..., None] * u[:, :, None]
        outputs.append(np.einsum("bhdv,bhd->bhv", state, query))
        updates.append(u)
    return np.stack(outputs, 1), np.stack(updates, 1)


@pytest.mark.parametrize("is_looped", [True, False])
@pytest.mark.parametrize("kind", ["delta", "state_space"])
def test_a_text_in_chunks(kind, is_looped):
    tokens, state = example()
    tokens = tokens if kind == "delta" else tokens._replace(beta=None)
    reading = jax.jit(functools.partial(read_text, is_looped=is_looped))(*as_float32((tokens, state)))
    outputs, updates = token_by_token(tokens, state)
    np.testing.assert_allclose(reading.output, outputs, atol=2e-6)
    np.testing.assert_allclose(reading.value, updates, atol=2e-6)
    np.testing.assert_allclose(np.sum(reading.total, -1), np.cumsum(tokens.decay, 1), rtol=2e-6)


def test_a_constant_mask_selects_the_form_of_texts():
    """Both forms agree, and so does a text without a constant mask."""
    arguments = as_float32(example())
    mask = np.broadcast_to(np.tril(np.ones((COUNT, COUNT), bool)), (ROWS, COUNT, COUNT))
    tree = jax.jit(lambda tokens, state, mask: read_nodes(tokens, state, Ancestry(mask, None), None))
    text = jax.jit(lambda tokens, state: read_pass(tokens, state, Ancestry(None, None), None))
    for one, other in zip(tree(*arguments, mask), text(*arguments), strict=True):
        np.testing.assert_allclose(one.reshape(other.shape), other, atol=2e-5, rtol=1e-5)
    assert "scan" in str(jax.make_jaxpr(text)(*arguments))


def as_float32(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
