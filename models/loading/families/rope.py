"""Rotary settings of both formats, converted to a base and a `RopeScaling`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.loading.families.config_fields import POSITIONS, ConfigFields
from specjax.models.rotary import RopeScaling, rope_frequencies

GGUF_DIVISORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors of GGUF files that are divisors of rotary frequencies, not parameters."""

FULL, SLIDING = "full_attention", "sliding_attention"

BASE = {"minimum": 1.0, "maximum": 1e15}
FACTOR = {"minimum": 1e-6, "maximum": 1e9}


class Rotary(NamedTuple):
    """Rotary settings of a model's heads."""

    base: float
    scaling: RopeScaling | None
    rotary_dim: int | None  # rotated numbers of a head; None: all


LENGTHS = (
    "n_positions", "max_sequence_length", "max_seq_length", "max_seq_len", "seq_length", "seq_len", "model_max_length",
    "n_ctx",
)  # fmt: skip
"""Other names of `max_position_embeddings`."""


def with_length(hf: ConfigFields) -> ConfigFields:
    """Return the fields with `max_position_embeddings`, if the file has it under another name."""
    lengths = [hf.size(name) for name in LENGTHS if hf.has(name)]
    return hf.with_defaults({"max_position_embeddings": min(lengths)}) if lengths else hf


def max_positions(hf: ConfigFields, scaling: RopeScaling | None) -> int:
    """Return the length of the longest text of a config.json, see `longest_text`."""
    return longest_text(hf.size("max_position_embeddings"), scaling)


def longest_text(length: int, scaling: RopeScaling | None) -> int:
    """Return the stated length, or that of YaRN, which lengthens texts whether or not a file counts it."""
    if scaling is None or scaling.kind != "yarn":
        return length
    return min(max(length, int(scaling.factor * scaling.original_positions)), POSITIONS)


def rotary_from_hf(
    hf: ConfigFields, head_dim: int, *, base: float = 10000.0, layer_type: str | None = None, partial: bool = False,
    part: float = 1.0,
) -> Rotary:  # fmt: skip
    """Read the rotary settings of a Hugging Face config, old (`rope_theta`, `rope_scaling`) or new (`rope_parameters`).

    Args:
      base: the rotary base of the family, for a config without one.
      layer_type: the entry to read if the new form has one per kind of layer.
      partial: True if the family's code can rotate a part of each head.
      part: the rotated part of each head in the family, for a config that does not state it.

    Raises: UsageError for settings that are not supported, or that the config has twice with different values.
    """
    blocks = [fields for name in ("rope_parameters", "rope_scaling") if (fields := hf.subfields(name)).values]
    blocks = blocks or [hf.subfields("rope_parameters")]
    rotary = [_rotary(hf, block, head_dim, (base, part), layer_type, partial) for block in blocks]
    if rotary[0] != rotary[-1]:
        raise UsageError(
            f"{hf.where} has rope_parameters and rope_scaling with different settings, and libraries read one or the "
            "other; keep one"
        )
    return rotary[0]


def _rotary(
    hf: ConfigFields, rope: ConfigFields, head_dim: int, defaults: tuple[float, float], layer_type: str | None,
    partial: bool,
) -> Rotary:  # fmt: skip
    """Read one object of rotary settings. defaults: the base, and the rotated part of each head."""
    if layer_type is not None and rope.has(layer_type):
        rope = rope.subfields(layer_type)
    base = _stated_once(hf, rope, "rope_theta", defaults[0], **BASE)
    part = _stated_once(hf, rope, "partial_rotary_factor", defaults[1], maximum=1.0)
    if part != 1.0 and not partial:
        raise UsageError(
            f"{hf.where} has partial_rotary_factor {part:g}, which specjax does not support for this architecture"
        )
    rotary_dim = int(head_dim * part)
    if rotary_dim % 2 or not rotary_dim:
        raise UsageError(
            f"{hf.where} has partial_rotary_factor {part:g}, which rotates {rotary_dim} of the {head_dim} numbers of a "
            "head; the number must be even and at least 2"
        )
    scaling = _scaling(hf, rope, rotary_dim)
    if base == 1 and scaling is not None and scaling.kind == "yarn":
        raise UsageError(f"{hf.where} has rope_theta 1, which YaRN does not support; it must be above 1")
    return Rotary(base, scaling, None if rotary_dim == head_dim else rotary_dim)


