"""The training pass is the decoder's: each of its rounds says what a head says that has read so far and drafts."""

import functools

import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from head_runs import draft, random_params
from tiers import those

from specjax.models.heads.agreement import prompted_features
from specjax.models.heads.contract import DraftHead, FeaturePairs
from specjax.models.heads.kinds import KINDS, TRAINABLE
from specjax.pallas_kernels.tree_attention.shared import shared_tree_attention
from specjax.training.data.packing import PackedBatch
from specjax.training.objectives.unroll import Rounds, run_target, unroll_rounds
from specjax.types import Context

DEPTHS = 3
ROW, SECOND = 12, 4  # tokens of a row, and where the second text of the first row begins
PLACES = np.array([[1, 5], [1, -1]], np.int32)  # behind three tokens of a text each; -1: none
OF_EACH_FAMILY = ("eagle3", "medusa", "hydra", "dspark", "kangaroo", "longspec", "chimera", "falcon", "hidden_transfer")
CANNOT_BE_PACKED = ("falcon",)  # it remembers the pairs before


@functools.cache
def target():
    return toy.tiny_llama(layers=3)


def packed_batch(packed: bool = True) -> PackedBatch:
    tokens = np.random.default_rng(1).integers(0, 64, (2, ROW)).astype(np.int32)
    first = np.zeros((2, ROW), np.int32)
    if packed:
        first[0, SECOND:] = SECOND
    return PackedBatch(tokens, first, np.ones((2, ROW), bool))


@functools.partial(jax.jit, static_argnums=0)
def _said(head, params, target, packed):
    stack = lambda depths: jnp.stack([depth.logits for depth in depths], 1)
    activations = run_target(target, head, packed)
    return unroll_rounds(head, params, target, Rounds(packed, activations, jnp.asarray(PLACES)), DEPTHS, stack)


@functools.partial(jax.jit, static_argnums=0)
def _alone(head, params, target, tokens, path):
    """Return the output of a head that read all of a text int32[1, T] but its root, the last token."""
    size = tokens.shape[1]
    model = target.model
    cache = model.init_cache(target.params, None, 1, 128)
    positions, mask = jnp.arange(size)[None], jnp.tril(jnp.ones((1, size, size), bool))
    taps = {"taps": head.taps} if head.taps else {}
    output, pending = model.forward(target.params, tokens, cache, positions=positions, mask=mask, **taps)
    length = jnp.array([size])
    cache = model.commit(cache, pending, positions, length - 1)
    context = Context(tokens, length, target=target, cache=cache)
    features = head.features_of(output)
    if head.soft_prompts is not None:
        features = prompted_features(target, DraftHead(head, params), tokens)
    pairs = FeaturePairs(features[:, :-1], tokens[:, 1:], length - 1)
    memory = head.read(params, head.init_memory(params, context, 1, 128), pairs, context)
    return draft(head, params, memory, context, path)


@pytest.mark.parametrize("kind", those(OF_EACH_FAMILY, TRAINABLE))
def test_a_round_is_what_the_head_drafts_from_there(kind):
    config = heads.config_of(kind, target())
    head, params = KINDS[kind].head(config), random_params(kind, config)
    packed = packed_batch(kind not in CANNOT_BE_PACKED)
    unrolled = np.asarray(_said(head, params, target(), packed)).reshape(*PLACES.shape, DEPTHS, -1)
    for row, column in np.argwhere(PLACES >= 0):
        t = PLACES[row, column]
        if t > SECOND and not packed.text_start[row, t]:
            continue
        text, path = packed.tokens[None, row, t - 1 : t + 2], packed.tokens[None, row, t + 2 : t + 1 + DEPTHS]
        expected = np.asarray(_alone(head, params, target(), text, path))[0]
        np.testing.assert_allclose(unrolled[row, column], expected, atol=2e-5, rtol=2e-4)


def test_rows_that_share_a_prefix_attend_in_bfloat16_too():
    """The attention runs on a CPU, which has no products of bfloat16 in some orders of their axes."""
    q, k, prefix = (jnp.ones(shape, jnp.bfloat16) for shape in ((10, 1, 4, 8), (10, 2, 3, 8), (2, 2, 64, 8)))
    row, mask = jnp.ones((10,), jnp.int32), jnp.ones((10, 1, 3), bool)
    attend = jax.jit(functools.partial(shared_tree_attention, scale=1.0))
    attended = attend(q, k, k, prefix, prefix, row, row[:, None], mask)
    np.testing.assert_allclose(np.asarray(attended, np.float32), 1.0, atol=0.02)


def test_a_round_of_separate_modules_is_what_they_draft_from_there():
    head = heads.separate_modules(target())
    packed = packed_batch()
    unrolled = np.asarray(_said(head.head, head.params, target(), packed)).reshape(*PLACES.shape, DEPTHS, -1)
    for row, column in np.argwhere(PLACES >= 0):
        t = PLACES[row, column]
        text, path = packed.tokens[None, row, t - 1 : t + 2], packed.tokens[None, row, t + 2 : t + 1 + DEPTHS]
        expected = np.asarray(_alone(head.head, head.params, target(), text, path))[0]
        np.testing.assert_allclose(unrolled[row, column], expected, atol=2e-5, rtol=2e-4)
