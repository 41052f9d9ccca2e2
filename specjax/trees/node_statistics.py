"""How likely drafted nodes are to be right, by classes of nodes, learnt in hindsight.

A whole draft is kept, verified or not, until the text has passed it by. Then it is known which of its nodes would have
been accepted, whatever was: so plain decoding keeps learning, and what is learnt does not depend on what was verified.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.trees import operations
from specjax.trees.templates import Template
from specjax.types import Array, Context, TokenTree

MEMORY = 0.98
"""How much of its counts a class keeps at each new trial: the last WINDOW count."""
WINDOW = 1 / (1 - MEMORY)
PRIOR = 6.0
"""How many trials the prior chance is worth."""
DOUBT = 3.0
"""How many expected hits it takes to be half convinced that a text disappoints."""
FADING = 0.95
"""How much of what was found and expected is kept at each draft."""


class Shape(NamedTuple):
    """Of every draft: a chain of `copied` nodes below the root, and beside it templates. In numpy, so that a program
    holds no step from parent to child: half of what drafting took on a TPU."""

    copied: int
    parents: np.ndarray  # int32[M]
    depth: np.ndarray  # int32[M]
    above: np.ndarray  # bool[M, M]: node j is node i or one of its ancestors
    path: np.ndarray  # int32[M, D], the nodes on the way to each, itself again behind it; D: the depth of the templates
    source: np.ndarray  # int32[M], 0: the chain and the first template; 1, 2, ...: the others

    @property
    def sources(self) -> int:
        return int(self.source.max()) + 1


def shape_of(copied: int, *templates: Template) -> Shape:
    """Of drafts with a chain of `copied` tokens and the nodes of each of `templates`."""
    parents, source = [np.arange(-1, copied)], [np.zeros(1 + copied)]
    for number, template in enumerate(templates):
        before = sum(map(len, parents)) - 1
        parents.append(np.where(template.parents[1:] > 0, template.parents[1:] + before, 0))
        source.append(np.full(template.num_nodes - 1, number))
    joined, of = np.concatenate(parents).astype(np.int32), np.concatenate(source).astype(np.int32)
    depth, above = operations.depths(joined[None])[0], operations.ancestor_mask(joined[None])[0]
    at_depth = lambda d: np.argmax(above & (depth == np.minimum(d, depth)[:, None]), 1)
    path = [at_depth(d) for d in range(1, 1 + max(template.max_depth for template in templates))]
    return Shape(copied, joined, depth, above, np.stack(path, 1).astype(np.int32), of)


class Drafted(NamedTuple):
    """The nodes of `Shape` at one place of the text; equal paths may stand in several of its parts."""

    tokens: Array  # int32[B, M]
    valid: Array  # bool[B, M]
    kind: Array  # int32[B, M], the class of each node
    start: Array  # int32[B], length of the text when it was drafted; 0: none


class Counts(NamedTuple):
    """Of the nodes whose parent was right, how many were, by class."""

    hits: Array  # float32[B, C]
    trials: Array  # float32[B, C]


class Hindsight(NamedTuple):
    """How good the drafts were."""

    counts: Counts  # of the row's own drafts
    shadow: Drafted  # waits for the text to pass it by
    found: Array  # float32[B, 2, S], of late, by source: nodes that were right, and how many the classes had expected


def begin(classes: int, batch: int, shape: Shape) -> Hindsight:
    """What rows know that have drafted nothing yet."""
    none = jnp.zeros((batch, len(shape.parents)), jnp.int32)
    counts = Counts(jnp.zeros((batch, classes)), jnp.zeros((batch, classes)))
    return Hindsight(counts, Drafted(none, none > 0, none, none[:, 0]), jnp.zeros((batch, 2, shape.sources)))


def beside(counts: Counts, earlier: Counts) -> Counts:
    """Those of rows [B, C] with `earlier` ones [C] behind them, which fade as the rows' own fill the window."""
    share = jnp.maximum(1 - counts.trials / WINDOW, 0)
    return jax.tree.map(lambda own, old: own + share * old, counts, earlier)


def joined(earlier: Counts, rows: Counts) -> Counts:
    """`earlier` ones [C] and those of rows [B, C], all alike, scaled down to the window: a long text counts no more
    than all before it, and takes nothing back of what shorter ones added while it ran."""
    both = Counts(earlier.hits + jnp.sum(rows.hits, 0), earlier.trials + jnp.sum(rows.trials, 0))
    return jax.tree.map(lambda x: x * WINDOW / jnp.maximum(both.trials, WINDOW), both)


