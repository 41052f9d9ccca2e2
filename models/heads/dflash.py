"""DFlash and what is built on it, DSpark, DFlash 2 and Domino: one pass over a block of masks drafts all of its tokens.

DFlash: Block Diffusion for Flash Speculative Decoding (2026), arXiv 2602.06036. c_t = norm(fc[h^a; ...; h^e]) of each
committed token; a layer's keys and values of the text are its own projections of c, the same as of the block but
without the norm before its attention. The block [root, mask, ..., mask] stands behind the text and sees all of it and
itself; what its slots say is h, their logits W_o h, with the target's embedding and head.

            position    n-2    n-1    n      n+1    n+2
            read        c      root   mask   mask   mask      c of position t is the feature of the pair t
            says                      n      n+1    n+2       DFlash, DFlash 2
            says               n      n+1    n+2    n+3       `from_anchor`: DSpark, Domino

DSpark (DeepSeek 2026, github.com/deepseek-ai/DeepSpec), DFlash 2 (z-lab 2026, github.com/z-lab/dflash) and Domino
(2026, arXiv 2605.29707) correct the logits of a slot once the token before it is drafted: see `corrections`.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from specjax.arrays import batch_axes
from specjax.arrays.indexing import take_along
from specjax.errors import UsageError
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.heads.blocks import (
    DraftVocabulary,
    bind,
    commit_pairs,
    embed,
    empty_cache,
    layout_of,
    next_step,
    run_blocks,
    step_of,
    taps_of,
    unembed,
)
from specjax.models.heads.contract import DraftedNodes, Head, FeaturePairs
from specjax.models.heads.convolution import Convolution
from specjax.models.heads.corrections import Confidence, Markov, Prefix, Selector
from specjax.models.heads.eagle import Layer
from specjax.models.llama import LlamaConfig
from specjax.pallas_kernels.gumbel_topk import gumbel_topk
from specjax.types import Array, Context, DraftOutput


@dataclass(frozen=True)
class DFlashConfig:
    """Shapes and flags of a block drafter. Published keys, where they are not named as the fields:

    taps: `target_layer_ids` + 1 (z-lab, DeepSpec, SpecForge), `aux_hidden_state_layer_ids` (speculators).
    mask_token: `mask_token_id`. from_anchor: `sample_from_anchor`, `shift_label`; always in DeepSpec.
    windows: `sliding_window` where `layer_types` has "sliding_attention". causal: "no" for `is_causal` false or
    `sliding_window_non_causal`. logit_scale: `output_multiplier`; softcap: `final_logit_softcapping`.
    markov: `markov_head_type` where `markov_rank` > 0. confidence: `enable_confidence_head` ("markov":
    `confidence_head_with_markov`). conv_taps, conv_group: `conv_kernel_size`, `conv_group_size`. candidates:
    `selector_top_k`. prefix_rank, prefix_state, pure_prefix: `emb_dim`, `gru_hidden_dim`, `pure_draft_prefix_len`.
    """

    layer: LlamaConfig  # of its layers; of the target's width; vocab_size: of its own head
    taps: tuple[int, ...]  # streams of the target, 0 the embedding
    target_width: int
    vocab_size: int  # of the target
    block_size: int  # slots, the root's included
    mask_token: int
    from_anchor: bool = False  # the root's slot says the first token; else the first mask does
    windows: tuple[int | None, ...] = ()  # of each layer; (): none
    causal: Literal["no", "windowed", "all"] = "windowed"  # which layers see only slots before, not the whole block
    embeds: bool = False  # has an embedding of its own, in place of the target's
    own_head: bool = False  # else the target's
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    markov: Literal["no", "vanilla", "gated", "rnn"] = "no"
    markov_rank: int = 256
    confidence: Literal["no", "state", "markov"] = "no"  # of h, or of it and the Markov head's embedding
    conv_taps: int = 0  # 0: no convolutions
    conv_group: int = 16  # channels with the same dynamic kernel
    selector_rank: int = 0  # 0: no selector
    candidates: int = 16  # of the selector, in each slot
    prefix_rank: int = 0  # of Domino's head; 0: none
    prefix_state: int = 1024
    pure_prefix: int = 1  # slots that it leaves as they are

    @property
    def kind(self) -> str:
        """The method that it is drafted with."""
        if self.conv_taps or self.selector_rank:
            return "dflash2"
        if self.prefix_rank:
            return "domino"
        return "dflash" if self.markov == self.confidence == "no" else "dspark"

    @property
    def first(self) -> int:
        """The slot that says the first token."""
        return 0 if self.from_anchor else 1

    @property
    def max_depth(self) -> int:
        """How many tokens it drafts."""
        return self.block_size - self.first

    @property
    def is_trimmed(self) -> bool:
        """Whether it can draft only some of the target's ids."""
        return self.own_head and self.layer.vocab_size < self.vocab_size


