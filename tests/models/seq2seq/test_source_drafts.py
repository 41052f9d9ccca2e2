"""Drafts that copy what the encoder of the target has read."""

import functools

import numpy as np
import pytest
from toy import scripted_model

import specjax
from specjax.drafters import auto, input_guided, prompt_lookup, suffix
from specjax.models import sources
from specjax.types import Capabilities, Target

VOCAB = 50
RNG = np.random.default_rng(0)
SOURCES = [RNG.permutation(np.arange(2, 42)).tolist(), RNG.permutation(np.arange(2, 30))[:17].tolist()]
TEXTS = [[0, *SOURCES[0][:20], 45, *SOURCES[0][21:], 1], [0, *SOURCES[1][:9], *SOURCES[1][10:], 1]]
"""Each source with one edit: a token that is replaced, and one that is left out."""

DRAFTERS = {
    "prompt_lookup": lambda: prompt_lookup(7),
    "suffix": lambda: suffix(7),
    "input_guided": lambda: input_guided(num_tokens=7),
    "auto": lambda: auto(VOCAB, widths=(1, 4, 8), costs=(1.0, 1.1, 1.2), draft_cost=0.01),
}


@functools.cache
def copier(shows_source=True):
    """Return a model that writes its parameters, and whose cache is the source."""
    return scripted_model(VOCAB)._replace(
        init_cache=lambda params, inputs, batch, capacity: inputs,
        source=(lambda cache: cache) if shows_source else None,
        capabilities=Capabilities(inputs=True),
        name="copier",
    )


def run(drafter, rows, model):
    """Return the texts and the passes of some of the rows."""
    width = max(map(len, TEXTS))
    params = np.array([text + [1] * (width - len(text)) for text in TEXTS], np.int32)[rows]
    texts = [SOURCES[row] for row in rows]
    result = specjax.decode(
        Target(model, params), drafter, [[0]] * len(rows), key=0, inputs=sources(texts), max_new_tokens=60, eos=1
    )
    return result.to_lists(), np.asarray(result.stats.target_passes)


@pytest.mark.parametrize("name", list(DRAFTERS))
def test_an_edited_source_takes_few_passes(name):
    drafter = DRAFTERS[name]()
    texts, passes = run(drafter, [0, 1], copier())
    assert texts == [text[1:] for text in TEXTS]
    assert passes[0] <= 14 and passes[1] <= 10, passes
    blind, without = run(drafter, [0, 1], copier(shows_source=False))
    assert blind == texts
    assert np.all(without > 1.5 * passes), (without, passes)


@pytest.mark.parametrize("name", ["prompt_lookup", "suffix", "input_guided"])
def test_a_row_drafts_as_it_does_alone(name):
    """Sources of other lengths in the batch change nothing."""
    _, together = run(DRAFTERS[name](), [0, 1], copier())
    alone = [run(DRAFTERS[name](), [row], copier())[1][0] for row in (0, 1)]
    assert together.tolist() == alone


def test_the_example_of_aggressive_decoding():
    """Draft the whole source at first; search once after the edit, and copy the end: three passes for six tokens."""
    source, text = [2, 3, 4, 5, 6], [0, 2, 9, 4, 5, 6, 1]
    target = Target(copier(), np.array([text + [1] * 40], np.int32))
    result = specjax.decode(
        target, input_guided(num_tokens=32), [[0]], key=0, inputs=sources([source]), max_new_tokens=20, eos=1
    )
    assert result.to_lists() == [text[1:]]
    assert result.stats.target_passes.tolist() == [3]
