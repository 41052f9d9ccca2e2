"""The contracts every part of specjax speaks.

Shapes: B batch, N tree nodes (root included), T new tokens, S cache slots, L token buffer, V vocabulary, D model
width, H heads, K kv heads. `p` is the target's distribution, `q` the drafter's. A *position* is an index into the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import jax

from specjax.arrays import batch_axes
from specjax.arrays.indexing import take_along

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
"""How the siblings of a tree were drawn, the static fact that decides which verifiers are exact.

`point_mass`: without randomness, given the past (n-grams, retrieval, top-k). The others were drawn from
`TokenTree.logits` of their parent. `chain`: one child per node. `without_replacement`: one after another, never twice
the same token. `with_replacement`: independently, equal siblings kept as nodes of their own;
`with_replacement_uneven`: likewise, in a shape whose chains of first children differ in length. `top_and_sampled`: the
first sibling is sampled; the others, to which the row gives no mass, are fixed. `without_replacement_then_uniform`:
once the row has no token left, uniformly among those to which it gives no mass.
"""


class TokenTree(NamedTuple):
    """A draft: a tree of tokens of fixed shape, parents before children, siblings in draft order.

    Node 0 is the last committed token, which is not in the cache yet. A node is valid only if its parent is.
    For sampled drafts `valid[:, i]` must not depend on the token drawn at node i (stopping *after* it may): else the
    output is biased.
    """

    tokens: Array  # int32[B, N]
    parents: Array  # int32[B, N], parents[:, 0] = -1, parents[:, i] < i
    valid: Array  # bool[B, N]
    logits: Array | None = None  # float32[B, N, V], warped; children of node i were drawn from row i. None: point mass


class Verdict(NamedTuple):
    """What the target accepts of a tree."""

    path: Array  # int32[B, N], accepted nodes from the root down, then -1
    num_nodes: (
        Array  # int32[B], accepted nodes, root included: 1 ... depth + 1; a drafter sees 0 in rows that had ended
    )
    next_token: Array  # int32[B], drawn by the target after the last accepted node


class Output(NamedTuple):
    """Result of one forward pass. What a caller does not use, the compiler removes."""

    logits: Array  # float32[B, T, V]
    hidden: Array  # [B, T, D], the feature the head reads (after the final norm)
    taps: tuple[Array, ...] = ()  # [B, T, D] each, the residual stream after the layers asked for (0: the embedding)


class Mixture(NamedTuple):
    """Tokens in superposition, where a model takes tokens: the weighted sum of their embeddings stands for each."""

    ids: Array  # int32[B, T, K]
    weights: Array  # float32[B, T, K]


class Stream(NamedTuple):
    """A residual stream, where a model takes tokens: what the first of the layers that run reads."""

    values: Array  # [B, T, D]


class Appended(NamedTuple):
    """Tokens, and behind them vectors in place of embeddings, where a model takes tokens: W + P in all."""

    tokens: Array  # int32[B, W]
    vectors: Array  # [B, P, D], as `Model.embed` gives them


class SoftPrompts(NamedTuple):
    """Vectors below the nodes of a tree that the target reads in the same pass. They are no nodes: no rule sees them,
    nothing accepts them, and no node has one above it."""

    vectors: Array  # [B, P, D]
    parents: Array  # int32[B, P]: a node of the tree of W nodes, or W + i, an earlier one of these
    valid: Array  # bool[B, P]; one that is not sees itself alone


class Sublayers(NamedTuple):
    """Which sublayers of a model run, per row. The others leave the residual stream as it is.

    A sublayer that no row runs costs no time; one that some rows run costs what it costs all of them.
    """

    attention: Array  # bool[B, layers]
    mlp: Array  # bool[B, layers]


class Capabilities(NamedTuple):
    """What a model can do besides predicting the next token. Whether it can rewind, `Model.rewind` says itself."""

    num_layers: int = 0  # that can be named in `taps` (0: the embedding) and `layers`
    taps: bool = False
    layer_skipping: bool = False
    groups: tuple[int, ...] | None = ()  # the values above 1 that `group` takes; None: any
    trees: bool = True  # passes over trees; else over chains only
    mixtures: bool = False  # takes a `Mixture` for tokens
    streams: bool = False  # takes a `Stream` for tokens
    vectors: bool = False  # takes `Appended` for tokens
    inputs: bool = False  # `init_cache` reads some; others are given None


class Model(NamedTuple):
    """A language model as pure functions. Hashable: equal hyperparameters give the same object.

    `init_cache(params, inputs, batch, capacity) -> cache` of no tokens, with room for `capacity`. `inputs` are what a text
    is conditioned on besides its own tokens, arrays [B, ...] such as an encoder's input; None for most models.

    `forward(params, tokens[B, T], cache, *, positions[B, T], mask[B, T, T], taps=(), earlier=None, layers=None,
    group=1)` returns `(Output, pending)`. It reads the cache and does not change it. `mask` is only *among the new
    tokens*: it names each token's ancestors and itself; what the cache holds is seen by all. `pending` is what the new
    tokens would add. Of the rest a caller passes only what `capabilities` allows:
      earlier: P tokens that are pending still (a tree that grows level by level); the mask is then [B, T, P + T].
      taps: layers after which `Output.taps` has the residual stream.
      layers: the `Sublayers` to run, None: all. What is pending of the others is zeros.
      group: above 1 the pass is approximate: of the middle layers, the attention of so many in a row reads one stream,
        that before them, so that it can run at once. Never asked of models of less than 4 layers.

    `commit(cache, pending, path[B, P], num_nodes[B]) -> cache` adds nodes `path[b, :num_nodes[b]]`, a path down the
    tree. Prefill, plain decoding, chains and trees are these two calls; what is not committed is forgotten.

    `rewind(cache, length[B]) -> cache` forgets all but the first `length` tokens. None: the model cannot, as one whose
    memory is a running state cannot; then nothing may be committed that could be taken back.

    `prompted(cache, length[B]) -> cache` says, before a text is read, of how many tokens its prompt is. None: that
    makes no difference to the model.

    `widen(pending, slots)` gives what is pending room for `slots` tokens; `insert(wide, new, place)` writes what a
    later pass left at slot `place` (an int, int32[] or one per row [B]) and following, or each token at a slot of its
    own (int32[B, T], of which those beyond the last fall away). The defaults are for `pending` whose arrays are all
    [B, T, ...]. `axes(cache or pending)` has the place of B in the shape of each array, by default
    0, and `shardings(cache or pending)` how each lies on the model's mesh.

    `embed(params, tokens[B, T]) -> [B, T, D]` is what the first layer reads, `unembed(params, hidden[..., D]) ->
    float32[..., V]` the head without the final norm, `head(params, stream[B, T, D]) -> float32[B, T, V]` both: what the
    model would predict if it ended at a residual stream such as one of `Output.taps`. For drafters that share them.
    """

    init_cache: Callable[..., PyTree]
    forward: Callable[..., tuple[Output, PyTree]]
    commit: Callable[..., PyTree]
    vocab_size: int
    max_positions: int
    name: str = "model"
    rewind: Callable[[PyTree, Array], PyTree] | None = None
    prompted: Callable[[PyTree, Array], PyTree] | None = None
    widen: Callable[[PyTree, int], PyTree] = batch_axes.widen
    insert: Callable[[PyTree, PyTree, Any], PyTree] = batch_axes.insert
    axes: Callable[[PyTree], PyTree] = batch_axes.rows_first
    shardings: Callable[[PyTree], PyTree] | None = None
    embed: Callable[[PyTree, Array], Array] | None = None
    unembed: Callable[[PyTree, Array], Array] | None = None
    head: Callable[[PyTree, Array], Array] | None = None
    capabilities: Capabilities = Capabilities()
    config: Any = None  # what it was made from, if by `specjax.models`
    mesh: jax.sharding.Mesh | None = None  # over which its parameters lie
    over: tuple[str, ...] | None = None  # the axes of it that split them, besides "data"; None: all

    def reads(self, inputs: PyTree) -> PyTree:
        """`inputs` for `init_cache` if the model reads any, else None: of a draft model beside a target that does."""
        return inputs if self.capabilities.inputs else None

    def start_cache(self, params: PyTree, inputs: PyTree, length: Array, capacity: int) -> PyTree:
        """`init_cache` for texts whose prompts are of `length` int32[B] tokens."""
        cache = self.init_cache(params, inputs, len(length), capacity)
        return cache if self.prompted is None else self.prompted(cache, length)

    def rewind_cache(self, cache: PyTree, length: Array) -> PyTree:
        """`rewind`, where it is known that the model can."""
        assert self.rewind is not None, f"{self.name} cannot rewind"
        return self.rewind(cache, length)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Target:
    """A model with its parameters. A pytree: the parameters are its leaves, so it can be an argument of `jit`."""

    model: Model = field(metadata={"static": True})
    params: PyTree


class Sampling(NamedTuple):
    """How logits become a distribution; every field is `None` (off, and not compiled) or a traced scalar or [B]."""

    temperature: Array | None = None  # None: greedy
    top_k: Array | None = None
    top_p: Array | None = None
    min_p: Array | None = None


class Context(NamedTuple):
    """What a drafter may read: the committed text, the target, and how it samples."""

    tokens: Array  # int32[B, L]
    length: Array  # int32[B], committed tokens
    sampling: Sampling = Sampling()
    noise: Array | None = None  # key[B] of the target's own draws, for drafters that share them (coupled sampling)
    cache: PyTree = None  # the target's, of the first length - 1 tokens; not in `init`
    target: Target | None = None  # for drafters made of its layers or its head
    inputs: PyTree = (
        None  # what the text is conditioned on besides its tokens, as `Model.init_cache` has it; only in `init`
    )
    left: Array | None = None  # int32[B], tokens to come where rows wait for the last to end; None: none waits

    @property
    def root(self) -> Array:
        """int32[B, 1]: the last committed token, node 0 of every tree."""
        return take_along(self.tokens, self.length[:, None] - 1, 1)


class DraftOutput(NamedTuple):
    """What a drafter says of the children of nodes, where that is more than their logits."""

    logits: Array  # [B, F, V]
    confidence: Array | None = None  # float32[B, F], how likely it holds what it drafts from them to be accepted
    accepted: Array | None = None  # float32[B, F], how likely it holds the nodes themselves to be accepted


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
    """Size of every tree that a drafter proposes. Both numbers count the whole tree, so a chain of k tokens has k + 1
    nodes and depth k."""

    num_nodes: int  # N, the root included
    max_depth: int  # edges from the root to the deepest node


class Traits(NamedTuple):
    """Static facts about a drafter. They decide which verifiers are exact for it and which programs are compiled."""

    draws: Draws = "point_mass"
    # Widths of the target pass that are worth compiling, besides N. A width above 1 needs trees whose valid nodes come
    # first (`trees.operations.compact`).
    widths: tuple[int, ...] = (1,)
    chains: bool = False  # every tree is a chain; implied by draws="chain"
    rewinds: bool = True  # the state stays correct when the text becomes shorter, as happens within `hierarchical`
    follows_any_tree: bool = False  # `observe` accepts trees that another drafter proposed
    taps: tuple[int, ...] = ()  # layers of the target whose residual streams `observe` and `Hooks.prefill` read
    max_accepted: int | None = None  # accepted tokens per step, root included, that `update` can handle; None: N


class Hooks(NamedTuple):
    """Optional functions of a drafter. Most drafters need none of them.

    `prefill(params, state, context, tokens[B, T], count[B], output) -> state` receives the target's outputs for the
    prompt, chunk by chunk. In row b, the first `count[b]` of the T tokens are the next tokens of the prompt.

    `export(params, state) -> params` returns parameters that a later call can start from (`DecodeResult.drafter`). In
    `serve`, rows end at different times. So the state should hold only the things that its own rows learned, and
    `export` should add them to the parameters. Then no row overwrites the contribution of another row.

    `soft_prompts(params, state, context, tree) -> SoftPrompts` adds vectors below nodes of the tree to the target
    pass. The tree is cut to the width of the pass, and P may depend on that width. In `observe`, the outputs for these
    vectors follow those of the tree's nodes.

    `resume(params, state, length[B]) -> state` removes everything but the first `length` tokens of the text from a
    state between two steps. Another writer then continues the text, and `propose` reads it. None: the state is
    initialised again.

    `axes(state)` returns the position of the batch axis in each array of the state, or `batch_axes.SHARED` for an array
    that all rows share. Default: 0 for every array.

    `explain(before, after) -> str` returns one sentence on why the tree was drafted. It compares the states of one row
    before and after a step, and runs on the host (`specjax.explain`).
    """

    prefill: Callable[..., PyTree] | None = None
    export: Callable[..., PyTree] | None = None
    soft_prompts: Callable[..., SoftPrompts] | None = None
    resume: Callable[..., PyTree] | None = None
    axes: Callable[[PyTree], PyTree] = batch_axes.rows_first
    explain: Callable[[PyTree, PyTree], str] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drafter:
    """A proposer of token trees, made of pure functions. A pytree whose only leaves are its parameters.

    Only `propose` and `size` are required.

    `propose(params, keys[B], state, context, limit[B]) -> (TokenTree, state)` drafts a tree of `size.num_nodes` nodes.
    Valid nodes must not be deeper than `limit`.

    `init(params, context) -> state` builds the state from the prompts. Default: ().

    The drafter learns from a target pass in two functions. `observe(params, state, context, tree, verdict, output) ->
    observed` selects the part of the pass that the drafter needs. `tree` and `output` are cut to the width of the pass,
    which covers all valid nodes. `observed` must be small, and its shape must not depend on the width: each width is a
    branch of the program, and a branch copies its results. `output.taps` holds the layers listed in `traits.taps`.

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
        """Number of nodes of every tree (N), the root included."""
        return self.size.num_nodes

    @property
    def max_depth(self) -> int:
        """Depth of the deepest possible node."""
        return self.size.max_depth

    @property
    def drafts_chains(self) -> bool:
        """True if the parent of every node is the node before it."""
        return self.traits.chains or self.traits.draws == "chain" or self.num_nodes <= 2