class BlockLayer(Layer):
    """A decoder layer, its sublayers between convolutions where there are any."""

    def __init__(self, config: DFlashConfig, rngs: nnx.Rngs):
        c, taps = config.layer, config.conv_taps
        super().__init__(c, has_norm=True, rngs=rngs)
        conv = lambda: Convolution(c.width, taps, config.conv_group, dtype=c.dtype, rngs=rngs) if taps else None
        self.attention_conv, self.mlp_conv = conv(), conv()

    def __call__(self, x: Array, inputs: L.LayerInputs) -> tuple[Array, tuple]:
        assert self.attention_norm is not None
        y, after = _convolved(self.attention_conv, self.attention_norm(x))
        y, new = self.attention(y, inputs)
        x = x + after(y)
        y, after = _convolved(self.mlp_conv, self.mlp_norm(x))
        return x + after(inputs.shared.sum(self.mlp(y), "mlp")), new


def _convolved(conv: Convolution | None, x: Array):
    return (x, lambda y: y) if conv is None else conv(x)


class BlockSlots(NamedTuple):
    """What the slots of a block that draft said in one pass."""

    h: Array  # [B, n, D], behind the last norm
    logits: Array  # float32[B, n, size of the head], or of the candidates alone: [B, n, K]
    candidates: Array | None = None  # int32[B, n, K]; None: all tokens are


