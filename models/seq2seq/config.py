"""Shapes and constants of encoder-decoder models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specjax.models.decoder import DecoderConfig
from specjax.models.seq2seq.distance_bias import STANDARD, DistanceBuckets


@dataclass(frozen=True)
class Seq2SeqConfig(DecoderConfig):
    """An encoder-decoder of the T5 family. The fields of `DecoderConfig` describe the decoder.

    Layers are separate, and matrices are not joined. Positions enter through the bias of attention only.
    """

    encoder_layers: int = 0
    buckets: DistanceBuckets = STANDARD
    bias_per_layer: bool = False  # umT5: each layer has its own table; otherwise the first layer's serves all
    gated: bool = True  # the MLP has a gate (T5 1.1); otherwise it is down(relu(up(x)))
    feed_activation: Literal["relu", "gelu"] = "gelu"  # "gelu": approximated by tanh
    scales_output: bool = False  # hidden states are multiplied by width ** -0.5 before the output head (T5 1.0)
    first_token: int = 0  # the text begins with it
    name: str = "seq2seq"

    def __post_init__(self):
        object.__setattr__(self, "stacked", False)
        object.__setattr__(self, "joined", ())
        super().__post_init__()

    def attention_settings(self, positions):
        raise NotImplementedError("the biases of an encoder-decoder are parameters, see `EncoderDecoder`")
