"""Costs of passes by chip."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from toy import tiny_llama

from specjax import costs
from specjax.costs import accelerators
from specjax.costs.accelerators import pass_cost
from specjax.costs.chips import CHIPS
from specjax.errors import UsageError


def test_an_h200_has_its_measured_costs():
    np.testing.assert_allclose(costs.estimated((1, 8, 16, 32, 64), 1, "bfloat16", "h200"), [1, 1.01, 1.04, 1.07, 1.11])
    np.testing.assert_allclose(costs.estimated((1, 64), 1, "bfloat16", "gpu"), [1, 1.11])  # an unknown GPU
    assert costs.estimated((1, 128), 1, "bfloat16", "h200")[1] == pytest.approx(1.11 + 64 * 0.04 / 32)


@pytest.mark.parametrize(("chip", "tokens"), [("h200", 206), ("h100", 295), ("v5e", 241), ("v6e", 560)])
def test_wide_passes_cost_their_arithmetic(chip, tokens):
    """A pass over many tokens takes the time of its FLOPs: as much as the weights at the chip's own balance."""
    balance = CHIPS[chip].peak_flops / CHIPS[chip].hbm_bandwidth
    assert balance == pytest.approx(tokens, rel=0.01)
    assert accelerators.pass_cost(chip, 10 * balance) == pytest.approx(10)


@pytest.mark.parametrize(
    ("chip", "factor"), [("v5e", 3), ("tpu", 3), ("h200", 989.5 / 67 / 2), ("gpu", 989.5 / 67 / 2)]
)
def test_float32_takes_longer_than_it_reads(chip, factor):
    """It has twice the bytes, and 6 bfloat16 passes on a TPU or the units beside the matrix units of a GPU."""
    tokens = 2000
    assert accelerators.pass_cost(chip, tokens, "float32") == pytest.approx(
        factor * accelerators.pass_cost(chip, tokens), rel=1e-3
    )
    few, many = (costs.estimated((1, 64), 1, dtype, chip)[1] for dtype in ("bfloat16", "float32"))
    assert few < 1.15 and many > 1.35
    with jax.default_matmul_precision("default"):
        assert accelerators.pass_cost(chip, tokens, "float32") == pytest.approx(tokens / few_tokens(chip) / 2, rel=1e-3)


def few_tokens(chip: str) -> float:
    """The tokens whose arithmetic takes as long as the weights in bfloat16."""
    figures = CHIPS[{"tpu": "v5e", "gpu": "h200"}.get(chip, chip)]
    return figures.peak_flops / figures.hbm_bandwidth


@pytest.mark.parametrize(
    ("kind", "chip"),
    [
        ("NVIDIA H200", "h200"),
        ("TPU v5 lite", "v5e"),
        ("TPU v6 lite", "v6e"),
        ("NVIDIA A100-SXM4-40GB", "gpu"),
    ],
)
def test_chips_by_the_name_of_a_device(monkeypatch, kind, chip):
    device = type("Device", (), {"device_kind": kind, "platform": "gpu"})
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert accelerators.current_chip() == chip


def test_names_of_platforms():
    """A name that is misspelled must not have the costs of another chip."""
    assert accelerators.pass_cost("cuda", 64) == accelerators.pass_cost("h200", 64) != accelerators.pass_cost("tpu", 64)
    with pytest.raises(UsageError, match=r'platform must be cpu, gpu, .* or a chip \(v4, .*h100\), not "h20"'):
        costs.estimated((1, 8), 1, platform="h20")


def test_small_models_wait_for_launches_on_a_gpu():
    """The logits and drafts of small models cost little on a GPU: 100 MB per layer are read in the time of its
    kernels."""
    target = tiny_llama()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(target.params))
    waiting = 25e-6 * 0.83 * 4.8e12 * target.model.capabilities.num_layers
    assert accelerators.equivalent_bytes("h200", size, target.model.capabilities.num_layers) == size + waiting
    assert accelerators.equivalent_bytes("cpu", size, 2) == accelerators.equivalent_bytes("v5e", size, 2) == size
    assert costs.shares_of(target, "h200").logits == pytest.approx(4 * target.model.vocab_size / (size + waiting))
    assert costs.of_draft(target, target, "h200") == costs.of_draft(target, target, "cpu") == 1


def test_arithmetic_costs_more_beside_weights_of_few_bits():
    """The arithmetic of 512 tokens takes the same time, and reading the weights a fourth of it."""
    wide = pass_cost("v5e", 512, "bfloat16")
    assert pass_cost("v5e", 512, "bfloat16", 0.5) == pytest.approx(4 * wide)
    four_bits = costs.RoundedWeights("bfloat16", 0.5)
    assert costs.estimated((1, 512), 1, four_bits, "v5e")[1] > 3 * costs.estimated((1, 512), 1, "bfloat16", "v5e")[1]
    assert pass_cost("v5e", 512, "int8") == pytest.approx(wide)  # half the bytes, and twice the peak
    assert pass_cost("v4", 2048, "int8") == pytest.approx(2 * pass_cost("v4", 2048, "bfloat16"))
