"""Inputs of an encoder-decoder, and the keys and values of the encoded source, which the cache contains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.models.seq2seq.config import BartConfig, Seq2SeqConfig, WhisperConfig
from specjax.numerics.validation import pad_token_lists
from specjax.types import Array, EncodedInputs, Source


def sources(texts: Sequence[Sequence[int]], length: int | None = None) -> Source:
    """Return the input of an encoder for token lists, padded to a common length.

    Args:
      length: tokens of the padded sources, such as those of the longest source of a server. None: the smallest multiple
        of 32.

    Raises: UsageError for no texts, and for a text that is empty, longer than `length` or no list of token ids.
    """
    return Source(*pad_token_lists("sources", texts, length))


class Spectrogram(NamedTuple):
    """The input of an encoder of speech."""

    frames: Array  # float[B, M, T], log-mel energies by bin and time


def spectrograms(frames: Sequence[Any] | Any) -> Spectrogram:
    """Return the input of an encoder for log-mel spectrograms of one size, float[M, T] each.

    Raises: UsageError for another shape, and for values that are not finite.
    """
    shapes = {np.shape(row) for row in frames}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise UsageError(f"spectrograms must be arrays [bins, frames] of one size, not {sorted(shapes) or 'nothing'}")
    stacked = np.asarray(np.stack([np.asarray(row) for row in frames]), np.float32)
    if not np.isfinite(stacked).all():
        raise UsageError("a spectrogram has values that are not finite; check the audio")
    return Spectrogram(jnp.asarray(stacked))


def check_inputs(config: Seq2SeqConfig, inputs: Any) -> None:
    """Check that the inputs of an encoder have its type and a length that it can read.

    Raises: UsageError if they do not.
    """
    if config.shares_encoder:
        raise UsageError(
            f"{config.name} has no encoder of its own; pass it as the draft model of its target, such as "
            "two_model(draft), or use the model without share_encoder"
        )
    if isinstance(config, WhisperConfig):
        if not isinstance(inputs, Spectrogram):
            raise UsageError(
                f"the speech model {config.name} needs spectrograms; pass inputs=specjax.models.spectrograms(...), or "
                "use specjax.speech.transcribe or the command specjax transcribe"
            )
        bins, frames = inputs.frames.shape[1:]
        if (bins, frames) != (config.mel_bins, config.source_frames):
            raise UsageError(
                f"the speech model {config.name} reads spectrograms of {config.mel_bins} bins and "
                f"{config.source_frames} frames, not {bins} and {frames}; use specjax.speech.log_mel"
            )
        return
    if not isinstance(inputs, Source):
        raise UsageError(
            f"the encoder-decoder {config.name} needs a source; pass inputs=specjax.models.sources(...), or choose "
            "a decoder-only model where a function has no inputs"
        )
    if isinstance(config, BartConfig) and inputs.tokens.shape[1] > config.source_positions:
        raise UsageError(
            f"the encoder of {config.name} reads {config.source_positions} tokens, and the padded sources have "
            f"{inputs.tokens.shape[1]}; shorten the longest one"
        )


def check_width(config: Seq2SeqConfig, encoded: EncodedInputs) -> None:
    """Check that a decoder can read the output of an encoder. Raises: UsageError for another width."""
    width = encoded.output.shape[-1]
    if width != config.width:
        raise UsageError(
            f"{config.name} reads the output of an encoder of width {config.width}, and that of its target has "
            f"{width}; use it with the target that share_encoder was called with"
        )


class SourceMemory(NamedTuple):
    """Keys and values of the source, which the decoder reads."""

    k: tuple[Array, ...]  # [B, H, S, h] of each layer of the decoder
    v: tuple[Array, ...]
    length: Array  # int32[B]
    text: Source | None = None  # what the encoder has read; None: it was no text
