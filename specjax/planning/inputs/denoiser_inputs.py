"""Checks of options for autoregressive and for diffusion models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.catalog import METHODS, Method, of_kind
from specjax.errors import UsageError
from specjax.models.loading.families.denoisers import DenoiserSettings


def default_method(reading: DenoiserSettings) -> str:
    """Return the published procedure of a diffusion model."""
    return "sdar" if reading.attention == "block_causal" else "llada"


def check_autoregressive(target: Any, method: str | None, block: int | None) -> None:
    """Raise a UsageError for options of diffusion models."""
    if method is not None and method in METHODS and METHODS[method].kind == "diffusion":
        raise UsageError(
            f"--method {method} decodes diffusion models, and {target.name} is autoregressive; choose another method, "
            "or a --target such as llada_8b"
        )
    if block is not None:
        raise UsageError(f"--block applies to diffusion models, and {target.name} is autoregressive; leave it out")


def check_denoiser(target: Any, reading: DenoiserSettings, method: str | None, drafts: Mapping[str, Any]) -> str:
    """Return the method, by default the published one. Raises: UsageError for options of autoregressive models."""
    for flag, value in drafts.items():
        if value is not None:
            raise UsageError(
                f"{flag} applies to autoregressive models, and {target.name} is a diffusion model; leave it out"
            )
    methods = of_kind("diffusion")
    if method is not None and method not in methods:
        problem = f"is a {METHODS[method].kind} for autoregressive models" if method in METHODS else "is unknown"
        raise UsageError(
            f"--method {method} {problem}, and {target.name} is a diffusion model; choose one of {', '.join(methods)}"
        )
    return method or default_method(reading)


def in_blocks(
    reading: DenoiserSettings, row: Method, options: Mapping[str, str], block: int | None
) -> tuple[DenoiserSettings, Mapping[str, str]]:
    """Return settings and options with blocks of `block` columns, set for the model or, without blocks, for the method.

    Raises: UsageError for a method without blocks.
    """
    if block is None:
        return reading, options
    if block < 1:
        raise UsageError(f"--block must be at least 1, not {block}")
    if reading.block is not None:
        return reading._replace(block=block), options
    if row.option("block") is None:
        raise UsageError(f"--block: method {row.name} has no blocks; leave it out, or choose llada")
    if "block" in options:
        raise UsageError("--block and --set block set the same option; leave one out")
    return reading, {**options, "block": str(block)}
