"""DFlash, JetSpec, DSpark, DFlash 2 and Domino: one pass over a block of mask tokens drafts all of its tokens.

DFlash: Block Diffusion for Flash Speculative Decoding (2026), arXiv 2602.06036. DSpark: Confidence-Scheduled
Speculative Decoding with Semi-Autoregressive Generation (DeepSeek 2026), github.com/deepseek-ai/DeepSpec. DFlash 2
(z-lab 2026), github.com/z-lab/dflash. Domino (2026), arXiv 2605.29707. JetSpec (2026), arXiv 2606.18394.

Rule: c_t = norm(fc[h^a; ...; h^e]) of each committed token. Each layer projects c to keys and values of the text, with
the weights of the block but without the norm before the attention. The block [root, mask, ..., mask] follows the text
and attends to the text and itself. Its slots have the outputs h and the logits W_o h, with the target's embedding and
output layer.

            position    n-2    n-1    n      n+1    n+2
            input       c      root   mask   mask   mask      c of position t is the feature of the pair t
            predicts                  n      n+1    n+2       DFlash, DFlash 2
            predicts           n      n+1    n+2    n+3       `from_anchor`: DSpark, Domino

JetSpec is DFlash with slots that attend to earlier slots only, in all layers (`causal="all"`). A slot then does not
depend on the length of the block, so a short draft computes only its own slots. Its trees are those of `trees.ddtree`,
whose fan-out may be capped.
In DFlash and JetSpec all nodes at one depth have the same distribution. The others correct the logits of a slot once
the token before it is drafted (`corrections`). DSpark uses that token, and Domino a recurrence over all drafted tokens.
DFlash 2 uses a selector that joins the candidates of the slots to a path. DSpark's confidence predicts the acceptance
of a slot's token from the tokens before it. Three stop conditions use it: `trees.stops.drafter_confidence(P)` stops
where it is below P, and `trees.stops.budget()` is the scheduler for a batch. The condition `trees.stops.acceptance(T,
lag=False, predict=trees.stops.read_confidence)` stops where the product of confidences falls below 1 - T.
Guarantee: distribution. q of a chain is softmax(logits), with all corrections, warped like the target's; a tree of
most likely tokens is a point mass. q of DFlash 2 is 0 outside of the candidates.
Deviations: the block has its full trained length near the end of a text too. Embeddings of the target are scaled as the
target does, times `embedding_scale`. top-k and top-p of the target's sampling also warp the scores of DFlash 2. JetSpec
trains with forward KL at temperature 1 and the decay of DFlash's recipe; the paper's values are not in its code.
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
from specjax.catalog import Method, shared
from specjax.errors import UsageError
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.heads.blocks import (
    DraftVocabulary,
    bind,
    causal_inputs,
    check_taps,
    commit_pairs,
    embed,
    empty_cache,
    head_layout,
    pass_inputs,
    run_blocks,
    unembed,
)
from specjax.models.heads.contract import DraftedNodes, FeaturePairs, Head, HeadKind, StateDraft
from specjax.models.heads.convolution import Convolution
from specjax.models.heads.corrections import Confidence, Markov, Prefix, Selector
from specjax.models.heads.eagle import Layer
from specjax.models.llama import LlamaConfig
from specjax.models.rotary import rotate
from specjax.pallas_kernels.gumbel_topk import gumbel_topk
from specjax.types import Array, Context, DraftOutput

METHODS = (
    Method(
        name="dflash",
        summary="drafts a block of mask tokens in one pass of layers that attend to the target's hidden states",
        paper="arXiv 2602.06036 (2026)",
        options=shared.head_options(),
        cpu_options={"num_tokens": 7},
        takes=frozenset({"costs"}),
        **shared.HEAD,
    ),
    Method(
        name="jetspec",
        summary="drafts a block of mask tokens that attend to earlier ones only, for trees of its likeliest prefixes",
        paper="arXiv 2606.18394 (2026)",
        options=shared.head_options(),
        cpu_options={"num_tokens": 7},
        takes=frozenset({"costs"}),
        **shared.HEAD,
    ),
    Method(
        name="dflash2",
        summary="extends dflash by convolutions and a selector that joins the candidates per position to a path",
        paper="z-lab 2026, github.com/z-lab/dflash",
        options=shared.head_options(),
        cpu_options={"num_tokens": 7},
        **shared.HEAD,
    ),
    Method(
        name="domino",
        summary="extends dflash by a recurrent network that corrects the logits for the tokens drafted so far",
        paper="arXiv 2605.29707 (2026)",
        options=shared.head_options(),
        cpu_options={"num_tokens": 7},
        **shared.HEAD,
    ),
    Method(
        name="dspark",
        summary="extends dflash by a correction of the logits for the previous token, and a trained confidence",
        paper="DeepSeek 2026, github.com/deepseek-ai/DeepSpec",
        options=shared.head_options(),
        serving_stop="budget",
        cpu_options={"num_tokens": 7},
        takes=frozenset({"costs"}),
        **shared.HEAD,
    ),
)


@dataclass(frozen=True)
class DFlashConfig:
    """Shapes and flags of a block drafter."""

    layer: LlamaConfig  # shape of its layers, as wide as the target; vocab_size: of its own output layer
    taps: tuple[int, ...]  # streams of the target; 0: the embedding
    target_width: int
    vocab_size: int  # of the target
    block_size: int  # slots, including the root
    mask_token: int
    from_anchor: bool = False  # True: the root's slot predicts the first token; False: the first mask does
    windows: tuple[int | None, ...] = ()  # window of each layer; (): no windows
    causal: Literal["no", "windowed", "all"] = "windowed"  # the layers that attend to earlier slots only
    embeds: bool = False  # has its own embedding; False: the target's
    own_head: bool = False  # has its own output layer; False: the target's
    mask_embedding: bool = False  # has its own embedding of the mask; False: that of `mask_token`
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    capped_scale: float = 1.0  # multiplies the logits after the softcap
    markov: Literal["no", "vanilla", "gated", "rnn"] = "no"
    markov_rank: int = 256
    confidence: Literal["no", "state", "markov"] = "no"  # reads h, or also the Markov head's embedding
    conv_taps: int = 0  # 0: no convolutions
    conv_group: int = 16  # channels that share a dynamic kernel
    selector_rank: int = 0  # 0: no selector
    candidates: int = 16  # candidates of the selector in each slot
    prefix_rank: int = 0  # rank of Domino's correction; 0: none
    prefix_state: int = 1024
    pure_prefix: int = 1  # first drafting slots that Domino does not correct

    @property
    def kind(self) -> str:
        """Return the name of the method."""
        if self.conv_taps or self.selector_rank:
            return "dflash2"
        if self.prefix_rank:
            return "domino"
        if self.markov != "no" or self.confidence != "no":
            return "dspark"
        return "jetspec" if self.causal == "all" else "dflash"

    @property
    def first(self) -> int:
        """Return the slot that predicts the first token."""
        return 0 if self.from_anchor else 1

    @property
    def max_depth(self) -> int:
        """Return the number of tokens that it drafts."""
        return self.block_size - self.first

    @property
    def is_trimmed(self) -> bool:
        """Return True if it can draft only a subset of the target's ids."""
        return self.own_head and self.layer.vocab_size < self.vocab_size


