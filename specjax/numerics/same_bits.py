"""The dtypes, backends and meshes for which a token's logits have the same bits in every pass."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from specjax.errors import UsageError


class SameBitsError(UsageError):
    """Error for a model, device or setting for which `same_bits` was not shown to hold.

    Args:
      reason: a predicate whose subject is the option. It may end with a fix, after a semicolon.
      option, fix: the name of the option, and the fix that leaves it out.
    """

    def __init__(self, reason: str, option: str = "same_bits", fix: str = "leave same_bits out"):
        self.reason = reason
        super().__init__(f"{option} {reason}{', or' if ';' in reason else ';'} {fix}")


def check_same_bits(
    dtype: str, cache_dtype: str | None = None, mesh: Mesh | None = None, over: tuple[str, ...] | None = None
) -> None:
    """Check that the logits of a model have the same bits on the devices of `mesh`, or of JAX's default backend.

    over: axes that split the model, besides "data"; None: all.

    Raises: SameBitsError with the reason, where that was not shown.
    """
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    names = () if mesh is None else mesh.axis_names if over is None else ("data", *over)
    axes = {} if mesh is None else {axis: mesh.shape.get(axis, 1) for axis in names}
    reason = unsupported_reason(dtype, cache_dtype, platform, axes)
    if reason is not None:
        raise SameBitsError(reason)


def unsupported_reason(dtype: str, cache_dtype: str | None, platform: str, axes: Mapping[str, int]) -> str | None:
    """Return why logits may depend on the pass, as a predicate with a fix; None if they do not.

    platform: "cpu", "gpu" or "tpu". axes: sizes of the mesh axes that split the model or the batch.
    """
    if dtype != "bfloat16":
        return f'needs dtype "bfloat16", not "{dtype}"; use that dtype'
    if platform not in ("cpu", "tpu"):
        return f'was not shown to hold on the backend "{platform}"; use dtype "float32", where only near-ties differ'
    if platform == "tpu" and cache_dtype is not None:
        return f'does not hold on a TPU with cache_dtype "{cache_dtype}"; leave cache_dtype out'
    axis = next((axis for axis in ("data", "sequence") if axes.get(axis, 1) > 1), None)
    if axis is not None:
        return f'does not hold on a mesh that splits rows or slots; set its axis "{axis}" to 1'
    return None
