"""Products of activations and weights, in the form that is fastest with each backend's compiler."""

from specjax.models.products.padding import fill_tile, pad_tokens
from specjax.models.products.plain import matmul, matmul_same_bits, take_rows

__all__ = ["fill_tile", "matmul", "matmul_same_bits", "pad_tokens", "take_rows"]
