"""SpecKV: a draft model looks ahead, and the target drops the cached prompt tokens that its text will hardly need.

Source: Galim et al. 2025, Draft-based Approximate Inference for LLMs, arXiv 2506.08373.

Rule: the draft writes `lookahead` tokens after the prompt. The target reads the prompt, all but its last token, and
then once the last `window` of these tokens, the last token and the lookahead. In each layer and key/value head, the
score of a token before the window is its largest attention weight over all these queries and the heads of the group.
The maximum of `kernel` scores around a token replaces its score. The cache keeps the `window` tokens and the tokens
with the highest scores, `capacity` in all, in the order of the text. Equal scores are in that order too. The lookahead
is dropped, and decoding continues with the last token of the prompt.
Keys keep the rotation of their positions, and new tokens have their positions in the complete text.
A lookahead that ends before the answer loses the tokens that the answer reads (docs/compression.md, "Measured").
Guarantee: lossy. The tokens are selected once. Then the target has a fixed distribution, for which methods are exact.
Deviations: the paper's lookahead has as many tokens as the text; here it has at most 128. The prompt is read with
complete attention; the authors can leave out a part of it in long prompts. The draft does not stop at an end-of-text
token. The paper does not fix the position at which decoding continues.
"""

from __future__ import annotations

from typing import Any

from specjax.catalog import Method, Option
from specjax.compression.compact_model import CacheRule, compact_model
from specjax.engine.prefill import CHUNK
from specjax.errors import UsageError
from specjax.numerics.validation import check_integer
from specjax.retrieval.last_queries import check_full_attention
from specjax.types import Target

METHOD = Method(
    name="speckv",
    kind="compression",
    guarantee="lossy",
    summary="keeps the cached prompt tokens to which the target attends after a draft's look ahead",
    paper="Galim et al. 2025, Draft-based Approximate Inference for LLMs, arXiv 2506.08373",
    options=(
        Option("capacity", "int", 1024, "cached tokens of the prompt, for each layer and key/value head"),
        Option("window", "int", 32, "last tokens of the prompt, which select the others and stay"),
        Option("kernel", "int", 7, "tokens over which the maximum of the scores is taken, an odd number"),
        Option("lookahead", "int", None, "tokens that the draft writes; default: those of the text, at most 128"),
    ),
    words=(Option("draft", "model", None, "the draft model; default: the model of --draft, or the target"),),
    arguments=("target", "draft"),
)


SAME_BITS = "speckv selects tokens by scores whose bits depend on the batch; leave same_bits out"


def speckv(
    target: Target,
    draft: Target | None,
    max_new_tokens: int,
    capacity: int = 1024,
    *,
    window: int = 32,
    kernel: int = 7,
    lookahead: int | None = None,
) -> Target:
    """Return the target with a cache that keeps at most `capacity` tokens of each prompt. This is lossy.

    The result is a target for `decode` and `stream`, with drafters that do not select from its cache. Its text for a
    prompt of at most `capacity + 1` tokens is that of the complete cache.

    Args:
      draft: a model with the tokenizer of the target. It looks ahead; None: the target does.
      max_new_tokens: maximum number of new tokens, for the size of the cache. `decode` refuses more.
      capacity: tokens that stay, for each layer and key/value head; the last token of the prompt comes on top.
      window: last tokens of the cached prompt. Their attention selects the others, and they always stay.
      kernel: tokens over which the maximum of the scores is taken.
      lookahead: tokens that the draft writes; None: max_new_tokens, but at most 128.

    Raises: UsageError for a setting out of range, and for another number of tokens in the draft's vocabulary. The
      target needs a cache of keys and values on one device, and attention without windows.
    """
    for role, model in (("target", target), ("draft", target if draft is None else draft)):
        if not isinstance(model, Target):
            raise UsageError(f"{role} must be a specjax.Target, not {type(model).__name__}; load one with specjax.load")
    _check_given("max_new_tokens", max_new_tokens)
    rule = check_options(capacity, window, kernel, lookahead)
    rule = rule._replace(max_new_tokens=max_new_tokens, lookahead=rule.lookahead or min(max_new_tokens, CHUNK))
    check_full_attention(target.model, "speckv", "choose another target or leave the compression out")
    if target.model.capabilities.inputs:
        raise UsageError(
            f"the model {target.model.name} reads images, which speckv would drop parts of; choose another target or "
            "leave the compression out"
        )
    if getattr(target.model.config, "same_bits", False):
        raise UsageError(SAME_BITS)
    if draft is None or draft is target:
        return Target(compact_model(target.model, None, rule), {"base": target.params})
    if draft.model.rewind is None:
        raise UsageError(f"the draft model {draft.model.name} cannot rewind, which speckv needs; choose another one")
    if draft.model.vocab_size != target.model.vocab_size:
        raise UsageError(
            f"the draft model {draft.model.name} has {draft.model.vocab_size} tokens and the target "
            f"{target.model.vocab_size}; choose a draft model of the same family"
        )
    return Target(compact_model(target.model, draft.model, rule), {"base": target.params, "draft": draft.params})


def check_options(
    capacity: int = 1024, window: int = 32, kernel: int = 7, lookahead: int | None = None
) -> CacheRule:  # fmt: skip
    """Return the settings of `speckv`. Raises: UsageError for a value out of range."""
    for name, value in (("capacity", capacity), ("window", window), ("kernel", kernel)):
        _check_given(name, value)
    if kernel % 2 == 0:
        raise UsageError(f"kernel must be an odd number, such as {kernel + 1}, not {kernel}")
    if lookahead is not None:
        check_integer("lookahead", lookahead, 1, CHUNK)
    if capacity <= window:
        raise UsageError(
            f"capacity must be above {window}, the last tokens that always stay, not {capacity}; raise capacity, or "
            "lower window"
        )
    return CacheRule(capacity, window, kernel, lookahead or 0, 0)


def _check_given(name: str, value: Any) -> None:
    """Check that a value is an integer of at least 1. Raises: UsageError, for None too."""
    if value is None:
        raise UsageError(f"{name} must be a whole number of at least 1, not None")
    check_integer(name, value)
