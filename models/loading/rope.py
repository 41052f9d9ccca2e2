"""Rotary settings of both formats, as a base and a `RopeScaling`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.models.layers import RopeScaling, rope_frequencies
from specjax.models.loading.fields import POSITIONS, Fields
from specjax.reading import shown

BASE = {"least": 1.0, "most": 1e15}
FACTOR = {"least": 1e-6, "most": 1e9}


def from_hf(
    hf: Fields, *, base: float = 10000.0, layer_type: str | None = None, yarn: bool = True
) -> tuple[float, RopeScaling | None]:
    """(base, scaling) of a Hugging Face config, old (`rope_theta`, `rope_scaling`) or new (`rope_parameters`).

    `layer_type` picks the entry where the new form has one per kind of layer (Gemma 3). yarn: there may be YaRN.
    """
    rope = hf.inside("rope_parameters" if hf.given("rope_parameters") else "rope_scaling")
    if layer_type is not None and rope.given(layer_type):
        rope = rope.inside(layer_type)
    base = rope.number("rope_theta", hf.number("rope_theta", base, **BASE), **BASE)
    kind = rope.text("rope_type", None) or rope.text("type", "default")
    if rope.number("partial_rotary_factor", hf.number("partial_rotary_factor", 1.0)) != 1.0:
        raise UsageError(
            f"{hf.where} rotates only part of each head (partial_rotary_factor), which specjax does not support"
        )
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, RopeScaling("linear", rope.number("factor", **FACTOR))
    if kind == "llama3":
        low, high = (rope.number(f"{end}_freq_factor", **FACTOR) for end in ("low", "high"))
        if low >= high:
            raise UsageError(f"{hf.where} has low_freq_factor {low:g}, which must be below high_freq_factor, {high:g}")
        original = rope.size("original_max_position_embeddings", most=POSITIONS)
        return base, RopeScaling("llama3", rope.number("factor", **FACTOR), low, high, original)
    if kind == "yarn" and yarn:
        return base, _yarn(hf, rope)
    known = f"default, linear, llama3{', yarn' if yarn else ''}"
    raise UsageError(f"{hf.where} has RoPE scaling {shown(kind)}, which specjax does not support (only {known})")


def to_hf(base: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """What `from_hf` reads, in the old form, which all know."""
    if scaling is None:
        return {"rope_theta": base, "rope_scaling": None}
    said: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        said |= {
            "low_freq_factor": scaling.low, "high_freq_factor": scaling.high,
            "original_max_position_embeddings": scaling.original_positions,
        }  # fmt: skip
    if scaling.kind == "yarn":
        said |= {
            "beta_slow": scaling.low, "beta_fast": scaling.high, "attention_factor": scaling.amplitude,
            "original_max_position_embeddings": scaling.original_positions, "truncate": scaling.whole,
        }  # fmt: skip
    return {"rope_theta": base, "rope_scaling": said}


def _yarn(hf: Fields, rope: Fields) -> RopeScaling:
    """As transformers reads it."""
    original = rope.size("original_max_position_embeddings", most=POSITIONS)
    factor = rope.number("factor", hf.size("max_position_embeddings") / original, **FACTOR)
    low, high = rope.number("beta_slow", 1.0, **FACTOR), rope.number("beta_fast", 32.0, **FACTOR)
    if low >= high:
        raise UsageError(f"{hf.where} has beta_slow {low:g}, which must be below beta_fast, {high:g}")
    grown = lambda by: 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0
    by, of_all = rope.number("mscale", 0.0, least=0.0), rope.number("mscale_all_dim", 0.0, least=0.0)
    amplitude = grown(by) / grown(of_all) if by and of_all else grown(1.0)
    amplitude = rope.number("attention_factor", amplitude, **FACTOR)
    return RopeScaling("yarn", factor, low, high, original, amplitude, rope.flag("truncate", True))


def from_gguf(meta: Fields) -> tuple[float, RopeScaling | None]:
    """(base, scaling) of GGUF metadata; see also `llama3_from_factors`."""
    base = meta.number("rope.freq_base", 10000.0, **BASE)
    kind = meta.text("rope.scaling.type", "none")
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 1.0, least=0.0), least=0.0)
    if kind not in ("none", "linear"):
        raise UsageError(
            f"{meta.where} has RoPE scaling {shown(kind)}, which specjax does not support (only linear, llama3)"
        )
    return base, RopeScaling("linear", factor) if factor not in (0.0, 1.0) else None


def llama3_from_factors(factors: np.ndarray, dim: int, base: float, where: str) -> RopeScaling:
    """The scaling whose divisors GGUF stores as `rope_freqs.weight` float32[h/2].

    Only the divisors are kept; all Llama 3.x models share the other constants, so the largest divisor tells it all.
    """
    wrong = UsageError(f"{where} has a rope_freqs.weight that is not Llama 3's, which specjax does not support")
    if factors.shape != (dim // 2,) or not (np.isfinite(factors) & (factors > 0)).all():
        raise wrong
    scaling = RopeScaling("llama3", float(np.max(factors)))
    expected = np.asarray(rope_frequencies(dim, base) / rope_frequencies(dim, base, scaling))
    if not np.allclose(factors, expected, rtol=1e-3):
        raise wrong
    return scaling
