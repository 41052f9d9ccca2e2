"""Names of the formats of a quantised model, for cards, configs and messages."""

from __future__ import annotations

from typing import Any

from specjax.models.storage.schemes import SCHEMES
from specjax.numerics.quantized_array import FLOAT8, WeightFormat


def describe_formats(config: Any) -> str | None:
    """Return the scheme of a config, such as "int4-weights", or other formats in words; None: it is not quantised."""
    formats = [form for _, form in getattr(config, "quantized", ()) if form is not None]
    return ", ".join(dict.fromkeys(map(_format_name, formats))) or None


def _format_name(form: WeightFormat) -> str:
    for name, scheme in SCHEMES.items():
        has_number_type = (scheme.values == FLOAT8) == (form.values == FLOAT8)
        if has_number_type and scheme.has_values_of(form) and scheme.inputs == form.inputs:
            return name
    return " ".join(
        [
            "float8" if form.values == FLOAT8 else f"{form.bits} bits",
            *([f"in groups of {form.group}"] if form.group else []),
            *(["with offsets"] if form.has_offsets else []),
            *([f"by {form.inputs} activations"] if form.inputs else []),
        ]
    )
