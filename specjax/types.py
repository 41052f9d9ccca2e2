"""Contracts between the parts of specjax: models, drafters, verifiers, controllers and processors.

Every part is a bundle of pure functions. One decoding step calls them in this order:

1. `Drafter.propose` drafts a `TokenTree` of fixed shape. Its node 0 is the last committed token.
2. `Model.forward` runs the target pass and returns the logits of every node.
3. The verifier, a `VerifyFn`, returns a `Verdict`: the accepted path and one more token.
4. `Drafter.observe` selects the part of the pass that the drafter needs for its update.
5. `Model.commit` adds the accepted path to the cache.
6. `Drafter.update` and `Controller.update` compute the next states.

Shapes: B batch rows, N tree nodes (root included), T new tokens, S cache slots, L token buffer, V vocabulary. D is the
model width, H the number of heads, K that of key/value heads. `p` is the distribution of the target and `q` that of the
drafter. A *position* is an index into the text. Rows are independent, unless a drafter or controller shares state
between them on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import jax

from specjax.arrays import batch_axes
from specjax.arrays.indexing import take_along
from specjax.arrays.logit_rows import LogitRows

Array = jax.Array
PyTree = Any


Draws = Literal[
    "point_mass",
    "chain",
    "without_replacement",
    "with_replacement",
    "with_replacement_uneven",
    "top_and_sampled",
    "without_replacement_then_uniform",
]
"""The way in which a drafter draws the siblings of a tree. It determines the verifiers that are exact.

`point_mass`: siblings are a deterministic function of the past (n-grams, retrieval, top-k). All other values mean that
siblings are drawn from the row of `TokenTree.logits` of their parent:

