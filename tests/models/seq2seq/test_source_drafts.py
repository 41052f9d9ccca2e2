"""Drafts that copy what the encoder of the target has read."""

import functools

import jax
import numpy as np
import pytest
from toy import scripted_model

import specjax
from specjax import trees
from specjax.drafters import auto, input_guided, prompt_lookup, suffix, two_model
from specjax.models import init_params, make_model, prune_layers, sources
from specjax.models.seq2seq.config import T5Config
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


def test_a_part_of_the_decoder_drafts_for_it():
    """The draft model has the encoder of the target, which reads the same sources, and one layer of the decoder."""
    config = T5Config(
        vocab_size=VOCAB, width=16, num_layers=3, encoder_layers=2, num_heads=2, num_kv_heads=2, head_dim=8,
        mlp_width=24, max_positions=64,
    )  # fmt: skip
    target = Target(make_model(config), init_params(config, jax.random.key(0)))
    draft = prune_layers(target, [0])
    jax.tree.map(np.testing.assert_array_equal, draft.params["encoder"], target.params["encoder"])
    options = {"key": 3, "inputs": sources(SOURCES), "max_new_tokens": 20}
    plain = specjax.decode(target, "autoregressive", [[0]] * 2, **options)
    for tree in (None, trees.branching("2x1x1")):
        drafted = specjax.decode(target, two_model(draft, 3, tree), [[0]] * 2, **options)
        assert drafted.to_lists() == plain.to_lists()
        assert np.all(np.asarray(drafted.stats.drafted) > 0)
    itself = specjax.decode(target, two_model(target, 3), [[0]] * 2, **options)
    assert np.all(np.asarray(itself.stats.target_passes) == 5)
