"""The card's tests of DEL (B4): the metric, shadow tokens, and the choice of exit and length."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import compiled, tiny_llama

from specjax import Target, UsageError, decode, trees
from specjax.drafters import dynamic_exit, early_exit
from specjax.drafters.layers.dynamic_exit import Agreement, acceptance, add, choose, falling, matches, tokens_per_layer
from specjax.drafters.layers.early_exit import first_layers, self_draft
from specjax.engine.prefill import prefill
from specjax.trees.contracts import Fed
from specjax.trees.operations import ancestor_mask
from specjax.types import Context

EXITS = (4, 8, 12, 16)


def test_the_cards_example():
    alpha = jnp.array([0.5, 0.75, 0.85, 0.9])
    value = tokens_per_layer(alpha, EXITS, 32, 18)
    assert jnp.argmax(value, 1).tolist() == [2, 3, 3, 3]
    assert [int(x) for x in choose(alpha, EXITS, 32, 18)] == [8, 3]
    np.testing.assert_allclose(jnp.max(value), 2.734375 / 56, rtol=1e-6)


def test_certain_and_hopeless_exits():
    sure = jnp.array([1.0, 0.0])
    assert [int(x) for x in choose(sure, (1, 4), 32, 18)] == [1, 18]
    value = tokens_per_layer(jnp.zeros(2), (1, 4), 32, 18)
    assert int(choose(jnp.zeros(2), (1, 4), 32, 18)[1]) == 0
    np.testing.assert_allclose(jnp.max(value), 1 / 32, rtol=1e-6)


def test_a_draft_ends_where_its_own_tokens_per_layer_would_fall():
    """Check L = 32, exit 8: .9 / 8 > 1.9 / 40; then c = .5: .45 / 8 > 2.35 / 48; then .3: .135 / 8 <= 2.485 / 56."""
    stop = falling(jnp.array([8]), 32)
    value, stops = stop.start, []
    for depth, c in enumerate((0.9, 0.5, 0.3)):
        logits = jnp.log(jnp.array([[[c, *[(1 - c) / 9] * 9]]]))
        value, go_on = stop.judge(value, Fed(logits, jnp.array([[depth]]), logits))
        stops.append(not go_on[0, 0])
    assert stops == [False, False, True]


@functools.cache
def drafted(layer):
    """Return a greedy chain of exit `layer`, and the outputs of the target pass over it."""
    target = tiny_llama(layers=4)
    tokens = jnp.zeros((1, 260), jnp.int32).at[0, :4].set(jnp.array([3, 1, 4, 1]))
    length = jnp.array([4])
    cache = prefill(
        target.model, target.params, target.model.init_cache(target.params, None, 1, 260), tokens, length - 1
    )
    context = Context(tokens, length, cache=cache, target=target)
    layers = first_layers(target.model, jnp.array([layer]))

    @jax.jit
    def both(params, context, layers):
        tree = self_draft(trees.chain(3), None, context, jnp.array([3]), layers)
        output, _ = target.model.forward(
            params, tree.tokens, context.cache, positions=length[:, None] - 1 + jnp.arange(4),
            mask=ancestor_mask(tree.parents), taps=(1, 2, 4),
        )  # fmt: skip
        return tree, output

    return target, context, *both(target.params, context, layers)


@pytest.mark.parametrize(("layer", "tap"), [(1, 0), (2, 1), (4, 2)])
def test_shadow_tokens_of_an_exit_are_its_drafts_and_of_the_last_layer_the_targets(layer, tap):
    target, _, tree, output = drafted(layer)
    valid = jnp.array([[True, True, True, False]])
    drafts = jnp.roll(tree.tokens, -1, 1)
    agree = jax.jit(matches)
    assert agree(target, output.taps, drafts, valid)[0, tap] == 3
    likeliest = jnp.argmax(output.logits, -1)
    assert agree(target, output.taps, likeliest, valid)[0, 2] == 3
    assert agree(target, output.taps, likeliest + 1, valid)[0, 2] == 0


def test_a_draft_is_the_beginning_of_that_of_early_exit():
    target, context, _, _ = drafted(1)
    fixed = compiled(early_exit(target, 1, num_tokens=6))
    ours = compiled(dynamic_exit(target, 6, exits=(1, 2)))
    hopeful = Agreement(jnp.array([[90.0, 0.0]]), jnp.array([90.0]), jnp.array([True]))
    limit = jnp.array([6])
    wanted, _ = fixed.propose(fixed.params, None, (), context, limit)
    tree, state = ours.propose(ours.params, None, hopeful, context, limit)
    assert state.watching.tolist() == [True]  # a round with a draft is learnt from
    length = int(tree.valid.sum())
    assert length > 1
    np.testing.assert_array_equal(tree.tokens[0, :length], wanted.tokens[0, :length])
    hopeless = hopeful._replace(matches=jnp.zeros((1, 2)))
    tree, state = ours.propose(ours.params, None, hopeless, context, limit)
    assert tree.valid.tolist() == [[True] + [False] * 6]
    assert state.watching.tolist() == [False]  # length 4: not its turn
    assert ours.propose(ours.params, None, hopeless, context._replace(length=jnp.array([8])), limit)[1].watching.all()


def test_the_choice_follows_a_text_that_changes():
    """Swap the correct exit from 1 to 2; the choice follows within 1 / (1 - w) steps."""
    state = Agreement(jnp.zeros((1, 2)), jnp.zeros((1,)), jnp.array([True]))
    two = jnp.array([2])
    pick = lambda state: int(choose(acceptance(state), (4, 8), 32, 18)[0][0])
    for _ in range(60):
        state = add(state, jnp.array([[2.0, 0.0]]), two, 0.95)
    assert pick(state) == 4
    rounds = 0
    while pick(state) == 4:
        state = add(state, jnp.array([[0.0, 2.0]]), two, 0.95)
        rounds += 1
    assert 5 <= rounds <= 25
    same = add(state, jnp.zeros((1, 2)), two * 0, 0.95)  # nothing seen, nothing forgotten
    assert same.positions == state.positions


def test_the_prompt_is_read_at_spread_positions_whatever_else_is_in_the_batch():
    target = tiny_llama()
    drafter = dynamic_exit(target, 4, exits=(1, 2))
    assert drafter.traits.taps == (1, 2, 2)
    states = []
    original = drafter.hooks.prefill

    def read(params, state, context, tokens, count, output):
        state = original(params, state, context, tokens, count, output)
        jax.debug.callback(lambda s: states.append(s), state)
        return state

    for prompts in ([[1, 2, 3] * 50, [4, 5, 6, 7]], [[4, 5, 6, 7]]):
        decode(
            target,
            drafter.replace(hooks=drafter.hooks._replace(prefill=read)),
            prompts,
            key=jax.random.key(0),
            max_new_tokens=2,
        )
    jax.effects_barrier()
    first, second, alone = states
    assert first.positions.tolist() == [16, 3]
    assert second.positions[1] == first.positions[1] == alone.positions[0] == 3
    np.testing.assert_allclose(second.positions[0], 16 * 0.95 + 16)
    assert first.matches[:, 1].tolist() == first.positions.tolist()  # an exit behind the last layer is always right
    np.testing.assert_array_equal(second.matches[1], alone.matches[0])


def test_bad_settings():
    with pytest.raises(UsageError, match="exits must be from 1 to 2, the number of layers of the model, not"):
        dynamic_exit(tiny_llama(), exits=(1, 3))
    with pytest.raises(UsageError, match="num_tokens must be at least 1"):
        dynamic_exit(tiny_llama(), 0)
    with pytest.raises(UsageError, match="decay must be at least 0 and below 1"):
        dynamic_exit(tiny_llama(), decay=1.0)
    with pytest.raises(UsageError, match=r"no function for the logits of its layers; set Model.head"):
        dynamic_exit(Target(tiny_llama().model._replace(head=None), ()))
