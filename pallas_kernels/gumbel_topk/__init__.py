"""The k best of logits plus Gumbel noise: k draws without replacement per row, in order."""

from __future__ import annotations

import jax

from specjax.pallas_kernels.gumbel_topk import reference, tpu

__all__ = ["gumbel_topk"]


def gumbel_topk(keys, logits, k, *, temperature=None, valid=None, implementation=None, **options):
    """The k largest of `logits / temperature + noise` of each row, descending: a sample without replacement, in order.

    The noise is `specjax.sampling.noise(keys, V)` on every backend, so equal keys give equal draws wherever they run,
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
    if options and implementation != "pallas_tpu":
        raise ValueError(f'options are for implementation="pallas_tpu" only: got {sorted(options)}')
    arguments = {"temperature": temperature, "valid": valid}
    xla = lambda: reference.gumbel_topk(keys, logits, k, **arguments)
    kernel = lambda: tpu.gumbel_topk(keys, logits, k, **arguments, **options)
    reason = tpu.unsupported(keys, logits, k)
    if implementation is None and jax.sharding.get_abstract_mesh().size > 1:
        reason = "is for programs on one device; the compiler splits XLA's form over a mesh by itself"
    if implementation == "xla" or (implementation is None and reason):
        return xla()
    if implementation is None:
        return jax.lax.platform_dependent(tpu=kernel, default=xla)
    if implementation != "pallas_tpu":
        raise NotImplementedError(
            f'gumbel_topk has no implementation "{implementation}"; use None, "xla" or "pallas_tpu"'
        )
    if reason:
        raise NotImplementedError(f"gumbel_topk on pallas_tpu {reason}")
    return kernel()


def _check(keys, logits, k, temperature):
    rows, vocab = logits.shape[:-1], logits.shape[-1]
    if not 1 <= k <= vocab:
        raise ValueError(f"k must lie between 1 and the vocabulary's {vocab}, not {k}")
    if keys is not None and (keys.shape != rows or not jax.dtypes.issubdtype(keys.dtype, jax.dtypes.prng_key)):
        raise ValueError(f"keys must be typed keys of shape {rows}, one per row, not {keys.dtype}{list(keys.shape)}")
    if temperature is not None and getattr(temperature, "shape", ()) not in ((), rows):
        raise ValueError(f"temperature must be a scalar or of shape {rows}, not {temperature.shape}")
