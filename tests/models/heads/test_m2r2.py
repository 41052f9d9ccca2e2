"""M2R2: the fast stream next to the target's own, and its training."""

from __future__ import annotations

import functools
from dataclasses import replace

import depths
import jax
import numpy as np
import pytest
from head_runs import random_params
from heads import tiny_head
from rules import takes_all
from tiers import exhaustive
from toy import chi_square, markov, pairs_after, tiny_llama

from specjax import UsageError, adaptive, decode, drafters, trees
from specjax.adaptive import m2r2
from specjax.adaptive.optimise import one_pass
from specjax.models.heads.blocks import bind
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.m2r2 import M2R2, M2R2Config, m2r2_head

CONFIG = M2R2Config(depths.WIDTH, exit_layer=4, rank=4, router_width=4)
NEVER = trees.stops.drafter_confidence(0.0)


def head_of(config=CONFIG, **changes) -> DraftHead:
    return DraftHead(m2r2_head(config), random_params("m2r2", config) | changes)


def run(drafter, target=None, **options):
    options = {"key": jax.random.key(0), "max_new_tokens": depths.NEW} | options
    result = decode(target or depths.target(), drafter, depths.PROMPTS, **options)
    return result.to_lists(), result.stats.target_passes.tolist()


@pytest.mark.parametrize(("stacked", "temperature"), [(True, 0.0), exhaustive(True, 1.0), exhaustive(False, 1.0)])
def test_a_stream_that_is_not_faster_is_an_early_exit(stacked, temperature):
    """Drafts and their distributions are those of the first layers if B is 0."""
    head, target = head_of(up=np.zeros((4, depths.WIDTH, 4), np.float32)), depths.target(stacked)
    ours = run(drafters.head_drafter(head, 3, stop=NEVER), target, temperature=temperature)
    assert ours == run(drafters.early_exit(target, 4, num_tokens=3), target, temperature=temperature)
    assert ours != run(drafters.head_drafter(head_of(), 3, stop=NEVER), target, temperature=temperature)


@jax.jit
def passed(params, target, tokens):
    """Return the pending entries of the target's own stream in the first layers, and the fast streams after them."""
    module = bind(M2R2, CONFIG)(params)
    cache = target.model.init_cache(target.params, None, len(tokens), 0)
    output, pending = one_pass(target.model, target.params, tokens, cache, (1, 2, 3, 4), run=module.two_streams())
    return (pending.k, pending.v), output.taps


def test_no_bit_of_the_slow_stream_depends_on_the_accelerators():
    tokens, target = depths.lesson()[0], depths.target()
    (slow, fast), (again, faster) = (
        passed(params, target, tokens) for params in (head_of().params, random_params("m2r2", CONFIG, 1))
    )
    jax.tree.map(np.testing.assert_array_equal, slow, again)
    assert not np.allclose(fast[0], faster[0])
    cache = target.model.init_cache(target.params, None, len(tokens), 0)
    _, full = jax.jit(one_pass, static_argnums=0)(target.model, target.params, tokens, cache)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y[:4], atol=1e-5), slow, (full.k, full.v))


@functools.cache
def trained():
    blank = adaptive.blank_m2r2(depths.target(), jax.random.key(1), exit_layer=4, rank=8)
    return blank, *adaptive.train_m2r2(depths.target(), blank, *depths.lesson(), steps=120, learning_rate=1e-2)


def test_streams_come_closer_and_say_the_same_more_often():
    blank, head, losses = trained()
    assert losses[-1] < 0.6 * losses[0]
    target = depths.target()
    previous, next_state = (
        m2r2.streams(target.model, head.head.config, target.params, of.params, *depths.lesson()) for of in (blank, head)
    )
    assert next_state.apart < 0.8 * previous.apart
    assert next_state.agrees > previous.agrees + 0.3
    assert next_state.sure < previous.sure


def test_a_trained_stream_drafts_what_the_target_says():
    passes = [sum(run(drafters.head_drafter(of, 3, stop=NEVER))[1]) for of in trained()[:2]]
    assert passes[1] < 0.8 * passes[0]  # of the texts that it was trained on


def test_a_router_that_is_not_sure_ends_the_draft():
    text, passes = run(drafters.head_drafter(trained()[1], 3))
    assert text == depths.texts(depths.target())
    never = run(drafters.head_drafter(trained()[1], 3, stop=trees.stops.drafter_confidence(1.1)))
    assert never == (text, [depths.NEW] * 3) and passes != never[1]


def drafter_for(target):
    config = replace(CONFIG, exit_layer=2)
    return drafters.head_drafter(DraftHead(m2r2_head(config), random_params("m2r2", config)), 2, stop=NEVER)


def test_sampled_text_has_the_joint_law_of_the_target():
    counts, law, result = pairs_after(drafter_for)
    assert chi_square(counts, law) > 1e-3
    assert 15 < result.stats.accepted.sum() < 240


def test_a_rule_that_takes_every_draft_has_not():
    counts, law, _ = pairs_after(drafter_for, verifier=takes_all)
    assert chi_square(counts, law) < 1e-3


def test_what_does_not_fit():
    with pytest.raises(UsageError, match="markov has no layers for a second stream"):
        adaptive.train_m2r2(markov(), head_of(), *depths.lesson())
    with pytest.raises(UsageError, match="markov has no layers for a second stream"):
        adaptive.blank_m2r2(markov(), jax.random.key(0))
    with pytest.raises(UsageError, match="rank must be a whole number of at least 1, not 0"):
        adaptive.blank_m2r2(tiny_llama(), jax.random.key(0), rank=0)
    with pytest.raises(UsageError, match="train_m2r2 needs a head of kind m2r2, not medusa"):
        adaptive.train_m2r2(tiny_llama(), tiny_head("medusa", tiny_llama()), *depths.lesson())
    with pytest.raises(UsageError, match=r"of width 32 through the first 4 layers of its target, but .* has 2"):
        decode(tiny_llama(), drafters.head_drafter(head_of(), 3), [[1, 2]], key=0, max_new_tokens=2)
