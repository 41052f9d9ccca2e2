"""The card's hand-worked edits (Aggressive Decoding, A10), and random edits compared with plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import TARGET_ROWS, chi_square, joint_distribution, markov, sampled_triples, scripted

from specjax import UsageError, decode
from specjax.drafters import input_guided

A, B, C, D, E, X, Y, BOS, EOS = range(9)


def edit(sources, outputs, **options):
    """Return target passes and drafted tokens of each edit; the target writes `outputs`, each with an eos."""
    longest = max(map(len, outputs)) + 1
    script = [[BOS, *row, *[EOS] * (longest - len(row))] for row in outputs]
    result = decode(
        scripted(script, 9), input_guided(sources, **options), [[BOS]] * len(outputs), key=jax.random.key(0),
        max_new_tokens=longest, eos=EOS,
    )  # fmt: skip
    assert result.to_lists() == [[*row, EOS] for row in outputs]
    return list(zip(result.stats.target_passes.tolist(), result.stats.drafted.tolist(), strict=True))


def test_the_cards_edits():
    text = [A, B, C, D, E]
    edits = {  # source, output, (target passes, tokens drafted)
        "one word changed": (text, [A, X, C, D, E], (3, 5 + 2)),  # a x | c | d e eos
        "nothing changed": (text, text, (1, 5)),
        "nothing in common": (text, [X, Y, X], (4, 5)),
        "one word left out": (text, [A, C, D, E], (2, 5 + 2)),  # a c | d e eos
        "one word put in": (text, [A, B, X, C, D, E], (3, 5 + 2)),  # a b x | c | d e eos
        # Nothing is copied behind `a` or `b`, which occur twice; the bigram `a b` occurs once.
        "repeated words": ([A, B, X, B, A, X], [Y, A, B, X, B, A, X], (4, 6 + 4)),  # y | a | b | x b a x eos
        "the end of the source": (text, [X, E, A], (4, 5 + 4)),  # nothing stands behind the `e`, but behind the `a`
    }
    sources, outputs, costs = zip(*edits.values(), strict=True)
    assert dict(zip(edits, edit(sources, outputs), strict=True)) == dict(zip(edits, costs, strict=True))


def reference(source, output, num_tokens, max_ngram):
    """Count target passes in plain Python: the paper's loop with drafts of at most `num_tokens`."""
    text, place, passes = [], 0, 0
    output = [*output, EOS]
    while len(text) < len(output):
        draft = source[place : place + num_tokens] if place is not None else []
        accepted = 0
        while accepted < len(draft) and draft[accepted] == output[len(text) + accepted]:
            accepted += 1
        text += output[len(text) : len(text) + accepted + 1]
        passes += 1
        if place is not None and place + accepted < len(source) and source[place + accepted] == text[-1]:
            place += accepted + 1  # the draft was cut off, and the target agrees with what would have followed
            continue
        place = None
        for n in range(1, min(max_ngram, len(text)) + 1):
            ends = [i for i in range(n, len(source) + 1) if source[i - n : i] == text[-n:]]
            if len(ends) == 1:
                place = ends[0]
            if len(ends) <= 1:
                break
    return passes


@pytest.mark.parametrize(("num_tokens", "max_ngram"), [(4, 3), (30, 2)])
def test_equals_plain_python(num_tokens, max_ngram):
    rng = np.random.default_rng(num_tokens)
    sources, outputs = [], []
    for _ in range(64):
        source = rng.integers(0, rng.integers(2, 8), rng.integers(1, 25)).tolist()
        output = [int(t) if rng.uniform() < 0.9 else int(rng.integers(0, 7)) for t in source if rng.uniform() < 0.95]
        sources.append(source)
        outputs.append(output)
    passes = [cost[0] for cost in edit(sources, outputs, num_tokens=num_tokens, max_ngram=max_ngram)]
    wanted = [reference(s, o, num_tokens, max_ngram) for s, o in zip(sources, outputs, strict=True)]
    assert passes == wanted
    assert np.mean(passes) < 0.6 * np.mean([len(o) + 1 for o in outputs])


def test_the_prompt_is_the_source_by_default():
    """Start with a search: only the target's own tokens are searched for, and only in the prompt."""
    prompt = [BOS, A, B, C, D, E]
    output = [B, C, D, E, X, B, C]  # b | c d e x | b | c
    script = [prompt + output]
    drafter = input_guided()
    result = decode(scripted(script, 9), drafter, [prompt], key=jax.random.key(0), max_new_tokens=7)
    assert result.to_lists() == [output]
    assert result.stats.target_passes.tolist() == [4]
    assert input_guided() is drafter


def test_sampled_text_has_the_law_of_the_target():
    rows = 20_000
    source = jnp.tile(jnp.array([[1, 2, 0, 1, 1, 2, 2]]), (rows, 1))
    drafter = input_guided((source, jnp.full(rows, 7)), 3)
    assert chi_square(sampled_triples(drafter, TARGET_ROWS), joint_distribution(TARGET_ROWS, 0, 3)) > 1e-3
    prompts = (jnp.zeros((rows, 4), jnp.int32), jnp.full((rows,), 4))
    result = decode(markov(), drafter, prompts, key=jax.random.key(0), max_new_tokens=3, temperature=1.0)
    assert 0.2 < float(result.stats.accepted.mean()) < 2.8  # it was put to the test


def test_bad_input():
    with pytest.raises(UsageError, match="num_tokens must be at least 1"):
        input_guided(num_tokens=0)
    with pytest.raises(UsageError, match="max_ngram must be at least 1"):
        input_guided(max_ngram=0)
    with pytest.raises(UsageError, match="source 1 is empty"):
        input_guided([[1], []])
    with pytest.raises(UsageError, match="source 0 has length 5, but the array holds 4"):
        input_guided((jnp.zeros((1, 4), jnp.int32), jnp.array([5])))
    with pytest.raises(UsageError, match=r"source must be \(tokens"):
        input_guided((jnp.zeros((2, 4), jnp.int32), jnp.array([4])))
    with pytest.raises(UsageError, match="source has 2 rows for 1 prompts"):
        decode(markov(), input_guided([[1], [2]]), [[0]], key=jax.random.key(0), max_new_tokens=2)
