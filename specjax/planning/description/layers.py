"""Kinds of the layers of a model: how each mixes tokens, what follows, and the pattern in which they repeat."""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple

from specjax.models.hybrid.config import HybridConfig


class Kind(NamedTuple):
    """Sublayers of a layer, by the words of `specjax.models.hybrid.config`, and "windowed_attention"."""

    mixer: str
    feed: str


class LayerPattern(NamedTuple):
    """The kinds of all layers, in order."""

    kinds: tuple[Kind, ...]  # one per layer

    @property
    def counts(self) -> dict[Kind, int]:
        """Return the number of layers of each kind, the most frequent first."""
        numbers = {kind: self.kinds.count(kind) for kind in self.kinds}
        return dict(sorted(numbers.items(), key=lambda item: -item[1]))

    @property
    def group(self) -> tuple[tuple[Kind, int], ...]:
        """Return the runs of equal layers of the smallest group whose repetition gives all layers."""
        total = len(self.kinds)
        sizes = (size for size in range(1, total + 1) if total % size == 0)
        size = next(size for size in sizes if self.kinds == self.kinds[:size] * (total // size))
        return tuple((kind, len(list(run))) for kind, run in groupby(self.kinds[:size]))

    @property
    def num_groups(self) -> int:
        """Return how often the group repeats."""
        return len(self.kinds) // sum(length for _, length in self.group)

    def numbers(self, kind: Kind) -> tuple[int, ...]:
        """Return the numbers of the layers of a kind; the first layer is 0."""
        return tuple(index for index, other in enumerate(self.kinds) if other == kind)

    def count_attention(self) -> int:
        """Return the number of layers that store keys and values."""
        return sum("attention" in kind.mixer for kind in self.kinds)


def layers_of(config: Any) -> LayerPattern:
    """Return the kinds of the layers of a config of `specjax.models`."""
    if isinstance(config, HybridConfig):
        return LayerPattern(tuple(Kind(kind.mixer, kind.feed) for kind in config.kinds))
    full = config.is_global or (config.window is None,) * config.num_layers
    mixers = ("attention" if is_full or config.window is None else "windowed_attention" for is_full in full)
    return LayerPattern(tuple(Kind(mixer, "gated") for mixer in mixers))


def sizes_of(config: Any) -> dict[str, dict[str, Any]]:
    """Return the sizes of each mixer that the model has, by the name of the mixer."""
    sizes: dict[str, dict[str, Any]] = {}
    mixers = {kind.mixer for kind in layers_of(config).kinds}
    if any("attention" in mixer for mixer in mixers):
        sizes["attention"] = {
            "heads": config.num_heads, "kv_heads": config.num_kv_heads, "head_dim": config.head_dim,
            "rotated": _rotated(config), "window": config.window, "output_gate": config.attention_gate,
        }  # fmt: skip
    if "gated_delta" in mixers:
        delta = config.gated_delta
        sizes["gated_delta"] = {
            "key_heads": delta.num_key_heads, "value_heads": delta.num_value_heads, "key_dim": delta.key_dim,
            "value_dim": delta.value_dim, "taps": delta.kernel,
        }  # fmt: skip
    if any("mamba2" in mixer for mixer in mixers):
        mamba = config.mamba2
        sizes["mamba2"] = {
            "heads": mamba.num_heads, "head_dim": mamba.head_dim, "groups": mamba.num_groups,
            "state_dim": mamba.state_dim, "taps": mamba.kernel,
        }  # fmt: skip
    if "short_convolution" in mixers:
        sizes["short_convolution"] = {"channels": config.width, "taps": config.convolution_kernel}
    return sizes


def _rotated(config: Any) -> int:
    """Return how many numbers of a query or key are rotated."""
    return (config.rotary_dim or config.head_dim) if getattr(config, "rotates", True) else 0
