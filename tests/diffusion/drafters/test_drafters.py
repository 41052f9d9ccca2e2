"""Denoisers that draft for an autoregressive target: what holds for all published ways."""

import numpy as np
import pytest
import toy
import toy_denoisers as toys
from tiers import exhaustive

import specjax
from specjax import UsageError, make_drafter
from specjax.diffusion import drafters

PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8], [9] * 11]
DENOISERS = {"full": toys.full("shifted"), "causal": toys.causal(), "seeded": toys.causal(4, "seed_and_mask")}


@pytest.mark.parametrize(
    ("name", "denoiser", "temperature"),
    [
        ("diffuspec", "full", 0.0),
        ("failfast", "causal", 0.0),
        ("deer", "seeded", 0.0),
        exhaustive("diffuspec", "causal", 0.9),
        exhaustive("failfast", "full", 0.9),
        exhaustive("failfast", "seeded", 0.0),
    ],
)
def test_texts_are_those_of_plain_decoding(name, denoiser, temperature):
    """A point mass also leaves sampled text as it is, as the target's own draw decides."""
    target = toy.tiny_llama()
    drafter = make_drafter(name, target, DENOISERS[denoiser], **toys.SMALL[name])
    settings = {"key": 3, "max_new_tokens": 24, "eos": (27, 12), "temperature": temperature}
    plain = specjax.decode(target, "autoregressive", PROMPTS, **settings)
    ours = specjax.decode(target, drafter, PROMPTS, **settings)
    assert ours.to_lists() == plain.to_lists() and int(ours.stats.drafted.sum()) > 0


COUNTING = np.roll(np.eye(12), 1, 1) * 0.99 + 0.01 / 12
"""A target that counts on from the last token."""


@pytest.mark.parametrize("name", ["deer", "diffuspec", "failfast"])
def test_what_the_target_would_say_is_accepted_whole(name):
    options = {"deer": {}, "diffuspec": {"min_tokens": 3, "blend": 0.9, "eos": None}, "failfast": {"chunk": 3}}[name]
    denoiser = toys.frozen(np.full(12, 0.9), np.arange(12) % 11)
    drafter = make_drafter(name, toy.markov(COUNTING), denoiser, **{**toys.SMALL[name], **options, "num_tokens": 3})
    result = specjax.decode(toy.markov(COUNTING), drafter, [[0, 1]], key=0, max_new_tokens=8)
    assert result.to_lists() == [[2, 3, 4, 5, 6, 7, 8, 9]] and result.stats.target_passes.tolist() == [2]


def test_bad_input_is_one_sentence():
    denoiser, target = toys.causal(), toy.tiny_llama()
    with pytest.raises(UsageError, match=r"deer drafts with a specjax\.Denoiser, not with Target"):
        make_drafter("deer", target, target)
    with pytest.raises(UsageError, match="does not draft with a denoiser; choose one of deer, diffuspec, failfast"):
        make_drafter("two_model", target, denoiser)
    with pytest.raises(UsageError, match="chunk must be from 1 to num_tokens, 4"):
        drafters.failfast(denoiser, chunk=5, num_tokens=4)
    for wrong, words in (
        ({"min_tokens": 31}, "min_tokens"),
        ({"blend": 2}, "blend must be from 0"),
        ({"beams": 0}, "beams"),
    ):
        with pytest.raises(UsageError, match=words):
            drafters.diffuspec(denoiser, **wrong)
    with pytest.raises(UsageError, match="12 tokens in its vocabulary"):
        specjax.decode(target, drafters.failfast(toys.coupled()), PROMPTS, key=0, max_new_tokens=4)