- `chain`: one child per node.
- `without_replacement`: one after another, and never the same token twice.
- `with_replacement`: independently; equal siblings stay separate nodes.
- `with_replacement_uneven`: as above, in a shape whose chains of first children differ in length.
- `top_and_sampled`: the first sibling is sampled; the other siblings are fixed tokens with no mass in the row.
- `without_replacement_then_uniform`: once no token with mass remains, uniformly among the tokens without mass.
"""


class TokenTree(NamedTuple):
    """A draft: a tree of tokens of fixed shape. Parents precede their children, and siblings are in draft order.

    Node 0 is the root: the last committed token, which is not in the cache yet. A node is valid only if its parent is
    valid. In sampled drafts, `valid[:, i]` must not depend on the token drawn at node i, or the output is biased.
    Stopping *after* that token is allowed.
    """

    tokens: Array  # int32[B, N]
    parents: Array  # int32[B, N], parents[:, 0] = -1, parents[:, i] < i
    valid: Array  # bool[B, N]
    # float32[B, N, V], warped; the children of node i were drawn from row i. None: a point mass on every token
    # `LogitRows`: not stored, because they are large
    logits: Array | LogitRows | None = None
    # float32[B, N], a drafter's trained confidence that a node is accepted if its parent is; on request
    confidence: Array | None = None


class Verdict(NamedTuple):
    """The part of a tree that the target accepts, and the token that follows it."""

    path: Array  # int32[B, N], accepted nodes from the root down, then -1
    # int32[B], accepted nodes, root included: 1 ... depth + 1. A drafter receives 0 for rows that have ended
    num_nodes: Array
    next_token: Array  # int32[B], drawn by the target after the last accepted node


class Best(NamedTuple):
    """The k likeliest tokens of each node, best first."""

    tokens: Array  # int32[..., k]; a token with the logit -inf is arbitrary
    logits: Array  # float32[..., k]
    total: Array  # float32[...], logarithm of the sum of exp(logit) over the vocabulary; not finite if a logit is NaN


class Output(NamedTuple):
    """Result of one forward pass. The compiler removes the computation of unused fields."""

    logits: Array  # float32[B, T, V]
    hidden: Array  # [B, T, D], hidden states after the final norm, the input of the output head
    taps: tuple[Array, ...] = ()  # [B, T, D] each, residual streams after the requested layers (0: the embedding)
    best: Best | None = None  # [B, T], set in passes whose logits are too large to be stored; see `Traits.reads_best`
    experts: Array | None = None  # float32[], mean number of distinct experts that a layer read; None: not counted


class Mixture(NamedTuple):
    """Weighted mixtures of tokens, as an input of a model in place of tokens. The model reads sums of embeddings."""

    ids: Array  # int32[B, T, K]
    weights: Array  # float32[B, T, K]


class Stream(NamedTuple):
    """A residual stream, as an input of a model in place of tokens. The first layer that runs reads it."""

    values: Array  # [B, T, D]


class Appended(NamedTuple):
    """Tokens followed by vectors in place of embeddings, as an input of a model. The pass has T = W + P inputs."""

    tokens: Array  # int32[B, W]
    vectors: Array  # [B, P, D], of the form that `Model.embed` returns


class SoftPrompts(NamedTuple):
    """Vectors that the target reads below the nodes of a tree, in the same pass.

    They are not nodes: no verifier reads them, no node attends to them, and they are never committed.
    """

    vectors: Array  # [B, P, D]
    parents: Array  # int32[B, P]: a node of the tree of W nodes, or W + i for an earlier vector i
    valid: Array  # bool[B, P]; an invalid vector attends only to itself


class Sublayers(NamedTuple):
    """Sublayers of a model that run, per row. All others leave the residual stream unchanged.

    A sublayer that no row runs costs no time. If any row runs it, it costs as much as for all rows.
    """

    attention: Array  # bool[B, layers]
    mlp: Array  # bool[B, layers]


class Capabilities(NamedTuple):
    """Optional inputs and outputs of a model. `Model.rewind` shows whether the model can rewind its cache."""

    num_layers: int = 0  # number of layers that `taps` (0: the embedding) and `layers` can name
    taps: bool = False  # returns residual streams
    layer_skipping: bool = False  # accepts `layers`
    depth: bool = False  # accepts `depth`
    groups: tuple[int, ...] | None = ()  # values above 1 that `group` accepts; None: any
    trees: bool = True  # accepts trees; otherwise chains only
    tree_depth: int | None = None  # largest depth of a tree that is not a chain; None: any
    mixtures: bool = False  # accepts a `Mixture` in place of tokens
    streams: bool = False  # accepts a `Stream` in place of tokens
    vectors: bool = False  # accepts `Appended` in place of tokens
    inputs: bool = False  # `init_cache` reads `inputs`; other models receive None
    needs_inputs: bool = True  # with `inputs`: a call without them is refused
    shares_encoder: bool = False  # as a draft model, it reads the `EncodedInputs` of its target
    placeholder: int | None = None  # the token in prompts that vectors of the inputs replace; no drafter should copy it
    reads_in_order: bool = False  # no token may see a later one, as with recurrent layers
    sees_ahead: bool = False  # reads the rest of an image that a text cuts in two; texts then have a constant mask
    shared_keys: tuple[int, int] | None = None  # the local and the global layer whose keys assistants read in the cache
    new_tokens: int | None = None  # the new tokens for which a compressed cache has room; None: no such limit

    @property
    def requires_inputs(self) -> bool:
        """Return True if a call without inputs is refused."""
        return self.inputs and self.needs_inputs


class Model(NamedTuple):
    """A language model made of pure functions. It is hashable; equal hyperparameters give the same object.

    `init_cache(params, inputs, batch, capacity) -> cache` returns an empty cache with room for `capacity` tokens.
    `inputs` condition the text in addition to its tokens, such as the input of an encoder: arrays [B, ...], or None.

    `forward(params, tokens[B, T], cache, *, positions[B, T], mask[B, T, T], taps=(), earlier=None, layers=None,
    depth=None, group=1) -> (Output, pending)` runs the model on new tokens. It reads the cache and does not change it.
    `pending` contains the cache entries of the new tokens. `mask` covers the new tokens only: it marks each token's
    ancestors and the token itself. Every new token attends to the complete cache. Callers pass the other arguments only
    if `capabilities` allows them:
      earlier: pending entries of P earlier tokens, for trees that grow level by level; the mask is then [B, T, P + T].
      taps: layers whose residual streams `Output.taps` returns.
      layers: the `Sublayers` to run; None: all. The pending entries of the other sublayers are zeros.
      depth: a `DepthPass`, which selects the layers of each token (`specjax.models.skipping.policy`). The pending
        entries are then a `SkippingPending`.
      group: above 1, the pass is approximate: in the middle layers, `group` consecutive attention sublayers read the
        stream before the first of them and can run in parallel. Only for models of 4 layers or more.

    `commit(cache, pending, path[B, P], num_nodes[B]) -> cache` adds the nodes `path[b, :num_nodes[b]]`, which form a
    path down the tree. All other pending entries are dropped. Prefill, plain decoding, chains and trees all consist of
    `forward` and `commit`.

    `rewind(cache, length[B]) -> cache` removes all tokens except the first `length`. None: the model cannot rewind, as
    with recurrent states. Callers then commit only tokens that stay in the text.

    `mark_prompt(cache, length[B]) -> cache` stores the prompt lengths before the prompts are read. None: the model does
    not need them.

    `finish_prompt(params, cache, tokens[B, L], length[B], num_nodes) -> cache` returns the cache for decoding, after
    the first `length - 1` tokens were read. It may be smaller. `num_nodes` is the number of nodes of a commit. None:
    the cache stays. A loop that does not call it decodes with the complete cache.

    `widen(pending, slots)` gives pending entries room for `slots` tokens. `insert(wide, new, place)` writes the entries
    of a later pass at slot `place` (an int, int32[], or int32[B], one per row) and following. With int32[B, T], each
    token has its own slot, and slots beyond the end are dropped. The defaults fit arrays of shape [B, T, ...].

    `axes(cache or pending)` returns the position of the batch axis in each array. Default: 0. `shardings(cache or
    pending)` returns the sharding of each array on the model's mesh.

    `embed(params, tokens[B, T]) -> [B, T, D]` returns the input of the first layer. `unembed(params, hidden[..., D]) ->
    float32[..., V]` is the output head without the final norm. `head(params, stream[B, T, D]) -> float32[B, T, V]`
    applies the final norm and the output head to a residual stream, such as one of `Output.taps`. Draft heads share
    these functions. `best(params, hidden[B, T, D], k) -> Best` returns the k likeliest tokens of the head without an
    array of all logits. It must agree with `forward`, so a model with another `forward` replaces it. None: the logits
    are always computed as a whole.

    `queries(params, streams, positions[B, T]) -> queries` returns the queries [B, T, H, h] of each layer, rotated and
    scaled, so that their products with cached keys are attention scores. `streams` is the residual stream [B, T, D] at
    the input of each layer. None: the cache is not one of keys and values, or it is spread over a mesh.

    `pass_params(params) -> params` returns the parameters that `forward` reads, for costs. None: all of them.

    `encode(params, inputs) -> EncodedInputs` runs an encoder. `init_cache` accepts the result in place of `inputs`, so
    that a draft model can share it (`specjax.models.share_encoder`). None: no draft model can.

    `source(cache) -> Source` returns the texts that an encoder has read. None: the model has no encoder of texts.

    `images(cache)` returns the vectors of the images of the prompts (`models.vision.ImageMemory`), or None if there are
    no images. None: the model reads no images.

    `check_inputs(inputs, tokens, lengths, max_new_tokens)` raises UsageError for inputs with values that do not fit the
    prompts int[B, P] of `lengths` int[B] tokens. It is called before the program runs, and not for traced values. None:
    all values fit.
    """

    init_cache: Callable[..., PyTree]
    forward: Callable[..., tuple[Output, PyTree]]
    commit: Callable[..., PyTree]
    vocab_size: int
    max_positions: int
    name: str = "model"
    rewind: Callable[[PyTree, Array], PyTree] | None = None
    mark_prompt: Callable[[PyTree, Array], PyTree] | None = None
    finish_prompt: Callable[..., PyTree] | None = None
    widen: Callable[[PyTree, int], PyTree] = batch_axes.widen
    insert: Callable[[PyTree, PyTree, Any], PyTree] = batch_axes.insert
    axes: Callable[[PyTree], PyTree] = batch_axes.rows_first
    shardings: Callable[[PyTree], PyTree] | None = None
    embed: Callable[[PyTree, Array], Array] | None = None
    unembed: Callable[[PyTree, Array], Array] | None = None
    head: Callable[[PyTree, Array], Array] | None = None
    best: Callable[[PyTree, Array, int], Best] | None = None
    queries: Callable[[PyTree, tuple[Array, ...], Array], tuple[Array, ...]] | None = None
    pass_params: Callable[[PyTree], PyTree] | None = None
    encode: Callable[[PyTree, PyTree], EncodedInputs] | None = None
    source: Callable[[PyTree], Source] | None = None
    images: Callable[[PyTree], PyTree] | None = None
    check_inputs: Callable[[PyTree, Array, Array, int], None] | None = None
    capabilities: Capabilities = Capabilities()
    config: Any = None  # configuration from which `specjax.models` built the model
    base_config: Any = None  # that of the model whose layers a variant without a configuration runs
    mesh: jax.sharding.Mesh | None = None  # mesh over which the parameters are sharded
    over: tuple[str, ...] | None = None  # mesh axes except "data" that split the parameters; None: all

    def __deepcopy__(self, memo: dict) -> Model:
        """Return the model itself, which is immutable."""
        return self

    def select_inputs(self, inputs: PyTree) -> PyTree:
        """Return the part of the target's inputs that a draft model reads.

        They are None for one without inputs, and `EncodedInputs` only for one that shares the encoder of its target.
        """
        if isinstance(inputs, EncodedInputs) and not self.capabilities.shares_encoder:
            inputs = inputs.inputs
        return inputs if self.capabilities.inputs else None

    def encode_inputs(self, params: PyTree, inputs: PyTree) -> PyTree:
        """Return `encode(params, inputs)`, or `inputs` for a model without it."""
        return inputs if self.encode is None or inputs is None else self.encode(params, inputs)

    def start_cache(self, params: PyTree, inputs: PyTree, length: Array, capacity: int) -> PyTree:
        """Return an empty cache for prompts of `length` int32[B] tokens."""
        cache = self.init_cache(params, inputs, len(length), capacity)
        return cache if self.mark_prompt is None else self.mark_prompt(cache, length)

    def cache_after_prompt(
        self, params: PyTree, cache: PyTree, tokens: Array, length: Array, num_nodes: int
    ) -> PyTree:  # fmt: skip
        """Return the cache for decoding. The arguments are those of `finish_prompt`."""
        return cache if self.finish_prompt is None else self.finish_prompt(params, cache, tokens, length, num_nodes)

    def rewind_cache(self, cache: PyTree, length: Array) -> PyTree:
        """Return `rewind(cache, length)`. The caller must have checked that the model can rewind."""
        assert self.rewind is not None, f"{self.name} cannot rewind"
        return self.rewind(cache, length)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Target:
    """A model with its parameters. As a pytree, its leaves are the parameters, so it can be an argument of `jit`."""

    model: Model = field(metadata={"static": True})
    params: PyTree
    native: Any = field(default=None, metadata={"static": True})  # a draft module in its own files (`NativeModule`)

    @property
    def pass_params(self) -> PyTree:
        """Return the parameters that a pass of the model reads."""
        read = self.model.pass_params
        return self.params if read is None else read(self.params)


class Sampling(NamedTuple):
    """Options of the sampling distribution.

    Each field is None (off, not compiled) or a traced array: a scalar, or one value per row [B].
    """

    temperature: Array | None = None  # None: greedy
    top_k: Array | None = None
    top_p: Array | None = None
    min_p: Array | None = None


class Source(NamedTuple):
    """Texts that an encoder reads, such as those to translate or to correct."""

    tokens: Array  # int32[B, S], then unspecified values
    length: Array  # int32[B]


class EncodedInputs(NamedTuple):
    """Inputs of a model, and what its encoder makes of them."""

    output: Array  # [B, S, D]
    length: Array  # int32[B], entries of each row
    inputs: PyTree  # what the encoder has read


class Context(NamedTuple):
    """All inputs of a drafter except its state: the committed text, the target and the sampling options."""

    tokens: Array  # int32[B, L], committed tokens, then unspecified values
    length: Array  # int32[B], number of committed tokens
    sampling: Sampling = Sampling()
    noise: Array | None = None  # key[B] of the target's own draws, for drafters that share them (coupled sampling)
    cache: PyTree = None  # cache of the target, with the first length - 1 tokens; None in `init`
    target: Target | None = None  # for drafters that use its layers or its output head
    inputs: PyTree = None  # inputs that condition the text (`Model.init_cache`); set in `init` only
    source: Source | None = None  # what the encoder of the target has read, to copy from; not set in `init`
    images: PyTree = None  # vectors of the images of the prompts (`Model.images`); set while a prompt is read only
    remaining: Array | None = None  # int32[B], tokens still to generate, if finished rows are not replaced; else None
    # () if the controller limits no draft, so that a loop over its depth may have a fixed length; None: it may. Neither
    # has leaves, so the choice is static.
    unlimited: tuple[()] | None = None

    @property
    def root(self) -> Array:
        """Return the last committed token of each row, int32[B, 1]: node 0 of every tree."""
        return take_along(self.tokens, self.length[:, None] - 1, 1)


class DraftOutput(NamedTuple):
    """Logits of a draft model or draft head for F nodes, with optional estimates of acceptance."""

    logits: Any  # float[B, F, V], for the children of the nodes, or states from which they are computed
    confidence: Array | None = None  # float32[B, F], estimated probability that a child drafted here is accepted
    accepted: Array | None = None  # float32[B, F], estimated probability that the node itself is accepted


def _no_state(params: PyTree, context: Context) -> PyTree:
    return ()


def _observe_nothing(
    params: PyTree, state: PyTree, context: Context, tree: TokenTree, verdict: Verdict, output: Output
) -> PyTree:
    return ()


def _same_state(params: PyTree, state: PyTree, observed: PyTree, verdict: Verdict) -> PyTree:
    return state


STATIC = {"static": True}  # metadata of a dataclass field that belongs to the pytree's structure, not to its leaves


class TreeSize(NamedTuple):
    """Size of every tree that a drafter proposes. A chain of k tokens has k + 1 nodes and depth k."""

    num_nodes: int  # N, the root included
    max_depth: int  # number of edges from the root to the deepest node


class Traits(NamedTuple):
    """Static properties of a drafter. They determine the verifiers that are exact for it and the compiled programs."""

    draws: Draws = "point_mass"
    # Widths of the target pass that are worth compiling, besides N. A width above 1 needs trees whose valid nodes come
    # first (`trees.operations.compact`).
    widths: tuple[int, ...] = (1,)
    chains: bool = False  # every tree is a chain; implied by draws="chain"
    rewinds: bool = True  # the state stays correct when the text becomes shorter, as happens within `hierarchical`
    follows_any_tree: bool = False  # `observe` accepts trees that another drafter proposed
    taps: tuple[int, ...] = ()  # layers of the target whose residual streams `observe` and `Hooks.prefill` read
    max_accepted: int | None = None  # accepted tokens per step, root included, that `update` can handle; None: N
    # Likeliest tokens per node that `observe` reads: from `Output.best` if that is not None, else from `Output.logits`.
    # None: it may read all logits. A drafter without `observe` reads none.
    reads_best: int | None = None
    lag: int = 1  # last tokens of a prompt that the state does not contain after `Hooks.prefill`


class Hooks(NamedTuple):
    """Optional functions of a drafter. Most drafters need none of them.

    `prefill(params, state, context, tokens[B, T], count[B], output) -> state` receives the target's outputs for the
    prompt, chunk by chunk. In row b, the first `count[b]` of the T tokens are the next tokens of the prompt.

    `export(params, state) -> params` returns parameters from which a later call can start (`DecodeResult.drafter`). In
    `serve`, rows end at different times. So the state should contain only values learned from its own rows, and
    `export` should add them to the parameters. Then no row overwrites the contribution of another row.

    `soft_prompts(params, state, context, tree) -> SoftPrompts` adds vectors below nodes of the tree to the target
    pass. The tree is cut to the width of the pass, and P may depend on that width. In `observe`, the outputs for these
    vectors follow those of the tree's nodes.

    `resume(params, state, length[B]) -> state` removes all tokens of the text except the first `length` from a state
    between two steps. Another decoder then continues the text, and `propose` reads it. None: the state is initialised
    again.

    `axes(state)` returns the position of the batch axis in each array of the state, or `batch_axes.SHARED` for an array
    that all rows share. Default: 0 for every array.

    `widths(batch, target) -> widths` returns the widths of the target pass that occur with `batch` rows, if they depend
    on the batch. Trees must then have no more valid nodes than the widest. Only these widths are compiled, and the
    widest determines the memory of a pass. None: all of `Traits.widths` and N.

    `explain(before, after) -> str` returns one sentence with the reason for the tree. It compares the states of one row
    before and after a step, and runs on the host (`specjax.explain`).
    """

    prefill: Callable[..., PyTree] | None = None
    export: Callable[..., PyTree] | None = None
    soft_prompts: Callable[..., SoftPrompts] | None = None
    resume: Callable[..., PyTree] | None = None
    axes: Callable[[PyTree], PyTree] = batch_axes.rows_first
    widths: Callable[[int, Target], tuple[int, ...]] | None = None
    explain: Callable[[PyTree, PyTree], str] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drafter:
    """A proposer of token trees, made of pure functions. As a pytree, its only leaves are its parameters.

    Only `propose` and `size` are required.

    `propose(params, keys[B], state, context, limit[B]) -> (TokenTree, state)` drafts a tree of `size.num_nodes` nodes.
    Valid nodes must not be deeper than `limit`.

    `init(params, context) -> state` builds the state from the prompts. Default: ().

    The drafter learns from a target pass in two functions. `observe(params, state, context, tree, verdict, output) ->
    observed` selects the part of the pass that the drafter needs. `tree` and `output` are cut to the width of the pass,
    which covers all valid nodes. `observed` must be small, and its shape must not depend on the width: each width is a
    branch of the program, and a branch copies its results. `output.taps` contains the layers listed in `traits.taps`.

    `update(params, state, observed, verdict) -> state` runs after these branches, where caches and tables are written
    in place. In rows that have ended, the verdict accepts 0 nodes.

    Within a step, `propose` may store intermediate values in the state for its own `update`, unless
    `traits.follows_any_tree` is set.
    """

    propose: Callable[..., tuple[TokenTree, PyTree]] = field(metadata=STATIC)
    size: TreeSize = field(metadata=STATIC)
    init: Callable[..., PyTree] = field(metadata=STATIC, default=_no_state)
    observe: Callable[..., PyTree] = field(metadata=STATIC, default=_observe_nothing)
    update: Callable[..., PyTree] = field(metadata=STATIC, default=_same_state)
    params: PyTree = ()
    traits: Traits = field(metadata=STATIC, default=Traits())
    hooks: Hooks = field(metadata=STATIC, default=Hooks())

    replace = replace

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes of every tree (N), the root included."""
        return self.size.num_nodes

    @property
    def max_depth(self) -> int:
        """Return the depth of the deepest possible node."""
        return self.size.max_depth

    def pass_widths(self, batch: int, target: Target) -> list[int]:
        """Return the widths of the target pass that are compiled for `batch` rows, rising."""
        widths = self.hooks.widths(batch, target) if self.hooks.widths else (*self.traits.widths, self.num_nodes)
        return sorted({width for width in widths if width <= self.num_nodes})

    @property
    def reads_best(self) -> int | None:
        """Return the number of likeliest tokens per node that `observe` reads; None: it may read all logits."""
        return 0 if self.observe is _observe_nothing else self.traits.reads_best

    @property
    def drafts_chains(self) -> bool:
        """Return True if the parent of every node is the previous node."""
        return self.traits.chains or self.traits.draws == "chain" or self.num_nodes <= 2


