"""Sizes and rules of a mixture of experts, a part of a config."""

from __future__ import annotations

from typing import Any, NamedTuple

from specjax.errors import UsageError
from specjax.models.experts.routing import Routing


class TokenShuffling(NamedTuple):
    """A mixture whose rows are sent to devices that tables predict, see `specjax.models.experts.shuffling`."""

    devices: int  # size of the mesh axis "expert" that the tables are for
    vocab_size: int
    remote: float  # mean number of other devices that have an expert of a row; it sets the size of the exchange


class MixtureSizes(NamedTuple):
    """Sizes and rules of a mixture of experts. All its experts have the same shape."""

    num_experts: int
    width: int  # hidden units of an expert
    routing: Routing
    shared_width: int = 0  # hidden units of an MLP that reads every row; 0: there is none
    shared_gate: bool = False  # the output of that MLP is multiplied by the sigmoid of a projection
    correction: bool = False  # a number per expert is added to the scores for the choice
    router_bias: bool = False
    bias: bool = False  # of the projections of experts
    limit: float | None = None  # gpt-oss: gate and up are clamped, see `feed.clamped_product`; None: they are not
    dense_layers: tuple[int, ...] = ()  # layers that have an MLP instead
    shuffling: TokenShuffling | None = None  # None: each device of a mesh reads all rows

    def check_groups(self, name: str) -> None:
        """Raise a UsageError if a group has too few experts for its score. `name` is that of the model.

        transformers fails in the first pass of such a model.
        """
        groups, count = self.routing.num_groups, self.num_experts
        if groups > 1 and self.routing.group_score == "two_best" and count < 2 * groups:
            raise UsageError(
                f"{name or 'the model'} has {groups} groups for {count} experts (n_group, expert_group_count), but the "
                f"score of a group is the sum of its two best experts; use at most {count // 2} groups"
            )

    def expected_experts(self, rows: Any) -> Any:
        """Return the expected number of distinct experts that `rows` rows choose, E (1 - (1 - k / E) ** rows).

        Rows that choose independently are an upper bound, because neighbours of a text share experts.
        """
        share = self.routing.num_chosen / self.num_experts
        return self.num_experts * (1.0 - (1.0 - share) ** rows)
