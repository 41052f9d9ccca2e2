"""What every acceptance rule is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.arrays.x64 import without_x64
from specjax.catalog.method import Guarantee
from specjax.errors import UsageError
from specjax.numerics.sampling import draw, fold_in, node_keys, uniform
from specjax.trees import operations
from specjax.types import Array, Draws, PyTree, TokenTree, Verdict, VerifyFn

ANY: tuple[Draws, ...] = get_args(Draws)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Verifier:
    """An acceptance rule and what it promises. A pytree whose only leaves are the parameters of rules that have some.

    Call it as a `VerifyFn`, `verifier(keys, tree, target_logits)`; keys may also be one per row, [B].
    """

    name: str = field(metadata={"static": True})
    rule: Callable[..., Verdict] = field(metadata={"static": True})  # VerifyFn; with params (..., hidden, params)
    draws: tuple[Draws, ...] = field(metadata={"static": True})  # the drafts for which the guarantee holds
    guarantee: Guarantee = field(metadata={"static": True})
    summary: str = field(metadata={"static": True})
    paper: str = field(metadata={"static": True}, default="")
    params: PyTree = None
    # Of a lossy rule: total variation of three tokens of text from the target's distribution, on the toy pair of the
    # tests, and what it was measured with.
    distance: float | None = field(metadata={"static": True}, default=None)
    setting: str = field(metadata={"static": True}, default="")
    # Of a lossy rule: at temperature 0, where p is one-hot, it gives the greedy text after all.
    greedy_at_zero: bool = field(metadata={"static": True}, default=False)

    @without_x64
    def __call__(self, keys: Array, tree: TokenTree, target_logits: Array, hidden: Array | None = None) -> Verdict:
        """`hidden` [B, N, D]: the target's features, for rules that read them."""
        tree = tree._replace(tokens=tree.tokens.astype(jnp.int32), parents=tree.parents.astype(jnp.int32))
        if keys.ndim == 1:
            keys = node_keys(keys, jnp.zeros_like(tree.tokens[:, 0]), operations.depths(tree.parents))
        if self.params is None:
            return self.rule(keys, tree, target_logits)
        return self.rule(keys, tree, target_logits, hidden, self.params)


class Accepted(NamedTuple):
    """What a rule decides once its uniforms are given; the next token is still to be drawn from `residual`."""

    path: Array  # int32[B, N], accepted nodes from the root down, then -1
    num_nodes: Array  # int32[B], of `path`
    residual: Array  # float32[B, V], the distribution of the next token

    @property
    def node(self) -> Array:
        """int32[B]: the last accepted node."""
        return take_along(self.path, self.num_nodes[:, None] - 1, 1)[:, 0]


def with_keys(core: Callable[[Array, TokenTree, Array], Accepted]) -> VerifyFn:
    """The rule of a core that takes uniforms: `core(u[B, N], tree, target_logits) -> Accepted`.

    The uniforms belong to the round (the root's position), since a rule may test positions that it does not emit; the
    next token belongs to its own position.
    """

    def rule(keys: Array, tree: TokenTree, target_logits: Array) -> Verdict:
        nodes = jnp.arange(1, tree.tokens.shape[1] + 1)  # not 0: the root's own draw uses the key as it is
        end = core(uniform(fold_in(keys[:, :1], nodes), 1)[..., 0], tree, target_logits)
        last = take_along(keys, end.node[:, None], 1)[:, 0]
        return Verdict(end.path, end.num_nodes, draw(last, jnp.log(end.residual)))

    return rule


def with_keys_and_params(core: Callable[..., Accepted]) -> Callable[..., Verdict]:
    """As `with_keys`, for a core that takes the rule's parameters too: `core(u, tree, target_logits, *params)`."""

    def rule(keys: Array, tree: TokenTree, target_logits: Array, hidden: Array | None, params: tuple) -> Verdict:
        del hidden
        return with_keys(lambda u, tree, logits: core(u, tree, logits, *params))(keys, tree, target_logits)

    return rule


def distribution(logits: Array, node: Array | None = None) -> Array:
    """Probabilities float32[B, V] of row `node` [B] of logits [B, N, V]; zeros where no token can be drawn."""
    if node is not None:
        logits = take_along(logits, node[:, None, None], 1)[:, 0]
    total = jax.nn.logsumexp(logits, -1, keepdims=True)
    return jnp.exp(logits - jnp.where(jnp.isfinite(total), total, 0.0))


def normalise(x: Array, fallback: Array) -> Array:
    """x / sum(x), or `fallback` where nothing is left (p = q to rounding, or an exhausted draft)."""
    total = jnp.sum(x, -1, keepdims=True)
    return jnp.where(total > 0, x / jnp.where(total > 0, total, 1.0), fallback)


def residual(p: Array, q: Array) -> Array:
    """norm([p - q]+), or p where nothing is left."""
    return normalise(jnp.maximum(p - q, 0.0), p)


def check_parameter(name: str, value: float | Array, holds: Callable[[np.ndarray], np.ndarray], wanted: str) -> None:
    """Raises: UsageError for a value of `name`, such as "typical: epsilon", that does not hold; nan never may."""
    if not isinstance(value, jax.core.Tracer) and not np.all(holds(np.asarray(value))):
        raise UsageError(f"{name} must be {wanted}, not {value}")


def need_logits(tree: TokenTree) -> Array:
    """The draft's logits. Raises: UsageError for a point-mass tree."""
    if tree.logits is None:
        raise UsageError("the rule needs the draft's tree.logits; where there are none, draws must be point_mass")
    return tree.logits
