"""The shared part of the formats of heads with rows of images: EAGLE-1's names, and the field `image_rows`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from specjax.errors import UsageError
from specjax.models.heads.image_rows import ImageSizes
from specjax.models.llama import LlamaConfig
from specjax.models.loading.heads import eagle
from specjax.models.loading.heads.checkpoint_contents import (
    Contents,
    Tensors,
    count_indices,
    rename_tensors,
    split_fused,
)
from specjax.models.loading.heads.describing import describe_layers
from specjax.models.loading.heads.target_fit import TargetSpec, check_fits_target, layer_config, take_embedding

TABLE = {
    name: tensor
    for name, tensor in eagle.TABLE.items()
    if name.startswith(("embed.", "fc.", "stack."))
}  # fmt: skip


class HeadParts(NamedTuple):
    """The parts of a file that all of these heads have."""

    rows: str  # value of `image_rows`
    tensors: Tensors
    layer: LlamaConfig
    bias: bool  # of fc
    embeds: bool  # it has an embedding of its own
    images: ImageSizes
    notes: tuple[str, ...]

    @property
    def fields(self) -> dict[str, Any]:
        """Return the fields of an `EagleConfig`."""
        return {"layer": self.layer, "bias": self.bias, "embeds": self.embeds, "vocab_size": self.layer.vocab_size}


def rows_of(contents: Contents) -> str | None:
    """Return the value of `image_rows`, or None for other heads."""
    config = contents.config
    return config.text(eagle.IMAGE_ROWS) if config.has(eagle.IMAGE_ROWS) else None


def read_parts(contents: Contents, spec: TargetSpec) -> HeadParts:
    """Read the shared parts. Raises: UsageError for inconsistent files, or a head of another target."""
    c, rows = contents.config, rows_of(contents)
    assert rows is not None
    tensors = rename_tensors(contents, eagle.DIALECTS["safeailab"])
    layer = layer_config(c, tensors, "layers.0.self_attn", count_indices(tensors, r"layers\.(\d+)\."), spec)
    split_fused(tensors, layer)
    check_fits_target(c.where, layer.width, layer.vocab_size, spec)
    has_bias = "fc.bias" in tensors
    if c.has("bias") and c.flag("bias") != has_bias:
        has = "an" if has_bias else "no"
        raise UsageError(f"{c.where} has bias {str(c.flag('bias')).lower()}, and {contents.folder} has {has} fc.bias")
    notes: list[str] = []
    embeds = take_embedding(tensors, spec, notes)
    layer = dataclasses.replace(layer, vocab_size=spec.vocab_size)
    images = ImageSizes.of_target(spec.target.model.config)
    return HeadParts(rows, tensors, layer, has_bias, embeds, images, tuple(notes))


def describe(rows: str, layer: LlamaConfig, vocab_size: int) -> dict[str, Any]:
    """Return the fields of config.json that all of these heads have."""
    sizes = describe_layers(layer) | {"vocab_size": vocab_size or layer.vocab_size}
    return {"architectures": ["LlamaForCausalLM"], eagle.IMAGE_ROWS: rows} | sizes
