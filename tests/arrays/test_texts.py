"""Constant masks and paths of texts."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays import texts


def test_masks_of_texts_are_recognised():
    mask = texts.causal_mask(2, 5)
    assert texts.is_causal(mask) and mask.shape == (2, 5, 5)
    assert not texts.is_causal(mask[:, :4]), "the first token may be pending"
    branch = mask.copy()
    branch[1, 4, 3] = False
    assert not texts.is_causal(branch)
    assert not texts.is_causal(jnp.asarray(mask)), "its values are data in a traced function"
    assert jax.jit(texts.traced_mask)(jnp.asarray(mask)).tolist() == texts.traced_mask(mask).tolist() == mask.tolist()


def test_paths_through_texts_are_recognised():
    assert texts.is_in_order(texts.in_order(2, 4)) and texts.in_order(2, 4).dtype == np.int32
    assert not texts.is_in_order(np.array([[0, 2, 1]])) and not texts.is_in_order(jnp.arange(3)[None])
