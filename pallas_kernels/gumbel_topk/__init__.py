"""The k best of logits plus Gumbel noise: k draws without replacement per row, in order."""

from __future__ import annotations

import functools
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax.arrays.indexing import take_along
from specjax.numerics.sampling import threefry
from specjax.pallas_kernels.gumbel_topk import reference

__all__ = ["gumbel_topk", "likeliest"]


def gumbel_topk(keys, logits, k, *, temperature=None, valid=None, implementation=None, **options):
    """Return the k largest of `logits / temperature + noise` of each row: a sample without replacement, in order.

    The noise is `specjax.numerics.sampling.noise(keys, V)` on every backend. So equal keys give equal draws everywhere,
    up to the rounding of a logarithm.

    Args:
      keys: typed keys [R...]; None: no noise, the k largest logits.
      logits: float32 or bfloat16 [R..., V], without NaN; -inf where a token cannot be drawn.
      k: at most V. temperature: positive, a scalar or [R...]; None: 1. valid: bool[V] or [R..., V]; None: all.
      implementation: "xla": `reference.gumbel_topk`. "pallas_tpu": the kernel. None: the kernel if the program is
        lowered for TPUs and `tpu.unsupported_reason` returns None, XLA elsewhere.
      options: options of `tpu.gumbel_topk` (block, width, slots, device_kind, interpret), only with "pallas_tpu".

    Returns: ids int32[R..., k] and scores float32[R..., k], descending. Of equal scores the lower id comes first. If
    fewer than k tokens can be drawn, the remaining scores are -inf; their ids are arbitrary ids below V and may repeat.

    Raises: ValueError for shapes that do not fit, a k out of range, or kernel options without "pallas_tpu";
      NotImplementedError for an unknown implementation, or one that does not support the arguments.
    """
    _check(keys, logits, k, temperature)
    keys = None if keys is None else threefry(keys)
    if options and implementation != "pallas_tpu":
        raise ValueError(f'options need implementation="pallas_tpu"; remove {sorted(options)}')
    if implementation not in (None, "xla", "pallas_tpu"):
        raise NotImplementedError(
            f'gumbel_topk has no implementation "{implementation}"; use None, "xla" or "pallas_tpu"'
        )
    mesh = jax.sharding.get_abstract_mesh()
    if implementation is None and mesh.size > 1 and "data" in mesh.axis_names and not mesh.manual_axes:
        return _on_mesh(mesh, keys, logits, k, temperature, valid)
    return _on_one_device(keys, logits, k, temperature, valid, implementation, options)


def likeliest(logits, k):
    """Return the k most likely tokens of logits [R..., V], best first, and their log-probabilities.

    The best score is the maximum that a stable sum of exponentials needs. A second search for it took 0.17 of 0.27 ms
    for 64 rows of 128k tokens on v5e, by its compiler's schedule. The barriers are needed on CPU: if XLA sees that a
    part of its top-k is used, it sorts the vocabulary instead (10 ms per row of 49k). They also stop it from
    transposing the logits of several tokens once for each of their readers.

    Returns: ids int32[R..., k] and log-probabilities float32[R..., k].
    """
    logits = jax.lax.optimization_barrier(logits)
    ids, scores = jax.lax.optimization_barrier(gumbel_topk(None, logits, k))
    top = scores[..., :1]
    total = jnp.sum(jnp.exp(logits.astype(jnp.float32) - top), -1, keepdims=True)
    return ids, scores - top - jnp.log(total)


@functools.cache
def _load_kernel():
    """Return the kernel's module, imported on first use, because importing Pallas is slow."""
    from specjax.pallas_kernels.gumbel_topk import tpu

    return tpu


def _on_one_device(keys, logits, k, temperature, valid, implementation=None, options=MappingProxyType({}), **where):
    """Run on one device. `where` has first_id, the id of the first logit, if the logits are a part of a vocabulary."""
    arguments = {"temperature": temperature, "valid": valid, **where}
    xla = lambda: reference.gumbel_topk(keys, logits, k, **arguments)
    tpu = _load_kernel()
    kernel = lambda: tpu.gumbel_topk(keys, logits, k, **arguments, **options)
    reason = tpu.unsupported_reason(keys, logits, k)
    if implementation == "xla" or (implementation is None and reason):
        return xla()
    if implementation is None:
        return jax.lax.platform_dependent(tpu=kernel, default=xla)
    if reason:
        raise NotImplementedError(f"gumbel_topk on pallas_tpu {reason}")
    return kernel()


def _on_mesh(mesh, keys, logits, k, temperature, valid):
    """Run on a mesh with "data" for the rows and other axes for the vocabulary.

    Each device finds the best of its rows in its part of the vocabulary, then the best of all parts are selected. Only
    ids and scores travel between devices.
    """
    rows, vocab_axes = mesh.shape["data"], tuple(axis for axis in mesh.axis_names if axis != "data")
    parts = mesh.size // rows
    batch = "data" if logits.ndim > 1 and logits.shape[0] % rows == 0 else None
    vocab = vocab_axes if vocab_axes and logits.shape[-1] % parts == 0 and k <= logits.shape[-1] // parts else None
    leading = [batch, *[None] * (logits.ndim - 2)] if logits.ndim > 1 else []
    by_row, by_token = PartitionSpec(*leading), PartitionSpec(*leading, vocab)
    words = None if keys is None else jax.random.key_data(keys)
    heat = None if temperature is None else jnp.broadcast_to(temperature, logits.shape[:-1])
    mask = None if valid is None else jnp.broadcast_to(valid, logits.shape)

    def local(words, logits, heat, mask):
        keys = None if words is None else jax.random.wrap_key_data(words, impl="threefry2x32")
        if vocab is None:
            return _on_one_device(keys, logits, k, heat, mask)
        first = jax.lax.axis_index(vocab) * logits.shape[-1]
        ids, scores = _on_one_device(keys, logits, k, heat, mask, first_id=first)
        # The parts are gathered in order, so of equal scores the lower id still comes first.
        ids, scores = (jax.lax.all_gather(x, vocab, axis=x.ndim - 1, tiled=True) for x in (ids, scores))
        scores, place = jax.lax.top_k(scores, k)
        return take_along(ids, place, -1), scores

    specs = by_row, by_token, by_row, by_token
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(by_row, by_row), check_vma=False)
    return run(words, logits, heat, mask)


def _check(keys, logits, k, temperature):
    rows, vocab = logits.shape[:-1], logits.shape[-1]
    if not 1 <= k <= vocab:
        raise ValueError(f"k must be from 1 to the vocabulary size {vocab}, not {k}")
    if keys is not None and (keys.shape != rows or not jax.dtypes.issubdtype(keys.dtype, jax.dtypes.prng_key)):
        raise ValueError(f"keys must be typed keys of shape {rows}, one per row, not {keys.dtype}{list(keys.shape)}")
    if temperature is not None and getattr(temperature, "shape", ()) not in ((), rows):
        raise ValueError(f"temperature must be a scalar or of shape {rows}, not {temperature.shape}")
