"""Passes whose logits are too large to be stored."""

import dataclasses

import jax
import numpy as np
import pytest
from toy import tiny_llama

from specjax import UsageError, adaptive, decode
from specjax.arrays import logit_rows
from specjax.drafters import auto, autoregressive, token_recycling
from specjax.engine.prepare import Settings, prepare
from specjax.engine.run import start, step
from specjax.models import make_model
from specjax.models.vocabulary import resize_vocabulary
from specjax.pallas_kernels.gumbel_topk import by_blocks
from specjax.processors import ban
from specjax.types import Target

PROMPTS, NEW, VOCAB = [[1, 2, 3, 1, 2, 3, 1], [5, 9]], 24, 64


@pytest.fixture(autouse=True)
def nothing_fits(monkeypatch):
    monkeypatch.setattr(logit_rows, "LARGE_LOGITS", 0)
    monkeypatch.setattr(logit_rows, "GROUP_BYTES", 0)
    monkeypatch.setattr(by_blocks, "BLOCK_BYTES", 0)
    monkeypatch.setattr(by_blocks, "MIN_BLOCK", 16)


def target(name: str = "large", vocab: int = VOCAB) -> Target:
    """A model of its own: programs of the other one may be compiled already."""
    small = tiny_llama(vocab=vocab)
    return Target(make_model(dataclasses.replace(small.model.config, name=name)), small.params)


DRAFTERS = {
    "auto": lambda: auto(VOCAB, widths=(1, 4, 8), costs=(1.0, 1.01, 1.02)),
    "token_recycling": lambda: token_recycling(VOCAB, num_nodes=12),
}
TEMPERATURES = {"greedy": {}, "sampled": {"temperature": 1.0, "top_p": 0.9}, "mixed": {"temperature": [0.0, 1.5]}}


@pytest.mark.parametrize("how", TEMPERATURES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_text_is_that_of_plain_decoding(name, how):
    options = {"key": jax.random.key(3), "max_new_tokens": NEW, **TEMPERATURES[how]}
    ours = decode(target(), DRAFTERS[name](), PROMPTS, **options)
    assert ours.to_lists() == decode(tiny_llama(), autoregressive(), PROMPTS, **options).to_lists()
    assert int(ours.stats.drafted.sum()) > 0
    if how == "greedy":
        assert int(ours.stats.target_passes.max()) < NEW


def logits_in(model: Target) -> bool:
    """Return True if the compiled step of `token_recycling` has an array of all logits of its widest pass."""
    vocab = model.model.vocab_size
    job = prepare(model, token_recycling(vocab, num_nodes=12), PROMPTS, Settings(), key=0, max_new_tokens=4)
    text = step.lower(job.parts, jax.eval_shape(start, job)).compile().as_text()
    return any(f"f32[{shape}]" in text for shape in (f"2,13,{vocab}", f"26,{vocab}", f"{vocab},26"))


def test_a_pass_has_no_array_of_all_logits(monkeypatch):
    assert not logits_in(target("without", 80))
    monkeypatch.setattr(logit_rows, "LARGE_LOGITS", 1 << 28)
    assert logits_in(target("with", 80))


def test_processors_and_requested_logits_read_them_as_before():
    options = {"key": jax.random.key(3), "max_new_tokens": NEW}
    drafter = token_recycling(VOCAB, num_nodes=12)
    banned = decode(target(), drafter, PROMPTS, processors=[ban([3])], **options)
    assert banned.to_lists() == decode(tiny_llama(), drafter, PROMPTS, processors=[ban([3])], **options).to_lists()
    assert not (np.asarray(banned.tokens) == 3).any()


def test_a_head_with_nan_is_found():
    good = target()
    bad = good.params | {"head": {"weight": good.params["head"]["weight"].at[40, 0].set(np.nan)}}
    with pytest.raises(UsageError, match=r"head\.weight contains NaN"):
        decode(Target(good.model, bad), DRAFTERS["token_recycling"](), PROMPTS, key=jax.random.key(0), max_new_tokens=4)


def test_models_with_changed_logits_have_no_best_of_their_own():
    """Otherwise a pass without logits would take the tokens of the model inside."""
    inside = tiny_llama()
    assert inside.model.best is not None
    assert resize_vocabulary(inside.model, VOCAB - 8).best is None
    assert adaptive.skip_layers(tiny_llama(layers=4), adaptive.ffn_skip(first=1, last=1)).model.best is None
