"""The cases of transformers' candidate generators: assisted decoding, prompt lookup, assistants of another vocabulary.

Source: transformers (Apache-2.0), `tests/generation/test_candidate_generator.py` at 14dc3bc, and from
`tests/generation/test_utils.py` those of `_speculative_sampling`, of assisted decoding and of prompt lookup. Inputs and
outcomes are facts of them; the code is ours.

Differences: transformers drops the drafted tokens from an eos on, and specjax ends the text there. An assistant of
another tokenizer drafts by the ids of the target, so its vocabulary may be larger or smaller, but not other words.

Cases without meaning here: translation between two tokenizers with its cache, devices of inputs, and the attention
outputs of `generate`. The layers that DFlash reads are compared with its authors' class in `tests/models/heads`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import exhaustive, those
from toy import markov, scripted

from specjax import decode, drafters, verifiers
from specjax.models.vocabulary import resize_vocabulary
from specjax.trees import operations
from specjax.types import TokenTree

VOCAB = 10
TARGET, DRAFT = np.random.default_rng(0).dirichlet(np.full(VOCAB, 0.3), (2, VOCAB)).astype(np.float32)
PLAIN = drafters.autoregressive()


def written(drafter, prompt, count, target=None, **options):
    """Return the result of one row."""
    target = markov(TARGET) if target is None else target
    return decode(target, drafter, [prompt], key=options.pop("key", 0), max_new_tokens=count, **options)


def text(*arguments, **options):
    return written(*arguments, **options).to_lists()[0]


SAMPLED = [name for name, rule in verifiers.VERIFIERS.items() if rule.guarantee == "distribution"]
RULES = [name for name in SAMPLED if "chain" in verifiers.VERIFIERS[name].draws]


@pytest.mark.parametrize("name", those(["standard"], RULES))
def test_speculative_sampling_of_three_candidates(name):
    """The text 8, 0, 3, 9, 8 with the candidates 1, 4, 5: the target takes 1 and 4, and 8 instead of 5."""
    draft = np.full((4, VOCAB), -10.0, np.float32)
    draft[[0, 1, 2], [1, 4, 5]] = 10
    target = draft.copy()
    target[2] = np.where(np.arange(VOCAB) == 8, 10, -np.inf)
    tree = TokenTree(
        jnp.array([[8, 1, 4, 5]]), jnp.arange(4)[None] - 1, jnp.ones((1, 4), bool), jnp.asarray(draft)[None]
    )
    keys = jax.random.split(jax.random.key(0), 1)

    def tokens_of(rule, keys):
        verdict = rule(keys, tree, jnp.asarray(target)[None])
        return operations.emitted_tokens(tree, verdict)[0], verdict.num_nodes[0]

    tokens, count = jax.jit(functools.partial(tokens_of, verifiers.VERIFIERS[name]))(keys)
    assert tokens[:count].tolist() == [1, 4, 8]


@pytest.mark.parametrize("draft", [DRAFT, TARGET], ids=["random", "same"])
def test_assisted_decoding_matches_greedy_search(draft):
    """The assistant drafts two tokens, and the target needs two passes at least."""
    drafter = drafters.two_model(markov(draft), 2)
    for prompt in ([1, 2, 3, 4, 5, 6, 7], [9]):
        ours = written(drafter, prompt, 4)
        assert ours.to_lists()[0] == text(PLAIN, prompt, 4)
        assert int(ours.stats.target_passes[0]) >= 2
        assert draft is DRAFT or int(ours.stats.accepted[0]) >= 2


@pytest.mark.exhaustive
def test_prompt_lookup_matches_greedy_search():
    drafter = drafters.prompt_lookup(2, min_ngram=1)
    for prompt in ([1, 2, 3, 1, 2, 3, 1], [4, 4]):
        assert text(drafter, prompt, 4) == text(PLAIN, prompt, 4)


@pytest.mark.exhaustive
def test_assisted_sampling():
    """A model that assists itself drafts from the distribution of the target, so every token is accepted."""
    ours = written(drafters.two_model(markov(TARGET), 2), [1, 2, 3], 40, temperature=0.8, top_k=6, top_p=0.9)
    assert len(ours.to_lists()[0]) == 40
    assert int(ours.stats.accepted[0]) == int(ours.stats.drafted[0]) > 20


def test_prompt_lookup_ends_at_an_eos():
    """The last token occurred before an eos. Even a target that repeats the old text writes nothing after the eos."""
    prompt = [7, 12, 31, 51, 0, 24, 45, 3, 29, 51]
    copies = scripted([[*prompt, 0, 24, 45, 3, 29]], 64)
    drafter = drafters.prompt_lookup(4, max_ngram=1, min_ngram=1)
    assert text(drafter, prompt, 4, copies, eos=0) == [0]
    assert text(drafter, prompt, 4, copies) == [0, 24, 45, 3]  # without an eos, all of the draft


@pytest.mark.exhaustive
@pytest.mark.parametrize("depth", [1, 8, 17])
def test_depths_of_speculation(depth):
    """A draft never has more tokens than the depth, and a draft model that is the target has as many."""
    ours = written(drafters.two_model(markov(TARGET), depth), [1, 2, 3], 36)
    stats = ours.stats
    assert stats.drafted_by_depth.shape[1] == depth
    assert int(stats.drafted[0]) <= depth * int(stats.target_passes[0])
    assert ours.to_lists()[0] == text(PLAIN, [1, 2, 3], 36)
    assert int(stats.target_passes[0]) <= 1 - (-36 // (depth + 1))


@pytest.mark.exhaustive
def test_a_temperature_near_zero_is_greedy():
    """The assistant lacks two words of the target, and the sampled text is that of greedy search."""
    small = markov(DRAFT[:8, :8] / DRAFT[:8, :8].sum(1, keepdims=True))
    drafter = drafters.two_model(small, 3)
    for prompt in ([1, 2], [9, 8]):  # the assistant lacks words 8 and 9
        assert text(drafter, prompt, 5, temperature=1e-9) == text(PLAIN, prompt, 5)
    warm = written(drafter, [9, 8], 5, temperature=0.9)
    assert int(warm.stats.drafted[0]) > 0


@pytest.mark.parametrize("size", [exhaustive(4), exhaustive(6), 8])
def test_logits_of_an_assistant_with_another_vocabulary(size):
    """Words of the assistant alone are suppressed, and words that it lacks have no mass."""
    rows = np.random.default_rng(1).dirichlet(np.ones(6), 6).astype(np.float32)
    model = resize_vocabulary(markov(rows).model, size)
    mask, tokens = jnp.ones((1, 1, 1), bool), jnp.array([[1]])
    output, _ = model.forward(jnp.asarray(rows), tokens, (), positions=tokens, mask=mask)
    shared = min(size, 6)
    np.testing.assert_allclose(output.logits[0, 0, :shared], np.log(rows[1, :shared]), rtol=1e-6)
    assert np.isneginf(output.logits[0, 0, shared:]).all() and output.logits.shape == (1, 1, size)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [6, 13])
def test_an_assistant_of_fewer_or_more_words(size):
    """Check that drafts are words of both vocabularies, for prompts of words that only the target has."""
    draft = np.random.default_rng(2).dirichlet(np.full(size, 0.3), size).astype(np.float32)
    drafter = drafters.two_model(markov(draft), 3)
    ours = written(drafter, [9, 8], 12, temperature=0.9)
    assert int(ours.stats.drafted[0]) > 0 and max(ours.to_lists()[0]) < VOCAB
    assert text(drafter, [9, 8], 12) == text(PLAIN, [9, 8], 12)
