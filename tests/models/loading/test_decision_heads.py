"""SpecDec++'s folder in its authors' format, and a judge's linear layer, against NumPy."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax import UsageError
from specjax.models.heads.acceptance import init_acceptance
from specjax.models.loading.decision_heads import read_acceptance, read_judge, save_acceptance, save_judge

D = 6
RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(5, D)).astype(np.float32)


def tensors(blocks: int, only: int | None = None) -> dict[str, np.ndarray]:
    """Return the authors' tensors: one block several times, or only the first `only` copies of it."""
    draw = lambda *shape: RNG.normal(size=shape).astype(np.float32)
    block, bias = draw(D, D), draw(D)
    stored = range(blocks if only is None else only)
    loaded = {f"model.{j}.linear.{what}": x for j in stored for what, x in (("weight", block), ("bias", bias))}
    return loaded | {f"model.{blocks}.weight": draw(2, D), f"model.{blocks}.bias": draw(2)}


def folder_of(place, arrays, **config):
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps({"hidden_size": D, "num_layers": 3} | config))
    save_file({name: x.copy() for name, x in arrays.items()}, place / "model.safetensors")
    return place


def chance(arrays, blocks):
    x = FEATURES.astype(np.float64)
    for j in range(blocks):
        key = f"model.{j if f'model.{j}.linear.bias' in arrays else 0}.linear"
        z = x @ arrays[f"{key}.weight"].T + arrays[f"{key}.bias"]
        x = x + z / (1 + np.exp(-z))
    reject, accept = (x @ arrays[f"model.{blocks}.weight"].T + arrays[f"model.{blocks}.bias"]).T
    return 1 / (1 + np.exp(reject - accept))


@pytest.mark.parametrize("only", [None, 1])
def test_an_acceptance_head(only, tmp_path):
    arrays = tensors(3, only)
    head = read_acceptance(folder_of(tmp_path / "head", arrays))
    np.testing.assert_allclose(head.acceptance(FEATURES), chance(arrays, 3), atol=1e-5)
    save_acceptance(tmp_path / "again", head)
    jax.tree.map(np.testing.assert_array_equal, read_acceptance(tmp_path / "again"), head)
    full = arrays | {f"model.{j}.linear.{w}": arrays[f"model.0.linear.{w}"] for j in (1, 2) for w in ("weight", "bias")}
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert saved.keys() == full.keys()
    for name, value in full.items():
        np.testing.assert_array_equal(saved[name], value)


def test_an_acceptance_head_of_pytorch(tmp_path):
    torch = pytest.importorskip("torch")
    arrays = tensors(2)
    place = folder_of(tmp_path / "head", {}, num_layers=2)
    (place / "model.safetensors").unlink()
    torch.save({name: torch.from_numpy(x) for name, x in arrays.items()}, place / "pytorch_model.bin")
    np.testing.assert_allclose(read_acceptance(place).acceptance(FEATURES), chance(arrays, 2), atol=1e-5)


def test_an_untrained_acceptance_head_has_even_odds():
    np.testing.assert_array_equal(init_acceptance(D).acceptance(FEATURES), np.full(len(FEATURES), 0.5, np.float32))


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (lambda a: a.pop("model.3.bias"), {}, r"no tensor model\.3\.bias"),
        (lambda a: None, {"num_layers": 2}, r'has "model\.2\.linear\.bias", which is not a tensor of such a head'),
        (lambda a: None, {"hidden_size": 7}, r"model\.0\.linear\.weight of shape \[6, 6\], and it must be \[7, 7\]"),
        (lambda a: None, {"hidden_size": None}, "lacks the field hidden_size"),
        (lambda a: a.update({"model.3.bias": np.array([np.nan, 0], np.float32)}), {}, "not finite"),
    ],
)
def test_acceptance_heads_that_are_refused(change, config, message, tmp_path):
    arrays = tensors(3)
    change(arrays)
    with pytest.raises(UsageError, match=message):
        read_acceptance(folder_of(tmp_path / "head", arrays, **config))


def test_a_judge_with_and_without_its_features_standardised(tmp_path):
    w, b = RNG.normal(size=D).astype(np.float32), 0.25
    mean, scale = RNG.normal(size=D).astype(np.float32), np.exp(RNG.normal(size=D)).astype(np.float32)
    save_judge(tmp_path / "plain.safetensors", w, b, threshold=0.7)
    plain = read_judge(tmp_path / "plain.safetensors")
    np.testing.assert_array_equal(plain.weight, w)
    assert plain[1:] == (b, np.float32(0.7))
    two = {"weight": np.stack([-w, w]) / 2, "bias": np.array([-b, b], np.float32) / 2}  # one class against the other
    save_file(two, tmp_path / "two.safetensors")
    loaded = read_judge(tmp_path / "two.safetensors")
    np.testing.assert_allclose(loaded.weight, w, rtol=1e-6)
    assert loaded[1:] == (b, None)
    scaled = {"weight": w[None], "bias": np.array([b], np.float32), "mean": mean, "scale": scale}
    save_file(scaled, tmp_path / "scaled.safetensors")
    loaded = read_judge(tmp_path / "scaled.safetensors")
    expected = (FEATURES - mean) / scale @ w + b
    np.testing.assert_allclose(FEATURES @ loaded.weight + loaded.bias, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"weight": np.ones((3, D))}, "no weight with one or two rows"),
        ({"weight": np.ones(D)}, "no tensor bias"),
        ({"weight": np.ones((2, D)), "bias": np.ones(1)}, "a bias of 1 numbers, and a weight of 2 rows"),
        ({"weight": np.ones(D), "bias": np.ones(1), "scale": np.zeros(D)}, "scale with entries that are not above 0"),
        ({"weight": np.ones(D), "bias": np.ones(1), "mean": np.ones(3)}, r"mean of shape \[3\], and it must be \[6\]"),
        ({"weight": np.ones(D), "bias": np.ones(1), "other": np.ones(3)}, 'has "other", which is not a tensor'),
        ({"weight": np.ones(D), "bias": np.ones(1), "threshold": np.ones(2)}, "threshold of 2 numbers"),
    ],
)
def test_judges_that_are_refused(arrays, message, tmp_path):
    save_file({name: np.float32(x) for name, x in arrays.items()}, tmp_path / "judge.safetensors")
    with pytest.raises(UsageError, match=message):
        read_judge(tmp_path / "judge.safetensors")
    with pytest.raises(UsageError, match=r"is not a \.safetensors, \.pt or \.bin file"):
        read_judge(tmp_path)
