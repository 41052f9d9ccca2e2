"""Shapes and constants of encoder-decoder models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specjax.models.decoder import DecoderConfig
from specjax.models.seq2seq.distance_bias import STANDARD, DistanceBuckets

Activation = Literal["relu", "gelu", "gelu_exact"]
"""Activations of MLPs. "gelu" is approximated by tanh."""


@dataclass(frozen=True)
class Seq2SeqConfig(DecoderConfig):
    """An encoder-decoder. The fields of `DecoderConfig` describe the decoder.

    Layers are separate, and matrices are not joined.
    """

    encoder_layers: int = 0
    shares_encoder: bool = False  # a draft model that reads the output of its target's encoder
    feed_activation: Activation = "gelu"
    first_token: int = 0  # the text begins with it
    last_token: int | None = None  # ends a text of the maximum length; None: nothing does
    name: str = "seq2seq"

    def __post_init__(self):
        object.__setattr__(self, "stacked", False)
        object.__setattr__(self, "joined", ())
        super().__post_init__()

    @property
    def text_start(self) -> tuple[int, ...]:
        """Return the tokens before every text."""
        return (self.first_token,)

    def attention_settings(self, positions):
        raise NotImplementedError("an encoder-decoder reads positions by parameters, see `EncoderDecoder`")


@dataclass(frozen=True)
class T5Config(Seq2SeqConfig):
    """An encoder-decoder of the T5 family. Positions enter through the bias of attention only."""

    buckets: DistanceBuckets = STANDARD
    bias_per_layer: bool = False  # umT5: each layer has its own table; otherwise the first layer's serves all
    gated: bool = True  # the MLP has a gate (T5 1.1); otherwise it is down(relu(up(x)))
    scales_output: bool = False  # hidden states are multiplied by width ** -0.5 before the output head (T5 1.0)


@dataclass(frozen=True)
class BartConfig(Seq2SeqConfig):
    """An encoder-decoder of the BART family: learned positions, norms with a mean, and biases of all projections."""

    encoder_heads: int = 1
    encoder_mlp_width: int = 0
    source_positions: int = 1024  # length of the longest encoded source
    text_positions: int = 1024  # rows of the table of the decoder; `max_positions` may be smaller
    position_offset: int = 0  # rows of the tables before the first position
    norms_after: bool = False  # norm(x + sublayer(x)); otherwise x + sublayer(norm(x)), and a norm after the last layer
    embedding_norm: bool = False  # embeddings with positions are normalised
    logits_bias: bool = False  # a vector is added to the logits
    second_token: int | None = None  # follows `first_token`; None: any

    @property
    def text_start(self) -> tuple[int, ...]:
        return (self.first_token,) if self.second_token is None else (self.first_token, self.second_token)


@dataclass(frozen=True)
class WhisperConfig(BartConfig):
    """An encoder-decoder that reads the log-mel spectrogram of speech. Two convolutions halve its length."""

    mel_bins: int = 80

    @property
    def source_frames(self) -> int:
        """Return the number of frames of every spectrogram."""
        return 2 * self.source_positions
