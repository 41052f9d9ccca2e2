"""The format of Chimera's authors: three files, `trimlp.pt`, `fast_layer1.pt` and `chimera_head.pt`, one per part.

specjax writes one file with the names of the authors' module: the name of the file, then the name of the tensor.
"""

from __future__ import annotations

from typing import Any

from specjax.errors import UsageError
from specjax.models.heads.chimera import ChimeraConfig
from specjax.models.loading.families.config_fields import HEADS
from specjax.models.loading.heads.checkpoint_contents import (
    Contents,
    HeadPlan,
    Rules,
    count_indices,
    layer_table,
    rename_tensors,
)
from specjax.models.loading.heads.describing import describe_layers
from specjax.models.loading.heads.format import HeadFormat, SaveInfo, shown
from specjax.models.loading.heads.target_fit import TargetSpec, check_equal, layer_config, target_layer_config

TABLE = {
    "trigram.linear.weight": "trimlp.0.linear.weight",
    "trigram.linear.bias": "trimlp.0.linear.bias",
    "down.weight": "trimlp.1.weight",
    **layer_table("stack.*", "fast_layer1.*"),
    "heads.*.weight": "chimera_head.*.0.weight",
}
OF_FILES: Rules = (
    (r"^(0\.linear\.(weight|bias)|1\.weight)$", r"trimlp.\1"),
    (r"^(\d+\.(self_attn|mlp|input_layernorm|post_attention_layernorm)\.)", r"fast_layer1.\1"),
    (r"^(\d+\.0\.weight)$", r"chimera_head.\1"),
)
"""No name occurs in two of the files, so a name identifies its file."""

UNUSED = (r".*rotary_emb\.inv_freq$",)


def dialect_of(contents: Contents) -> str | None:
    """Return the dialect of the writer, or None for other files."""
    names = contents.tensors
    of_files = {"0.linear.weight", "1.weight", "0.0.weight"} <= set(names)
    return "authors" if of_files or "chimera_head.0.0.weight" in names else None


def plan(contents: Contents, dialect: str, spec: TargetSpec) -> HeadPlan:
    """Map the tensors to parameters. Raises: UsageError for inconsistent files, or a head of another target."""
    c, folder, where = contents.config, contents.folder, contents.config.where
    tensors = rename_tensors(contents, OF_FILES)
    width, columns = (*tensors.shape("trimlp.1.weight", folder), 0)[:2]
    check_equal(str(folder), "heads of width", width, spec.width, f"the width of the target {spec.name} is")
    check_equal(str(folder), "trimlp of inputs", columns, 3 * width, "it reads three embeddings, so it needs")
    size = tensors.shape("chimera_head.0.0.weight", folder)[0]
    check_equal(str(folder), "heads of a vocabulary of", size, spec.vocab_size, f"the target {spec.name} has")
    heads, layers = count_indices(tensors, r"chimera_head\.(\d+)\."), count_indices(tensors, r"fast_layer1\.(\d+)\.")
    if heads > HEADS:
        raise UsageError(f"{folder} has {heads} heads, and at most {HEADS} are supported")
    if layers != 1:
        raise UsageError(f"{folder} has {layers} layers in fast_layer1, and Chimera has one")
    if c.has("hidden_size"):
        layer = layer_config(c, tensors, "fast_layer1.0.self_attn", layers, spec)
    else:
        layer = target_layer_config(spec, "the layer of Chimera")
    listed = c.size("chimera_num_heads", heads, maximum=HEADS)
    notes = [] if listed == heads else [f"{where} lists {listed} heads, but the file has {heads}; all of them are used"]
    config = ChimeraConfig(layer, size, heads)
    return HeadPlan(
        "chimera", dialect, config, TABLE, tensors, {"num_heads": heads}, notes=tuple(notes), unused=UNUSED
    )  # fmt: skip


def describe(config: ChimeraConfig, layout: str, info: SaveInfo) -> dict[str, Any]:
    """Return config.json. The authors' config ends with the first three fields; their layer is like the target's."""
    return {
        "chimera_num_heads": config.num_heads,
        "chimera_num_layers": 1,
        "base_model_name_or_path": info.target,
    } | describe_layers(config.layer)


FORMAT = HeadFormat(
    kinds=("chimera",),
    table=TABLE,
    dialect_of=dialect_of,
    plan=plan,
    layouts={"authors": ()},
    describe=describe,
    neutral=shown("chimera_num_layers"),
)
