"""Names of the formats of a quantised model, for cards, configs and messages."""

from __future__ import annotations

from typing import Any

from specjax.models.storage.schemes import SCHEMES
from specjax.numerics.quantized_array import WeightFormat


def describe_formats(config: Any) -> str | None:
    """Return the scheme of a config, such as "int4-weights", or other formats in words; None: it is not quantised."""
    formats = [form for _, form in getattr(config, "quantized", ()) if form is not None]
    return ", ".join(dict.fromkeys(map(_format_name, formats))) or None


def _is_float(form: WeightFormat) -> bool:
    return form.values.startswith("float")


def _format_name(form: WeightFormat) -> str:
    for name, scheme in SCHEMES.items():
        is_same_type = scheme.values == form.values or not (_is_float(scheme) or _is_float(form))
        if is_same_type and scheme.has_values_of(form) and scheme.inputs == form.inputs:
            return name
    return " ".join(
        [
            form.values if _is_float(form) else f"{form.bits} bits",
            *([f"in groups of {form.group}"] if form.group else []),
            *(["with offsets"] if form.has_offsets else []),
            *([f"by {form.inputs} activations"] if form.inputs else []),
        ]
    )
