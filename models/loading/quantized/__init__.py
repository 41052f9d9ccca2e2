"""Readers of quantised matrices in safetensors folders, one file per method."""

from specjax.models.loading.quantized.registry import (
    Quantization,
    as_matrices,
    is_quantized_folder,
    matrix_name,
    method_of,
    refuse_quantized,
    zero_biases,
)

__all__ = [
    "Quantization",
    "as_matrices",
    "is_quantized_folder",
    "matrix_name",
    "method_of",
    "refuse_quantized",
    "zero_biases",
]
