"""Schemes of quantisation: their names, and the names of the models that they make."""

from __future__ import annotations

from specjax.errors import UsageError, require

SCHEME_NAMES = ("int8", "int8-weights", "int4-weights", "fp8")
"""The values of `load(quantize=...)`. `models/storage/schemes.py` has their formats."""


def check_scheme(name: str | None, setting: str = "quantize") -> None:
    """Check the name of a scheme, or None. Raises: UsageError, with the name of the setting."""
    if name is not None and name not in SCHEME_NAMES:
        raise UsageError(f'{setting} must be one of {", ".join(SCHEME_NAMES)}, not "{name}"')


def check_quantize(scheme: str | None, keep: bool | None, flag: str = "--quantize") -> None:
    """Raise a UsageError for an unknown scheme, or one for matrices that keep their file's formats."""
    check_scheme(scheme, flag)
    require(
        scheme is None or not keep,
        f"--keep-quantized keeps the formats of the file, and {flag} {scheme} rounds to others; leave one out",
    )


def with_scheme(name: str, scheme: str) -> str:
    """Return the name of a model after quantisation, such as "smollm2-135m (int8)"."""
    return f"{name} ({scheme})"


def without_scheme(name: str) -> str:
    """Return the name of a model before quantisation."""
    base, _, scheme = name.removesuffix(")").rpartition(" (")
    return base if name.endswith(")") and scheme in SCHEME_NAMES else name
