"""Kinds of the layers of a model: how each mixes tokens, what follows, and the pattern in which they repeat."""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple

from specjax.models.hybrid.config import HybridConfig, LayerKind


class Kind(NamedTuple):
    """Sublayers of a layer, by the words of `specjax.models.hybrid.config`, and "windowed_attention"."""

    mixer: str
    feed: str
    shares_keys: bool = False  # its attention reads the keys and values of an earlier layer, and stores none


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
        return sum("attention" in kind.mixer and not kind.shares_keys for kind in self.kinds)


def layers_of(config: Any) -> LayerPattern:
    """Return the kinds of the layers of a config of `specjax.models`."""
    if isinstance(config, HybridConfig):
        return LayerPattern(tuple(map(_kind_of, _configs_of_layers(config), config.kinds)))
    full = config.is_global or (config.window is None,) * config.num_layers
    mixers = ("attention" if is_full or config.window is None else "windowed_attention" for is_full in full)
    dense = range(config.num_layers) if config.experts is None else config.experts.dense_layers
    feeds = ("gated" if layer in dense else "moe" for layer in range(config.num_layers))
    return LayerPattern(tuple(map(Kind, mixers, feeds)))


def sizes_of(config: Any) -> dict[str, dict[str, Any]]:
    """Return the sizes of each mixer that the model has, and those of its experts, by name."""
    sizes = _sizes_of_attention(config)
    mixers = {kind.mixer for kind in layers_of(config).kinds}
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
    if config.experts is not None:
        experts = config.experts
        sizes["experts"] = {
            "count": experts.num_experts, "chosen": experts.routing.num_chosen, "width": experts.width,
            "shared_width": experts.shared_width,
        }  # fmt: skip
    return sizes


def _configs_of_layers(config: HybridConfig) -> list[HybridConfig]:
    return [config.of_layer(layer) for layer in range(config.num_layers)]


def _kind_of(layer: HybridConfig, kind: LayerKind) -> Kind:
    mixer = "windowed_attention" if kind.mixer == "attention" and layer.window is not None else kind.mixer
    return Kind(mixer, kind.feed, kind.attends and not kind.has_keys)


def _sizes_of_attention(config: Any) -> dict[str, dict[str, Any]]:
    """Return the sizes of attention: one entry if all layers share them, else one for each kind of attention."""
    kinds = layers_of(config).kinds
    if isinstance(config, HybridConfig) and config.latent is not None:
        latent = config.latent
        return {
            "latent_attention": {
                "heads": config.num_heads, "cached": latent.cached, "rotated": latent.rotary_dim,
                "value_dim": latent.value_dim, "query_rank": latent.query_rank,
            }
        }  # fmt: skip
    attending = {kind.mixer: i for i, kind in reversed([*enumerate(kinds)]) if "attention" in kind.mixer}
    if not isinstance(config, HybridConfig) or "windowed_attention" not in attending:
        return {"attention": _attention_sizes(config)} if attending else {}
    return {mixer: _attention_sizes(config.of_layer(layer)) for mixer, layer in attending.items()}


def _attention_sizes(layer: Any) -> dict[str, Any]:
    return {
        "heads": layer.num_heads, "kv_heads": layer.num_kv_heads, "head_dim": layer.head_dim,
        "rotated": _rotated(layer), "window": layer.window, "output_gate": layer.attention_gate,
        "sinks": layer.sinks,
    }  # fmt: skip


def active_parameters(config: Any, total: int) -> int:
    """Return the number of a model's `total` parameters that the pass of one token reads: those of chosen experts."""
    if config.experts is None:
        return total
    num_layers = sum(kind.feed == "moe" for kind in layers_of(config).kinds)
    unused = config.experts.num_experts - config.experts.routing.num_chosen
    biases = (2 * config.experts.width + config.width) * config.experts.bias
    return total - num_layers * unused * (3 * config.experts.width * config.width + biases)


def _rotated(config: Any) -> int:
    """Return how many numbers of a query or key are rotated."""
    scaling, size = config.rope_scaling, config.rotary_dim or config.head_dim
    if scaling is not None and scaling.kind == "proportional":  # the frequencies of the other pairs are 0
        size = 2 * int(scaling.share * size // 2)
    return size if getattr(config, "rotates", True) else 0