def _stated_once(hf: ConfigFields, rope: ConfigFields, name: str, default: float, **limits: float) -> float:
    """Return a number of the rotary settings or of the top level. Raises: UsageError if both have it and differ."""
    nested, top = rope.number(name, None, **limits), hf.number(name, None, **limits)
    if nested is not None and top is not None and nested != top:
        raise UsageError(
            f"{hf.where} has {hf.prefix}{name} {top:g} and {rope.prefix}{name} {nested:g}, and libraries read one or "
            "the other; keep one"
        )
    return next(value for value in (nested, top, default) if value is not None)


def local_base_from_hf(hf: ConfigFields, head_dim: int, base: float) -> float:
    """Return the rotary base of windowed layers, which have no scaling. `base` is that of a file in the old form."""
    rope = hf.subfields("rope_parameters")
    if not rope.values:
        return base
    if not rope.has(SLIDING):
        if not rope.has(FULL):
            raise UsageError(f"{hf.where} has rope_parameters without {FULL} and {SLIDING}, which this family needs")
        return base
    entry = rope.subfields(SLIDING)
    if _scaling(hf, entry, head_dim) is not None:
        raise UsageError(f"{hf.where} has RoPE scaling for its windowed layers, which specjax does not support")
    return entry.number("rope_theta", base, **BASE)


def _scaling(hf: ConfigFields, rope: ConfigFields, rotary_dim: int) -> RopeScaling | None:
    new_name, old_name = rope.text("rope_type", None), rope.text("type", None)
    if "mrope" in (new_name, old_name) and {new_name, old_name} <= {"mrope", "default", None}:
        new_name = old_name = "default"  # the three positions of a token of text are equal, and so are its sections
    if new_name and old_name and new_name != old_name:
        raise UsageError(
            f"{hf.where} has {rope.prefix}rope_type {quote(new_name)} and {rope.prefix}type {quote(old_name)}; keep one"
        )
    kind = new_name or old_name or "default"
    if kind == "default":
        rope.skip("mrope_section", "mrope_interleaved")
        hf.skip("original_max_position_embeddings")  # the length before scaling
        return None
    if kind == "linear":
        return RopeScaling("linear", rope.number("factor", **FACTOR))
    if kind == "llama3":
        low, high = (rope.number(f"{end}_freq_factor", **FACTOR) for end in ("low", "high"))
        if low >= high:
            raise UsageError(f"{hf.where} has low_freq_factor {low:g}, which must be below high_freq_factor, {high:g}")
        return RopeScaling("llama3", rope.number("factor", **FACTOR), low, high, _original_length(hf, rope))
    if kind in ("longrope", "su") or (
        kind == "yarn" and rope.has("long_factor")
    ):  # the first Phi-3 of 128k has "yarn" here
        return _longrope(hf, rope, rotary_dim)
    if kind == "yarn":
        return _yarn(hf, rope)
    supported = "default, linear, llama3, yarn, longrope"
    raise UsageError(f"{hf.where} has RoPE scaling {quote(kind)}, which specjax does not support (only {supported})")


def _original_length(hf: ConfigFields, rope: ConfigFields) -> int:
    """Return the length before scaling. Phi states it outside of the rotary settings, and that one counts."""
    length = rope.size("original_max_position_embeddings", hf.size("max_position_embeddings"), minimum=2)
    return hf.size("original_max_position_embeddings", length, minimum=2)


