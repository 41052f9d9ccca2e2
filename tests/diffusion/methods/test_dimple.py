"""Dimple: its rule, its shares, and the prompt that is read once together with the masks."""

import hand_made
import jax.numpy as jnp
import numpy as np
import pytest
import toy
import toy_denoisers as toys
from diffusion_oracles import NumpyLlama
from diffusion_oracles import dimple as released
from hand_made import proposal, taken
from tiers import exhaustive

import specjax
from specjax import UsageError
from specjax.diffusion import methods
from specjax.diffusion.methods.dimple import confident

SURE = [[0.5, 0.96, 0.7, 0.98, 0.6, 0.5, 0.5, 0.5]]


def test_all_that_is_confident_or_else_the_share():
    columns = proposal(SURE)
    assert taken(confident(0.95), columns) == [[1, 3]]
    assert taken(confident(0.0), columns) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert taken(confident(0.99), columns) == [[3]] and taken(confident(0.99, 3), columns) == [[1, 3]]
    assert taken(confident(0.95, 1), columns) == [[0, 1, 2, 3, 4, 5, 6, 7]]  # the last step


def test_nothing_is_more_confident_than_1():
    assert taken(confident(1.0, 4), proposal([[1.0, 1.0, 0.3, 0.3]])) == [[0]]


def by_the_card(columns, steps, sure=(), eps=1e-3):
    """Return how many columns each pass takes, if in the passes `sure` one column is confident and in the others
    none."""
    times, left, counts = np.linspace(1, eps, steps + 1), columns, []
    while left:
        i, t = len(counts), left / columns
        if i == steps - 1:
            counts.append(left)
        elif i in sure:
            counts.append(1)
        else:
            for k in range(max(int(np.flatnonzero(times < t)[0]), i + 1), steps + 1):
                share = left if k == steps else int(left * (1 - times[k] / t))
                if share >= 1:
                    break
            counts.append(share)
        left -= counts[-1]
    return counts


@pytest.mark.parametrize("sure", [(), (0,), (0, 1, 2), (1, 3)])
def test_shares_are_those_of_the_next_time_that_has_one_and_never_of_an_earlier_one(sure):
    for columns, steps in ((8, 4), (14, 5), (7, 3), (12, 12), (12, 64), (5, 1), (32, 6), (2, 2)):
        rule, left, counts, state = confident(0.9, steps), columns, [], None
        while left:
            confidence = np.full((1, columns), 0.5)
            if len(counts) in sure:
                confidence[0, columns - left] = 0.95
            view = hand_made.view(np.arange(columns) >= columns - left, entered=not counts)
            take, _, state = hand_made.select(rule, proposal(confidence), view, state=state)
            counts.append(int(np.asarray(take).sum()))
            left -= counts[-1]
        assert counts == by_the_card(columns, steps, sure)


def test_at_the_last_time_of_the_grid_all_is_taken():
    assert by_the_card(8, 8)[-1] == 2 and by_the_card(2, 2) == [2]  # the test above has both


def test_confidence_is_that_before_temperature():
    columns = proposal(SURE)
    hot = columns._replace(warped=columns.logits / 5, filtered=columns.logits / 5, greedy=jnp.zeros(1, bool))
    assert taken(confident(0.95), hot) == taken(confident(0.95), columns)


@pytest.mark.parametrize("alignment", ["shifted", exhaustive("same")])
@pytest.mark.parametrize(("gamma", "steps"), [(0.9, 9), (0.97, 4)])
def test_a_text_is_that_of_the_release(alignment, gamma, steps):
    target = toy.tiny_llama()
    denoiser, prompts = toys.full(alignment), [[1, 2, 3, 4, 5], [6], [9, 8, 7, 9, 8, 7, 9]]
    ours = specjax.denoise(
        denoiser, methods.dimple(denoiser, gamma=gamma, steps=steps), prompts, key=1, max_new_tokens=9
    )
    model = NumpyLlama(target, toys.MASK, shifted=alignment == "shifted")
    for row, prompt in enumerate(prompts):
        expected = released(model, prompt, 9, gamma=gamma, steps=steps)
        assert (ours.to_lists()[row], ours.decided_at[row].tolist()) == expected


def test_a_prompt_that_is_read_alone_gives_another_text():
    """The keys of a prompt that never saw a mask: what a memory of the prompt alone would do."""
    target, prompt = toy.tiny_llama(), [1, 2, 3, 4, 5]
    model = NumpyLlama(target, toys.MASK, shifted=True)
    alone = NumpyLlama(target, toys.MASK, shifted=True)
    alone.whole = lambda tokens: (model.whole(tokens)[0], model.whole(tokens[: len(prompt)])[1])
    both = [released(one, prompt, 9, gamma=0.9, steps=9) for one in (model, alone)]
    assert both[0] != both[1]


def test_of_one_layer_the_cache_changes_nothing_and_its_columns_are_counted():
    denoiser, prompts = toys.full("shifted", layers=1), [[1, 2, 3, 4, 5], [6]]
    once, always = (
        specjax.denoise(
            denoiser, methods.dimple(denoiser, prefill=prefill, gamma=0.3), prompts, key=1, max_new_tokens=9
        )
        for prefill in (True, False)
    )
    assert once.to_lists() == always.to_lists() and once.decided_at.tolist() == always.decided_at.tolist()
    passes = once.stats.target_passes
    assert once.columns.tolist() == (10 * passes + np.array([14, 10])).tolist()
    assert once.computed.tolist() == (33 * passes + 32).tolist()
    assert always.columns.tolist() == [14 * int(passes[0]), 10 * int(passes[1])]
    assert always.computed.tolist() == (32 * passes).tolist()


def test_a_block_causal_model_always_reads_its_prompt_once():
    with pytest.raises(UsageError, match="prefill=False has no effect"):
        methods.dimple(toys.causal(), prefill=False)
    assert methods.dimple(toys.causal(), prefill=True).memory is None
