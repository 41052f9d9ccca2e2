"""P-EAGLE against EAGLE-3: the logits at a depth equal those of EAGLE-3 after as many pairs of masks."""

from __future__ import annotations

from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heads import config_of, tiny_head
from toy import tiny_llama

from specjax import UsageError
from specjax.models.heads.contract import DraftedNodes, FeaturePairs
from specjax.models.heads.eagle3 import Eagle3Config, eagle3_head
from specjax.models.heads.p_eagle import p_eagle_head
from specjax.types import Context


def test_each_depth_is_one_more_pair_of_masks():
    ours = tiny_head("p_eagle", tiny_llama())
    config = ours.head.config
    theirs = eagle3_head(Eagle3Config(**{field.name: getattr(config, field.name) for field in fields(Eagle3Config)}))
    rng = np.random.default_rng(0)
    tokens, features = rng.integers(0, 64, (2, 7)).astype(np.int32), rng.normal(size=(2, 6, 96)).astype(np.float32)
    lengths = jnp.array([5, 7])

    @jax.jit
    def run(params, target):
        context, pairs = Context(tokens, lengths, target=target), FeaturePairs(features, tokens[:, 1:], lengths - 1)
        memory = ours.head.read(params, ours.head.init_memory(params, context, 2, 16), pairs, context)
        scratch, first = ours.head.start(params, memory, context, 3)
        fill = lambda value: jnp.full((2, 1), value)
        logits = [first]
        for depth in (1, 2):
            drafted = DraftedNodes(fill(9), fill(depth), jnp.int32(depth), fill(depth - 1), jnp.zeros((2, 1, 3), bool))
            logits.append(ours.head.follow(params, scratch, drafted, context)[1][:, 0])
        plain = {name: part for name, part in params.items() if name != "mask_hidden"}
        mask = FeaturePairs(
            jnp.broadcast_to(params["mask_hidden"], (2, 1, 96)), fill(config.mask_token), jnp.ones(2, jnp.int32)
        )
        wanted = []
        for _ in range(3):
            wanted.append(theirs.start(plain, memory, context, 1)[1])
            memory = theirs.read(plain, memory, mask, context)
        return logits, wanted

    logits, wanted = run(ours.params, tiny_llama())
    np.testing.assert_allclose(logits, wanted, atol=1e-5)
    assert np.abs(np.diff(np.array(logits), axis=0)).max() > 1e-2


def test_one_depth_is_refused():
    with pytest.raises(UsageError, match="depths must be at least 2, not 1"):
        p_eagle_head(replace(config_of("p_eagle", tiny_llama()), depths=1))