class BlockLayer(Layer):
    """A decoder layer with optional convolutions before and after its sublayers."""

    def __init__(self, config: DFlashConfig, rngs: nnx.Rngs):
        c, taps = config.layer, config.conv_taps
        super().__init__(c, has_norm=True, rngs=rngs)
        conv = lambda: Convolution(c.width, taps, config.conv_group, dtype=c.dtype, rngs=rngs) if taps else None
        self.attention_conv, self.mlp_conv = conv(), conv()

    def __call__(self, x: Array, inputs: L.LayerInputs) -> tuple[Array, tuple]:
        assert self.attention_norm is not None
        y, convolve = _convolved(self.attention_conv, self.attention_norm(x))
        y, new = self.attention(y, inputs)
        x = x + convolve(y)
        y, convolve = _convolved(self.mlp_conv, self.mlp_norm(x))
        return x + convolve(inputs.shared.sum(self.mlp(y), "mlp")), new


def _convolved(conv: Convolution | None, x: Array):
    return (x, lambda y: y) if conv is None else conv(x)


class BlockSlots(NamedTuple):
    """The outputs of a block's drafting slots in one pass."""

    h: Array  # [B, n, D], after the last norm
    # float32[B, n, output size], or [B, n, K] of the candidates only; None: they are too large to be stored
    logits: Array | None = None
    candidates: Array | None = None  # int32[B, n, K]; None: all tokens