def _is_its_settings(params: PyTree, settings: PyTree, tokens: Array, length: Array, vocab_size: int) -> PyTree:
    return settings


def _does_not_change(params: PyTree, state: PyTree, tokens: Array, count: Array) -> PyTree:
    return state


def _fits_any(processor: Processor, vocab_size: int) -> None:
    pass


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Processor:
    """Changes the target's logits by the text before them, as pure functions: penalties, biases, constraints.

    `process(params, state, tree, above, logits[B, N, V]) -> logits` changes row i of the logits as plain decoding would
    after the committed text and the path to node i: `above` bool[B, N, N] says which nodes that is, i and the root
    among them; the root is committed already, and in `state`. What it makes of row i must not depend on nodes that are
    not above i. Of invalid nodes any value will do, and their tokens may be outside of the vocabulary.

    `init(params, settings, tokens[B, L], length[B], vocab_size) -> state` reads the prompts; all arrays of the state
    are [B, ...]. Default: the settings. `update(params, state, tokens[B, N], count[B]) -> state` takes in the first
    `count` tokens, which were committed. Default: as it was.

    `settings` are what may differ from row to row, arrays [1, ...] or [B, ...]: `init` gets them as [B, ...] and puts
    what is needed of them into the state. `params` are shared by all rows. `check(processor, vocab_size)` is called
    before anything compiles, and raises UsageError for a processor that does not fit the vocabulary.
    """

    process: Callable[..., Array] = field(metadata=STATIC)
    init: Callable[..., PyTree] = field(metadata=STATIC, default=_is_its_settings)
    update: Callable[..., PyTree] = field(metadata=STATIC, default=_does_not_change)
    check: Callable[[Processor, int], None] = field(metadata=STATIC, default=_fits_any)
    params: PyTree = ()
    settings: PyTree = ()

    replace = replace