class DFlash(nnx.Module):
    """The backbone and the corrections. Published tensors, where their names are not those of the parameters:

    layers.i: attention_norm, mlp_norm are `input_layernorm`, `post_attention_layernorm`; attention.{q,k,v,o} and
    mlp.{gate,up,down} end in `_proj`; attention_conv, mlp_conv: base is `base_kernel`, projection `kernel_projection`.
    markov (`markov_head`): w1, w2, gating, joint are `markov_w1`, `markov_w2`, `gate_proj`, `joint_proj`.
    confidence (`confidence_head`): temperatures are `sts_temperatures` of a calibration file.
    selector (`candidate_selector`): predecessor.weight and successor.weight are `predecessor_codebook` and
    `successor_codebook`, projection `hidden_projection`.
    prefix: inputs, states are `prefix_gru.weight_ih_l0`, `prefix_gru.weight_hh_l0`; narrow, wide `embed_proj.{0,2}`.
    head.weight: `lm_head`; embed.weight: `embed_tokens`; vocabulary.place: `d2t`, turned round.
    """

    def __init__(self, config: DFlashConfig, *, rngs: nnx.Rngs):
        self.config, c = config, config.layer
        table = lambda size: L.Embedding(size, c.width, dtype=c.dtype, rngs=rngs)
        norm = lambda: L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype)
        shapes: dict[str, Any] = {"dtype": c.dtype, "rngs": rngs}
        size = c.vocab_size if config.own_head else config.vocab_size
        self.embed = table(config.vocab_size) if config.embeds else None
        self.fc = L.Linear(len(config.taps) * config.target_width, c.width, **shapes)
        self.hidden_norm, self.norm = norm(), norm()
        self.layers = nnx.List([BlockLayer(config, rngs) for _ in range(c.num_layers)])
        self.head = table(size) if config.own_head else None
        self.vocabulary = DraftVocabulary(config.vocab_size, size) if config.is_trimmed else None
        # A new correction adds nothing, so a new head of any kind says what DFlash says.
        rank, sure = config.markov_rank, c.width + config.markov_rank * (config.confidence == "markov")
        markov = lambda: Markov(config.markov, config.vocab_size, size, rank, c.width, **shapes)
        self.markov = None if config.markov == "no" else markov()
        self.confidence = None if config.confidence == "no" else Confidence(sure, config.max_depth, **shapes)
        self.selector = Selector(size, config.selector_rank, c.width, **shapes) if config.selector_rank else None
        prefix = lambda: Prefix(size, config.prefix_rank, config.prefix_state, c.width, **shapes)
        self.prefix = prefix() if config.prefix_rank else None

    @property
    def state_width(self) -> int:
        """Of what is remembered of the tokens drafted above a node."""
        return sum(part.state_width for part in (self.markov, self.prefix) if part is not None)

    def keys_and_values(self, features: Array, step: L.PassInputs, cache: kv.KVCache) -> kv.Pending:
        """Of the text, as the layers see it: of features [B, T, F]."""
        c = self.config.layer
        context = self.hidden_norm(self.fc(features.astype(c.dtype)))
        reach = c.attention_settings()
        heads = lambda x: step.place(x.reshape(*x.shape[:2], -1, c.head_dim), "data", None, "heads", None)

        def of(attention: L.Attention, slots: Array) -> tuple:
            k, v = heads(attention.k(context)), heads(attention.v(context))
            k = k if attention.k_norm is None else attention.k_norm(k)
            k = L.rope(k, step.positions, reach.frequencies, amplitude=reach.amplitude)
            return kv.to_cache_dtype(k.swapaxes(1, 2), slots), kv.to_cache_dtype(v.swapaxes(1, 2), slots)

        k, v = zip(*(of(layer.attention, cache.k[i]) for i, layer in enumerate(self.layers)), strict=True)
        return kv.Pending(k, v, step.positions, kv.write_dependency(context))

    def states(self, tokens: Array, step: L.PassInputs, cache: kv.KVCache, context: Context) -> Array:
        """What the slots of a block say, [B, b, D] behind the last norm: of tokens int32[B, b]."""
        c = self.config
        x = embed(self.embed, tokens, context).astype(c.layer.dtype) * jnp.asarray(c.embedding_scale, c.layer.dtype)
        windows = c.windows or (None,) * c.layer.num_layers
        blocks = [_with_window(layer, window, c.causal) for layer, window in zip(self.layers, windows, strict=True)]
        return self.norm(run_blocks(blocks, x, step, cache, c.layer)[0])

    def slots(self, h: Array, context: Context) -> BlockSlots:
        """Of the states h [B, n, D] of slots that draft."""
        c = self.config
        logits = unembed(h, context) if self.head is None else self.head.logits(h)
        logits = logits.astype(jnp.float32) * c.logit_scale
        logits = logits if c.softcap is None else c.softcap * jnp.tanh(logits / c.softcap)
        if self.selector is None or c.candidates == c.vocab_size:
            return BlockSlots(h, logits)
        return BlockSlots(h, *reversed(gumbel_topk(None, logits, c.candidates)))

    def below(self, tokens: Array, slot: Array, state: Array, slots: BlockSlots, context: Context):
        """(state, what it says) below nodes: int32[B, F] each, the slot that drafts their children."""
        h, logits, candidates = jax.tree.map(lambda x: take_along(x, slot[:, :, None], 1), slots)
        if self.markov is not None:
            state, more = self.markov(tokens, h, state)
            logits += more
        if self.prefix is not None:
            state, more = self.prefix(embed(self.embed, tokens, context).astype(h.dtype), h, state)
            is_pure = slot + self.config.first < self.config.pure_prefix
            logits += jnp.where(is_pure[:, :, None], 0.0, more)
        if self.selector is not None:
            logits = self.selector(tokens, h, logits, candidates, self.config.vocab_size)
        logits = logits if self.vocabulary is None else self.vocabulary.spread(logits)
        if self.confidence is None:
            return state, logits
        if self.config.confidence == "markov":
            assert self.markov is not None
            h = jnp.concatenate([h, self.markov.w1(tokens)], -1)
        return state, DraftOutput(logits, self.confidence(h, slot))


