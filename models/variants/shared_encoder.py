"""Draft models that read what the encoder of their target has written, as distil-whisper does (arXiv 2311.00430)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.models.bridge import make_model
from specjax.models.seq2seq.config import BartConfig, Seq2SeqConfig, WhisperConfig
from specjax.models.seq2seq.model import is_of_encoder
from specjax.types import PyTree, Target

DECODER_FIELDS = (
    "name", "num_layers", "max_positions", "first_token", "last_token", "tied", "cache_dtype", "cache_lanes",
    "cache_bits",
)  # fmt: skip
"""Fields of a config that say nothing about the encoder."""
DECODER_FIELDS_OF_BART = (
    "num_heads", "num_kv_heads", "head_dim", "mlp_width", "text_positions", "second_token", "logits_bias",
)  # fmt: skip
"""Further ones of BART and Whisper, whose encoder has fields of its own."""


def share_encoder(draft: Target, target: Target) -> Target:
    """Return a draft model without an encoder, which reads the output of its target's encoder.

    Its drafts are the same, and each source is encoded once. It drafts only for targets with this encoder, by drafters
    such as `two_model`; methods with a loop of their own need a complete draft model.

    Raises: UsageError if a model has no encoder, or if the encoders differ.
    """
    for name, model in (("target", target), ("draft model", draft)):
        if not isinstance(model.model.config, Seq2SeqConfig):
            raise UsageError(f"the {name} {model.model.name} is no encoder-decoder; leave share_encoder out")
    shared = share_equal_encoder(draft, target)
    if not shared.model.capabilities.shares_encoder:
        raise UsageError(
            f"the encoder of the draft model {draft.model.name} is not that of the target {target.model.name}; use the "
            "draft model as it is"
        )
    return shared


def share_equal_encoder(draft: Target, target: Target) -> Target:
    """Return the result of `share_encoder`, or the draft model itself if it has another encoder or none."""
    if not has_encoder_of(draft, target):
        return draft
    config = dataclasses.replace(draft.model.config, shares_encoder=True)
    return Target(make_model(config), {name: part for name, part in draft.params.items() if not is_of_encoder(name)})


def has_encoder_of(draft: Target, target: Target) -> bool:
    """Return True if both models are encoder-decoders of one family whose encoders have equal settings and weights."""
    config, of_target = draft.model.config, target.model.config
    if not isinstance(config, Seq2SeqConfig) or type(config) is not type(of_target):
        return False
    fields = DECODER_FIELDS + (DECODER_FIELDS_OF_BART if isinstance(config, BartConfig) else ())
    if dataclasses.replace(config, **{field: getattr(of_target, field) for field in fields}) != of_target:
        return False
    ours, theirs = (dict(jax.tree_util.tree_leaves_with_path(_encoder(model))) for model in (draft, target))
    if ours.keys() != theirs.keys():
        return False
    return all(ours[path] is theirs[path] or bool(jnp.array_equal(ours[path], theirs[path])) for path in ours)


def _encoder(model: Target) -> PyTree:
    """Return the parameters that an encoder reads: its own, and the embeddings of source tokens."""
    reads_tokens = not isinstance(model.model.config, WhisperConfig)
    return {
        name: part for name, part in model.params.items() if is_of_encoder(name) or (reads_tokens and name == "embed")
    }
