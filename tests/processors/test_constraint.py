"""Automata as arrays, and those that outlines-core compiles."""

import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processed import EOS, Letters, accepts, begun, counting, in_a_tree
from toy import markov

from specjax import UsageError, decode, drafters, processors
from specjax.processors.automaton import automaton
from specjax.processors.constraint import following
from specjax.types import TokenTree

VOCAB = 14


def allowed(processor, *texts, follow=0):
    """The sets of tokens allowed after texts of one length."""
    processor = following(processor, follow)
    n = len(texts)
    state = begun(processor, np.zeros((n, 1), np.int32), np.ones(n, np.int32), VOCAB)
    state = processor.update(processor.params, state, jnp.array(texts, jnp.int32), jnp.full(n, len(texts[0])))
    alone = TokenTree(jnp.zeros((n, 1), jnp.int32), jnp.full((n, 1), -1), jnp.ones((n, 1), bool))
    logits = in_a_tree(processor, state, alone, jnp.zeros((n, 1, VOCAB)))
    return [set(np.flatnonzero(row == 0).tolist()) for row in np.asarray(logits[:, 0])]


def test_several_automata_in_one():
    """Three automata by hand are followed in one: (2 3)* then EOS, any text of 40 tokens' ids above a word of 32 bits,
    and none."""
    pairs = automaton(7, {7: {2: 9}, 9: {3: 7, 4: 8}, 8: {5: 8}}, {7}, [EOS])
    assert pairs.accepting.tolist() == [True, False]  # no text ends from state 8
    both = processors.constraint(pairs, counting(VOCAB))
    assert allowed(both, [2, 3], [2, 2], [2, EOS]) == [{2, EOS}, {EOS}, {EOS}]
    assert allowed(both, [2], [4]) == [{3}, {EOS}]
    evens, odds = set(range(2, VOCAB, 2)), set(range(1, VOCAB, 2))
    assert allowed(both, [2, 3], [2, 4], follow=1) == [evens | odds - {3}, evens | odds | {EOS}]
    assert allowed(both, [2, 3], follow=None) == [set(range(VOCAB))]


def test_what_no_text_satisfies_and_what_does_not_fit():
    with pytest.raises(UsageError, match="no text of the model's tokens satisfies it"):
        automaton(0, {0: {1: 2}, 2: {1: 0}}, {3}, [EOS])
    with pytest.raises(UsageError, match="follow is 1, but the constraint has 1 automata"):
        processors.constraint(counting(VOCAB), follow=1)
    with pytest.raises(UsageError, match="has tokens up to 13, but the model's vocabulary has 3"):
        decode(markov(), None, [[1]], key=0, max_new_tokens=2, processors=[processors.constraint(counting(VOCAB))])


@pytest.mark.parametrize(
    "pattern", ["(ab|c)*1?", "[ab]{2}é+", "", "a", ".b", "[^a]b", r"\S\Wa?", ".*é", r"\D+c", "a[^b]{2}|"]
)
def test_a_regular_expression_accepts_what_python_matches(pattern):
    """All texts of up to 3 tokens, in every spelling."""
    pytest.importorskip("outlines_core")
    letters, automaton = Letters(), processors.regex(pattern, Letters())
    tokens = [i for i, spelled in enumerate(letters.spellings()) if spelled and i != EOS]
    for ids in itertools.chain.from_iterable(itertools.product(tokens, repeat=n) for n in range(4)):
        assert accepts(automaton, ids) == bool(re.fullmatch(pattern, letters.decode(ids))), ids


@pytest.mark.parametrize(
    ("pattern", "bare"),
    [
        ("^ab$", "ab"),
        ("^a|b$", "a|b"),
        ("(?:^a|^b)c$", "(?:a|b)c"),
        (r"\Aab\z", "ab"),
        ("^(ab|c$)", "(ab|c)"),
        ("(?i)^AB$", "(?i)AB"),
        (r"a[^$]\$?$", r"a[^$]\$?"),
    ],
)
def test_anchors_at_the_ends_restrict_nothing(pattern, bare):
    pytest.importorskip("outlines_core")
    ours, theirs = (vars(processors.regex(text, Letters())) for text in (pattern, bare))
    for name, values in ours.items():
        np.testing.assert_array_equal(values, theirs[name])


def test_json_of_a_schema():
    """Whatever the target would like to write: sampled from a uniform one, drafted by it too."""
    pytest.importorskip("outlines_core")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 12]}, "b": {"type": "boolean"}}, "required": ["a"]}
    schema["properties"]["b"] = {"enum": ["c", "ab"]}
    schema_constraint = processors.constraint(processors.json_schema(schema, Letters()))
    uniform = np.full((VOCAB, VOCAB), 1 / VOCAB, np.float32)
    result = decode(
        markov(uniform), drafters.token_recycling(VOCAB, num_nodes=5), [[1]] * 8, key=jax.random.key(0),
        max_new_tokens=60, temperature=1.0, eos=EOS, processors=[schema_constraint],
    )  # fmt: skip
    texts = [Letters().decode(ids) for ids in result.to_lists()]
    assert result.hit_eos.all() and len(set(texts)) > 3
    for text in map(json.loads, texts):
        assert text["a"] in (1, 12) and text.get("b", "c") in ("c", "ab")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda letters: processors.regex("[", letters), "regular expression is invalid or not supported: Failed to"),
        (lambda letters: processors.regex("xyz", letters), "no text of the model's tokens satisfies the regular"),
        (lambda letters: processors.json_schema("nothing", letters), "JSON schema is not JSON: Expecting value"),
        (lambda letters: processors.json_schema({"enum": []}, letters), "no text satisfies the JSON schema"),
        (lambda letters: processors.json_schema({"const": "z"}, letters), "tokens satisfies the JSON schema"),
        (lambda letters: processors.regex("a^b", letters), r"expression has the anchor \^ inside; only"),
        (lambda letters: processors.regex("a", letters, eos=()), "needs an eos to end texts, but the tokenizer"),
    ],
)
def test_what_cannot_be_followed(make, sentence):
    pytest.importorskip("outlines_core")
    with pytest.raises(UsageError, match=sentence):
        make(Letters())