def _keep_settings(params: PyTree, settings: PyTree, tokens: Array, length: Array, vocab_size: int) -> PyTree:
    return settings


def _keep_state(params: PyTree, state: PyTree, tokens: Array, count: Array) -> PyTree:
    return state


def _accept_any(processor: Processor, vocab_size: int) -> None:
    pass


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Processor:
    """A bundle of pure functions that change the target's logits depending on the text: penalty, bias, constraint.

    `process(params, state, tree, ancestors, logits[B, N, V]) -> logits` changes the logits of every node. Row i must
    equal the result of plain decoding after the committed text and the path to node i. `ancestors` bool[B, N, N] marks
    the nodes on that path, node i and the root included. The root is already committed and part of the state. Row i
    must depend only on nodes that are ancestors of node i. Rows of invalid nodes may have any value, and their tokens
    may be outside of the vocabulary.

    `init(params, settings, tokens[B, L], length[B], vocab_size) -> state` reads the prompts. All arrays of the state
    are [B, ...]. Default: the settings.

    `update(params, state, tokens[B, N], count[B]) -> state` receives the first `count` tokens, which were committed.
    Default: the state stays unchanged.

    With `by_row`, `process` also accepts the logits [B, R, V] of any R nodes, with their rows of `ancestors`
    bool[B, R, N]. Then only the nodes that the verifier visits are processed.

    `settings` may differ from row to row: arrays [1, ...] or [B, ...]. `init` receives them as [B, ...] and stores the
    needed values in the state. `params` are shared by all rows.

    `check(processor, vocab_size)` runs before anything is compiled. It raises UsageError if the processor does not fit
    the vocabulary.
    """

    process: Callable[..., Array] = field(metadata=STATIC)
    init: Callable[..., PyTree] = field(metadata=STATIC, default=_keep_settings)
    update: Callable[..., PyTree] = field(metadata=STATIC, default=_keep_state)
    check: Callable[[Processor, int], None] = field(metadata=STATIC, default=_accept_any)
    by_row: bool = field(metadata=STATIC, default=False)
    params: PyTree = ()
    settings: PyTree = ()

    replace = replace


