"""The card's training of CEED-VLA (collaboration, B9) and CLLM (B8): trajectories, losses, and fewer passes."""

from __future__ import annotations

import functools

import depths
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_llama

from specjax import UsageError
from specjax.decoders import ceed_vla
from specjax.training.methods.consistency import collect_trajectories, compute_losses, mixed_labels, train_consistency

BLOCK, NEW = 5, 15


@functools.cache
def found():
    return collect_trajectories(tiny_llama(), depths.PROMPTS, key=jax.random.key(0), max_new_tokens=NEW, block=BLOCK)


@functools.cache
def greedy():
    return depths.texts(tiny_llama(), max_new_tokens=NEW)


def test_trajectories_end_in_the_greedy_text():
    states, start = np.asarray(found().states), np.asarray(found().start)
    blocks = [answer[at : at + BLOCK] for answer in greedy() for at in range(0, NEW, BLOCK)]
    assert states[:, -1].tolist() == blocks
    right = np.cumprod(states == states[:, -1:], 2).sum(2)
    assert (right[:, 1:] >= np.minimum(np.arange(1, BLOCK + 1), BLOCK)).all()  # one more in each pass, at least
    assert start.tolist() == [len(p) + at for p in depths.PROMPTS for at in range(0, NEW, BLOCK)]
    for row, text in enumerate(np.asarray(found().text)):
        prompt = depths.PROMPTS[row // 3]
        assert set(states[row, 0].tolist()) <= set(prompt)
        assert text[: start[row]].tolist() == (prompt + greedy()[row // 3])[: start[row]]


def test_losses_by_hand():
    """The losses of two blocks are those computed by hand."""
    some = jax.tree.map(lambda x: x[::5], found())
    of_states = functools.partial(
        jax.jit(compute_losses, static_argnums=0), tiny_llama().model, tiny_llama().params, some
    )
    assert of_states(jnp.full(2, BLOCK)).consistency == 0  # at the fixed point nothing is wrong
    first, labels = of_states(jnp.zeros(2, jnp.int32))
    soft, count, surprise = 0.0, 0, []
    model, params = tiny_llama().model, tiny_llama().params

    def log_p(tokens):
        tokens = jnp.asarray([tokens])
        size = tokens.shape[1]
        logits = model.forward(
            params, tokens, model.init_cache(params, None, 1, 0), positions=jnp.arange(size)[None],
            mask=jnp.tril(jnp.ones((1, size, size), bool)),
        )[0].logits  # fmt: skip
        return np.asarray(jax.nn.log_softmax(logits))[0]

    for text, start, states in zip(*(np.asarray(x) for x in some), strict=True):
        prefix, guess, best = text[:start].tolist(), states[0].tolist(), states[-1].tolist()
        at_guess, at_best = log_p(prefix + guess), log_p(prefix + best)
        wrong = next((i for i in range(BLOCK) if guess[i] != best[i]), BLOCK)
        for i in range(wrong + 1, BLOCK):
            soft -= np.sum(np.exp(at_best[start + i - 1]) * at_guess[start + i - 1])
            count += 1
        surprise += [-at_best[start + i - 1][best[i]] for i in range(BLOCK)]
    np.testing.assert_allclose(first, soft / count, rtol=1e-4)
    np.testing.assert_allclose(labels, np.mean(surprise), rtol=1e-4)


def test_what_the_target_says_at_the_fixed_point_is_constant():
    """No derivative but through what it says of the guess."""
    model, params, which = tiny_llama().model, tiny_llama().params, jnp.zeros(len(found().start), jnp.int32)
    head = lambda params: compute_losses(model, params, found(), which).consistency
    gradient = jax.jit(jax.grad(head))(params)
    assert np.abs(gradient["head"]["weight"]).max() > 0
    at_best = jax.jit(jax.grad(lambda params: compute_losses(model, params, found(), which + BLOCK).consistency))(
        params
    )
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(at_best))


def test_mixed_labels():
    values = jnp.asarray([0.0, 0.1, 0.5, 1.0])
    teacher, truth = jnp.asarray([0, 0, 3, 2]), jnp.asarray([1, 2, 2, 2])
    assert mixed_labels(teacher, truth, values, 0.25).tolist() == [0, 2, 2, 2]
    assert mixed_labels(teacher, truth, values, 9.0).tolist() == teacher.tolist()
    assert mixed_labels(teacher, truth, values, -1.0).tolist() == truth.tolist()


def passes(target):
    return int(
        ceed_vla(target, depths.PROMPTS, max_new_tokens=NEW, block=BLOCK, iterations=None).stats.target_passes.sum()
    )


@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_distilled_model_converges_in_fewer_passes(is_mixed):
    best = found().states[:, -1]
    truth = best.at[:, -1].add(1) % 64  # which differs in the last place of each block
    labels = mixed_labels(best, truth, jnp.arange(64.0), 0.5) if is_mixed else None
    target, each = train_consistency(
        tiny_llama(), found(), key=jax.random.key(1), labels=labels, steps=80, learning_rate=1e-2, weight=3.0
    )
    assert each[-1] < 0.3 * each[0]
    if is_mixed:
        one = ceed_vla(target, depths.PROMPTS, max_new_tokens=BLOCK, block=BLOCK, iterations=None).to_lists()
        assert one == [row.tolist() for row in np.asarray(truth)[::3]]
    else:
        assert passes(target) < 0.75 * passes(tiny_llama())
        assert depths.texts(target, max_new_tokens=NEW) == greedy()


def test_blocks_that_no_answer_has():
    with pytest.raises(UsageError, match="max_new_tokens must be at least block, 5, not 4"):
        collect_trajectories(tiny_llama(), depths.PROMPTS, key=jax.random.key(0), max_new_tokens=4, block=BLOCK)


def test_a_seed_will_do_and_labels_of_another_shape_do_not():
    ours = collect_trajectories(tiny_llama(), depths.PROMPTS, key=0, max_new_tokens=NEW, block=BLOCK)
    np.testing.assert_array_equal(ours.states, found().states)
    for labels in (ours.states, ours.states[0, -1], ours.states[:, -1, :1]):
        with pytest.raises(UsageError, match="labels must be one per token of each block"):
            train_consistency(tiny_llama(), ours, key=0, labels=labels)
    with pytest.raises(UsageError, match="block must be a whole number of at least 1, not 0"):
        collect_trajectories(tiny_llama(), depths.PROMPTS, key=0, max_new_tokens=NEW, block=0)
