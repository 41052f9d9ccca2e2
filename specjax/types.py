"""The contracts every part of specjax speaks.

Shapes: B batch, N tree nodes (root included), T new tokens, S cache slots, L token buffer, V vocabulary, D model
width, H heads, K kv heads. `p` is the target's distribution, `q` the drafter's. A *position* is an index into the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import jax

Array = jax.Array
PyTree = Any

Guarantee = Literal["distribution", "greedy", "lossy"]
"""What a method promises about its text.

`distribution`: the exact law of the target at any temperature (hence greedy equality too); `greedy`: equality at
temperature 0 only; `lossy`: neither.
"""

Draws = Literal[
    "point_mass",
    "chain",
    "without_replacement",
    "with_replacement",
    "top_and_sampled",
    "without_replacement_then_uniform",
]
"""How the siblings of a tree were drawn, the static fact that decides which verifiers are exact.

`point_mass`: without randomness, given the past (n-grams, retrieval, top-k). The others were drawn from
`TokenTree.logits` of their parent. `chain`: one child per node. `without_replacement`: one after another, never twice
the same token. `with_replacement`: independently, equal siblings kept as nodes of their own. `top_and_sampled`: the
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
    num_nodes: Array  # int32[B], accepted nodes, root included: 1 ... depth + 1
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


class Sublayers(NamedTuple):
    """Which sublayers of a model run, per row. The others leave the residual stream as it is.

    A sublayer that no row runs costs no time; one that some rows run costs what it costs all of them.
    """

    attention: Array  # bool[B, layers]
    mlp: Array  # bool[B, layers]


class Model(NamedTuple):
    """A language model as pure functions. Hashable: equal hyperparameters give the same object.

    `forward(params, tokens[B, T], cache, *, positions[B, T], mask[B, T, T], taps=(), earlier=None, layers=None,
    group=1)` returns `(Output, pending)`. It reads the cache and does not change it. `mask` is only *among the new
    tokens*; which slots of the cache count is the cache's own `length[B]`. `pending` is what the new tokens would add.
    Tokens may also see `earlier`, P tokens that are pending still (a tree that grows level by level): the mask is then
    [B, T, P + T]. `layers` are the `Sublayers` to run, None: all; what is pending of the others is zeros. Tokens may be
    a `Mixture`. With a `group` above 1 the pass is approximate: of the middle layers, the attention of so many in a row
    reads one stream, that before them, so that it can run at once. It is never asked of models of less than 4 layers.

    `commit(cache, pending, path[B, P], num_nodes[B]) -> cache` adds nodes `path[b, :num_nodes[b]]`. Prefill, plain
    decoding, chains and trees are these two calls; rolling back is committing fewer nodes.

    `head(params, stream[B, T, D]) -> float32[B, T, V]`: the final norm and the head on a residual stream, such as one
    of `Output.taps`: what the model would predict if it ended there.
    """

    init_cache: Callable[..., PyTree]  # (batch, capacity) -> cache
    forward: Callable[..., tuple[Output, PyTree]]
    commit: Callable[..., PyTree]
    vocab_size: int
    max_positions: int
    name: str = "model"
    config: Any = None  # what it was made from, if by `specjax.models`
    mesh: jax.sharding.Mesh | None = None  # over which its parameters lie
    num_layers: int = 0  # 0: it has none that could be tapped or skipped
    head: Callable[[PyTree, Array], Array] | None = None
    group: int | None = None  # if its layers lie on devices of their own: the `group` it takes, besides 1; None: any


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


class Context(NamedTuple):
    """What a drafter may read: the committed text and how the target samples."""

    tokens: Array  # int32[B, L]
    length: Array  # int32[B], committed tokens
    sampling: Sampling = Sampling()
    noise: Array | None = None  # key[B] of the target's own draws, for drafters that share them (coupled sampling)
    cache: PyTree = (
        None  # the target's, of the first length - 1 tokens, for drafters made of its own layers; not in init
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drafter:
    """A proposer of token trees as pure functions, with its parameters as the only leaves.

    `init(params, context) -> state` reads the prompts.

    `propose(params, keys[B], state, context, limit[B]) -> (TokenTree, state)` drafts a tree of `num_nodes` nodes no
    deeper than `limit`.

    `update(params, state, tree, verdict, output) -> state` learns from the round; `tree` and `output` may be cut to the
    first nodes, which are then the valid ones. `output.taps` has the layers that `taps` names, here and in `read`.

    Two more, if it has use for them. `read(params, state, tokens[B, T], count[B], output) -> state` sees the target's
    outputs for the prompt, chunk by chunk: the first `count` of these T tokens are its next ones. `remember(params,
    state) -> params` says what a later call may start from: `DecodeResult.drafter` has it.
    """

    init: Callable[..., PyTree] = field(metadata={"static": True})
    propose: Callable[..., tuple[TokenTree, PyTree]] = field(metadata={"static": True})
    update: Callable[..., PyTree] = field(metadata={"static": True})
    num_nodes: int = field(metadata={"static": True})  # N
    max_depth: int = field(metadata={"static": True})
    draws: Draws = field(metadata={"static": True}, default="point_mass")
    widths: tuple[int, ...] = field(metadata={"static": True}, default=())  # verify widths worth compiling, besides N
    follows_any_tree: bool = field(metadata={"static": True}, default=False)  # `update` may get trees drafted by others
    read: Callable[..., PyTree] | None = field(metadata={"static": True}, default=None)
    remember: Callable[..., PyTree] | None = field(metadata={"static": True}, default=None)
    taps: tuple[int, ...] = field(metadata={"static": True}, default=())  # the target's streams that it reads
    params: PyTree = ()

    replace = replace


VerifyFn = Callable[[Array, TokenTree, Array], Verdict]
"""`verify(keys[B, N], tree, target_logits[B, N, V]) -> Verdict`.

`keys[:, i]` belongs to the row and to the *position* that the children of node i would take, so a verifier that draws
the target's token from it gives the same token whatever was drafted; those of invalid nodes are not to be used.
`target_logits` are warped already.
"""


class Controller(NamedTuple):
    """Chooses how deep to draft. It reads only the past, so a lossless method stays lossless under any controller."""

    init: Callable[[int], PyTree]  # (batch) -> state
    limit: Callable[[PyTree], Array]  # (state) -> int32[B]
    update: Callable[[PyTree, Any], PyTree]  # (state, Info) -> state
    reads_signals: bool = False  # needs `Info.signals`


class Signals(NamedTuple):
    """What the drafter's laws said of a round, along the accepted path: entry j is of the law of its token j + 1."""

    confidence: Array  # float32[B, N], largest probability
    entropy: Array  # float32[B, N], nats
    judged: Array  # bool[B, N], which entries there are: of the accepted tokens and of the first rejected one


class Scored(NamedTuple):
    """A tree after the target's pass: what a verifier judges."""

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
    laws: Array | None = None  # float32[B, N, V], warped logits that the added tokens were drawn from, if asked for
    logprobs: Array | None = None  # float32[B, N], of the added tokens under these laws, if asked for
    violations: Array | None = None  # int32[B], bits of `checks.VIOLATIONS`, when debugging
    scored: Scored | None = None  # what the verifier saw, if asked for
    signals: Signals | None = None  # if the controller reads them


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


class Decoder(NamedTuple):
    """`init(params, ...) -> DecodeState`, `step(params, state) -> (state, Info)`: the outer contract of every loop."""

    init: Callable[..., DecodeState]
    step: Callable[..., tuple[DecodeState, Info]]
