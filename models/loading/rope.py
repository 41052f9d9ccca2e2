"""Rotary settings of both formats, as a base and a `RopeScaling`."""

from __future__ import annotations

import numpy as np

from specjax.errors import UsageError
from specjax.models.layers import RopeScaling, rope_frequencies


def from_hf(
    hf: dict, where: str, *, base: float = 10000.0, layer_type: str | None = None
) -> tuple[float, RopeScaling | None]:
    """(base, scaling) of a Hugging Face config, old (`rope_theta`, `rope_scaling`) or new (`rope_parameters`).

    `layer_type` picks the entry where the new form has one per kind of layer (Gemma 3).
    """
    rope = hf.get("rope_parameters")
    if rope is None:
        rope = {"rope_theta": hf.get("rope_theta", base), **(hf.get("rope_scaling") or {})}
    elif layer_type is not None and layer_type in rope:
        rope = rope[layer_type]
    base = float(rope.get("rope_theta", hf.get("rope_theta", base)))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UsageError(
            f"{where} rotates only part of each head (partial_rotary_factor), which specjax does not support"
        )
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, RopeScaling("linear", float(rope["factor"]))
    if kind == "llama3":
        return base, RopeScaling(
            "llama3",
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )
    raise UsageError(
        f'{where} has RoPE scaling "{kind}", which specjax does not support (only default, linear, llama3)'
    )


def from_gguf(meta: dict, arch: str, where: str) -> tuple[float, RopeScaling | None]:
    """(base, scaling) of GGUF metadata; see also `llama3_from_factors`."""
    base = float(meta.get(f"{arch}.rope.freq_base", 10000.0))
    kind = meta.get(f"{arch}.rope.scaling.type", "none")
    factor = float(meta.get(f"{arch}.rope.scaling.factor", meta.get(f"{arch}.rope.scale_linear", 1.0)))
    if kind not in ("none", "linear"):
        raise UsageError(f'{where} has RoPE scaling "{kind}", which specjax does not support (only linear, llama3)')
    return base, RopeScaling("linear", factor) if factor not in (0.0, 1.0) else None


def llama3_from_factors(factors: np.ndarray, dim: int, base: float, where: str) -> RopeScaling:
    """The scaling whose divisors GGUF stores as `rope_freqs.weight` float32[h/2].

    Only the divisors are kept; all Llama 3.x models share the other constants, so the largest divisor tells it all.
    """
    scaling = RopeScaling("llama3", float(np.max(factors)))
    expected = np.asarray(rope_frequencies(dim, base) / rope_frequencies(dim, base, scaling))
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise UsageError(f"{where} has a rope_freqs.weight that is not Llama 3's, which specjax does not support")
    return scaling
