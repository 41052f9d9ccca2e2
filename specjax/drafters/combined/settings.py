"""Settings of `auto`, and the shapes that follow from them."""

from __future__ import annotations

import dataclasses
from functools import cached_property

import jax
import numpy as np

from specjax import costs as costs_of
from specjax import trees
from specjax.drafters.combined import node_classes
from specjax.drafters.tables.token_recycling import best_paths, token_recycling
from specjax.drafters.widths import PassWidths, default_widths, select_passes
from specjax.errors import UsageError
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.heads.contract import Head
from specjax.numerics.validation import MAX_NODES
from specjax.trees import Builder
from specjax.trees.node_statistics import DraftShape, make_shape
from specjax.trees.shape_search.best_shapes import Paths
from specjax.trees.templates import Template
from specjax.types import Drafter, Target

CPU_TREE: Paths = ((0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0))
"""Tree of a draft head on CPUs: a chain, and second-best tokens without children."""
WIDE_TREE = (0.65, 0.12, 0.05, 0.03, 0.02, 0.015, 0.01, 0.01), 41, 6
"""Tree of a draft head elsewhere, by Sequoia: acceptance rates of the ranks, number of nodes with the root, depth."""
MOST_COST = 10_000
"""Maximum cost of a head's draft in passes of width 1; an int32 counts the pauses between its drafts."""
WAITING = 32
"""Steps of plain decoding after which a head reads its pending tokens."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Static settings of a program; hashable."""

    vocab_size: int
    num_recycled: int
    widths: tuple[int, ...]
    costs: costs_of.Costs
    dtype: costs_of.WeightDtype
    platform: str | None
    head: Head | None
    paths: Paths  # rank paths of the head's tree
    head_cost: float | None
    draft_cost: float  # of drafting without the head, in passes of width 1
    fits_batch: bool  # the widths are the defaults, which depend on the batch

    def passes(self, batch: int, target: Target | None) -> PassWidths:
        """Return the passes of `batch` rows of the target, and their costs."""
        if self.fits_batch:
            return select_passes(
                self.widths, self.costs, batch, self.vocab_size, self.dtype, self.platform, target
            )  # fmt: skip
        shares = costs_of.NO_SHARES if target is None else costs_of.shares_of(target, self.platform)
        pass_inputs = self.costs, self.widths, batch, self.dtype, self.platform, shares
        return PassWidths(self.widths, costs_of.evaluate(*pass_inputs), costs_of.added_by_experts(*pass_inputs))

    def counted_experts(self, target: Target | None) -> MixtureSizes | None:
        """Return the experts of the target if their counts correct the costs of passes, else None.

        Given costs are not corrected, because their parts are unknown.
        """
        return None if target is None or self.costs else costs_of.expert_share(target).sizes

    @cached_property
    def recycling(self) -> Drafter:
        return token_recycling(self.vocab_size, num_nodes=self.num_recycled, keep_chances=True)

    @cached_property
    def template(self) -> Template:
        """Return the template of the recycled nodes."""
        return Template(best_paths(self.num_recycled))

    @cached_property
    def shape(self) -> DraftShape:
        head_templates = [] if self.head is None else [Template(self.paths)]
        return make_shape(max(self.widths) - 1, self.template, *head_templates)

    @cached_property
    def prior(self) -> np.ndarray:
        """Return the prior acceptance rate float32[C] of each class of nodes."""
        return node_classes.prior(self.head is not None)

    @cached_property
    def builder(self) -> Builder:
        """Return the builder of the head's tree."""
        return dataclasses.replace(trees.static(self.paths, "point_mass"), scored=True)

    @cached_property
    def noisy_builder(self) -> Builder:
        """Return the builder of the head's tree in coupled decoding, of nodes that are likely to be drawn."""
        return dataclasses.replace(trees.static(self.paths, "without_replacement"), scored=True)

    @property
    def longest(self) -> int:
        """Return the maximum number of tokens that a step may accept, the root included."""
        return 1 + int(self.shape.depth.max())

    @property
    def chunk(self) -> int:
        """Return the number of pairs that the head reads in one pass: those of its draft, or more at the same cost."""
        return max(self.builder.max_depth + 1, self.widths[1])

    @property
    def window(self) -> int:
        """Return the maximum number of pending pairs, a multiple of `chunk`."""
        return -(-(self.longest + WAITING) // self.chunk) * self.chunk


def make_config(
    vocab_size: int,
    num_recycled: int | None,
    widths: tuple[int, ...] | None,
    costs: costs_of.Costs,
    dtype: costs_of.WeightDtype,
    platform: str | None,
    head: Head | None,
    head_tree: Paths | None,
    head_cost: float | None,
    draft_cost: float,
) -> Config:
    """Check the settings of `auto` and fill in defaults for the platform. Raises: UsageError, see `auto`."""
    on_cpu = (platform or jax.default_backend()) == "cpu"
    fits_batch = widths is None
    if widths is None:
        widths = default_widths(platform)
    if num_recycled is None:
        num_recycled = 40 if on_cpu else 80
    if len(widths) < 2 or widths[0] != 1 or list(widths) != sorted(set(widths)):
        raise UsageError(f"widths must rise from 1, such as 1, 4, 8, not {list(widths)}")
    if widths[-1] > MAX_NODES:
        raise UsageError(f"widths must be at most {MAX_NODES}, not {widths[-1]}")
    costs_of.check(costs, len(widths), "width")
    if head is None and (head_tree is not None or head_cost is not None):
        raise UsageError("head_tree and head_cost need a draft head; give one, or leave them out")
    if not 0 <= draft_cost < MOST_COST:
        raise UsageError(f"draft_cost must be at least 0 and below {MOST_COST:,} passes, not {draft_cost}")
    if head_cost is not None and not head_cost >= 0:
        raise UsageError(f"head_cost must be at least 0, not {head_cost}")
    if head_cost is not None and head_cost >= MOST_COST:
        raise UsageError(f"head_cost must be below {MOST_COST:,} passes, not {head_cost}")
    paths: Paths = ()
    if head is not None and head.soft_prompts is not None:
        raise UsageError(f"a head of {head.kind} drafts in the target's own pass; choose method {head.kind}")
    if head is not None:
        paths = _paths(head, head_tree, CPU_TREE if on_cpu else trees.sequoia(*WIDE_TREE)[1])
    config = Config(
        vocab_size, num_recycled, widths, costs, dtype, platform, head, paths, head_cost, draft_cost, fits_batch
    )
    config.recycling  # noqa: B018  raises for a bad number of nodes
    return config


def _paths(head: Head, tree: Paths | None, default: Paths) -> Paths:
    max_depth = head.max_depth
    if tree is None:
        return tuple(path for path in default if max_depth is None or len(path) <= max_depth)
    if not tree:
        raise UsageError("head_tree needs at least one node; leave it out for the default")
    depth = max(map(len, tree))
    if max_depth is not None and depth > max_depth:
        raise UsageError(f"head_tree is {depth} tokens deep, but the head drafts {max_depth}; choose a shorter tree")
    return tree
