"""FailFast: how long a draft becomes, counted by hand."""

import jax.numpy as jnp
import numpy as np
import pytest
import toy_denoisers as toys

from specjax.diffusion.drafters import failfast
from specjax.types import Context


@pytest.mark.parametrize(
    ("sure", "limit", "length"),
    [
        ([0.9, 0.9, 0.9, 0.4, 0.9, 0.9], 6, 4),  # the second chunk has a weak token: it is the last
        ([0.4, 0.9, 0.9, 0.9, 0.9, 0.9], 6, 2),
        ([0.9, 0.9, 0.9, 0.9, 0.9, 0.9], 6, 6),
        ([0.9, 0.9, 0.9, 0.9, 0.9, 0.9], 3, 3),
        ([0.9, 0.9, 0.9, 0.9, 0.9, 0.9], 0, 0),
    ],
)
def test_a_chunk_with_a_weak_token_is_the_last(sure, limit, length):
    """The first of two rows stops after a chunk with a weak token; the other one always drafts one chunk."""
    denoiser = toys.frozen(np.array([0.9, *sure, 0.9, 0.1, 0.1, 0.1]), np.arange(11) + 0)
    drafter = failfast(denoiser, chunk=2, num_tokens=6, tau=0.5)
    context = Context(jnp.zeros((2, 16), jnp.int32), jnp.array([1, 8]))
    state = drafter.init(drafter.params, context)
    tree, _ = drafter.propose(drafter.params, toys.keys_of(0, 2), state, context, jnp.array([limit, 6]))
    assert tree.valid.sum(1).tolist() == [1 + length, 3] and tree.logits is None
    assert tree.tokens[0, 1 : 1 + length].tolist() == list(range(1, 1 + length))
