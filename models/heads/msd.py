"""MSD: EAGLE-1 for vision-language targets, with image vectors as rows of their own.

Lin, Lin, Zeng, Ji: Speculative Decoding Reimagined for Multimodal Large Language Models (2025), arXiv 2505.14260.

Rule: the row of a pair with a text token is that of EAGLE-1, fc[E x_{t+1}; f_t]. The row of a pair whose next token is
the placeholder of an image vector is that vector: no feature, no embedding, no fc. So the last text before an image is
followed by its first vector, and the first text after it has the feature of the last vector. All drafted tokens are
text. `rows=dropped` leaves the rows of images out of the head's cache, and text keeps its positions.
Guarantee: distribution (a tree of most likely tokens is a point mass; a sampled one is verified with its q).
Deviations: as in `eagle`. Training draws texts with images more often from the middle of the run on, by step and not by
epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp

from specjax.catalog import Method, shared
from specjax.models.heads.autoregressive import autoregressive
from specjax.models.heads.contract import Head, HeadKind
from specjax.models.heads.eagle import Eagle, EagleConfig
from specjax.models.heads.image_rows import ImageRows
from specjax.models.llama import LlamaConfig
from specjax.models.vision.memory import ImageMemory
from specjax.types import Array, Context

METHOD = Method(
    name="msd",
    summary="drafts like EAGLE for targets that read images, with image vectors as rows of their own",
    paper="Lin et al. 2025, arXiv 2505.14260",
    options=shared.head_options(length=5),
    cpu_options={"num_tokens": 3},
    wide_tree="eagle2:8x6x60",
    **shared.HEAD,
)

ROWS = "vectors", "dropped"


@dataclass(frozen=True)
class MsdConfig(EagleConfig):
    """Shapes of an MSD head."""

    rows: Literal["vectors", "dropped"] = "vectors"  # "dropped": the head does not read the rows of images


class Msd(Eagle):
    """The module of MSD, an `image_rows.ImageModule`."""

    config: MsdConfig

    def image_rows(self, images: ImageMemory, context: Context, keys: Array | None) -> ImageRows:
        is_kept = jnp.full(images.places.shape, self.config.rows == "vectors")
        return ImageRows(images.vectors, is_kept)


def msd_head(config: MsdConfig) -> Head:
    """Return the functions of an MSD head."""
    return autoregressive("msd", Msd, config, reads_images=True)


def of_target(
    target: LlamaConfig, *, num_layers: int = 1, mlp_width: int | None = None, rows: Any = "vectors", **changes
) -> MsdConfig:
    """Return the shapes that the authors train for a target: one layer like the target's."""
    layer = target.draft_head_config(num_layers, mlp_width=mlp_width or target.mlp_width)
    return MsdConfig(layer, vocab_size=target.vocab_size, rows=rows, **changes)


KIND = HeadKind(
    METHOD, Msd, msd_head, of_target, ("num_layers", "mlp_width"), flags=("bias", "embeds"), choices=(("rows", ROWS),)
)
