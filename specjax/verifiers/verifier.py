"""The `Verifier` record and the building blocks of acceptance rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.arrays.logit_rows import LogitRows
from specjax.arrays.modes import with_standard_modes
from specjax.catalog.method import Guarantee
from specjax.errors import UsageError
from specjax.numerics.sampling import draw, fold_in, node_keys, uniform
from specjax.trees import operations
from specjax.types import Array, Draws, PyTree, TokenTree, Verdict, VerifyFn
from specjax.verifiers.node_logits import AnyLogits, NodeLogits, all_rows, row_of

ANY: tuple[Draws, ...] = get_args(Draws)

NO_TOKEN = jnp.iinfo(jnp.int32).max
"""An id outside of every vocabulary. A node with such a token is never accepted."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Verifier:
    """An acceptance rule with its guarantee. It is a pytree whose only leaves are the rule's parameters, if any.

    Call it as a `VerifyFn`, `verifier(keys, tree, target_logits)`. `keys` may also have the shape [B], one per row.
    """

    name: str = field(metadata={"static": True})
    rule: Callable[..., Verdict] = field(metadata={"static": True})  # VerifyFn; with params (..., hidden, params)
    draws: tuple[Draws, ...] = field(metadata={"static": True})  # kinds of drafts for which the guarantee is valid
    guarantee: Guarantee = field(metadata={"static": True})
    summary: str = field(metadata={"static": True})
    paper: str = field(metadata={"static": True}, default="")
    params: PyTree = None
    # For a lossy rule: total variation between three tokens of its text and the target's distribution. It is measured
    # on the toy pair of the tests, with this setting.
    distance: float | None = field(metadata={"static": True}, default=None)
    setting: str = field(metadata={"static": True}, default="")
    # True if `rule` accepts `NodeLogits` and reads the rows of single nodes, so that no other row is warped.
    by_row: bool = field(metadata={"static": True}, default=False)
    # For a lossy rule: True if its text is the greedy text at temperature 0, where p is one-hot.
    greedy_at_zero: bool = field(metadata={"static": True}, default=False)

    @with_standard_modes
    def __call__(
        self, keys: Array, tree: TokenTree, target_logits: Array | NodeLogits, hidden: Array | None = None
    ) -> Verdict:
        """Apply the rule. `hidden` [B, N, D] are the target's hidden states, for rules that read them."""
        if not self.by_row:
            target_logits = all_rows(target_logits)
            tree = tree._replace(logits=None if tree.logits is None else all_rows(tree.logits))
        tokens = tree.tokens.astype(jnp.int32)
        tokens = jnp.where(tokens < 0, NO_TOKEN, tokens)  # JAX reads an index of -1 as the last token
        tree = tree._replace(tokens=tokens, parents=tree.parents.astype(jnp.int32))
        if keys.ndim == 1:
            keys = node_keys(keys, jnp.zeros_like(tree.tokens[:, 0]), operations.depths(tree.parents))
        if self.params is None:
            return self.rule(keys, tree, target_logits)
        return self.rule(keys, tree, target_logits, hidden, self.params)


class Accepted(NamedTuple):
    """The decision of a rule for given uniforms. The next token has not been drawn from `residual` yet."""

    path: Array  # int32[B, N], accepted nodes from the root down, then -1
    num_nodes: Array  # int32[B], length of `path`
    residual: Array  # float32[B, V], the distribution of the next token

    @property
    def node(self) -> Array:
        """Return int32[B]: the last accepted node."""
        return take_along(self.path, self.num_nodes[:, None] - 1, 1)[:, 0]


def with_keys(core: Callable[[Array, TokenTree, Any], Accepted]) -> VerifyFn:
    """Convert a core that takes uniforms, `core(u[B, N], tree, target_logits) -> Accepted`, to a `VerifyFn`.

    The uniforms are drawn with the key of the root's position, because a rule may test positions that it does not emit.
    The next token is drawn with the key of its position.
    """

    def rule(keys: Array, tree: TokenTree, target_logits: Array) -> Verdict:
        nodes = jnp.arange(1, tree.tokens.shape[1] + 1)  # not 0: the root's own draw uses the unfolded key
        end = core(uniform(fold_in(keys[:, :1], nodes), 1)[..., 0], tree, target_logits)
        last = take_along(keys, end.node[:, None], 1)[:, 0]
        return Verdict(end.path, end.num_nodes, draw(last, jnp.log(end.residual)))

    return rule


def with_keys_and_params(core: Callable[..., Accepted]) -> Callable[..., Verdict]:
    """Apply `with_keys` to a core that also takes the rule's parameters: `core(u, tree, target_logits, *params)`."""

    def rule(keys: Array, tree: TokenTree, target_logits: Array, hidden: Array | None, params: tuple) -> Verdict:
        del hidden
        return with_keys(lambda u, tree, logits: core(u, tree, logits, *params))(keys, tree, target_logits)

    return rule


def distribution(logits: AnyLogits, node: Array | None = None) -> Array:
    """Return probabilities float32[B, V] of row `node` [B] of logits [B, N, V], zero where a token cannot be drawn."""
    logits = all_rows(logits) if node is None else row_of(logits, node)
    total = jax.nn.logsumexp(logits, -1, keepdims=True)
    return jnp.exp(logits - jnp.where(jnp.isfinite(total), total, 0.0))


def normalise(x: Array, fallback: Array) -> Array:
    """Return x / sum(x), or `fallback` if the sum is zero (p = q up to rounding, or an exhausted draft)."""
    total = jnp.sum(x, -1, keepdims=True)
    return jnp.where(total > 0, x / jnp.where(total > 0, total, 1.0), fallback)


def residual(p: Array, q: Array) -> Array:
    """Return norm([p - q]+), or p if that has no mass."""
    return normalise(jnp.maximum(p - q, 0.0), p)


def check_parameter(
    name: str, value: float | Array, predicate: Callable[[np.ndarray], np.ndarray], expected: str
) -> None:
    """Check a parameter `name`, such as "typical: epsilon", with a predicate. Raises: UsageError, also for NaN."""
    if not isinstance(value, jax.core.Tracer) and not np.all(predicate(np.asarray(value))):
        raise UsageError(f"{name} must be {expected}, not {value}")


def need_logits(tree: TokenTree) -> Array | LogitRows:
    """Return the draft's logits. Raises: UsageError for a point-mass tree."""
    if tree.logits is None:
        raise UsageError("the rule needs the draft's tree.logits; without logits, draws must be point_mass")
    return tree.logits
