"""Schemes of quantisation of weights and caches: their names, and the names of the models that they make."""

from __future__ import annotations

from typing import Any

from specjax.catalog.methods import METHODS, of_kind
from specjax.catalog.options import read_call
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


def check_cache_dtype(cache_dtype: str | None, setting: str = "cache_dtype") -> None:
    """Check that a cache dtype is None, "int8" or a compressed form such as "gear:4".

    Raises: UsageError, with the name of the setting.
    """
    forms = of_kind("cache")
    if cache_dtype in (None, "int8"):
        return
    if not isinstance(cache_dtype, str) or cache_dtype.partition(":")[0] not in forms:
        choices = " or ".join(f"{name}:BITS" for name in forms)
        raise UsageError(
            f'{setting} must be "int8", {choices} or left out, not "{cache_dtype}"; without it the cache has the dtype '
            "of the model"
        )
    try:
        compressed_form(cache_dtype)
    except UsageError as error:
        raise UsageError(f"{setting}: {error}") from None


def compressed_form(cache_dtype: str | None) -> dict[str, Any] | None:
    """Return the options of a compressed cache such as "gear:4"; None for other cache dtypes.

    Raises: UsageError for a wrong option.
    """
    name = (cache_dtype or "").partition(":")[0]
    if name not in of_kind("cache"):
        return None
    row = METHODS[name]
    options = {option.name: option.default for option in row.options} | read_call(cache_dtype or "", row.options)
    return check_gear(**options)


def of_drafts(cache_dtype: str | None) -> str | None:
    """Return the dtype of the caches of draft models. They rewind, which a compressed cache cannot do."""
    return None if compressed_form(cache_dtype) is not None else cache_dtype


def check_gear(*, bits: int, block: int, rank: int, outliers: float) -> dict[str, Any]:
    """Check the options of GEAR and return them. Raises: UsageError for a value out of range."""
    require(bits in (2, 4, 8), f"bits must be 2, 4 or 8, not {bits}")
    require(
        block in BLOCK_SIZES, f"block must be one of {', '.join(map(str, BLOCK_SIZES))}, not {block}; the default is 64"
    )
    require(0 <= rank <= 64, f"rank must be from 0 to 64, not {rank}")
    require(0 <= outliers <= 1, f"outliers must be from 0 to 1, not {outliers:g}; the default is 0.02")
    return {"bits": bits, "block": block, "rank": rank, "outliers": outliers}


BLOCK_SIZES = (4, 8, 16, 32, 64, 128, 256)
"""The numbers of tokens that a block of a compressed cache may have."""
