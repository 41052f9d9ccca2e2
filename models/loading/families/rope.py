"""Rotary settings of both formats, as a base and a `RopeScaling`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.layers import RopeScaling, rope_frequencies
from specjax.models.loading.families.config_fields import POSITIONS, ConfigFields

OF_GGUF = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors of GGUF files that are no parameters: what frequencies are divided by."""

BASE = {"least": 1.0, "most": 1e15}
FACTOR = {"least": 1e-6, "most": 1e9}


class Rotary(NamedTuple):
    """How a family's heads are rotated."""

    base: float
    scaling: RopeScaling | None
    rotary_dim: int | None  # numbers of a head; None: all


def from_hf(
    hf: ConfigFields, head_dim: int, *, base: float = 10000.0, layer_type: str | None = None, partial: bool = False
) -> Rotary:
    """Of a Hugging Face config, old (`rope_theta`, `rope_scaling`) or new (`rope_parameters`).

    `layer_type` picks the entry where the new form has one per kind of layer. partial: the family's code can rotate a
    part of each head.
    """
    rope = hf.inside("rope_parameters" if hf.given("rope_parameters") else "rope_scaling")
    if layer_type is not None and rope.given(layer_type):
        rope = rope.inside(layer_type)
    base = rope.number("rope_theta", hf.number("rope_theta", base, **BASE), **BASE)
    part = rope.number("partial_rotary_factor", hf.number("partial_rotary_factor", 1.0, most=1.0), most=1.0)
    if part != 1.0 and not partial:
        raise UsageError(
            f"{hf.where} rotates only part of each head (partial_rotary_factor), which specjax supports for phi3 only"
        )
    rotary_dim = int(head_dim * part)
    if rotary_dim % 2 or not rotary_dim:
        raise UsageError(
            f"{hf.where} has partial_rotary_factor {part:g}, which rotates {rotary_dim} of the {head_dim} numbers of a "
            "head; these must be even"
        )
    scaling = _scaling(hf, rope, rotary_dim)
    if base == 1 and scaling is not None and scaling.kind == "yarn":
        raise UsageError(f"{hf.where} has rope_theta 1, by which YaRN cannot tell frequencies apart; give one above 1")
    return Rotary(base, scaling, None if rotary_dim == head_dim else rotary_dim)


def local_from_hf(hf: ConfigFields, head_dim: int, base: float) -> float:
    """The rotary base of windowed layers, which are never stretched. base: that of a file in the old form."""
    if not hf.given("rope_parameters"):
        return base
    found = from_hf(hf, head_dim, layer_type="sliding_attention")
    if found.scaling is not None:
        raise UsageError(f"{hf.where} scales RoPE in its windowed layers, which specjax does not support")
    return found.base


def _scaling(hf: ConfigFields, rope: ConfigFields, rotary_dim: int) -> RopeScaling | None:
    kind = rope.text("rope_type", None) or rope.text("type", "default")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", rope.number("factor", **FACTOR))
    if kind == "llama3":
        low, high = (rope.number(f"{end}_freq_factor", **FACTOR) for end in ("low", "high"))
        if low >= high:
            raise UsageError(f"{hf.where} has low_freq_factor {low:g}, which must be below high_freq_factor, {high:g}")
        original = rope.size("original_max_position_embeddings", most=POSITIONS)
        return RopeScaling("llama3", rope.number("factor", **FACTOR), low, high, original)
    if kind in ("longrope", "su") or (kind == "yarn" and rope.given("long_factor")):  # so the first Phi-3 of 128k
        return _longrope(hf, rope, rotary_dim)
    if kind == "yarn":
        return _yarn(hf, rope)
    known = "default, linear, llama3, yarn, longrope"
    raise UsageError(f"{hf.where} has RoPE scaling {quote(kind)}, which specjax does not support (only {known})")


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
    if scaling.kind == "longrope":
        said |= {
            "short_factor": list(scaling.short), "long_factor": list(scaling.long),
            "attention_factor": scaling.amplitude, "original_max_position_embeddings": scaling.original_positions,
        }  # fmt: skip
    return {"rope_theta": base, "rope_scaling": said}