class SlotStates(NamedTuple):
    """Nodes with the slots of their children: the inputs of the output layer and its corrections."""

    tokens: Array  # int32[B, F]
    slot: Array  # int32[B, F]
    h: Array  # [B, F, D], of the slot
    z: Any  # [B, F, rank], of the correction; None: a selector or no correction


class DFlash(nnx.Module):
    """The backbone and the corrections."""

    def __init__(self, config: DFlashConfig, *, rngs: nnx.Rngs):
        self.config, c = config, config.layer
        table = lambda size: L.Embedding(size, c.width, dtype=c.dtype, rngs=rngs)
        norm = lambda: L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype)
        shapes: dict[str, Any] = {"dtype": c.dtype, "rngs": rngs}
        size = c.vocab_size if config.own_head else config.vocab_size
        self.embed = table(config.vocab_size) if config.embeds else None
        mask = jnp.zeros((c.width,), c.dtype)
        self.mask_embedding = nnx.Param(mask) if config.mask_embedding else None
        self.fc = L.Linear(len(config.taps) * config.target_width, c.width, **shapes)
        self.hidden_norm, self.norm = norm(), norm()
        self.layers = nnx.List([BlockLayer(config, rngs) for _ in range(c.num_layers)])
        self.head = table(size) if config.own_head else None
        self.vocabulary = DraftVocabulary(config.vocab_size, size) if config.is_trimmed else None
        # A new correction adds nothing, so a new head of any kind drafts like DFlash.
        rank, confidence_width = config.markov_rank, c.width + config.markov_rank * (config.confidence == "markov")
        markov = lambda: Markov(config.markov, config.vocab_size, size, rank, c.width, **shapes)
        self.markov = None if config.markov == "no" else markov()
        self.confidence = (
            None if config.confidence == "no" else Confidence(confidence_width, config.max_depth, **shapes)
        )
        self.selector = Selector(size, config.selector_rank, c.width, **shapes) if config.selector_rank else None
        prefix = lambda: Prefix(size, config.prefix_rank, config.prefix_state, c.width, **shapes)
        self.prefix = prefix() if config.prefix_rank else None

    @property
    def state_width(self) -> int:
        """Return the width of the state that summarises the tokens drafted above a node."""
        return sum(part.state_width for part in (self.markov, self.prefix) if part is not None)

    def keys_and_values(self, features: Array, step: L.PassInputs, cache: kv.KVCache) -> kv.Pending:
        """Return the keys and values of the text in each layer, from features [B, T, F]."""
        c = self.config.layer
        context = self.hidden_norm(self.fc(features.astype(c.dtype)))
        rotation = c.attention_settings(step.positions).rotation
        heads = lambda x: step.place(x.reshape(*x.shape[:2], -1, c.head_dim), "data", None, "heads", None)

        def project(attention: L.Attention, slots: Array) -> tuple:
            assert attention.k is not None and attention.v is not None
            k, v = heads(attention.k(context)), heads(attention.v(context))
            k = k if attention.k_norm is None else attention.k_norm(k)
            k = k if rotation is None else rotate(k, rotation)
            return kv.to_cache_dtype(k.swapaxes(1, 2), slots), kv.to_cache_dtype(v.swapaxes(1, 2), slots)

        k, v = zip(*(project(layer.attention, cache.k[i]) for i, layer in enumerate(self.layers)), strict=True)
        return kv.Pending(k, v, step.positions, kv.write_dependency(context))

    def states(self, tokens: Array, step: L.PassInputs, cache: kv.KVCache, context: Context) -> Array:
        """Return the outputs [B, b, D] of a block's slots after the last norm, for tokens int32[B, b], root first."""
        c = self.config
        x = embed(self.embed, tokens, context).astype(c.layer.dtype)
        if self.mask_embedding is not None:  # all slots but the root's are masks
            is_mask = (jnp.arange(tokens.shape[1]) > 0)[None, :, None]
            x = jnp.where(is_mask, self.mask_embedding[...][None, None], x)
        x *= jnp.asarray(c.embedding_scale, c.layer.dtype)
        windows = c.windows or (None,) * c.layer.num_layers
        blocks = [_with_window(layer, window, c.causal) for layer, window in zip(self.layers, windows, strict=True)]
        return self.norm(run_blocks(blocks, x, step, cache, c.layer)[0])

    def slots(self, h: Array, context: Context) -> BlockSlots:
        """Return the logits of the drafting slots, from their states h [B, n, D]."""
        c = self.config
        logits = unembed(h, context) if self.head is None else self.head.logits(h)
        logits = logits.astype(jnp.float32) * c.logit_scale
        if c.softcap is not None:  # tokens that are no candidates keep -inf
            logits = jnp.where(logits == -jnp.inf, logits, c.softcap * jnp.tanh(logits / c.softcap))
        logits = logits * c.capped_scale
        if self.selector is None or c.candidates == c.vocab_size:
            return BlockSlots(h, logits)
        return BlockSlots(h, *reversed(gumbel_topk(None, logits, c.candidates)))

    def below(
        self, tokens: Array, slot: Array, state: Array, slots: BlockSlots, context: Context
    ) -> tuple[Array, Array | SlotStates | DraftOutput]:
        """Return the new states and the logits after nodes, from their tokens and the slots of their children.

        If the logits of the slots are not stored, the states of the output layer take the place of logits.
        """
        at = jax.tree.map(lambda x: take_along(x, slot[:, :, None], 1), slots)
        h, z = at.h, None
        if self.markov is not None:
            state, z = self.markov(tokens, h, state)
        if self.prefix is not None:
            state, z = self.prefix(embed(self.embed, tokens, context).astype(h.dtype), h, state)
        states = SlotStates(tokens, slot, h, z)
        output = states if at.logits is None else self.corrected(at, states)
        if self.confidence is None:
            return state, output
        if self.config.confidence == "markov":
            assert self.markov is not None
            h = jnp.concatenate([h, self.markov.w1(tokens)], -1)
        return state, DraftOutput(output, self.confidence(h, slot))

    def corrected(self, at: BlockSlots, states: SlotStates) -> Array:
        """Return the logits float32[B, F, V] after nodes, from the logits `at` the slots of their children."""
        logits = at.logits
        assert logits is not None
        if self.markov is not None:
            logits += self.markov.logits(states.z)
        if self.prefix is not None:
            is_pure = states.slot < self.config.pure_prefix
            logits += jnp.where(is_pure[:, :, None], 0.0, self.prefix.logits(states.z))
        if self.selector is not None:
            logits = self.selector(states.tokens, at.h, logits, at.candidates, self.config.vocab_size)
        return logits if self.vocabulary is None else self.vocabulary.spread(logits)


