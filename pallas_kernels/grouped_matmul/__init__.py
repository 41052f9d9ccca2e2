"""Products with weights that have one scale per group of inputs."""

from specjax.pallas_kernels.grouped_matmul.tpu import (
    chunk_inputs,
    grouped_matmul,
    grouped_matmul_of,
    too_wide_reason,
    unsupported_reason,
)

__all__ = ["chunk_inputs", "grouped_matmul", "grouped_matmul_of", "too_wide_reason", "unsupported_reason"]
