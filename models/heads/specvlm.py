"""SpecVLM: an EAGLE head for vision-language targets whose compressor of images is chosen by the question.

Huang et al.: SpecVLM: Fast Speculative Decoding in Vision-Language Models (2025), arXiv 2509.11815.

Rule: the head is EAGLE-1 with a norm before its attention. At most R rows replace those of each image. One of five
experts makes them for all images of a prompt: `prune` keeps the longest vectors, `pool` averages regions, `conv`
weights the vectors of a region by channel, `resampler` attends to the vectors with R learned queries, and `none` keeps
no row. A small network chooses the expert from the product of the mean vector and the mean embedding of the prompt's
text. Training draws the expert (Gumbel-softmax, straight-through), and decoding takes the likeliest one.
Guarantee: distribution (a tree of most likely tokens is a point mass; a sampled one is verified with its q).
Deviations: the paper's abstract names the primitives, and their form is ours. A row has the position of the first
vector of its region. The network learns from the values of rows, not from the choice which vectors have one. The
target's activations of a text are computed in each step, which is the paper's online distillation without new texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.arrays.indexing import take_along
from specjax.catalog import Method, shared
from specjax.models import layers as L
from specjax.models.heads import image_rows
from specjax.models.heads.autoregressive import autoregressive
from specjax.models.heads.blocks import embed
from specjax.models.heads.contract import Head, HeadKind
from specjax.models.heads.eagle import Eagle, EagleConfig
from specjax.models.heads.image_rows import NO_IMAGES, ImageBlocks, ImageRows, ImageSizes
from specjax.models.llama import LlamaConfig
from specjax.models.vision.memory import ImageMemory
from specjax.types import Array, Context

METHOD = Method(
    name="specvlm",
    summary="drafts like EAGLE for targets that read images, which it compresses in a way chosen by the question",
    paper="Huang et al. 2025, arXiv 2509.11815",
    options=shared.head_options(length=5),
    cpu_options={"num_tokens": 3},
    wide_tree="eagle2:8x6x60",
    **shared.HEAD,
)

EXPERTS = "prune", "pool", "conv", "resampler", "none"


@dataclass(frozen=True)
class SpecVlmConfig(EagleConfig):
    """Shapes of a SpecVLM head."""

    queries: int = 64  # R, the most rows of each image or tile
    taps_of_conv: int = 4  # vectors of a region that the convolution reads
    expert: Literal["auto", "prune", "pool", "conv", "resampler", "none"] = "auto"  # "auto": by the question
    images: ImageSizes = NO_IMAGES

    @property
    def norms_input(self) -> bool:
        """Return True: a norm precedes the first attention."""
        return True


class Compressor(nnx.Module):
    """The experts, and the network that chooses one."""

    def __init__(self, config: SpecVlmConfig, rngs: nnx.Rngs):
        width, dtype = config.layer.width, config.layer.dtype
        linear = lambda inputs, outputs: L.Linear(inputs, outputs, dtype=dtype, rngs=rngs)
        self.queries, self.conv = linear(width, config.queries), linear(width, config.taps_of_conv)
        self.conv.weight[...] = jnp.full_like(self.conv.weight[...], 1 / config.taps_of_conv)
        self.gate_up, self.gate_down = linear(width, max(width // 4, 1)), linear(max(width // 4, 1), len(EXPERTS))

    def choose(self, question: Array, image: Array, keys: Array | None) -> Array:
        """Return the weights float32[B, E] of the experts: 1 for one of them, with the gradient of a softmax."""
        logits = self.gate_down(nnx.silu(self.gate_up(question * image))).astype(jnp.float32)
        if keys is not None:
            draw = lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32)
            logits = logits + jax.vmap(draw)(keys)
        hard = jax.nn.one_hot(jnp.argmax(logits, -1), len(EXPERTS))
        soft = jax.nn.softmax(logits, -1)
        return hard if keys is None else hard + soft - jax.lax.stop_gradient(soft)

    def rows(self, blocks: ImageBlocks) -> list[ImageRows]:
        """Return the rows of each expert."""
        count = self.queries.weight.shape[0]
        return [
            _prune(blocks, count), _pool(blocks, count), self._convolve(blocks, count),
            blocks.at_regions(image_rows.attend(self.queries.weight[...], blocks)),
            blocks.flat(jnp.zeros_like(blocks.vectors), jnp.zeros_like(blocks.is_valid)),
        ]  # fmt: skip

    def _convolve(self, blocks: ImageBlocks, count: int) -> ImageRows:
        """Return sums of the next vectors from the first one of each region on, weighted by channel."""
        taps = self.conv.weight[...]
        valid = jnp.where(blocks.is_valid[..., None], blocks.vectors, 0)
        padded = jnp.pad(valid, ((0, 0), (0, 0), (0, len(taps) - 1), (0, 0)))
        size = blocks.vectors.shape[2]
        rows = sum(weight * padded[:, :, i : i + size] for i, weight in enumerate(taps))
        return blocks.flat(jnp.asarray(rows), blocks.regions(count)[1])


def _prune(blocks: ImageBlocks, count: int) -> ImageRows:
    """Return the `count` longest vectors of each block, at their places."""
    norms = jnp.where(blocks.is_valid, jnp.linalg.norm(blocks.vectors.astype(jnp.float32), axis=-1), -1)
    rank = jnp.argsort(jnp.argsort(-norms, -1), -1)
    return blocks.flat(blocks.vectors, (rank < count) & blocks.is_valid)


def _pool(blocks: ImageBlocks, count: int) -> ImageRows:
    """Return the means of the regions of each block."""
    region = blocks.regions(count)[0]
    member = jax.nn.one_hot(region, count) * blocks.is_valid[..., None]
    sums = jnp.einsum("bnvr,bnvd->bnrd", member, blocks.vectors.astype(jnp.float32))
    return blocks.at_regions(sums / jnp.maximum(jnp.sum(member, 2), 1)[..., None])


class SpecVlm(Eagle):
    """The module of SpecVLM, an `image_rows.ImageModule`."""

    config: SpecVlmConfig

    def __init__(self, config: SpecVlmConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.compressor = Compressor(config, rngs)

    def image_rows(self, images: ImageMemory, context: Context, keys: Array | None) -> ImageRows:
        config, blocks = self.config, image_rows.split_blocks(images, self.config.images)
        experts = self.compressor.rows(blocks)
        if config.expert != "auto":
            return experts[EXPERTS.index(config.expert)]
        question = _mean(embed(self.embed, context.tokens, context), _is_question(context, config.images.token))
        weights = self.compressor.choose(question, _mean(*_flat(blocks)), keys)
        rows = sum(weight[:, None, None] * expert.rows for weight, expert in zip(weights.T, experts, strict=True))
        is_kept = take_along(jnp.stack([expert.is_kept for expert in experts], 1), _index(weights), 1)[:, 0]
        return ImageRows(jnp.asarray(rows), is_kept)


def _index(weights: Array) -> Array:
    """Return the chosen expert int32[B, 1, 1]."""
    return jnp.argmax(weights, -1)[:, None, None]


def _flat(blocks: ImageBlocks) -> tuple[Array, Array]:
    """Return all vectors [B, P, D] of a prompt, and bool[B, P]: they exist."""
    batch, _, _, width = blocks.vectors.shape
    return blocks.vectors.reshape(batch, -1, width), blocks.is_valid.reshape(batch, -1)


def _is_question(context: Context, placeholder: int) -> Array:
    """Return bool[B, L], True for the text of the prompts."""
    tokens = context.tokens
    return (jnp.arange(tokens.shape[1]) < context.length[:, None]) & (tokens != placeholder)


def _mean(x: Array, is_counted: Array) -> Array:
    """Return the mean [B, D] of some of the vectors x [B, T, D]."""
    total = jnp.einsum("bt,btd->bd", is_counted.astype(jnp.float32), x.astype(jnp.float32))
    return total / jnp.maximum(jnp.sum(is_counted, 1), 1)[:, None]


def specvlm_head(config: SpecVlmConfig) -> Head:
    """Return the functions of a SpecVLM head. Raises: UsageError for more rows than vectors."""
    config.images.check_rows(config.queries)
    return autoregressive("specvlm", SpecVlm, config, reads_images=True)


def of_target(
    target: LlamaConfig, *, num_layers: int = 1, mlp_width: int | None = None, queries: int | None = None, **changes
) -> SpecVlmConfig:
    """Return shapes for a target: one layer like the target's, and at most a quarter as many rows as vectors."""
    images = ImageSizes.of_target(target)
    layer = target.draft_head_config(num_layers, mlp_width=mlp_width or target.mlp_width)
    return SpecVlmConfig(
        layer, vocab_size=target.vocab_size, queries=queries or images.default_rows(4), images=images, **changes
    )  # fmt: skip


KIND = HeadKind(
    METHOD, SpecVlm, specvlm_head, of_target, ("num_layers", "mlp_width", "queries"), flags=("bias", "embeds"),
    choices=(("expert", ("auto", *EXPERTS)),),
)  # fmt: skip