def _with_window(layer: BlockLayer, window: int | None, causal: str):
    """Return the layer with its mask within the block."""

    def block(x: Array, inputs: L.LayerInputs) -> tuple[Array, tuple]:
        step = inputs.shared
        ahead = step.positions[:, None, :] - step.positions[:, :, None]  # [B, b, b], distance to each key
        mask = step.mask
        if causal == "all" or (causal == "windowed" and window is not None):
            mask &= ahead <= 0
        elif window is not None:
            mask &= ahead < window
        settings = inputs.settings if window is None else inputs.settings._replace(window=window)
        return layer(x, inputs._replace(shared=step.replace(mask=mask), settings=settings))

    return block


class BlockScratch(NamedTuple):
    """The slots and the drafted nodes of one step."""

    slots: BlockSlots
    state: Array  # [B, places, state_width], of the root and the drafted nodes


@functools.cache
def dflash_head(config: DFlashConfig) -> Head:
    """Return the functions of a block drafter. Its memory stores its layers' keys and values of the text.

    Raises: UsageError for fields of the config that contradict each other.
    """
    _check(config)
    module_of, c = bind(DFlash, config), config.layer

    def init_memory(params, context: Context, batch: int, capacity: int) -> kv.KVCache:
        return empty_cache(context, c, batch, capacity)

    def read(params, cache: kv.KVCache, pairs: FeaturePairs, context: Context) -> kv.KVCache:
        step = causal_inputs(context, c, cache, pairs.tokens.shape[1], pairs.first)
        pending = module_of(params).keys_and_values(pairs.features, step, cache)
        return commit_pairs(context, c, cache, pending, pairs)

    def start(
        params, cache: kv.KVCache, context: Context, places: int, *, stores: bool = True
    ) -> tuple[BlockScratch, Any]:
        module, batch, size = module_of(params), len(cache.length), config.block_size
        if config.kind == "jetspec":  # the slots behind the last level change nothing
            size = min(size, config.first + places)
        tokens = jnp.full((batch, size), config.mask_token, jnp.int32).at[:, :1].set(context.root)
        positions = cache.length[:, None] + jnp.arange(size)  # the text ends before the root
        step = pass_inputs(context, c, cache, positions, jnp.ones((batch, size, size), bool))
        h = module.states(tokens, step, cache, context)
        state = jnp.zeros((batch, 1, module.state_width), h.dtype)
        if config.markov == "rnn" and not config.from_anchor:  # trained to read the root's slot too
            state, _ = module.markov(context.root, h[:, :1], state)
        slots = module.slots(h[:, config.first :], context) if stores else BlockSlots(h[:, config.first :])
        state, output = module.below(context.root, jnp.zeros((batch, 1), jnp.int32), state, slots, context)
        states = jnp.zeros((batch, places, module.state_width), h.dtype).at[:, :1].set(state)
        return BlockScratch(slots, states), jax.tree.map(lambda x: x[:, 0], output)

    def follow(params, scratch: BlockScratch, drafted: DraftedNodes, context: Context) -> tuple[BlockScratch, Any]:
        state = take_along(scratch.state, drafted.parent[:, :, None], 1)
        state, output = module_of(params).below(drafted.tokens, drafted.depth, state, scratch.slots, context)
        return scratch._replace(state=batch_axes.insert(scratch.state, state, drafted.place)), output

    def logits(params, states: SlotStates, context: Context) -> Array:
        module = module_of(params)
        return module.corrected(module.slots(states.h, context), states)

    def shardings(cache: kv.KVCache, mesh: Mesh) -> Any:
        layout = head_layout(mesh, c)
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
        training_head=_without_candidates(config),
        in_states=StateDraft(functools.partial(start, stores=False), follow, logits),
    )


