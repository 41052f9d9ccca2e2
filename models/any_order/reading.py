"""Folders of XLNet models in the Hugging Face layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import guarded_read, quote
from specjax.models.any_order.xlnet import ACTIVATIONS, XLNetConfig
from specjax.models.loading import resolve
from specjax.models.loading.families.config_fields import LAYERS, ROWS, WIDTH, ConfigFields
from specjax.models.loading.families.unread_fields import warn_of_unread
from specjax.models.loading.formats import hf
from specjax.models.loading.quantized import refuse_quantized
from specjax.models.loading.tensors.tensors import TensorLocation, read_rows
from specjax.models.loading.tokenizers import hf as hf_tokenizer
from specjax.models.loading.tokenizers.tokenizer import Tokenizer

MASK = "<mask>"
"""The piece of a missing token."""


UNUSED = (
    "architectures", "bi_data", "dropout", "mem_len", "reuse_len", "untie_r", "use_mems_eval", "use_mems_train",
    "start_n_top", "end_n_top", "summary_activation", "summary_last_dropout", "summary_type", "summary_use_proj",
)  # fmt: skip
"""Fields of memory between segments, of training, and of the summary of classifiers."""


class LoadedXLNet(NamedTuple):
    """A model with its parameters, its tokenizer, and the id of missing tokens."""

    config: XLNetConfig
    params: dict[str, Any]
    tokenizer: Tokenizer
    mask_token: int
    name: str


def load_xlnet(source: str | Path) -> LoadedXLNet:
    """Load a folder or a hub id, with weights in float32.

    Raises: UsageError for a source that cannot be read, or is not an XLNet language model.
    """
    path = resolve(source)
    with guarded_read(path):
        fields = hf.read_config(path) if path.is_dir() else None
        kind = None if fields is None else fields.text("model_type", "")
        if fields is None or kind != "xlnet":
            raise UsageError(
                f"{path} is no any-order model ({'a file' if kind is None else f'model_type {quote(kind)}'}); give the "
                "folder of an XLNet language model"
            )
        refuse_quantized(fields)
        config = read_config(fields)
        tensors = {name: tensor for file in hf.weight_files(path) for name, tensor in hf.read_tensors(file).items()}
        params = _read_params(config, tensors, path)
        tokenizer = hf_tokenizer.from_folder(path)
        if MASK not in tokenizer.vocab:
            raise UsageError(f"the tokenizer in {path} has no piece {MASK}, which stands for a missing token")
    warn_of_unread(fields, stacklevel=4)
    return LoadedXLNet(config, params, tokenizer, tokenizer.vocab.index(MASK), path.name)


def read_config(c: ConfigFields) -> XLNetConfig:
    """Return the config of config.json. Raises: UsageError for a model with one direction, or limits on attention."""
    direction, activation = c.text("attn_type", "bi"), c.text("ff_activation", "gelu")
    if direction != "bi" or c.flag("same_length"):
        raise UsageError(
            f"{c.where} has attn_type {quote(direction)} or same_length, and an any-order model reads both ways"
        )
    if activation not in ACTIVATIONS:
        raise UsageError(f"{c.where} has ff_activation {quote(activation)}; supported are {', '.join(ACTIVATIONS)}")
    c.skip(*UNUSED)
    width, heads = c.size("d_model", maximum=WIDTH), c.size("n_head", maximum=WIDTH)
    limit = c.number("clamp_len", -1, minimum=-1, maximum=1e9)
    return XLNetConfig(
        c.size("vocab_size", maximum=ROWS), width, c.size("n_layer", maximum=LAYERS), heads,
        c.size("d_head", width // heads, maximum=WIDTH), c.size("d_inner", maximum=8 * WIDTH),
        float(c.number("layer_norm_eps", 1e-12, minimum=0)), activation, int(limit) if limit > 0 else None,
        c.flag("tie_word_embeddings", True),
    )  # fmt: skip


def _read_params(c: XLNetConfig, tensors: dict[str, TensorLocation], path: Path) -> dict[str, Any]:
    """Read all parameters. Raises: UsageError for a missing one, another shape, or values that are not finite."""
    d, n, h = c.width, c.num_heads, c.head_dim

    def read(name: str, *shape: int) -> Any:
        place = next((full for full in (f"transformer.{name}", name) if full in tensors), None)
        if place is None or tensors[place].shape != shape:
            raise UsageError(f"{path} has no tensor {name} of shape {list(shape)}, which an XLNet model needs")
        values = read_rows(tensors[place], 0, shape[0])
        if not np.isfinite(values).all():
            raise UsageError(f"{path} has values in {name} that are not finite")
        return jnp.asarray(values)

    def linear(name: str, *shape: int) -> dict[str, Any]:
        return {"weight": read(f"{name}.weight", *shape), "bias": read(f"{name}.bias", shape[0])}

    def layer(number: int) -> dict[str, Any]:
        attention, mlp = f"layer.{number}.rel_attn", f"layer.{number}.ff"
        return {
            **{name: read(f"{attention}.{name}", d, n, h) for name in "qkvor"},
            "content_bias": read(f"{attention}.r_w_bias", n, h), "distance_bias": read(f"{attention}.r_r_bias", n, h),
            "norm": linear(f"{attention}.layer_norm", d), "up": linear(f"{mlp}.layer_1", c.mlp_width, d),
            "down": linear(f"{mlp}.layer_2", d, c.mlp_width), "mlp_norm": linear(f"{mlp}.layer_norm", d),
        }  # fmt: skip

    embedding = read("word_embedding.weight", c.vocab_size, d)
    return {
        "embedding": embedding, "query": read("mask_emb", 1, 1, d)[0, 0],
        "layers": [layer(number) for number in range(c.num_layers)],
        "output": embedding if c.tied else read("lm_loss.weight", c.vocab_size, d),
        "bias": read("lm_loss.bias", c.vocab_size),
    }  # fmt: skip
