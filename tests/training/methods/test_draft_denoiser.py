"""Small denoisers that draft: the columns that stage II masks, its loss, and drafts that a target accepts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
import toy_denoisers as toys

import specjax
from specjax import UsageError
from specjax.training import TrainingText, train_draft_denoiser
from specjax.training.data.packing import pack
from specjax.training.data.vocabulary import find_unused_token
from specjax.training.methods import draft_denoiser

TEXTS = [TrainingText((5, 6, 7, *range(10, 18)), 3), TrainingText((9, 8, *range(20, 30)), 2)]


def test_texts_end_in_masked_columns():
    """Cuts are uniform over the response, at most `num_tokens` columns are masked, and nothing reads those after."""
    (packed,) = pack(TEXTS, 2, 16, one_per_row=True)
    first, counts = [], []
    for seed in range(200):
        view = draft_denoiser.mask_suffix(packed, 3, 1.5, jax.random.key(seed))
        for row, text in enumerate(TEXTS):
            columns = np.flatnonzero(view.masked[row])
            assert columns[0] >= text.prompt_length and columns[-1] < len(text.tokens)
            assert columns.tolist() == list(range(columns[0], columns[-1] + 1)) and len(columns) <= 3
            np.testing.assert_allclose(view.weight[row, columns], 1.5 ** np.arange(len(columns) - 1, -1, -1.0))
            starts = np.asarray(view.packed.text_start[row])
            assert (starts[: columns[-1] + 1] == 0).all() and (starts[columns[-1] + 1 :] > columns[-1]).all()
            if row == 0:
                first.append(columns[0])
                counts.append(len(columns))
    assert {*first} == set(range(3, 11)) and {*counts} == {1, 2, 3}
    assert np.bincount(first, minlength=11)[3:].min() > 8  # of 25 each


def test_the_loss_is_the_weighted_surprise_of_what_follows():
    """The example of the paper's card: R = 4 and alpha = 1.01 give 1.0303, 1.0201, 1.01, 1."""
    denoiser = toys.frozen([0.9] * 2 + [0.8, 0.5, 0.3, 0.6], [1, 1, 2, 3, 4, 5])
    (packed,) = pack([TrainingText((1, 1, 2, 3, 4, 0), 2)], 1, 8, one_per_row=True)
    masked = jnp.asarray(packed.loss_mask)
    weight = jnp.zeros((1, 8)).at[0, 2:6].set(jnp.array([1.0303, 1.0201, 1.01, 1.0]))
    other = 0.4 / (denoiser.model.vocab_size - 2)
    surprise = -np.log([0.8, 0.5, 0.3, other])
    expected = np.sum(np.array([1.030301, 1.0201, 1.01, 1.0]) * surprise) / 4.0604
    loss = draft_denoiser.suffix_loss(denoiser, draft_denoiser.SuffixMasks(packed, masked, weight))
    assert float(loss) == pytest.approx(expected, rel=1e-4)


def test_it_drafts_what_the_target_writes():
    """After training on the target's own texts more drafts are accepted, and the text stays the target's."""
    target, prompts = toy.tiny_llama(layers=2), [[1, 2, 3], [7, 5]]
    settings = {"key": 0, "max_new_tokens": 12}
    plain = specjax.decode(target, "autoregressive", prompts, **settings).to_lists()
    texts = [TrainingText((*a, *b), len(a)) for a, b in zip(prompts, plain, strict=True)]
    mask_token = find_unused_token(texts, 64, (63,))
    assert mask_token == max(set(range(63)) - {token for text in texts for token in text.tokens})
    trained, losses = train_draft_denoiser(
        target, texts, mask_token=mask_token, layers=1, num_tokens=3, epochs=30, refine=30, rows=2, length=16,
        learning_rate=1e-2,
    )  # fmt: skip
    assert len(losses) == 60 and np.isfinite(losses).all() and losses[-1] < 0.5 * losses[0]
    passes = []
    for denoiser in (draft_denoiser.init_from_layers(target, 1, mask_token), trained):
        drafter = specjax.make_drafter("deer", target, denoiser, num_tokens=3)
        drafted = specjax.decode(target, drafter, prompts, **settings)
        assert drafted.to_lists() == plain
        passes.append(int(drafted.stats.target_passes.sum()))
    assert passes[1] < 0.7 * passes[0]


def test_it_starts_from_floats_of_a_quantised_target():
    target = toy.quantized(toy.tiny_llama(layers=2), "int8")
    denoiser = draft_denoiser.init_from_layers(target, 1, 63)
    assert {leaf.dtype for leaf in jax.tree.leaves(denoiser.params)} == {jnp.dtype("float32")}
    expected = target.params["layers"][0]["mlp"]["down"]["weight"].expand()
    np.testing.assert_array_equal(denoiser.params["layers"][0]["mlp"]["down"]["weight"], expected)
    trained, _ = train_draft_denoiser(target, TEXTS, mask_token=63, layers=1, num_tokens=2, rows=2, length=16)
    assert not np.array_equal(trained.params["layers"][0]["mlp"]["down"]["weight"], expected)


def test_bad_settings():
    target = toy.tiny_llama(layers=2)
    for options, words in (
        ({"mask_token": 12}, "the texts contain token 12"),
        ({"layers": 3}, "layers must be from 1 to 2, the layers of the target, not 3"),
        ({"num_tokens": 0}, "num_tokens must be"),
        ({"refine": -1}, "refine must be"),
        ({"alpha": float("nan")}, "alpha must be"),
        ({"mask_token": 64}, "mask_token 64 is outside the vocabulary"),
    ):
        with pytest.raises(UsageError, match=words):
            train_draft_denoiser(target, TEXTS, **{"mask_token": 63, "num_tokens": 2} | options)
    with pytest.raises(UsageError, match="the texts contain all tokens"):
        find_unused_token(TEXTS, 5, range(5))