VerifyFn = Callable[[Array, TokenTree, Array], Verdict]
"""`verify(keys[B, N], tree, target_logits[B, N, V]) -> Verdict` chooses the accepted path and the next token.

`keys[:, i]` depends on the row and on the *position* that the children of node i would take. So a verifier that draws
the target's token with this key returns the same token for any draft. The keys of invalid nodes must not be used.
`target_logits` are already processed and warped.
"""


class Controller(NamedTuple):
    """A rule for the draft length. It reads only the past, so a lossless method stays lossless under any controller."""

    init: Callable[[int], PyTree]  # (batch) -> state
    limit: Callable[[PyTree], Array]  # (state) -> int32[B], maximum depth of the next tree
    update: Callable[[PyTree, Any], PyTree]  # (state, Info) -> state
    reads_signals: bool = False  # True if `update` reads `Info.signals`
    reads_experts: bool = False  # True if `update` reads `Info.experts`
    reads_confidence: bool = False  # True if `update` reads `Info.confidence`
    axes: Callable[[PyTree], PyTree] = batch_axes.rows_first  # position of the batch axis, like `Hooks.axes`
    # (widths of the target pass, rising) -> the same rule for a drafter whose passes have these widths
    for_widths: Callable[[tuple[int, ...]], Controller] | None = None


