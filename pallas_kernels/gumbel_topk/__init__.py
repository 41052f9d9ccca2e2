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
    """The k largest of `logits / temperature + noise` of each row, descending: a sample without replacement, in order.

    The noise is `specjax.numerics.sampling.noise(keys, V)` on every backend, so equal keys give equal draws wherever they run,
    up to the rounding of a logarithm.

    Args:
      keys: typed keys [R...]; None: no noise, the k largest logits.
      logits: float32 or bfloat16 [R..., V], without NaN; -inf where a token cannot be drawn.
      k: at most V. temperature: positive, a scalar or [R...]; None: 1. valid: bool[V] or [R..., V]; None: all.
      implementation: None: the TPU kernel where the program is lowered for TPUs and `tpu.unsupported` has nothing to
        say, XLA elsewhere. "xla": `reference.gumbel_topk`. "pallas_tpu": the kernel.
      options: of `tpu.gumbel_topk` (block, width, slots, device_kind, interpret), with "pallas_tpu" alone.

    Returns: ids int32[R..., k] and scores float32[R..., k]; of equal scores the lower id comes first. Where fewer than
      k tokens can be drawn, the scores that are left are -inf and their ids are some ids below V, perhaps equal ones.

    Raises: ValueError for shapes that do not fit, a k out of range, or options without the kernel they are for;
      NotImplementedError for a named implementation that does not exist or cannot do it.
    """
    _check(keys, logits, k, temperature)
    keys = None if keys is None else threefry(keys)
    if options and implementation != "pallas_tpu":
        raise ValueError(f'options are for implementation="pallas_tpu" only: got {sorted(options)}')
    if implementation not in (None, "xla", "pallas_tpu"):
        raise NotImplementedError(
            f'gumbel_topk has no implementation "{implementation}"; use None, "xla" or "pallas_tpu"'
        )
    mesh = jax.sharding.get_abstract_mesh()
    if implementation is None and mesh.size > 1 and "data" in mesh.axis_names and not mesh.manual_axes:
        return _over(mesh, keys, logits, k, temperature, valid)
    return _on_one_device(keys, logits, k, temperature, valid, implementation, options)


def likeliest(logits, k):
    """The k likeliest tokens of logits [R..., V], best first, and their log-probabilities: ids int32[R..., k] and
    float32[R..., k].

    The best score is the maximum that a stable sum of exponentials needs: looking for it again took 0.17 of 0.27 ms for
    64 rows of 128k tokens on v5e, by its compiler's schedule. The barriers: where XLA sees a part of its top-k taken,
    it sorts the vocabulary on CPU instead (10 ms per row of 49k); and it turns the logits of several tokens, which its
    product leaves lying across, for each of their readers.
    """
    logits = jax.lax.optimization_barrier(logits)
    ids, scores = jax.lax.optimization_barrier(gumbel_topk(None, logits, k))
    top = scores[..., :1]
    total = jnp.sum(jnp.exp(logits.astype(jnp.float32) - top), -1, keepdims=True)
    return ids, scores - top - jnp.log(total)


@functools.cache
def _tpu():
    """Imported on first use: Pallas takes a moment."""
    from specjax.pallas_kernels.gumbel_topk import tpu

    return tpu


def _on_one_device(keys, logits, k, temperature, valid, implementation=None, options=MappingProxyType({}), **where):
    """`where`: first_id, the id of the first of these logits, if they are a part of a vocabulary."""
    arguments = {"temperature": temperature, "valid": valid, **where}
    xla = lambda: reference.gumbel_topk(keys, logits, k, **arguments)
    tpu = _tpu()
    kernel = lambda: tpu.gumbel_topk(keys, logits, k, **arguments, **options)
    reason = tpu.unsupported(keys, logits, k)
    if implementation == "xla" or (implementation is None and reason):
        return xla()
    if implementation is None:
        return jax.lax.platform_dependent(tpu=kernel, default=xla)
    if reason:
        raise NotImplementedError(f"gumbel_topk on pallas_tpu {reason}")
    return kernel()


def _over(mesh, keys, logits, k, temperature, valid):
    """On a mesh with "data" for the rows and other axes for the vocabulary: each device the best of its rows and of its
    part of the vocabulary, then the best of all parts. Only ids and scores travel.
    """
    rows, others = mesh.shape["data"], tuple(axis for axis in mesh.axis_names if axis != "data")
    parts = mesh.size // rows
    batch = "data" if logits.ndim > 1 and logits.shape[0] % rows == 0 else None
    vocab = others if others and logits.shape[-1] % parts == 0 and k <= logits.shape[-1] // parts else None
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
        # In the order of the parts: of equal scores the lower id still comes first.
        ids, scores = (jax.lax.all_gather(x, vocab, axis=x.ndim - 1, tiled=True) for x in (ids, scores))
        scores, place = jax.lax.top_k(scores, k)
        return take_along(ids, place, -1), scores

    specs = by_row, by_token, by_row, by_token
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(by_row, by_row), check_vma=False)
    return run(words, logits, heat, mask)


def _check(keys, logits, k, temperature):
    rows, vocab = logits.shape[:-1], logits.shape[-1]
    if not 1 <= k <= vocab:
        raise ValueError(f"k must lie between 1 and the vocabulary's {vocab}, not {k}")
    if keys is not None and (keys.shape != rows or not jax.dtypes.issubdtype(keys.dtype, jax.dtypes.prng_key)):
        raise ValueError(f"keys must be typed keys of shape {rows}, one per row, not {keys.dtype}{list(keys.shape)}")
    if temperature is not None and getattr(temperature, "shape", ()) not in ((), rows):
        raise ValueError(f"temperature must be a scalar or of shape {rows}, not {temperature.shape}")