def _without_candidates(c: DFlashConfig) -> Head | None:
    """Return a head that scores all tokens, because the choice of candidates has no gradient; None if `c` does so."""
    if not c.selector_rank or c.candidates == c.vocab_size:
        return None
    return dflash_head(dataclasses.replace(c, candidates=c.vocab_size))


def _check(c: DFlashConfig) -> None:
    """Raise a UsageError for fields that contradict each other."""
    if sum((c.markov != "no", c.selector_rank > 0, c.prefix_rank > 0)) > 1:
        raise UsageError("a block drafter can have a Markov head, a selector or a Domino head, but only one of them")
    if c.is_trimmed and (c.selector_rank or c.prefix_rank):
        raise UsageError(
            f"a selector or a Domino head needs the target's {c.vocab_size} tokens, not a draft vocabulary of "
            f"{c.layer.vocab_size}"
        )
    if c.confidence == "markov" and c.markov == "no":
        raise UsageError('confidence="markov" needs a Markov head, and there is none; choose "state"')
    if c.conv_taps and c.layer.width % c.conv_group:
        raise UsageError(f"conv_group must divide the width {c.layer.width}, and {c.conv_group} does not")
    if c.selector_rank and not 0 < c.candidates <= c.vocab_size:
        raise UsageError(f"candidates must be between 1 and the vocabulary size, {c.vocab_size}, not {c.candidates}")
    if c.windows and len(c.windows) != c.layer.num_layers:
        raise UsageError(f"windows has {len(c.windows)} entries for {c.layer.num_layers} layers")
    if not 0 <= c.mask_token < c.vocab_size:
        raise UsageError(f"mask_token must be below the vocabulary size, {c.vocab_size}, not {c.mask_token}")
    if c.max_depth < 1:
        raise UsageError(f"a block of {c.block_size} slots drafts nothing; block_size must be at least {c.first + 1}")


