"""The card's means of STAND (A6), and which of several contexts counts."""

import jax
import jax.numpy as jnp
import pytest

from specjax.retrieval import contexts
from specjax.retrieval.contexts import NextTokens, mix

A, B, C, D = range(4)


def entry(occurrences=1, **probs):
    """An entry of three tokens."""
    tokens = [globals()[name] for name in probs] + [-1] * (3 - len(probs))
    return NextTokens(
        jnp.array(tokens), jnp.array([*probs.values()] + [0.0] * (3 - len(probs))), jnp.array(occurrences)
    )


def distribution(x):
    """{token: probability}, the likeliest first."""
    return {int(t): float(p) for t, p in zip(x.tokens, x.probs, strict=True) if t >= 0}


def test_the_cards_means():
    first = mix(entry(A=0.7, B=0.2, C=0.1), entry(A=0.3, B=0.6, D=0.1))
    assert (list(distribution(first)), int(first.occurrences)) == ([A, B, C], 2)  # C and D tie: the lower id
    assert distribution(first) == pytest.approx({A: 0.5, B: 0.4, C: 0.05})
    second = mix(first, entry(A=0.1, B=0.8, D=0.1))
    assert list(distribution(second))[:2] == [B, A]
    assert list(distribution(second).values()) == pytest.approx([1.6 / 3, 1.1 / 3, 0.1 / 3])
    assert distribution(mix(entry(occurrences=0), entry(B=0.5))) == {B: 0.5}
    assert distribution(mix(entry(occurrences=3, B=0.5), entry(occurrences=0))) == {B: 0.5}


def test_tokens_of_no_probability_are_none():
    assert distribution(mix(entry(occurrences=0), entry(A=1.0, B=0.0))) == {A: 1.0}


def taught_by(*distributions):
    """A table that was taught, one after another, that a token follows a context; -1: not known, no context of it."""
    table = contexts.empty(1, 16, 9)
    for context, token in distributions:
        entries = NextTokens(
            jnp.full((1, 1, 9), -1).at[0, 0, 0].set(token), jnp.eye(9)[None, None, 0], jnp.ones((1, 1), int)
        )
        table = jax.jit(contexts.add_entries)(table, jnp.array([[context]]), entries)
    return table


def test_the_longest_context_that_either_table_knows_counts():
    two, three = taught_by(([-1, -1, 3, 4], A)), taught_by(([-1, 2, 3, 4], B))
    find = lambda *tables: jax.tree.map(lambda x: x[0, 0], jax.jit(contexts.find)(*tables, jnp.array([[[1, 2, 3, 4]]])))
    for tables in ((two, three), (three, two), ((), three)):
        assert (distribution(find(*tables)), int(find(*tables).occurrences)) == ({B: 1.0}, 1)
    other = taught_by(([-1, -1, 3, 4], C))
    assert (distribution(find(two, other)), int(find(two, other).occurrences)) == ({A: 0.5, C: 0.5}, 2)
    assert (distribution(find(other, taught_by())), int(find((), taught_by()).occurrences)) == ({C: 1.0}, 0)


def test_contexts_of_different_lengths_are_told_apart():
    """3 tokens are not the 4 that begin with any one token."""
    table = taught_by(([0, 1, 2, 3], A), ([8, 1, 2, 3], B))
    entries = jax.jit(contexts.find)((), table, jnp.array([[[0, 1, 2, 3], [8, 1, 2, 3], [7, 1, 2, 3]]]))
    distributions = [
        distribution(NextTokens(*entry))
        for entry in zip(entries.tokens[0], entries.probs[0], entries.occurrences[0], strict=True)
    ]
    assert distributions == [{A: 1.0}, {B: 1.0}, {A: 0.5, B: 0.5}]