def rotary_to_hf(base: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Return the fields that `rotary_from_hf` reads, in the old form, which all libraries support."""
    if scaling is None:
        return {"rope_theta": base, "rope_scaling": None}
    fields: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        fields |= {
            "low_freq_factor": scaling.low, "high_freq_factor": scaling.high,
            "original_max_position_embeddings": scaling.original_positions,
        }  # fmt: skip
    if scaling.kind == "yarn":
        fields |= {
            "beta_slow": scaling.low, "beta_fast": scaling.high, "attention_factor": scaling.amplitude,
            "original_max_position_embeddings": scaling.original_positions, "truncate": scaling.whole,
        }  # fmt: skip
    if scaling.kind == "longrope":
        fields |= {
            "short_factor": list(scaling.short), "long_factor": list(scaling.long),
            "attention_factor": scaling.amplitude, "original_max_position_embeddings": scaling.original_positions,
        }  # fmt: skip
    return {"rope_theta": base, "rope_scaling": fields}


def to_rope_parameters(fields: dict[str, Any]) -> dict[str, Any]:
    """Convert the fields of `rotary_to_hf` to one entry of `rope_parameters`."""
    return {"rope_type": "default", "rope_theta": fields["rope_theta"], **(fields["rope_scaling"] or {})}


def _yarn(hf: ConfigFields, rope: ConfigFields) -> RopeScaling:
    """Read YaRN settings like transformers."""
    original = _original_length(hf, rope)
    factor = rope.number("factor", hf.size("max_position_embeddings") / original, **FACTOR)
    low, high = rope.number("beta_slow", 1.0, **FACTOR), rope.number("beta_fast", 32.0, **FACTOR)
    if low >= high:
        raise UsageError(f"{hf.where} has beta_slow {low:g}, which must be below beta_fast, {high:g}")
    scaled = lambda mscale: 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
    mscale, mscale_all_dim = rope.number("mscale", 0.0, minimum=0.0), rope.number("mscale_all_dim", 0.0, minimum=0.0)
    amplitude = scaled(mscale) / scaled(mscale_all_dim) if mscale and mscale_all_dim else scaled(1.0)
    amplitude = rope.number("attention_factor", amplitude, **FACTOR)
    return RopeScaling("yarn", factor, low, high, original, amplitude, rope.flag("truncate", True))


def _longrope(hf: ConfigFields, rope: ConfigFields, rotary_dim: int) -> RopeScaling:
    """Read LongRoPE settings like transformers."""
    for name in ("short_mscale", "long_mscale"):
        if rope.has(name):
            raise UsageError(f"{hf.where} has {rope.prefix}{name}, which specjax does not support")
    original = _original_length(hf, rope)
    factor = rope.number("factor", hf.size("max_position_embeddings") / original, **FACTOR)
    amplitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    amplitude = rope.number("attention_factor", amplitude, **FACTOR)
    short, long = (_divisors(rope, name, rotary_dim // 2) for name in ("short_factor", "long_factor"))
    return RopeScaling("longrope", factor, original_positions=original, amplitude=amplitude, short=short, long=long)


def _divisors(rope: ConfigFields, name: str, count: int) -> tuple[float, ...]:
    """Read one divisor for each frequency."""
    divisors = rope.array(name, (int, float), count)
    if not divisors:
        raise UsageError(
            f"{rope.where} lacks the field {rope.prefix}{name}, so the rotary frequencies are unknown; add it"
        )
    invalid = [x for x in divisors if not FACTOR["minimum"] <= x <= FACTOR["maximum"]]
    if invalid:
        description = f"numbers from {FACTOR['minimum']:g} to {FACTOR['maximum']:g}"
        raise UsageError(f"{rope.where} has {quote(invalid[0])} in {rope.prefix}{name}, which must have {description}")
    return tuple(map(float, divisors))


def rotary_from_gguf(meta: ConfigFields, *, whole_ends: bool | None = None) -> tuple[float, RopeScaling | None]:
    """Read (base, scaling) from GGUF metadata; see also `scaling_from_divisors`.

    whole_ends: `RopeScaling.whole` of YaRN, which files do not state; None: specjax reads no YaRN of this architecture.
    """
    base = meta.number("rope.freq_base", 10000.0, **BASE)
    kind = meta.text("rope.scaling.type", "none")
    if kind == "yarn" and whole_ends is not None:
        return base, _yarn_from_gguf(meta, whole_ends)
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 1.0, minimum=0.0), minimum=0.0)
    if kind not in ("none", "linear"):
        supported = "linear, llama3" if whole_ends is None else "linear, llama3, yarn"
        raise UsageError(
            f"{meta.where} has RoPE scaling {quote(kind)}, which specjax does not support (only {supported})"
        )
    return base, RopeScaling("linear", factor) if factor not in (0.0, 1.0) else None


def _yarn_from_gguf(meta: ConfigFields, whole_ends: bool) -> RopeScaling:
    """Read YaRN settings. Raises: UsageError for factors that the authors' YaRN does not have.

    Such factors are not certain. Converters write the factor on rotated numbers of transformers as `attn_factor`, and
    llama.cpp multiplies that of YaRN by it.
    """
    for name in ("yarn_ext_factor", "yarn_attn_factor", "attn_factor"):
        value = meta.number(f"rope.scaling.{name}", 1.0, minimum=-1e9)
        is_set = value >= 0 or name == "attn_factor"  # llama.cpp has negative numbers for settings that a file lacks
        if value != 1.0 and is_set:
            raise UsageError(
                f"{meta.where} has {meta.prefix}rope.scaling.{name} {value:g}, and specjax supports 1 only; use its "
                "safetensors"
            )
    low = meta.number("rope.scaling.yarn_beta_slow", 1.0, **FACTOR)
    high = meta.number("rope.scaling.yarn_beta_fast", 32.0, **FACTOR)
    if low >= high:
        raise UsageError(f"{meta.where} has yarn_beta_slow {low:g}, which must be below yarn_beta_fast, {high:g}")
    factor = meta.number("rope.scaling.factor", **FACTOR)
    original = meta.size("rope.scaling.original_context_length", minimum=2, maximum=POSITIONS)
    amplitude = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
    return RopeScaling("yarn", factor, low, high, original, amplitude, whole_ends)


def scaling_from_divisors(
    factors: Mapping[str, np.ndarray], meta: ConfigFields, rotary_dim: int, base: float
) -> RopeScaling | None:
    """Return the scaling for the frequency divisors of a file, by names in GGUF_DIVISORS; None without any."""
    llama3_name, *sets = GGUF_DIVISORS
    meta.skip("rope.scaling.original_context_length")  # the tables of divisors and llama3 state the rest
    if llama3_name in factors:
        return llama3_from_factors(factors[llama3_name], rotary_dim, base, meta.where)
    if not factors:
        return None
    long, short = (_divisors_of_gguf(factors.get(name), name, rotary_dim // 2, meta.where) for name in sets)
    original = meta.size("rope.scaling.original_context_length", minimum=2, maximum=POSITIONS)
    factor = meta.size("context_length") / original
    amplitude = meta.number("rope.scaling.attn_factor", 1.0, **FACTOR)
    return RopeScaling("longrope", factor, original_positions=original, amplitude=amplitude, short=short, long=long)


def _divisors_of_gguf(divisors: np.ndarray | None, name: str, count: int, where: str) -> tuple[float, ...]:
    if (
        divisors is None
        or divisors.shape != (count,)
        or not FACTOR["minimum"] <= divisors.min() <= divisors.max() <= FACTOR["maximum"]
    ):
        description = f"{count} numbers from {FACTOR['minimum']:g} to {FACTOR['maximum']:g}"
        raise UsageError(f"{where} must have {name} with {description}, because it has the other set of longrope")
    return tuple(map(float, divisors))


def llama3_from_factors(factors: np.ndarray, dim: int, base: float, where: str) -> RopeScaling:
    """Return the scaling with the divisors that GGUF stores as `rope_freqs.weight` float32[h/2].

    GGUF stores only the divisors. All Llama 3.x models share the other constants, so the largest divisor determines the
    scaling.
    """
    error = UsageError(
        f"{where} has a rope_freqs.weight that differs from that of Llama 3, which specjax does not support"
    )
    if factors.shape != (dim // 2,) or not (np.isfinite(factors) & (factors > 0)).all():
        raise error
    scaling = RopeScaling("llama3", float(np.max(factors)))
    expected = np.asarray(rope_frequencies(dim, base) / rope_frequencies(dim, base, scaling))
    if not np.allclose(factors, expected, rtol=1e-3):
        raise error
    return scaling
