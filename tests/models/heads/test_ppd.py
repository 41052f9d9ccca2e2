"""The attention of prompts, the average of their copies, and the accuracy of their guesses."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import markov, tiny_llama

from specjax.models.heads.agreement import agreement, prompted_features, read_text
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.kinds import init_head
from specjax.models.heads.ppd import PpdConfig, ppd_head, rank_accuracy
from specjax.types import Context

TEXT = [3, 1, 4, 1, 5, 9, 2, 6]


@functools.partial(jax.jit, static_argnums=2)
def said(target, head, t):
    """Return the logits float32[m, V] after the first t + 1 tokens of TEXT."""
    hidden = prompted_features(target, head, jnp.asarray([TEXT]))[:, t]
    context = Context(jnp.asarray([TEXT]), jnp.asarray([t + 2]), target=target)
    return head.head.start(head.params, hidden, context, 2)[0].logits[0]


def test_a_prompt_sees_the_text_and_the_prompts_before_it_of_its_copy():
    """The reference is one text per copy, with last tokens in place of the prompts."""
    target, config, t = tiny_llama(layers=1), PpdConfig(32, num_prompts=2, copies=2), 4
    ids = np.array([[10, 11], [12, 13]])  # by distance and copy
    rows = np.asarray(target.params["embed"]["weight"])[ids.ravel()]
    texts = np.concatenate([np.tile(TEXT[: t + 1], (2, 1)), ids.T], 1)

    @jax.jit
    def plain(target, texts):
        batch, size = texts.shape
        mask, at = jnp.tril(jnp.ones((batch, size, size), bool)), jnp.tile(jnp.arange(size), (batch, 1))
        cache = target.model.init_cache(target.params, None, batch, size)
        return target.model.forward(target.params, texts, cache, positions=at, mask=mask)[0].logits

    head = DraftHead(ppd_head(config), {"prompts": {"weight": rows}})
    np.testing.assert_allclose(said(target, head, t), plain(target, texts)[:, t + 1 :].mean(0), atol=1e-3)


@pytest.mark.exhaustive
def test_copies_that_are_equal_say_what_one_says():
    target, one = tiny_llama(layers=1), init_head("ppd", PpdConfig(32, num_prompts=2), jax.random.key(0))
    rows = jnp.repeat(one.params["prompts"]["weight"], 3, 0)
    several = DraftHead(ppd_head(PpdConfig(32, num_prompts=2, copies=3)), {"prompts": {"weight": rows}})
    np.testing.assert_allclose(said(target, several, 5), said(target, one, 5), atol=1e-4)


def test_the_share_of_right_guesses_by_distance_and_rank():
    """The target predicts 2 after 0 and 1, and 3 after others. The prompts are the embeddings of 0, 3 and 1."""
    rows = np.full((4, 4), 1e-4, np.float32)
    rows[[0, 1, 2, 3], [2, 2, 3, 3]] = 1.0
    rows[[0, 1], 3], rows[[2, 3], 2] = 0.1, 1e-5  # the second guess there, and the last one here
    target = markov(rows)
    head = DraftHead(ppd_head(PpdConfig(4)), {"prompts": {"weight": jnp.eye(4)[jnp.array([0, 3, 1])]}})
    text = [0, 1, 2, 0, 3, 1, 2]  # then it says 2 2 3 2 3 2 3
    accuracy = np.array(rank_accuracy(target, head, text, ranks=2))
    # x_{t+1+i} by what the target says at t + i: 2 3 2 3 2 3, then 3 2 3 2 3, then 2 3 2 3.
    np.testing.assert_allclose(accuracy, [[3 / 6, 3 / 6], [3 / 5, 0], [2 / 4, 2 / 4]], atol=1e-6)
    assert agreement(target, head, read_text(target, text, [head])) == pytest.approx((3 / 6, 3 / 5, 2 / 4))