class Signals(NamedTuple):
    """Statistics of the drafter's distributions along the accepted path. Entry j belongs to drafted token j + 1."""

    confidence: Array  # float32[B, N], largest probability
    entropy: Array  # float32[B, N], nats
    judged: Array  # bool[B, N], entries in use: those of the accepted tokens and of the first rejected token


class Scored(NamedTuple):
    """A tree with the results of the target pass, as a verifier receives it. Nodes outside of the pass have zeros."""

    tree: TokenTree
    logits: Array  # float32[B, N, V], warped
    hidden: Array  # float[B, N, D]


class TokenLogprobs(NamedTuple):
    """Log-probabilities of tokens by the target's own logits, before processors, temperature and filters."""

    tokens: Array  # float32[..., N], of the added tokens
    likeliest: Array  # int32[..., N, K], the likeliest tokens at their places, best first
    alternatives: Array  # float32[..., N, K], log-probabilities of `likeliest`


class Info(NamedTuple):
    """Diagnostics of one step. The next step never reads them. Controllers learn from `accepted`."""

    tokens: Array  # int32[B, N], tokens added to the text, then padding
    emitted: Array  # int32[B], number of added tokens
    accepted: Array  # int32[B], number of added tokens that were drafted
    drafted: Array  # int32[B], number of verified nodes, root excluded
    drafted_depth: Array  # int32[B], depth of the deepest valid node
    active: Array  # bool[B], rows that had not ended before the step
    hit_eos: Array  # bool[B], rows that ended with an eos token in this step
    logits: Array | None = None  # float32[B, N, V], warped logits of the draws of the added tokens; on request
    logprobs: Array | None = None  # float32[B, N], log-probabilities of the added tokens; on request
    violations: Array | None = None  # int32[B], bits of `value_checks.VIOLATIONS`; under debug=True
    scored: Scored | None = None  # input of the verifier; on request
    signals: Signals | None = None  # set if the controller reads them
    finite: Array | None = None  # bool[B], `DecodeState.finite` after the step
    done: Array | None = None  # bool[B], `DecodeState.done`; only from loops whose rows can end early without eos
    raw_logprobs: TokenLogprobs | None = None  # on request
    # int32[B], largest depth that the draft could have: the controller's limit, less near the end of a text. None: the
    # loop has no drafts
    offered_depth: Array | None = None
    # float32[B, 2], `Output.experts` and the tokens per row of the pass; set if the controller reads them and the model
    # counts them
    experts: Array | None = None
    # float32[B, D], the trained confidence in the drafted tokens of a chain by depth; set if the controller reads it
    confidence: Array | None = None


class Stats(NamedTuple):
    """Sums of `Info` over the steps of each row."""

    target_passes: Array  # int32[B]
    drafted: Array  # int32[B]
    accepted: Array  # int32[B]
    drafted_by_depth: Array  # int32[B, D], steps in which a node of depth d + 1 was drafted
    accepted_by_depth: Array  # int32[B, D], steps in which a node of depth d + 1 was accepted and emitted
    hit_eos: Array  # bool[B]
    violations: Array | None = None  # int32[B]; under debug=True


class DecodeState(NamedTuple):
    """State of a decoding loop, with exactly the inputs of the next step."""

    tokens: Array  # int32[B, L]
    length: Array  # int32[B], number of committed tokens
    done: Array  # bool[B]
    keys: Array  # key[B], constant: a step derives its randomness from the key and the position
    stop: Array  # int32[B], length at which the row is full
    cache: PyTree  # cache of the target, with the first length - 1 tokens
    draft: PyTree  # state of the drafter
    control: PyTree  # state of the controller
    # bool[B], False for a row that failed: it has an invalid input, the target returned NaN or Inf, or the processors
    # allow no token. Such a row has ended.
    finite: Array
    processed: tuple[PyTree, ...] = ()  # states of the processors
