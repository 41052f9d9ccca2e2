"""Attention of new tokens over a cached prefix and over each other."""

from specjax.pallas_kernels.tree_attention.xla import blocked_tree_attention as _xla

__all__ = ["tree_attention"]


def tree_attention(q, k, v, prefix_k, prefix_v, length, positions, mask, *, implementation=None, **options):
    """See `reference.tree_attention`. `implementation`: None or "xla"."""
    if implementation not in (None, "xla"):
        raise NotImplementedError(f'tree_attention has no implementation "{implementation}"; use None or "xla"')
    return _xla(q, k, v, prefix_k, prefix_v, length, positions, mask, **options)
