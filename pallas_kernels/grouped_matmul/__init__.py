"""Products with weights that have one scale per group of inputs."""

from specjax.pallas_kernels.grouped_matmul.tpu import grouped_matmul, unsupported_reason

__all__ = ["grouped_matmul", "unsupported_reason"]