def _with_window(layer: BlockLayer, window: int | None, causal: str):
    """The layer with what its queries see, besides the text, of the block."""

    def block(x: Array, inputs: L.LayerInputs) -> tuple[Array, tuple]:
        step = inputs.shared
        ahead = step.positions[:, None, :] - step.positions[:, :, None]  # [B, b, b], of a key
        mask = step.mask
        if causal == "all" or (causal == "windowed" and window is not None):
            mask &= ahead <= 0
        elif window is not None:
            mask &= ahead < window
        return layer(x, inputs._replace(shared=step.replace(mask=mask), settings=inputs.settings._replace(window=window)))

    return block


class BlockScratch(NamedTuple):
    """Of a round."""

    slots: BlockSlots
    state: Array  # [B, places, state_width], of the root and of drafted nodes


@functools.cache
def dflash_head(config: DFlashConfig) -> Head:
    """The functions of a block drafter. Memory: its layers' keys and values of the text.

    Raises: UsageError for parts that do not fit each other.
    """
    _check(config)
    module_of, c = bind(DFlash, config), config.layer

    def init_memory(params, context: Context, batch: int, capacity: int) -> kv.KVCache:
        return empty_cache(context, c, batch, capacity)

    def read(params, cache: kv.KVCache, pairs: FeaturePairs, context: Context) -> kv.KVCache:
        step = next_step(context, c, cache, pairs.tokens.shape[1], pairs.first)
        pending = module_of(params).keys_and_values(pairs.features, step, cache)
        return commit_pairs(context, c, cache, pending, pairs)

    def start(params, cache: kv.KVCache, context: Context, places: int) -> tuple[BlockScratch, Array | DraftOutput]:
        module, batch, size = module_of(params), len(cache.length), config.block_size
        tokens = jnp.full((batch, size), config.mask_token, jnp.int32).at[:, :1].set(context.root)
        positions = cache.length[:, None] + jnp.arange(size)  # the text ends before the root
        step = step_of(context, c, cache, positions, jnp.ones((batch, size, size), bool))
        h = module.states(tokens, step, cache, context)
        state = jnp.zeros((batch, 1, module.state_width), h.dtype)
        if config.markov == "rnn" and not config.from_anchor:  # it was trained to read the root's slot, too
            state, _ = module.markov(context.root, h[:, :1], state)
        slots = module.slots(h[:, config.first :], context)
        state, said = module.below(context.root, jnp.zeros((batch, 1), jnp.int32), state, slots, context)
        kept = jnp.zeros((batch, places, module.state_width), h.dtype).at[:, :1].set(state)
        return BlockScratch(slots, kept), jax.tree.map(lambda x: x[:, 0], said)

    def follow(params, scratch: BlockScratch, drafted: DraftedNodes, context: Context) -> tuple[BlockScratch, Array | DraftOutput]:
        state = take_along(scratch.state, drafted.parent[:, :, None], 1)
        state, said = module_of(params).below(drafted.tokens, drafted.depth, state, scratch.slots, context)
        return scratch._replace(state=batch_axes.insert(scratch.state, state, drafted.place)), said

    def shardings(cache: kv.KVCache, mesh: Mesh) -> Any:
        layout = layout_of(mesh, c)
        assert layout is not None
        return layout.cache(cache)

    return Head(
        init_memory=init_memory,
        read=read,
        start=start,
        follow=follow,
        kind=config.kind,
        config=config,
        taps=config.taps,
        max_depth=config.max_depth,
        is_single_pass=True,
        axes=kv.axes,
        shardings=shardings,
        training_head=_of_all_tokens(config),
    )