def default_taps(target_layers: int, count: int) -> tuple[int, ...]:
    """Return the authors' streams: after layers spread evenly from the second to the third-last."""
    if count == 1:
        return (target_layers // 2 + 1,)
    return tuple(round(1 + i * (target_layers - 4) / (count - 1)) + 1 for i in range(count))


def of_target(
    target: LlamaConfig, *, kind: str = "dflash", num_layers: int = 5, block_size: int = 16,
    mlp_width: int | None = None, taps: tuple[int, ...] | None = None, draft_vocab_size: int | None = None, **changes,
) -> DFlashConfig:  # fmt: skip
    """Return the shapes that the authors train for a target. The mask is the last token of the vocabulary.

    Args: kind: the method that the changes must fit. draft_vocab_size: ids of an own output layer; None: the target's.

    Raises: UsageError for changes that make a head of another method.
    """
    size = min(draft_vocab_size or target.vocab_size, target.vocab_size)
    layer = target.draft_head_config(
        num_layers, mlp_width=mlp_width or target.mlp_width, qk_norm=True, qk_norm_scope="head", qkv_bias=False,
        window=None, vocab_size=size,
    )  # fmt: skip
    taps = check_taps(target, taps, default_taps(target.num_layers, num_layers))
    config = DFlashConfig(
        layer, taps, target.width, target.vocab_size, block_size, target.vocab_size - 1,
        own_head=draft_vocab_size is not None, **changes,
    )  # fmt: skip
    if config.kind != kind:
        raise UsageError(f"a head of these parts is a {config.kind}, not a {kind}; use that method")
    return config


def dspark_of_target(target: LlamaConfig, *, block_size: int = 7, markov: str = "vanilla", **changes) -> DFlashConfig:
    """Return the shapes of DSpark for a target."""
    confidence = "state" if markov == "no" else "markov"
    parts: dict[str, Any] = {"from_anchor": True, "markov": markov, "confidence": confidence} | changes
    return of_target(target, kind="dspark", block_size=block_size, **parts)


def dflash2_of_target(target: LlamaConfig, **changes) -> DFlashConfig:
    """Return the shapes of DFlash 2 for a target. A small vocabulary limits the candidates."""
    parts: dict[str, Any] = {"conv_taps": 2, "selector_rank": 256, "candidates": min(16, target.vocab_size)}
    return of_target(target, kind="dflash2", **(parts | changes))


def domino_of_target(target: LlamaConfig, **changes) -> DFlashConfig:
    """Return the shapes of Domino for a target."""
    return of_target(target, kind="domino", **({"from_anchor": True, "prefix_rank": 256} | changes))


def jetspec_of_target(target: LlamaConfig, **changes) -> DFlashConfig:
    """Return the shapes of JetSpec for a target."""
    return of_target(target, kind="jetspec", **({"causal": "all"} | changes))


_SHAPES = ("num_layers", "block_size", "mlp_width")
_FLAGS = ("from_anchor", "embeds")
_MARKOV = (("markov", ("no", "vanilla", "gated", "rnn")), ("confidence", ("no", "state", "markov")))

KINDS = (
    HeadKind(METHODS[0], DFlash, dflash_head, of_target, (*_SHAPES, "draft_vocab_size"), taps=True, flags=_FLAGS),
    HeadKind(
        METHODS[1], DFlash, dflash_head, jetspec_of_target, (*_SHAPES, "draft_vocab_size"), taps=True, flags=_FLAGS,
    ),
    HeadKind(
        METHODS[2], DFlash, dflash_head, dflash2_of_target, (*_SHAPES, "conv_group", "candidates"), taps=True,
        flags=_FLAGS, counts=("conv_taps", "selector_rank"),
    ),
    HeadKind(
        METHODS[3], DFlash, dflash_head, domino_of_target, (*_SHAPES, "prefix_rank", "prefix_state"), taps=True,
        flags=_FLAGS, counts=("pure_prefix",),
    ),
    HeadKind(
        METHODS[4], DFlash, dflash_head, dspark_of_target, (*_SHAPES, "draft_vocab_size", "markov_rank"), taps=True,
        flags=_FLAGS, choices=_MARKOV,
    ),
)  # fmt: skip
