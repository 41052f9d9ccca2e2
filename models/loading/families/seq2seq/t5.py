"""T5, T5 1.1, Flan-T5, mT5 and umT5: tensor names and configurations of Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.loading.families.config_fields import HEADS, LAYERS, ROWS, WIDTH, ConfigFields
from specjax.models.loading.tensors.assembly import StoredTensor
from specjax.models.seq2seq.config import T5Config
from specjax.models.seq2seq.distance_bias import DistanceBuckets

HF_TYPES = ("t5", "mt5", "umt5")
GGUF_TYPES = ()
GENERATION_FIELDS = ("decoder_start_token_id",)
"""Fields that generation_config.json may state in place of config.json."""

FIELDS = {
    "vocab_size": 32_128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8,
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu", "tie_word_embeddings": True, "decoder_start_token_id": 0,
}  # fmt: skip
"""Fields that a config may omit, as in the class of transformers."""

FIELDS_OF = {
    "t5": FIELDS,
    **dict.fromkeys(
        ("mt5", "umt5"),
        FIELDS | {
            "vocab_size": 250_112, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu",
        },
    ),
}  # fmt: skip

MAX_POSITIONS = 1 << 20
"""Biases by distance limit no text; this is more than any buffer."""

FEEDS: Mapping[str, tuple[bool, Literal["relu", "gelu"]]] = {
    "relu": (False, "relu"), "gated-gelu": (True, "gelu"), "gated-relu": (True, "relu"),
}  # fmt: skip
"""Forms of the MLP by `feed_forward_proj`: whether it has a gate, and its activation."""


UNREAD = (
    "dense_act_fn",
    "is_gated_act",
    "dropout_rate",
    "classifier_dropout",
    "initializer_factor",
    "is_encoder_decoder",
)
"""Fields that other fields state too, and those of training."""


def config_from_hf(hf: ConfigFields, **options) -> T5Config:
    """Build a config from the config.json of one of HF_TYPES.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.
    """
    kind = hf.text("model_type")
    hf = hf.with_defaults(FIELDS_OF[kind])
    feed = hf.text("feed_forward_proj")
    if feed not in FEEDS:
        raise UsageError(
            f"{hf.where} has feed_forward_proj {quote(feed)}, which specjax does not support (only {', '.join(FEEDS)})"
        )
    hf.skip(*UNREAD)
    gated, activation = FEEDS[feed]
    layers, tied = hf.size("num_layers", maximum=LAYERS), hf.flag("tie_word_embeddings")
    heads = hf.size("num_heads", maximum=HEADS)
    return T5Config(
        vocab_size=hf.size("vocab_size", maximum=ROWS),
        width=hf.size("d_model", maximum=WIDTH),
        num_layers=hf.size("num_decoder_layers", layers, maximum=LAYERS),
        encoder_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hf.size("d_kv", maximum=HEADS),
        mlp_width=hf.size("d_ff", maximum=ROWS),
        norm_eps=hf.number("layer_norm_epsilon", maximum=1.0),
        query_scale=1.0,
        tied=tied,
        scales_output=_scales_output(hf, kind),
        buckets=_buckets(hf),
        bias_per_layer=kind == "umt5",
        gated=gated,
        feed_activation=activation,
        first_token=hf.size("decoder_start_token_id", minimum=0, maximum=ROWS),
        max_positions=MAX_POSITIONS,
        **options,
    )


def _buckets(hf: ConfigFields) -> DistanceBuckets:
    """Return the buckets of the biases. Raises: UsageError if a direction has no logarithmic ones."""
    count = hf.size("relative_attention_num_buckets", minimum=4, maximum=HEADS)
    single = count // 2  # distances of the decoder with a bucket of their own
    return DistanceBuckets(count, hf.size("relative_attention_max_distance", minimum=single + 1, maximum=ROWS))


def _scales_output(hf: ConfigFields, kind: str) -> bool:
    """Return True if hidden states are scaled before the output head, as the classes of transformers decide it.

    The class of mT5 never scales. The others scale unless the file says that the output head is another matrix.
    """
    flag = "scale_decoder_outputs" if hf.has("scale_decoder_outputs") else "tie_word_embeddings"
    return kind != "mt5" and hf.flag(flag)


def stored_hf(config: T5Config, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint."""
    names = {
        "embed.weight": "shared.weight",
        "head.weight": "lm_head.weight",
        "norm.weight": "decoder.final_layer_norm.weight",
        "encoder_norm.weight": "encoder.final_layer_norm.weight",
    }
    attention = lambda module, name: {f"{module}.{part}.weight": f"{name}.{part}.weight" for part in "qkvo"}
    mlp = {"gate": "wi_0", "up": "wi_1", "down": "wo"} if config.gated else {"up": "wi", "down": "wo"}

    def feed(module: str, name: str) -> dict[str, str]:
        parts = {
            f"{module}.mlp.{part}.weight": f"{name}.DenseReluDense.{stored}.weight" for part, stored in mlp.items()
        }
        return parts | {f"{module}.mlp_norm.weight": f"{name}.layer_norm.weight"}

    encoder, decoder = "encoder.block.*.layer", "decoder.block.*.layer"
    names |= attention("encoder.*.attention", f"{encoder}.0.SelfAttention")
    names |= {"encoder.*.attention_norm.weight": f"{encoder}.0.layer_norm.weight"} | feed("encoder.*", f"{encoder}.1")
    names |= attention("layers.*.attention", f"{decoder}.0.SelfAttention")
    names |= attention("layers.*.source", f"{decoder}.1.EncDecAttention")
    names |= {
        "layers.*.attention_norm.weight": f"{decoder}.0.layer_norm.weight",
        "layers.*.source_norm.weight": f"{decoder}.1.layer_norm.weight",
    }
    names |= feed("layers.*", f"{decoder}.2")
    bias = "0.SelfAttention.relative_attention_bias.weight"
    names |= {
        "encoder_bias.*.table": f"encoder.block.*.layer.{bias}",
        "bias.*.table": f"decoder.block.*.layer.{bias}",
    }
    return {path: StoredTensor(name) for path, name in names.items()}


def unused_hf(config: T5Config) -> frozenset[str]:
    """Return the names of tensors that some checkpoints have as copies of others, or that no layer reads."""
    return frozenset({
        "encoder.embed_tokens.weight", "decoder.embed_tokens.weight",
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
    })  # fmt: skip


def config_to_hf(c: T5Config) -> dict[str, Any]:
    """Return the fields that `config_from_hf` reads."""
    form = next(name for name, parts in FEEDS.items() if parts == (c.gated, c.feed_activation))
    kind = "umt5" if c.bias_per_layer else "t5"
    return {
        "architectures": [{"t5": "T5ForConditionalGeneration", "umt5": "UMT5ForConditionalGeneration"}[kind]],
        "model_type": kind,
        "vocab_size": c.vocab_size,
        "d_model": c.width,
        "d_kv": c.head_dim,
        "d_ff": c.mlp_width,
        "num_layers": c.encoder_layers,
        "num_decoder_layers": c.num_layers,
        "num_heads": c.num_heads,
        "relative_attention_num_buckets": c.buckets.num_buckets,
        "relative_attention_max_distance": c.buckets.furthest,
        "layer_norm_epsilon": c.norm_eps,
        "feed_forward_proj": form,
        "tie_word_embeddings": c.tied,
        "scale_decoder_outputs": c.scales_output,
        "decoder_start_token_id": c.first_token,
        "is_encoder_decoder": True,
        "torch_dtype": c.dtype,
    }
