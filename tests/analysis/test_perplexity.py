"""Perplexity against transformers' loss, and the evaluation of quantisation."""

import math

import numpy as np
import pytest
from written_models import VARIANTS, drawn, words

from specjax import save_model
from specjax.analysis import perplexity as module
from specjax.analysis.perplexity import evaluate_quantization, perplexity
from specjax.errors import UsageError
from specjax.models import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, drawn(VARIANTS["llama"]), words())
    return folder


def test_windows_have_the_loss_of_transformers(folder):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = np.random.default_rng(0).integers(0, 96, 37)
    losses, count = 0.0, 0
    for start in (0, 16, 32):
        part = torch.tensor(tokens[start : start + 16])[None]
        with torch.no_grad():
            losses += float(model(part, labels=part).loss) * (part.shape[1] - 1)
        count += part.shape[1] - 1
    windows = []
    value, predicted = perplexity(load(folder)[0], tokens.tolist(), window=16, on_window=lambda *n: windows.append(n))
    assert predicted == count == 34 and windows == [(1, 3), (2, 3), (3, 3)]
    assert value == pytest.approx(math.exp(losses / count), rel=1e-5)
    assert perplexity(load(folder)[0], tokens[:33].tolist(), window=16)[1] == 30  # the last window has one token


def test_each_scheme_is_compared_with_the_model(folder):
    text = "w5 w9 w7 a w31 w64 " * 20
    plain, eight, four = evaluate_quantization(folder, text, ("int8", "int4-weights"), window=32, max_tokens=100)
    assert (plain.model, eight.model) == (folder.name, f"{folder.name} (int8)")
    assert plain.tokens == eight.tokens == four.tokens and plain.ratio == 1
    assert eight.num_bytes < 0.4 * plain.num_bytes
    assert 0 < abs(eight.ratio - 1) < abs(four.ratio - 1)  # fewer bits change more
    for result in (eight, four):
        assert result.ratio == result.perplexity / plain.perplexity


def test_bad_input_is_one_sentence(folder, monkeypatch):
    target = load(folder)[0]
    with pytest.raises(UsageError, match=r"window must be from 2 to 128, the limit of .*, not 129"):
        perplexity(target, [1, 2, 3], window=129)
    with pytest.raises(UsageError, match="the text has 1 tokens, and perplexity needs at least 2"):
        perplexity(target, [1], window=8)
    with pytest.raises(UsageError, match=r'scheme must be one of int8, .*, not "int5"'):
        evaluate_quantization(folder, "abc", ("int5",))
    monkeypatch.setattr(module, "_surprise", lambda *_: np.nan)
    with pytest.raises(UsageError, match="has logits that are not finite on this text"):
        perplexity(target, [1, 2, 3], window=8)