def _of_all_tokens(c: DFlashConfig) -> Head | None:
    """Of a head with candidates: no derivative reaches the choice of them, nor the tokens that are left out."""
    if not c.selector_rank or c.candidates == c.vocab_size:
        return None
    return dflash_head(dataclasses.replace(c, candidates=c.vocab_size))


def _check(c: DFlashConfig) -> None:
    if sum((c.markov != "no", c.selector_rank > 0, c.prefix_rank > 0)) > 1:
        raise UsageError("a block drafter has one of a Markov head, a selector and a Domino head, not several")
    if c.is_trimmed and (c.selector_rank or c.prefix_rank):
        raise UsageError(
            f"a selector or a Domino head needs the target's {c.vocab_size} tokens, not a draft vocabulary of "
            f"{c.layer.vocab_size}"
        )
    if c.confidence == "markov" and c.markov == "no":
        raise UsageError('confidence="markov" reads the Markov head, and there is none; choose "state"')
    if c.conv_taps and c.layer.width % c.conv_group:
        raise UsageError(f"conv_group must divide the width {c.layer.width}, and {c.conv_group} does not")
    if c.selector_rank and not 0 < c.candidates <= c.vocab_size:
        raise UsageError(f"candidates must be between 1 and the {c.vocab_size} tokens there are, not {c.candidates}")
    if c.windows and len(c.windows) != c.layer.num_layers:
        raise UsageError(f"windows has {len(c.windows)} entries for {c.layer.num_layers} layers")
    if c.max_depth < 1:
        raise UsageError(f"a block of {c.block_size} slots drafts nothing; block_size must be at least {c.first + 1}")


def default_taps(target_layers: int, count: int) -> tuple[int, ...]:
    """The authors': behind layers spread evenly from the second to the last but two."""
    if count == 1:
        return (target_layers // 2 + 1,)
    return tuple(round(1 + i * (target_layers - 4) / (count - 1)) + 1 for i in range(count))


def of_target(
    target: LlamaConfig, *, num_layers: int = 5, block_size: int = 16, mlp_width: int | None = None,
    taps: tuple[int, ...] | None = None, **changes,
) -> DFlashConfig:  # fmt: skip
    """The shapes that the authors train for a target; the mask is its last token."""
    layer = target.draft_head_config(
        num_layers, mlp_width=mlp_width or target.mlp_width, qk_norm=True, qk_norm_scope="head", qkv_bias=False,
        window=None,
    )  # fmt: skip
    taps = taps_of(target, taps, default_taps(target.num_layers, num_layers))
    return DFlashConfig(layer, taps, target.width, target.vocab_size, block_size, target.vocab_size - 1, **changes)


def dspark_of_target(target: LlamaConfig, *, block_size: int = 7, **changes) -> DFlashConfig:
    """Likewise of DSpark."""
    parts: dict[str, Any] = {"from_anchor": True, "markov": "vanilla", "confidence": "markov"} | changes
    return of_target(target, block_size=block_size, **parts)


def dflash2_of_target(target: LlamaConfig, **changes) -> DFlashConfig:
    """Likewise of DFlash 2."""
    return of_target(target, **({"conv_taps": 2, "selector_rank": 256} | changes))


def domino_of_target(target: LlamaConfig, **changes) -> DFlashConfig:
    """Likewise of Domino."""
    return of_target(target, **({"from_anchor": True, "prefix_rank": 256} | changes))
