"""Chimera by its authors: three files, `trimlp.pt`, `fast_layer1.pt` and `chimera_head.pt`, one per part.

Written here as one file, with the names that the authors' module has: those of the three behind the name of the file.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.models.heads.chimera import ChimeraConfig
from specjax.models.heads.contract import DraftHead
from specjax.models.loading.families.config_fields import HEADS
from specjax.models.loading.heads.checkpoint_contents import (
    Contents,
    Plan,
    Reader,
    Rules,
    check_equal,
    indices,
    layer_config,
    layer_of_target,
    renamed,
)
from specjax.models.loading.heads.describing import described_layers

KINDS = ("chimera",)

TABLE = {
    "trigram.linear.weight": "trimlp.0.linear.weight",
    "trigram.linear.bias": "trimlp.0.linear.bias",
    "down.weight": "trimlp.1.weight",
    "stack.*.attention_norm.weight": "fast_layer1.*.input_layernorm.weight",
    "stack.*.mlp_norm.weight": "fast_layer1.*.post_attention_layernorm.weight",
    **{
        f"stack.*.attention.{part}.{what}": f"fast_layer1.*.self_attn.{part}_proj.{what}"
        for part in "qkvo"
        for what in ("weight", "bias")
    },
    **{f"stack.*.attention.{part}_norm.weight": f"fast_layer1.*.self_attn.{part}_norm.weight" for part in "qk"},
    **{f"stack.*.mlp.{part}.weight": f"fast_layer1.*.mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
    "heads.*.weight": "chimera_head.*.0.weight",
}
OF_FILES: Rules = (
    (r"^(0\.linear\.(weight|bias)|1\.weight)$", r"trimlp.\1"),
    (r"^(\d+\.(self_attn|mlp|input_layernorm|post_attention_layernorm)\.)", r"fast_layer1.\1"),
    (r"^(\d+\.0\.weight)$", r"chimera_head.\1"),
)
"""No name is in two of the files, so the name says which it is of."""

UNUSED = (r".*rotary_emb\.inv_freq$",)


def dialect_of(contents: Contents) -> str | None:
    """Who wrote it; None: it is no Chimera."""
    names = contents.tensors
    of_files = {"0.linear.weight", "1.weight", "0.0.weight"} <= set(names)
    return "authors" if of_files or "chimera_head.0.0.weight" in names else None


def kind_of(contents: Contents) -> str:
    """The method that it is drafted with."""
    return "chimera"


def plan(contents: Contents, dialect: str, reader: Reader, token_map: np.ndarray | None) -> Plan:
    """Raises: UsageError for a head that does not fit the target."""
    c, folder, where = contents.config, contents.folder, contents.config.where
    if token_map is not None:
        raise UsageError(f"{folder} holds Chimera's heads, which take no token map; leave it out")
    tensors = renamed(contents, OF_FILES)
    width, columns = (*tensors.shape("trimlp.1.weight", folder), 0)[:2]
    check_equal(str(folder), "heads of width", width, reader.width, f"the width of the target {reader.name} is")
    check_equal(str(folder), "trimlp of inputs", columns, 3 * width, "it reads three embeddings, numbers in all")
    size = tensors.shape("chimera_head.0.0.weight", folder)[0]
    check_equal(str(folder), "heads of a vocabulary of", size, reader.vocab_size, f"the target {reader.name} has")
    heads, layers = indices(tensors, r"chimera_head\.(\d+)\."), indices(tensors, r"fast_layer1\.(\d+)\.")
    if heads > HEADS:
        raise UsageError(f"{folder} has {heads} heads, more than there are")
    if layers != 1:
        raise UsageError(f"{folder} has {layers} layers in fast_layer1, and Chimera has one")
    if c.given("hidden_size"):
        layer = layer_config(c, tensors, "fast_layer1.0.self_attn", layers, reader)
    else:
        layer = layer_of_target(reader, "the layer of Chimera")
    said = c.size("chimera_num_heads", heads, most=HEADS)
    notes = [] if said == heads else [f"{where} says {said} heads, and the file has {heads}, which count"]
    config = ChimeraConfig(layer, size, heads)
    return Plan(
        "chimera", dialect, config, TABLE, tensors, {"num_heads": heads}, notes=tuple(notes), unused=UNUSED
    )  # fmt: skip


def variants(head: DraftHead, num_layers: int) -> dict[str, DraftHead]:
    """Other readings of the same tensors, by what would be wrong with this one: none."""
    return {}


LAYOUTS: dict[str, Rules] = {"authors": ()}


def describe(config: ChimeraConfig, layout: str, about: dict[str, Any]) -> dict[str, Any]:
    """config.json; the authors have no more than its first three words, the layer being like the target's."""
    return {
        "chimera_num_heads": config.num_heads,
        "chimera_num_layers": 1,
        "base_model_name_or_path": about["name"],
    } | described_layers(config.layer)
