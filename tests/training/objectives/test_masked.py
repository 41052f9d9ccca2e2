"""Training denoisers: what a view sees, what the loss estimates, its derivatives, and that a text is learned."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_denoisers as toys
from tiers import exhaustive

import specjax
from specjax import UsageError
from specjax.diffusion import forward, methods
from specjax.training import PackedBatch, TrainingText, recipe_of, train
from specjax.training.data.packing import pack
from specjax.training.methods import certainty_forcing, denoisers
from specjax.training.objectives import masked

TEXTS = [
    TrainingText(tuple(range(1, 12)), 3),
    TrainingText((20, 21, 22, 23, 24), 2),
    TrainingText(tuple(range(30, 42)), 4),
]
DENOISERS = [toys.full(), toys.full("shifted"), toys.causal(), toys.causal(4, "seed_and_mask")]


def packed_batch(rows: int = 2, length: int = 16) -> PackedBatch:
    (packed,) = pack(TEXTS, rows, length)
    return packed


@functools.partial(jax.jit, static_argnames="views")
def loss(denoiser, packed, key, views: int = 2):
    view = masked.mask_randomly(denoiser, packed, key)
    return masked.compute_loss(denoiser, packed, (view, masked.complement(packed, view))[:views])


@pytest.mark.parametrize("denoiser", [DENOISERS[2], *map(exhaustive, (*DENOISERS[:2], DENOISERS[3]))])
def test_a_view_is_what_the_decoder_sees(denoiser):
    """Two texts share a row; of the first, the window's logits in decoding against those of a view of the lesson."""
    packed, prompt, block = packed_batch(), 4, 4
    assert packed.text_start[0].tolist() == [0] * 11 + [11] * 5
    size = block if denoiser.is_causal else 7
    hide = jnp.zeros((2, 1, 16), bool).at[0, 0, prompt : prompt + size].set(True)
    view_logprobs = jax.jit(
        lambda denoiser: jax.nn.log_softmax(
            forward.compute_logits(denoiser, masked.forward_views(denoiser, packed, hide))
        )
    )
    text = specjax.denoise(
        denoiser, methods.llada(denoiser, block=denoiser.block, steps=1), [list(range(1, 5))], key=0,
        max_new_tokens=size, logprobs=True, temperature=1.0,
    )  # fmt: skip
    seeded = denoiser.seeding == "seed_and_mask"
    size = 1 if seeded else size  # the pass before decides the first column of a seeded block, and the others see it
    taken = np.asarray(text.tokens[0, :size])
    logprobs = np.asarray(view_logprobs(denoiser))[0, 0, prompt + np.arange(size), taken]
    np.testing.assert_allclose(logprobs, text.logprobs[0, :size], atol=1e-4)


def test_complementary_views_hide_every_column_once_and_rates_belong_to_texts_or_blocks():
    packed = packed_batch()
    for denoiser in (toys.full(), toys.causal()):
        view = masked.mask_randomly(denoiser, packed, jax.random.key(0))
        other = masked.complement(packed, view)
        assert jnp.array_equal(view.masked ^ other.masked, packed.loss_mask)
        unit = np.asarray(masked.block_starts(denoiser, packed))
        rate = np.asarray(view.rate)
        pairs = {(row, place): rate[row][unit[row] == place] for row in range(2) for place in set(unit[row].tolist())}
        assert all(np.ptp(values) == 0 for values in pairs.values()) and len(np.unique(rate)) == len(pairs)
        assert len(pairs) == (4 if denoiser.block is None else 9)


def test_the_loss_is_the_bound_that_masking_all_orders_gives():
    """Every rate and mask estimates the cross entropy of a model that predicts the same whatever it sees."""
    denoiser = toys.frozen([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2])
    (packed,) = pack([TrainingText((0, 1, 2, 3, 9, 9, 6, 7), 2)], 1, 8)
    losses = jax.vmap(lambda key: loss(denoiser, packed, key, 1)[0])(jax.random.split(jax.random.key(0), 4000))
    wrong = np.log(np.array([0.5, 0.6]) / 10)  # the rest is spread over ten tokens
    exact = -np.mean([*np.log([0.7, 0.6, 0.3, 0.2]), *wrong])
    assert abs(np.mean(losses) - exact) < 4 * np.std(losses) / np.sqrt(4000) and np.std(losses) > 0.1


