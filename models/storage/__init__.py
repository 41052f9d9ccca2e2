"""Form in which a process stores a model: its layers, projections and cache."""

from specjax.models.storage.backends import storage_options
from specjax.models.storage.joined import JOINED, join_projections, rows_in_joined, split_projections
from specjax.models.storage.schemes import (
    MIN_GROUP,
    SCHEMES,
    bits_of,
    check_exact_products,
    format_of,
    is_of_experts,
    num_bytes,
    quantize_params,
    quantized_config,
    scheme_format,
    stored_format,
    with_formats,
    with_quantized,
)

__all__ = [
    "JOINED",
    "MIN_GROUP",
    "SCHEMES",
    "bits_of",
    "check_exact_products",
    "format_of",
    "is_of_experts",
    "join_projections",
    "num_bytes",
    "quantize_params",
    "quantized_config",
    "rows_in_joined",
    "scheme_format",
    "split_projections",
    "storage_options",
    "stored_format",
    "with_formats",
    "with_quantized",
]
