"""Late ends and ascending passes, by the numbers of the paper."""

import hand_made
import jax.numpy as jnp
import numpy as np
import pytest
import toy
import toy_denoisers as toys
from diffusion_oracles import NumpyLlama
from diffusion_oracles import eoser as released

import specjax
from specjax import UsageError
from specjax.diffusion import Canvas, methods, rules
from specjax.diffusion.methods.eoser import late_ends, powers
from specjax.diffusion.schedules.blocks import num_passes

EOS = 5


def canvas_of(count, start=2, origin=None):
    count, start = jnp.atleast_1d(count), jnp.atleast_1d(start)
    origin = start if origin is None else jnp.full_like(start, origin)
    return Canvas(jnp.zeros((len(count), 200), jnp.int32), None, start, start + count, origin, None, start * 0)


def weights(score, canvas, passes, eos=(EOS,), entries=(0,)):
    """Return the weights of a word and of an end in each of these passes, of which `entries` are the first of their
    block."""
    proposal = hand_made.proposal([[0.5, 0.9]], [[3, EOS]], narrow=True)
    state, weight_rows = score.init((), canvas, 2, 12), []
    for i in passes:
        window = hand_made.window([[True] * 2], passes=i, eos=eos, entered=i in entries)
        weight_rows.append(score.weigh((), state, proposal, window)[0].tolist())
        state = score.learn((), state, window, None, None)
    return weight_rows


def test_the_discount_of_ends_fades_and_words_keep_their_confidence():
    rows = weights(late_ends(0.4, 1.0, None, None), canvas_of(5), range(5))
    np.testing.assert_allclose(rows, [[1, g] for g in (0.4, 0.55, 0.7, 0.85, 1.0)], rtol=1e-6)
    assert weights(late_ends(0.4, 1.0, None, None), canvas_of(5), [0], None) == [[1, 1]]
    assert weights(late_ends(0.4, 0.9, None, None), canvas_of(1), [0]) == [[1, np.float32(0.9)]]  # a single pass
    ascending = weights(late_ends(0.01, 1.0, None, None, ascending=True), canvas_of(8), range(3))
    np.testing.assert_allclose(np.array(ascending)[:, 1], 0.01 + 0.99 * np.array([1, 3, 7]) / 8, rtol=1e-6)


def test_the_step_restarts_in_every_block_and_the_total_does_not():
    blocks = weights(late_ends(0.4, 1.0, 4, 2), canvas_of(8), range(4), entries=(0, 2))
    np.testing.assert_allclose(np.array(blocks)[:, 1], [0.4, 0.6, 0.4, 0.6], rtol=1e-6)


def test_a_text_is_that_of_the_release():
    denoiser, model = toys.full(), NumpyLlama(toy.tiny_llama(), toys.MASK)
    method = methods.eoser(denoiser, block=4, steps=4, first_factor=0.3)
    for prompts, end in (([[30, 36, 58, 43], [5, 51, 1, 32]], 26), ([[16, 48, 40, 0], [52, 8, 34, 43]], 53)):
        ours = specjax.denoise(denoiser, method, prompts, key=0, max_new_tokens=12, eos=end)
        for row, prompt in enumerate(prompts):
            text, decided = released(model, prompt, 12, block=4, steps=4, first=0.3, last=1.0, ends=[end])
            count = text.index(end) + 1
            assert count > 4  # it ends in a later block
            assert (ours.to_lists()[row], ours.decided_at[row, :count].tolist()) == (text[:count], decided[:count])


def test_a_word_of_half_comes_before_an_end_of_nine_tenths():
    proposal = hand_made.proposal([[0.5, 0.9]], [[3, EOS]], narrow=True)
    score, view = late_ends(0.4, 1.0, None, None), hand_made.window([[True] * 2], eos=(EOS,))
    weighed = proposal._replace(weight=score.weigh((), score.init((), canvas_of(5), 2, 12), proposal, view))
    take = lambda p: hand_made.places(rules.quota().select((), (), p, view, jnp.ones(1, int))[0])
    assert take(weighed) == [[0]] and take(proposal) == [[1]]


@pytest.mark.parametrize(
    "count, size, steps, passes", [(14, None, None, 14), (14, None, 4, 4), (14, 4, 3, 11), (3, 8, None, 3)]
)
def test_how_many_passes_there_are(count, size, steps, passes):
    assert num_passes(canvas_of(count), size, steps).tolist() == [passes]


def test_blocks_of_a_block_causal_model_begin_before_the_new_columns():
    # columns 3 ... 11 in blocks of 4: one, four and four of them
    assert num_passes(canvas_of(9, start=3, origin=0), 4, 2).tolist() == [1 + 2 + 2]


def shares(count, parts=1):
    """Return how many columns each pass may decide, and below which."""
    schedule, canvas = powers(parts), canvas_of(count)
    state, view, out, left = schedule.init((), canvas, count), hand_made.window([[True] * count], start=2), [], count
    while left > 0:
        end, quota, state = schedule.bound(state, canvas, None, view)
        out.append((min(int(quota[0]), left), int(end[0]) - 2))
        left -= out[-1][0]
    return out


def test_ascending_passes_are_powers_of_two_and_the_rest():
    assert [n for n, _ in shares(128)] == [1, 2, 4, 8, 16, 32, 65] and {end for _, end in shares(128)} == {128}
    assert [n for n, _ in shares(8)] == [1, 2, 5] and [n for n, _ in shares(1)] == [1]
    assert shares(128, 4) == [(1, 15), (2, 15), (4, 15), (8, 15), (16, 31), (32, 63), (65, 128)]


def test_without_a_discount_it_is_the_base_and_with_one_ends_are_last():
    sure = [0.5, 0.5, *np.linspace(0.9, 0.5, 12)]
    best = [1, 1, 2, 3, EOS, EOS, 4, 6, EOS, 7, 8, 9, EOS, EOS]
    denoiser = toys.frozen(sure, best)
    texts = lambda method: specjax.denoise(denoiser, method, [[1, 1]], key=0, max_new_tokens=12, eos=EOS)
    base, same = texts(methods.llada(denoiser, block=None)), texts(methods.eoser(denoiser, first_factor=1.0))
    assert same.decided_at.tolist() == base.decided_at.tolist() and same.to_lists() == base.to_lists() == [[2, 3, EOS]]
    late = texts(methods.eoser(denoiser, first_factor=0.01, last_factor=0.02))
    assert base.decided_at[0, :3].tolist() == [0, 1, 2] and late.decided_at[0, :3].tolist() == [0, 1, 7]
    ascending = texts(methods.eoser(denoiser, ascending=True, first_factor=1.0))
    assert ascending.decided_at[0, :3].tolist() == [0, 1, 1]
    with pytest.raises(UsageError, match="parts"):
        methods.eoser(denoiser, block=8, ascending=True)