def in_new_form(said: dict[str, Any]) -> dict[str, Any]:
    """One entry of `rope_parameters`, of what `to_hf` says."""
    return {"rope_type": "default", "rope_theta": said["rope_theta"], **(said["rope_scaling"] or {})}


def _yarn(hf: ConfigFields, rope: ConfigFields) -> RopeScaling:
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


def _longrope(hf: ConfigFields, rope: ConfigFields, rotary_dim: int) -> RopeScaling:
    """As transformers reads it: Phi keeps its original length outside of the other settings, which then counts."""
    for name in ("short_mscale", "long_mscale"):
        if rope.given(name):
            raise UsageError(f"{hf.where} has {rope.prefix}{name}, which specjax does not support")
    most = hf.size("max_position_embeddings")
    inside = rope.size("original_max_position_embeddings", most, least=2, most=POSITIONS)
    original = hf.size("original_max_position_embeddings", inside, least=2, most=POSITIONS)
    factor = rope.number("factor", most / original, **FACTOR)
    amplitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    amplitude = rope.number("attention_factor", amplitude, **FACTOR)
    short, long = (_divisors(rope, name, rotary_dim // 2) for name in ("short_factor", "long_factor"))
    return RopeScaling("longrope", factor, original_positions=original, amplitude=amplitude, short=short, long=long)


def _divisors(rope: ConfigFields, name: str, count: int) -> tuple[float, ...]:
    """One for each frequency."""
    found = rope.array(name, (int, float), count)
    if not found:
        raise UsageError(f"{rope.where} lacks the field {rope.prefix}{name}, so the rotary frequencies are unknown")
    wrong = [x for x in found if not FACTOR["least"] <= x <= FACTOR["most"]]
    if wrong:
        wanted = f"numbers from {FACTOR['least']:g} to {FACTOR['most']:g}"
        raise UsageError(f"{rope.where} has {quote(wrong[0])} in {rope.prefix}{name}, which must have {wanted}")
    return tuple(map(float, found))


def from_gguf(meta: ConfigFields) -> tuple[float, RopeScaling | None]:
    """(base, scaling) of GGUF metadata; see also `divided`."""
    base = meta.number("rope.freq_base", 10000.0, **BASE)
    kind = meta.text("rope.scaling.type", "none")
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 1.0, least=0.0), least=0.0)
    if kind not in ("none", "linear"):
        raise UsageError(
            f"{meta.where} has RoPE scaling {quote(kind)}, which specjax does not support (only linear, llama3)"
        )
    return base, RopeScaling("linear", factor) if factor not in (0.0, 1.0) else None


def divided(factors: Mapping[str, np.ndarray], meta: ConfigFields, rotary_dim: int, base: float) -> RopeScaling | None:
    """What the divisors of frequencies, by names in OF_GGUF, say of a file's scaling; None without any."""
    plain, *sets = OF_GGUF
    if plain in factors:
        return llama3_from_factors(factors[plain], rotary_dim, base, meta.where)
    if not factors:
        return None
    long, short = (_divisors_of_gguf(factors.get(name), name, rotary_dim // 2, meta.where) for name in sets)
    original = meta.size("rope.scaling.original_context_length", least=2, most=POSITIONS)
    factor = meta.size("context_length") / original
    amplitude = meta.number("rope.scaling.attn_factor", 1.0, **FACTOR)
    return RopeScaling("longrope", factor, original_positions=original, amplitude=amplitude, short=short, long=long)


def _divisors_of_gguf(found: np.ndarray | None, name: str, count: int, where: str) -> tuple[float, ...]:
    if found is None or found.shape != (count,) or not FACTOR["least"] <= found.min() <= found.max() <= FACTOR["most"]:
        wanted = f"{count} numbers from {FACTOR['least']:g} to {FACTOR['most']:g}"
        raise UsageError(f"{where} must have a {name} of {wanted} beside the other set of longrope")
    return tuple(map(float, found))


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
