"""BART: tensor names and configurations of Hugging Face checkpoints, which Whisper shares in part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.loading.families.config_fields import HEADS, LAYERS, ROWS, WIDTH, ConfigFields
from specjax.models.loading.tensors.assembly import StoredTensor
from specjax.models.seq2seq.config import Activation, BartConfig

HF_TYPES = ("bart",)
GGUF_TYPES = ()
GENERATION_FIELDS = "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"
"""Fields that generation_config.json may state in place of config.json."""

FIELDS = {
    "vocab_size": 50_265, "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 16,
    "decoder_attention_heads": 16, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096, "activation_function": "gelu",
    "max_position_embeddings": 1024, "scale_embedding": False, "tie_word_embeddings": True, "decoder_start_token_id": 2,
}  # fmt: skip
"""Fields that a config may omit, as in the class of transformers."""

ACTIVATIONS: Mapping[str, Activation] = {"gelu": "gelu_exact", "relu": "relu", "gelu_new": "gelu"}
"""Activations of the MLPs by `activation_function`."""

SHARED_UNREAD = (
    "num_hidden_layers", "is_encoder_decoder", "dropout", "activation_dropout", "encoder_layerdrop",
    "decoder_layerdrop", "init_std",
)  # fmt: skip
"""Fields of BART and Whisper that other fields state too, and those of training."""

UNREAD = ("classifier_dropout",)
"""Fields of classifiers."""

OFFSET = 2
"""Rows of the tables of positions before the first position."""


def shared_fields(hf: ConfigFields) -> dict[str, Any]:
    """Return the fields of a config that BART and Whisper have in common."""
    hf.skip(*SHARED_UNREAD)
    name = hf.text("activation_function")
    if name not in ACTIVATIONS:
        raise UsageError(
            f"{hf.where} has activation_function {quote(name)}, which specjax does not support (only "
            f"{', '.join(ACTIVATIONS)})"
        )
    width = hf.size("d_model", maximum=WIDTH)
    heads, encoder_heads = (hf.size(f"{part}_attention_heads", maximum=HEADS) for part in ("decoder", "encoder"))
    for part, count in (("decoder", heads), ("encoder", encoder_heads)):
        if width % count:
            raise UsageError(f"{hf.where} has {part}_attention_heads {count}, which must divide d_model, {width}")
    return {
        "vocab_size": hf.size("vocab_size", maximum=ROWS), "width": width,
        "num_layers": hf.size("decoder_layers", maximum=LAYERS),
        "encoder_layers": hf.size("encoder_layers", maximum=LAYERS), "num_heads": heads, "num_kv_heads": heads,
        "head_dim": width // heads, "encoder_heads": encoder_heads,
        "mlp_width": hf.size("decoder_ffn_dim", maximum=ROWS),
        "encoder_mlp_width": hf.size("encoder_ffn_dim", maximum=ROWS), "feed_activation": ACTIVATIONS[name],
        "scales_embedding": hf.flag("scale_embedding"), "tied": hf.flag("tie_word_embeddings"),
        "first_token": hf.size("decoder_start_token_id", minimum=0, maximum=ROWS), "qkv_bias": True, "out_bias": True,
        "norm_eps": 1e-5,
    }  # fmt: skip


def config_from_hf(hf: ConfigFields, **options) -> BartConfig:
    """Build a config from the config.json of BART.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.
    """
    hf = hf.with_defaults(FIELDS)
    hf.skip(*UNREAD)
    for old in ("normalize_before", "add_final_layer_norm"):  # of files before the classes of mBART
        if hf.flag(old):
            raise UsageError(f"{hf.where} has {old} true, which specjax does not support; use a model of BART")
    hf.skip("normalize_embedding", "static_position_embeddings", "extra_pos_embeddings", "add_bias_logits")
    positions = hf.size("max_position_embeddings", maximum=ROWS)
    return BartConfig(
        **shared_fields(hf), max_positions=positions, text_positions=positions, source_positions=positions,
        position_offset=OFFSET, norms_after=True, embedding_norm=True, logits_bias=True,
        second_token=hf.size("forced_bos_token_id", None, minimum=0, maximum=ROWS),
        last_token=hf.size("forced_eos_token_id", None, minimum=0, maximum=ROWS), **options,
    )  # fmt: skip


def shared_names() -> dict[str, str]:
    """Return the names of the layers and positions of BART and Whisper by parameter path."""
    parts = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
    affine = lambda path, name: {f"{path}.{kind}": f"{name}.{kind}" for kind in ("weight", "bias")}
    names: dict[str, str] = {}
    for path, stack in (("encoder", "encoder"), ("layers", "decoder")):
        layer = f"model.{stack}.layers.*"
        attentions = {"attention": "self_attn"} | ({"source": "encoder_attn"} if stack == "decoder" else {})
        for module, name in attentions.items():
            for part, stored in parts.items():
                names |= affine(f"{path}.*.{module}.{part}", f"{layer}.{name}.{stored}")
            names |= affine(f"{path}.*.{module}_norm", f"{layer}.{name}_layer_norm")
        names |= affine(f"{path}.*.mlp.up", f"{layer}.fc1") | affine(f"{path}.*.mlp.down", f"{layer}.fc2")
        names |= affine(f"{path}.*.mlp_norm", f"{layer}.final_layer_norm")
    return names | {
        "positions.table": "model.decoder.embed_positions.weight",
        "encoder_positions.table": "model.encoder.embed_positions.weight",
    }


def stored_hf(config: BartConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint."""
    names = shared_names() | {"embed.weight": "model.shared.weight", "head.weight": "lm_head.weight"}
    for path, stack in (("embedding_norm", "decoder"), ("encoder_embedding_norm", "encoder")):
        names |= {f"{path}.{kind}": f"model.{stack}.layernorm_embedding.{kind}" for kind in ("weight", "bias")}
    stored = {path: StoredTensor(name) for path, name in names.items()}
    return stored | {"logits_bias.table": StoredTensor("final_logits_bias", flat=True)}


def unused_hf(config: BartConfig) -> frozenset[str]:
    """Return the names of tensors that some checkpoints have as copies of others."""
    return frozenset({"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"})


def shared_fields_to_hf(c: BartConfig) -> dict[str, Any]:
    """Return the fields that `shared_fields` reads."""
    return {
        "vocab_size": c.vocab_size, "d_model": c.width, "decoder_layers": c.num_layers,
        "encoder_layers": c.encoder_layers, "decoder_attention_heads": c.num_heads,
        "encoder_attention_heads": c.encoder_heads, "decoder_ffn_dim": c.mlp_width,
        "encoder_ffn_dim": c.encoder_mlp_width,
        "activation_function": next(name for name, value in ACTIVATIONS.items() if value == c.feed_activation),
        "scale_embedding": c.scales_embedding, "tie_word_embeddings": c.tied, "decoder_start_token_id": c.first_token,
        "is_encoder_decoder": True, "torch_dtype": c.dtype,
    }  # fmt: skip


def config_to_hf(c: BartConfig) -> dict[str, Any]:
    """Return the fields that `config_from_hf` reads."""
    return {
        "architectures": ["BartForConditionalGeneration"], "model_type": "bart", **shared_fields_to_hf(c),
        "max_position_embeddings": c.text_positions,
        **({} if c.second_token is None else {"forced_bos_token_id": c.second_token}),
        **({} if c.last_token is None else {"forced_eos_token_id": c.last_token}),
    }  # fmt: skip