def learn(prior: np.ndarray, shape: Shape, past: Hindsight, context: Context, earlier: Counts) -> Hindsight:
    """Count the nodes of the draft that waits, once the text has passed it by. prior, earlier: as `rank` has them."""
    tokens, valid, kind, start = past.shadow
    place = start[:, None] - 1 + shape.depth
    passed = place < context.length[:, None]
    text = take_along(context.tokens, jnp.clip(place, 0, context.tokens.shape[1] - 1), 1)
    agrees = valid & passed & (text == tokens) | (shape.depth == 0)
    right = jnp.all(agrees[:, None, :] | ~shape.above, 2)  # the whole path
    tried = valid & (shape.depth > 0) & right[:, np.maximum(shape.parents, 0)]
    over = (start > 0) & ~jnp.any(tried & ~passed, 1)  # no node waits for a token that is not there yet
    one_hot = (kind[:, :, None] == jnp.arange(len(prior))) & (tried & over[:, None])[:, :, None]  # [B, M, C]
    trials = jnp.sum(one_hot, 1, dtype=jnp.float32)
    hits = jnp.sum(one_hot & right[:, :, None], 1, dtype=jnp.float32)
    kept = MEMORY**trials
    chance = jnp.where(tried, _chance(prior, beside(past.counts, earlier), kind), 0.0)
    seen = jnp.stack([(tried & right).astype(jnp.float32), chance], 1)  # [B, 2, M]
    seen = jnp.stack([jnp.sum(jnp.where(shape.source == s, seen, 0.0), 2) for s in range(shape.sources)], 2)
    found = jnp.where(over[:, None, None], FADING * past.found + seen, past.found)
    counts = Counts(past.counts.hits * kept + hits, past.counts.trials * kept + trials)
    return Hindsight(counts, past.shadow._replace(start=jnp.where(over, 0, start)), found)


def wait_for(past: Hindsight, drafted: Drafted) -> Hindsight:
    """Keep a draft until the text has passed it by, in rows that do not wait for an earlier one."""
    free = past.shadow.start == 0
    pick = lambda new, old: jnp.where(free.reshape(-1, *[1] * (new.ndim - 1)), new, old)
    return past._replace(shadow=jax.tree.map(pick, drafted, past.shadow))


def rank(
    prior: np.ndarray, shape: Shape, drafted: Drafted, past: Hindsight, earlier: Counts
) -> tuple[TokenTree, Array]:
    """The union of all parts in falling order of the chances of their paths, and these float32[B, M]; 0 for the root
    and behind. prior: float32[C], the chance of each class before anything was seen. earlier: [C], of other texts."""
    tokens, valid = drafted.tokens, drafted.valid
    nodes = np.arange(len(shape.parents))
    spelt = tokens[:, shape.path]  # [B, M, D]
    comparable = (shape.depth[:, None] == shape.depth) & (shape.depth > 0) & (shape.depth <= shape.path.shape[1])
    same = jnp.all(spelt[:, :, None] == spelt[:, None], 3) & valid[:, :, None] & valid[:, None] & comparable
    same |= nodes[:, None] == nodes  # [B, M, M]
    first = jnp.argmax(same, 2)  # the node that stands for all whose paths spell the same
    trust = _trust(past.found)[:, shape.source]
    chance = _chance(prior, beside(past.counts, earlier), drafted.kind) * trust
    miss = jnp.where(valid, jnp.log1p(-chance), 0.0)
    chance = 1 - jnp.exp(jnp.sum(jnp.where(same, miss[:, None, :], 0.0), 2))
    path = jnp.prod(jnp.where(shape.above & (nodes > 0), chance[:, None, :], 1.0), 2)
    parents = first[:, np.maximum(shape.parents, 0)].at[:, 0].set(-1)
    return operations.by_score(TokenTree(tokens, parents, valid & (first == nodes)), path)


def _chance(prior: np.ndarray, counts: Counts, kind: Array) -> Array:
    """float32[B, N]: that a node of this class is right where its parent is."""
    chance = (counts.hits + PRIOR * prior) / (counts.trials + PRIOR)
    return take_along(chance, kind, 1)


def _trust(found: Array) -> Array:
    """float32[B, S]: by how much to believe the classes of each source. A text that disappoints does so in all of them,
    long before each has seen enough to know."""
    hits, expected = found[:, 0], found[:, 1]
    return jnp.minimum((hits + DOUBT) / (expected + DOUBT), 1.0)
