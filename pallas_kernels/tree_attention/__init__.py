"""Attention of new tokens over a cached prefix and over each other."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import jax

from specjax.arrays import scopes
from specjax.arrays.modes import with_standard_modes
from specjax.pallas_kernels.tree_attention.by_slot import tree_attention_by_slot
from specjax.pallas_kernels.tree_attention.over_slots import shard_over_slots
from specjax.pallas_kernels.tree_attention.reference import tree_attention as _reference
from specjax.pallas_kernels.tree_attention.reference import with_sinks
from specjax.pallas_kernels.tree_attention.shared import shared_tree_attention
from specjax.pallas_kernels.tree_attention.static import static_tree_attention
from specjax.pallas_kernels.tree_attention.xla import blocked_tree_attention as _xla

__all__ = ["shard_over_slots", "tree_attention"]

IMPLEMENTATIONS = ("xla", "pallas_tpu", "mosaic_gpu", "by_slot")


@jax.named_scope(scopes.ATTENTION)
def tree_attention(
    q, k, v, prefix_k, prefix_v, length, positions, mask, *, key_positions=None, layer=None, scale, window=None,
    softcap=None, with_total=False, implementation=None, first=None, sinks=None, value_size=None,
    bias=None,
):  # fmt: skip
    """Compute `reference.tree_attention`, which also defines the arguments and the derivatives.

    The kernel and the loop over blocks have no derivatives. A prefix of fewer rows than q is shared by several rows,
    see `shared.shared_tree_attention`.

    Args:
      first: int32[B], the first slot of a shared prefix that each row attends to. None: 0.
      sinks: float[H], as in the reference. They are applied to the result of an implementation without them.
      bias: float[H, D], as in the reference. "xla" and "pallas_tpu" support it, without sinks or a shared prefix.
      implementation: "xla" runs everywhere, "pallas_tpu" on TPU. None: the TPU kernel if the program is lowered for a
        TPU and the kernel supports these shapes, else "xla". "by_slot" runs everywhere, for bfloat16. With it no bit of
        a token's result depends on the pass that computes it. "mosaic_gpu" runs on Hopper GPUs, for bfloat16. It was
        never timed, so only its name selects it.

    Raises: NotImplementedError for an unknown implementation, or for arguments that the named one does not support.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        *names, last = IMPLEMENTATIONS
        raise NotImplementedError(
            f'tree_attention has no implementation "{implementation}"; use None, {", ".join(names)} or {last}'
        )
    is_shared = first is not None or prefix_k.shape[-4] < len(q)
    if bias is not None and (is_shared or sinks is not None or implementation not in (None, "xla", "pallas_tpu")):
        raise NotImplementedError(
            'tree_attention adds a bias by distance in "xla" and "pallas_tpu" only, without sinks or a shared prefix'
        )
    if is_shared:
        return shared_tree_attention(
            q, k, v, prefix_k, prefix_v, length, positions, mask, first=first, key_positions=key_positions, layer=layer,
            scale=scale, window=window, softcap=softcap, sinks=sinks, value_size=value_size,
        )  # fmt: skip
    if sinks is not None:
        out, total = tree_attention(
            q, k, v, prefix_k, prefix_v, length, positions, mask, key_positions=key_positions, layer=layer, scale=scale,
            window=window, softcap=softcap, with_total=True, implementation=implementation, value_size=value_size,
        )  # fmt: skip
        out, total = with_sinks(out, total, sinks)
        return (out, total) if with_total else out.astype(q.dtype)
    arrays = q, k, v, prefix_k, prefix_v, length, positions, mask, key_positions, layer, window, bias
    static = {"scale": scale, "softcap": softcap, "with_total": with_total, "value_size": value_size}
    if not prefix_k.shape[-2]:
        return _run_reference(*arrays, **static)
    on_xla: Callable = functools.partial(_run_xla, **static)
    on_gpu: Callable = functools.partial(_run_static, **static)
    on_tpu: Callable = functools.partial(_run_kernel, **static)
    run: Callable
    if implementation == "pallas_tpu":
        run = on_tpu
    elif implementation == "mosaic_gpu":
        run = functools.partial(_run_kernel, kernel="gpu", **static)
    elif implementation == "by_slot":
        run = functools.partial(_run_by_slot, **static)
        if not with_total and not _load_kernel("tpu_by_slot").unsupported_reason(q, k, prefix_k):
            more = {"scale": scale, "softcap": softcap, "value_size": value_size}
            on_tpu = functools.partial(_run_kernel, kernel="tpu_by_slot", **more)
            run = functools.partial(jax.lax.platform_dependent, tpu=on_tpu, default=run)
    elif implementation == "xla" or _load_kernel().unsupported_reason(q, k, prefix_k, value_size, bias):
        run = functools.partial(jax.lax.platform_dependent, cuda=on_gpu, rocm=on_gpu, default=on_xla)
    else:
        run = functools.partial(jax.lax.platform_dependent, tpu=on_tpu, cuda=on_gpu, rocm=on_gpu, default=on_xla)
    return _differentiable(run, functools.partial(_run_reference, **static), *arrays)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _differentiable(run: Callable, same: Callable, *arrays):
    """Return `run(*arrays)`, with the derivatives of `same`."""
    return run(*arrays)


@_differentiable.defjvp
def _differentiate(run, same, primals, tangents):
    return _differentiable(run, same, *primals), jax.jvp(same, primals, tangents)[1]


def _run_reference(q, k, v, prefix_k, prefix_v, length, positions, mask, key_positions, layer, window, bias, **static):
    return _reference(
        q, k, v, prefix_k, prefix_v, length, positions, mask, key_positions=key_positions, layer=layer, window=window,
        bias=bias, **static,
    )  # fmt: skip


def _load_kernel(kernel: str = "tpu"):
    """Return a kernel's module, imported on first use, because importing Pallas is slow."""
    return importlib.import_module(f"{__name__}.{kernel}")


def _run_xla(q, k, v, prefix_k, prefix_v, length, positions, mask, key_positions, layer, window, bias, **static):
    return _xla(
        q, k, v, prefix_k, prefix_v, length, positions, mask, key_positions=key_positions, layer=layer, window=window,
        bias=bias, **static,
    )  # fmt: skip


def _run_static(q, k, v, prefix_k, prefix_v, length, positions, mask, key_positions, layer, window, bias, **static):
    return static_tree_attention(
        q, k, v, prefix_k, prefix_v, length, positions, mask, key_positions=key_positions, layer=layer, window=window,
        bias=bias, **static,
    )  # fmt: skip


def _run_by_slot(q, k, v, prefix_k, prefix_v, length, positions, mask, key_positions, layer, window, bias, **static):
    return tree_attention_by_slot(
        q, k, v, prefix_k, prefix_v, length, positions, mask, key_positions=key_positions, layer=layer, window=window,
        **static,
    )  # fmt: skip


# `jit` makes equal layers share one trace: 0.6 ms instead of 27 ms.
@functools.partial(jax.jit, static_argnames=("kernel", "scale", "softcap", "with_total", "value_size"))
@with_standard_modes  # Mosaic's indices are 32 bits
def _run_kernel(
    q, k, v, prefix_k, prefix_v, length, positions, mask, key_positions, layer, window, bias, *, kernel="tpu", **static
):  # fmt: skip
    optional = {} if bias is None else {"bias": bias}
    return _load_kernel(kernel).tree_attention(
        q, k, v, prefix_k, prefix_v, length, positions, mask, key_positions=key_positions, layer=layer, window=window,
        **optional, **static,
    )  # fmt: skip
