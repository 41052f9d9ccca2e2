"""EasySpec: two-model drafting with draft passes that run the attention of several layers in parallel.

Wu et al.: EasySpec: Layer-Parallel Speculative Decoding for Efficient Multi-GPU Utilization (2025), arXiv 2502.02493.

Rule: the draft model's first and last layers run as usual, and the others in groups of G consecutive layers. Let h be
the residual stream before a group. All layers of the group compute a_i = Attn_i(norm_i(h)) in parallel. Then z = h, and
layer by layer z <- z + a_i, z <- z + MLP_i(norm'_i(z)). Keys and values come from the same h. The cache entries of
these approximate passes live for one step only. The next step feeds every newly committed token again, exactly, to an
exact cache (the paper's bonus calibration). The last logits of that pass are the first draft distribution. The rest
equals `two_model`, trees included.

Parallel attention is faster if each layer has a device of its own: see `specjax.parallel.layer_parallel`. On one device
the drafts are the same, and no faster.
Guarantee: distribution (verified with the q that was sampled).
Deviations: none known in the computation, which was not compared with the authors' code. Each step feeds the maximum
number of tokens that it can have committed, so that all rows have the same shapes.
"""

from __future__ import annotations

from specjax import trees
from specjax.catalog import Method, Option, shared
from specjax.drafters.model.two_model import functions as two_model_functions
from specjax.errors import UsageError
from specjax.models.requirements import check_grouped_layers
from specjax.trees import Builder, Stop
from specjax.types import Drafter, Model, Target

METHOD = Method(
    name="easyspec",
    kind="drafter",
    guarantee="distribution",
    summary="drafts with a smaller model whose layers compute their attention in parallel groups",
    paper="Wu et al. 2025, arXiv 2502.02493",
    needs=frozenset({"draft"}),
    options=(
        shared.num_tokens(4),
        shared.TREE,
        Option("group", "int", None, "layers per group; default: from the placement of the draft model"),
        shared.STOP,
        shared.KEEP_LOGITS,
    ),
    arguments=("draft",),
)


GROUP = 4
"""The paper's group size; from 5 on, acceptance falls by more than the passes gain."""


def easyspec(
    draft: Target,
    num_tokens: int = 4,
    tree: Builder | None = None,
    *,
    group: int | None = None,
    stop: Stop | None = None,
    keep_logits: bool = False,
) -> Drafter:
    """Draft a chain of `num_tokens` tokens of `draft`, or a `tree` from `specjax.trees`.

    Greedy decoding drafts the most likely tokens.

    Args:
      group: number of layers with attention over the same stream; 1: exact passes. Default: 4, or the group size for
        which `draft` is placed. A draft model of fewer than 4 layers has no layers to group.
      stop, keep_logits: see `two_model`.

    State: the state of `two_model`. Raises: UsageError for a setting below 1, or a group that differs from the
      placement of the draft model.
    """
    builder = trees.make_builder(num_tokens, tree, stop, keep_logits)
    lag = builder.max_depth + 1  # the maximum number of tokens of a step, the target's own included
    group = _group(draft.model, group)
    return two_model_functions(draft.model, builder, lag, group=group, judges=False).replace(params=draft.params)


def _group(model: Model, group: int | None) -> int:
    """Return the effective group size of a model, so that equal settings give the same cached drafter."""
    if group is not None and group < 1:
        raise UsageError(f"group must be at least 1, not {group}")
    check_grouped_layers(model, "easyspec")
    groups, num_layers = model.capabilities.groups, model.capabilities.num_layers
    if groups is None:
        return max(1, min(group or GROUP, num_layers - 2))
    if group not in (None, 1, *groups):
        raise UsageError(
            f"the draft model {model.name} is placed for groups of {groups[0]} layers, not {group}; leave group out, "
            'or give the mesh an axis "layer" of that size'
        )
    return group or groups[0]