@pytest.mark.parametrize("denoiser", [toys.causal(), exhaustive(toys.full("shifted"))])
def test_derivatives_are_those_of_differences(denoiser):
    packed, key = packed_batch(), jax.random.key(4)
    of = jax.jit(lambda params: loss(denoiser.replace(params=params), packed, key)[0])
    gradient = jax.grad(of)(denoiser.params)
    rng = np.random.default_rng(0)
    way = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), denoiser.params)
    step = 1e-3
    moved = lambda by: jax.tree.map(lambda x, w: x + by * w, denoiser.params, way)
    ahead, behind = of(moved(step)), of(moved(-step))
    along = sum(jax.tree.leaves(jax.tree.map(lambda g, w: jnp.vdot(g, w), gradient, way)))
    assert float(along) == pytest.approx(float(ahead - behind) / (2 * step), rel=5e-3)


def test_chunks_change_nothing():
    denoiser = toys.frozen(np.linspace(0.9, 0.2, 16))
    packed, view = packed_batch(), masked.mask_randomly(denoiser, packed_batch(), jax.random.key(1))
    packed = packed._replace(tokens=packed.tokens % 11)
    unchunked, parts = (masked.compute_loss(denoiser, packed, (view,), chunk=chunk)[0] for chunk in (None, 4))
    assert float(unchunked) == pytest.approx(float(parts), rel=1e-6)


def test_a_text_is_learned_and_kept_in_a_file(tmp_path):
    base = toys.causal()
    recipe = recipe_of("masked_diffusion", learning_rate=5e-3)
    fitted = train(None, base, TEXTS[:1], recipe=recipe, epochs=60, rows=1, length=12, starts_per_row=1)
    text = TEXTS[0]
    prompt, answer = [list(text.tokens[:3])], list(text.tokens[3:])
    assert specjax.denoise(fitted, "sdar", prompt, key=0, max_new_tokens=8).to_lists() == [answer]
    denoisers.save_denoiser(tmp_path / "fitted.safetensors", fitted, "float32")
    again = denoisers.load_denoiser(tmp_path / "fitted.safetensors")
    assert again.model.config == fitted.model.config  # not the models: their functions may have been made again since
    assert again.replace(params=(), model=fitted.model) == fitted.replace(params=())
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), again.params, fitted.params))
    with pytest.raises(UsageError, match="is trained on texts alone"):
        train(None, base, TEXTS[:1], recipe=recipe_of("eagle3"), rows=1, length=12, starts_per_row=1)


def test_two_views_of_a_block_hide_it_in_two_parts():
    packed = packed_batch()
    hidden, judged = certainty_forcing.mask_block(packed, 4, jax.random.key(3))
    assert not bool(jnp.any(judged[:, 0] & judged[:, 1])) and bool(jnp.all(judged <= hidden))
    hidden_columns = np.asarray(judged[:, 0] | judged[:, 1])
    for row, begin, answer, end in ((0, 0, 3, 11), (0, 11, 13, 16), (1, 0, 4, 12)):
        block = np.flatnonzero(hidden_columns[row, begin:end]) + begin
        size = min(4, end - block[0])
        assert (block[0] - answer) % 4 == 0
        assert block.tolist() == list(range(block[0], block[0] + size))
        clean, behind = hidden[row, :, begin : block[0]], hidden[row, :, block[-1] + 1 : end]
        assert not bool(jnp.any(clean)) and bool(jnp.all(behind))


def test_certainty_is_forced_only_where_the_model_is_right():
    """The loss is that by hand of two columns, of which the second is wrong and sure of it."""
    denoiser = toys.frozen([0.5, 0.5, 0.6, 0.9], best=[0, 1, 2, 5])
    (packed,) = pack([TrainingText((0, 1, 2, 3), 2)], 1, 4)
    hide = jnp.zeros((1, 2, 4), bool).at[0, 0, 2:].set(True)
    best, sure = denoiser.params
    view = masked.MaskedView(hide[:, 0], jnp.ones((1, 4)))

    @jax.jit
    def of(sure, beta):
        return certainty_forcing.compute_loss(denoiser.replace(params=(best, sure)), packed, hide, hide, beta=beta)

    def of_masked(sure):
        return masked.compute_loss(denoiser.replace(params=(best, sure)), packed, (view,), by_rate=False)[0]

    slope = jax.jit(jax.grad(of))
    plain, forced = slope(sure, 0.0), slope(sure, 2.0)
    entropy = -(0.36 * np.log(0.36 / (0.36 + 10 * 0.04**2)) + 10 * 0.04**2 * np.log(0.04**2 / (0.36 + 10 * 0.04**2)))
    entropy /= 0.36 + 10 * 0.04**2
    cross = -(np.log(0.6) + np.log(0.1 / 10)) / 2
    assert float(of(sure, 0.0)) == pytest.approx(cross, rel=1e-5)
    assert float(of(sure, 2.0)) == pytest.approx(cross + 2 * entropy, rel=1e-5)
    assert forced[3] == plain[3] and forced[2] < plain[2] < 0
    np.testing.assert_allclose(jax.jit(jax.grad(of_masked))(sure), plain, rtol=1e-6)
