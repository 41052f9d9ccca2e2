"""Fields and tensor names that several families of models with images share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.decoder import DecoderConfig
from specjax.models.llama import LlamaConfig
from specjax.models.loading.families import llama
from specjax.models.loading.families.config_fields import HEADS, LAYERS, ROWS, WIDTH, ConfigFields
from specjax.models.loading.tensors.assembly import StoredTensor
from specjax.models.vision.config import Activation, TowerSizes, VisionLanguageConfig, values_of

ACTIVATIONS: Mapping[str, Activation] = {
    "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "quick_gelu": "quick_gelu",
    "silu": "silu",
}  # fmt: skip

PIXELS = 1 << 14  # more than the side of any image

SUBLAYERS = {
    "attention_norm": "layer_norm1", "mlp_norm": "layer_norm2", "up": "mlp.fc1", "down": "mlp.fc2",
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.out_proj",
}  # fmt: skip
"""Modules of a layer of a tower, and their names in files."""

OF_OTHER_FAMILIES = (
    "perceiver_config", "qk_layer_norms", "use_resampler", "pixel_shuffle_factor", "neftune_noise_alpha",
    "max_image_size", "size", "use_base_siglip", "projection_dim", "initializer_factor", "_pad_token_id",
)  # fmt: skip
"""Fields of published configs that the classes of transformers do not read."""


def activation(hf: ConfigFields, name: str, default: str) -> Activation:
    """Return an activation. Raises: UsageError for one that is not supported."""
    value = hf.text(name, default)
    if value not in ACTIVATIONS:
        raise UsageError(
            f"{hf.where} has {hf.prefix}{name} {quote(value)}, which specjax does not support (only "
            f"{', '.join(ACTIVATIONS)})"
        )
    return ACTIVATIONS[value]


def image_token(hf: ConfigFields, default: int, text: DecoderConfig) -> int:
    """Return the placeholder of image vectors. Raises: UsageError if it is not in the vocabulary of the text model."""
    hf.skip("image_token_id")  # files of other versions have `image_token_index`
    name = "image_token_index" if hf.has("image_token_index") else "image_token_id"
    token = hf.size(name, default, minimum=0, maximum=ROWS)
    if token >= text.vocab_size:
        stated = f"has {name} {token}" if hf.has(name) else f"lacks {name}, whose default is {default}"
        raise UsageError(
            f"{hf.where} {stated}, outside of the vocabulary of {text.vocab_size}; add the id of the token that stands "
            "for images"
        )
    return token


def tower_sizes(hf: ConfigFields, **parts: Any) -> TowerSizes:
    """Return the shapes of a tower from the fields of a vision_config. `parts` are those that differ by family."""
    hf.skip(*OF_OTHER_FAMILIES)
    width, heads = hf.size("hidden_size", maximum=WIDTH), hf.size("num_attention_heads", maximum=HEADS)
    if width % heads:
        raise UsageError(
            f"{hf.where} has {hf.prefix}hidden_size {width}, which must be a multiple of num_attention_heads, {heads}"
        )
    patch = hf.size("patch_size", maximum=PIXELS)
    sizes = {
        "width": width,
        "num_heads": heads,
        "num_layers": hf.size("num_hidden_layers", maximum=LAYERS),
        "mlp_width": hf.size("intermediate_size", maximum=ROWS),
        "image_size": hf.size("image_size", minimum=patch, maximum=PIXELS),
        "patch_size": patch,
        "channels": hf.size("num_channels", 3, maximum=HEADS),
        "norm_eps": hf.number("layer_norm_eps", maximum=1.0),
        "activation": activation(hf, "hidden_act", "gelu_pytorch_tanh"),
    }
    return TowerSizes(**(sizes | parts))


def text_config(hf: ConfigFields, defaults: Mapping[str, Any], **options) -> tuple[DecoderConfig, str]:
    """Return the config of the text model, and its `model_type`."""
    text = llama.text_config(hf, {"model_type": "llama", **defaults})
    text.skip(*OF_OTHER_FAMILIES)
    return llama.config_from_hf(text, **options), text.text("model_type")


def text_names(config: VisionLanguageConfig, prefix: str) -> dict[str, StoredTensor]:
    """Map the parameter paths of the text model. `prefix` replaces "model." in the names of a language model."""
    stored = llama.stored_hf(_text_part(config), config.text_type)
    rename = lambda name: prefix + name.removeprefix("model.") if name.startswith("model.") else name
    return {path: tensor._replace(name=rename(tensor.name)) for path, tensor in stored.items()}


def tower_names(prefix: str, norms: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Map the parameter paths of a tower to names that begin with `prefix`. `norms` are those outside of the layers."""
    embeddings = f"{prefix}embeddings."
    names = {
        "tower.patch.kernel": f"{embeddings}patch_embedding.weight",
        "tower.patch.bias": f"{embeddings}patch_embedding.bias",
        "tower.positions.table": f"{embeddings}position_embedding.weight",
        "tower.start.vector": f"{embeddings}class_embedding",
    }
    for part, name in SUBLAYERS.items():
        names |= _affine(f"tower.layers.*.{part}", f"{prefix}encoder.layers.*.{name}")
    for part, name in norms.items():
        names |= _affine(f"tower.{part}", prefix + name)
    return {path: StoredTensor(name) for path, name in names.items()}


def _affine(path: str, name: str) -> dict[str, str]:
    return {f"{path}.{part}": f"{name}.{part}" for part in ("weight", "bias")}


def spare_names(config: VisionLanguageConfig, prefixes: Iterable[str], norms: Iterable[str]) -> frozenset[str]:
    """Return the names of the tensors of a tower that no pass reads: its last layers, and some norms."""
    layers = range(config.tower.num_layers, config.tower.num_layers + config.tower.spare_layers)
    modules = [f"encoder.layers.{layer}.{name}" for layer in layers for name in SUBLAYERS.values()]
    return frozenset(
        f"{prefix}{name}.{part}" for prefix in prefixes for name in (*modules, *norms) for part in ("weight", "bias")
    ) | {f"{prefix}embeddings.position_ids" for prefix in prefixes}


def _text_part(config: VisionLanguageConfig) -> LlamaConfig:
    return LlamaConfig(**values_of(config, fields(DecoderConfig)))


def to_hf(config: VisionLanguageConfig) -> dict[str, Any]:
    """Return the fields of a config.json that describe text model and tower."""
    text = llama.config_to_hf(_text_part(config))
    return {
        "model_type": config.model_type,
        "text_config": text | {"model_type": config.text_type},
        "tie_word_embeddings": config.tied,
        "torch_dtype": config.dtype,
        "vision_config": tower_to_hf(config.tower),
    }


def tower_to_hf(tower: TowerSizes) -> dict[str, Any]:
    """Return the fields of a vision_config."""
    names = {activation: name for name, activation in ACTIVATIONS.items()}
    return {
        "hidden_size": tower.width,
        "num_attention_heads": tower.num_heads,
        "num_hidden_layers": tower.num_layers + tower.spare_layers,
        "intermediate_size": tower.mlp_width,
        "image_size": tower.image_size,
        "patch_size": tower.patch_size,
        "num_channels": tower.channels,
        "layer_norm_eps": tower.norm_eps,
        "hidden_act": names[tower.activation],
    }
