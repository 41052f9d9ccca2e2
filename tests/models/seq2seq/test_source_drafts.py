"""Drafts that copy what the encoder of the target has read."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from toy import scripted_model

import specjax
from specjax import UsageError, trees
from specjax.cli.runs.session import Session
from specjax.drafters import auto, input_guided, prompt_lookup, suffix, two_model
from specjax.models import LlamaConfig, init_params, make_model, prune_layers, share_encoder, sources, spectrograms
from specjax.models.seq2seq.config import T5Config, WhisperConfig
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


def random_model(config, seed=0):
    return Target(make_model(config), init_params(config, jax.random.key(seed)))


WHISPER = WhisperConfig(
    vocab_size=VOCAB, width=16, num_layers=2, encoder_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, mlp_width=24,
    encoder_heads=2, encoder_mlp_width=24, mel_bins=4, source_positions=8, max_positions=48, text_positions=48,
)  # fmt: skip


def test_a_speech_model_drafts_with_the_encoder_of_its_target():
    """The draft model has another decoder, with more heads, as distil-whisper has fewer layers."""
    target = random_model(WHISPER)
    other = random_model(dataclasses.replace(WHISPER, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=4), 1)
    encoder = {name: part for name, part in target.params.items() if name.startswith("encoder")}
    draft = Target(other.model, other.params | encoder)
    inputs = spectrograms(np.random.default_rng(0).normal(size=(2, 4, 16)))
    options = {"key": 3, "inputs": inputs, "max_new_tokens": 12, "temperature": 0.8}
    complete, small = (
        specjax.decode(target, two_model(model, 3), [[0], [0]], **options)
        for model in (draft, share_encoder(draft, target))
    )
    assert small.to_lists() == complete.to_lists()
    jax.tree.map(np.testing.assert_array_equal, small.stats, complete.stats)
    for model, is_shared in ((draft, True), (other, False)):  # the command line finds out by itself
        arrays = jax.tree_util.tree_leaves_with_path(Session(target, None, model, "float32", 0.0).drafter("two_model"))
        assert any("encoder" in str(path) for path, _ in arrays) != is_shared


def test_encoders_that_cannot_be_shared():
    target, decoder = random_model(WHISPER), random_model(LlamaConfig(20, 8, 1, 1, 1, 8, 8))
    for draft, changes in ((random_model(WHISPER, 1), {}), (target, {"encoder_heads": 1}), (target, {"mel_bins": 8})):
        draft = random_model(dataclasses.replace(WHISPER, **changes)) if changes else draft
        with pytest.raises(UsageError, match=r"the encoder of the draft model .* is not that of the target"):
            share_encoder(draft, target)
    for models, name in (((decoder, target), "draft model"), ((target, decoder), "target")):
        with pytest.raises(UsageError, match=f"the {name} .* is no encoder-decoder"):
            share_encoder(*models)
    small = share_encoder(target, target)
    assert share_encoder(small, target) is small
    wide = random_model(dataclasses.replace(WHISPER, width=32))
    inputs = spectrograms(np.ones((1, 4, 16)))
    with pytest.raises(UsageError, match="reads the output of an encoder of width 16, and that of its target has 32"):
        specjax.decode(wide, two_model(small, 3), [[0]], key=0, inputs=inputs, max_new_tokens=4)
    with pytest.raises(UsageError, match="has no encoder of its own; pass it as the draft model of its target"):
        specjax.decode(small, "autoregressive", [[0]], key=0, inputs=inputs, max_new_tokens=4)


def test_a_part_of_the_decoder_drafts_for_it():
    """The draft model has the encoder of the target, which reads the same sources, and one layer of the decoder."""
    config = T5Config(
        vocab_size=VOCAB, width=16, num_layers=3, encoder_layers=2, num_heads=2, num_kv_heads=2, head_dim=8,
        mlp_width=24, max_positions=64,
    )  # fmt: skip
    target = random_model(config)
    draft = prune_layers(target, [0])
    small = share_encoder(draft, target)
    assert not any(name.startswith("encoder") for name in small.params)  # so only the target's encoder runs
    options = {"key": 3, "inputs": sources(SOURCES), "max_new_tokens": 20}
    plain = specjax.decode(target, "autoregressive", [[0]] * 2, **options)
    for tree in (None, trees.branching("2x1x1")):
        drafted = specjax.decode(target, two_model(draft, 3, tree), [[0]] * 2, **options)
        assert drafted.to_lists() == plain.to_lists()
        assert np.all(np.asarray(drafted.stats.drafted) > 0)
    shared = specjax.decode(target, two_model(small, 3, tree), [[0]] * 2, **options)
    assert shared.to_lists() == plain.to_lists()
    jax.tree.map(np.testing.assert_array_equal, shared.stats, drafted.stats)
    itself = specjax.decode(target, two_model(target, 3), [[0]] * 2, **options)
    assert np.all(np.asarray(itself.stats.target_passes) == 5)
