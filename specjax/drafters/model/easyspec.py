"""EasySpec: two-model drafting whose passes run the attention of several layers at once.

Wu et al.: EasySpec: Layer-Parallel Speculative Decoding for Efficient Multi-GPU Utilization (2025), arXiv 2502.02493.

Rule: the draft model's first and last layer run as usual, those between in groups of G consecutive ones. With h the
stream before a group, a_i = Attn_i(norm_i(h)) for all i at once, then z = h and, layer by layer, z <- z + a_i,
z <- z + MLP_i(norm'_i(z)). Keys and values come from the same h. What these approximate passes leave lives for one
round only: the next one feeds every newly committed token anew, exactly, to an exact cache (the paper's bonus
calibration), and the last logits of that pass are its first draft distribution. All else is `two_model`'s, trees
included.

The G attentions are worth running at once where each layer has a device of its own: see
`specjax.parallel.layer_parallel`. On one device the drafts are the same, and no faster.
Guarantee: distribution (verified with the q that was sampled).
Deviations: none known of the computation; not checked against the authors' code. Each round feeds as many tokens as it
can have committed, whatever it did commit, so that rows stay in step.
"""

from __future__ import annotations

from specjax import trees
from specjax.catalog import Method, Option, shared
from specjax.drafters.model.two_model import functions as two_model_functions
from specjax.errors import UsageError
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
"""The paper's; from 5 on it loses more than it gains."""


def easyspec(
    draft: Target,
    num_tokens: int = 4,
    tree: Builder | None = None,
    *,
    group: int | None = None,
    stop: Stop | None = None,
    keep_logits: bool = False,
) -> Drafter:
    """A chain of `num_tokens` tokens of `draft`, or a `tree` from `specjax.trees` (greedy decoding: the likeliest).

    Args:
      group: layers whose attention reads the same stream; 1: none, exact passes. None: 4, or as many as `draft` was
        placed for. A draft model of fewer than 4 layers has nothing to group.
      stop, keep_logits: as in `two_model`.

    State: as that of `two_model`. Raises: UsageError for a setting below 1, or another group than the draft's own.
    """
    builder = trees.builder_of(num_tokens, tree, stop, keep_logits)
    lag = builder.max_depth + 1  # as many tokens as a round can add, the target's own included
    group = _group(draft.model, group)
    return two_model_functions(draft.model, builder, lag, group=group, judges=False).replace(params=draft.params)


def _group(model: Model, group: int | None) -> int:
    """As the model takes it: equal settings give one drafter."""
    if group is not None and group < 1:
        raise UsageError(f"group must be at least 1, not {group}")
    groups, num_layers = model.capabilities.groups, model.capabilities.num_layers
    if groups is None:
        return max(1, min(group or GROUP, num_layers - 2))
    if not groups:
        return 1
    if group not in (None, 1, *groups):
        raise UsageError(
            f"the draft model {model.name} is placed for groups of {groups[0]} layers, not {group}; leave group out, "
            'or give the mesh an axis "layer" of that size'
        )
    return group or groups[0]
