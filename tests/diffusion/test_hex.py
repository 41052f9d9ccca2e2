"""Votes over block sizes."""

import jax
import pytest
import toy_denoisers as toys

import specjax
from specjax import UsageError
from specjax.diffusion import hex_vote, methods
from specjax.diffusion.hex import Expert, count_votes

PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]


def test_the_most_votes_and_of_equal_ones_the_smallest_block():
    vote = lambda *answers: count_votes([Expert(8, i, [], answer) for i, answer in enumerate(answers)])
    assert vote("a", "b", "b", "a", "c").answer == "a" and vote("b", "a", "b", "a", "c").answer == "b"
    assert vote(None, "a", None, "b", "b") == (("b", {"a": 1, "b": 2}, vote(None, "a", None, "b", "b").experts))
    assert vote(None, None).answer is None


def test_an_expert_among_others_is_the_procedure_of_its_block_size():
    denoiser, settings = toys.full(), {"max_new_tokens": 12, "temperature": 0.8}
    votes = hex_vote(denoiser, PROMPTS, answer=lambda text: text[-1] % 2, key=3, blocks=(8, 4), seeds=2, **settings)
    assert [(e.block, e.seed) for e in votes[1].experts] == [(4, 0), (4, 1), (8, 0), (8, 1)]
    keys = toys.keys_of(3, 2)
    expert_keys = jax.vmap(lambda key: jax.random.fold_in(jax.random.fold_in(key, 4), 1))(keys)
    alone = specjax.denoise(denoiser, methods.llada(denoiser, block=4), PROMPTS, key=expert_keys, **settings).to_lists()
    assert alone == [vote.experts[1].tokens for vote in votes]
    assert len({tuple(e.tokens) for e in votes[0].experts}) == 4
    for vote in votes:
        assert sum(vote.votes.values()) == 4 and vote.votes[vote.answer] == max(vote.votes.values())


def test_what_it_refuses():
    for denoiser, more, words in (
        (toys.causal(), {}, "block-causal"), (toys.full(), {"blocks": ()}, "at least 1"),
        (toys.full(), {"seeds": 0}, "at least 1"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            hex_vote(denoiser, PROMPTS, answer=len, key=0, max_new_tokens=4, **more)