VerifyFn = Callable[[Array, TokenTree, Array], Verdict]
"""`verify(keys[B, N], tree, target_logits[B, N, V]) -> Verdict`.

`keys[:, i]` belongs to the row and to the *position* that the children of node i would take, so a verifier that draws
the target's token from it gives the same token whatever was drafted; those of invalid nodes are not to be used.
`target_logits` are processed and warped already.
"""


class Controller(NamedTuple):
    """Chooses how deep to draft. It reads only the past, so a lossless method stays lossless under any controller."""

    init: Callable[[int], PyTree]  # (batch) -> state
    limit: Callable[[PyTree], Array]  # (state) -> int32[B]
    update: Callable[[PyTree, Any], PyTree]  # (state, Info) -> state
    reads_signals: bool = False  # needs `Info.signals`
    axes: Callable[[PyTree], PyTree] = batch_axes.rows_first  # as `Hooks.axes`, of its state


class Signals(NamedTuple):
    """What the drafter's distributions said of a round, on the accepted path: entry j is of that of its token j + 1."""

    confidence: Array  # float32[B, N], largest probability
    entropy: Array  # float32[B, N], nats
    judged: Array  # bool[B, N], which entries there are: of the accepted tokens and of the first rejected one


class Scored(NamedTuple):
    """A tree after the target's pass: what a verifier judges. What was not in the pass, which was cut behind the valid
    nodes, has zeros."""

    tree: TokenTree
    logits: Array  # float32[B, N, V], warped
    hidden: Array  # float[B, N, D]


class Info(NamedTuple):
    """Diagnostics of one step. The next step never reads them; `accepted` is what a controller may learn from."""

    tokens: Array  # int32[B, N], the tokens added to the text, then padding
    emitted: Array  # int32[B], how many of them
    accepted: Array  # int32[B], how many of them were drafted
    drafted: Array  # int32[B], nodes verified, root excluded
    drafted_depth: Array  # int32[B], depth of the deepest valid node
    active: Array  # bool[B], rows that were not done before the step
    hit_eos: Array  # bool[B], rows that ended with an eos token in this step
    logits: Array | None = None  # float32[B, N, V], warped, that the added tokens were drawn from, if asked for
    logprobs: Array | None = None  # float32[B, N], of the added tokens under these logits, if asked for
    violations: Array | None = None  # int32[B], bits of `checks.VIOLATIONS`, when debugging
    scored: Scored | None = None  # what the verifier saw, if asked for
    signals: Signals | None = None  # if the controller reads them
    finite: Array | None = None  # bool[B], that of the state
    done: Array | None = None  # bool[B], that of the state, of a loop whose rows may end before their stop without eos


class Stats(NamedTuple):
    """Sums of `Info` over the steps of a row."""

    target_passes: Array  # int32[B]
    drafted: Array  # int32[B]
    accepted: Array  # int32[B]
    drafted_by_depth: Array  # int32[B, D], rounds in which a node of depth d + 1 was drafted
    accepted_by_depth: Array  # int32[B, D], rounds in which one was accepted and emitted
    hit_eos: Array  # bool[B]
    violations: Array | None = None  # int32[B], when debugging


class DecodeState(NamedTuple):
    """Everything the next step needs, and nothing else."""

    tokens: Array  # int32[B, L]
    length: Array  # int32[B]
    done: Array  # bool[B]
    keys: Array  # key[B], constant: a step derives its randomness from key and position
    stop: Array  # int32[B], length at which the row is full
    cache: PyTree  # of the target: holds the first length - 1 tokens
    draft: PyTree
    control: PyTree
    finite: Array  # bool[B], whether all that the target said was
    processed: tuple[PyTree, ...] = ()  # the states of the processors, of the text so far
