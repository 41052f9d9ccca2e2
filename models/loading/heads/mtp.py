"""Formats of multi-token-prediction modules: those in the files of their targets, and specjax's own for trained ones.

The table has names of its own, to which `specjax.models.loading.mtp_dialects` renames the tensors of each family.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import quote, read_json_object
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.mtp import MtpConfig, layer_of
from specjax.models.llama import LlamaConfig
from specjax.models.loading import mtp_dialects
from specjax.models.loading.families import rope
from specjax.models.loading.families.config_fields import HEADS, ROWS, WIDTH, ConfigFields, check_heads
from specjax.models.loading.families.hybrid.common import head_rows
from specjax.models.loading.families.latent.deepseek import attention_forms
from specjax.models.loading.families.llama import HF_HEADS
from specjax.models.loading.formats import gguf, hf
from specjax.models.loading.formats.ggml_blocks import quantized_tensor
from specjax.models.loading.heads.checkpoint_contents import Contents, HeadPlan, Tensors, experts_table, layer_table
from specjax.models.loading.heads.describing import describe_layers
from specjax.models.loading.heads.format import HeadFormat, SaveInfo, shown
from specjax.models.loading.heads.settings import HeadVariant, change_config
from specjax.models.loading.heads.target_fit import TargetSpec, check_fits_target
from specjax.models.loading.mtp_dialects import BY_NAME, COPIES, GGUF, OWN, MtpDialect, NativeModule
from specjax.models.loading.quantized import as_matrices, method_of
from specjax.models.loading.tensors.assembly import StoredTensor
from specjax.types import Target


def _table(path: str, name: str) -> dict[str, str]:
    """Return the tensor names of the parameters of a module below `path`; "": a module alone."""
    parts = {"embedding_norm": "enorm", "state_norm": "hnorm", "fc": "eh_proj", "norm": "norm", "head": "head"}
    return {f"{path}{part}.weight": f"{name}.{stored}.weight" for part, stored in parts.items()}


LATENT = "q_down", "q_down_norm", "latent", "latent_norm", "k_up", "v_up"
"""Modules of latent attention, besides `q` and `o`. Their tensors have other names, see `_stored`."""

TABLE = {
    **_table("", "modules.0"),
    **layer_table("stack.*", "modules.0.layers.*"),
    **experts_table("stack.*.mlp", "modules.0.layers.*"),
    **_table("modules.*.", "modules.*"),
    **experts_table("modules.*.stack.*.mlp", "modules.*.layers.*"),
    **layer_table("modules.*.stack.*", "modules.*.layers.*"),
    **{f"stack.*.attention.{part}.weight": f"modules.0.layers.*.self_attn.{part}.weight" for part in LATENT},
    **{f"modules.*.stack.*.attention.{p}.weight": f"modules.*.layers.*.self_attn.{p}.weight" for p in LATENT},
    "stack.*.attention.output_gate.weight": "modules.0.layers.*.self_attn.output_gate.weight",
    "modules.*.stack.*.attention.output_gate.weight": "modules.*.layers.*.self_attn.output_gate.weight",
}

FLAGS = ("hidden_first", "hidden", "chained", "final_norm", "own_head", "zero_first")
OWN_FLAGS = {"final_norm": True, "zero_first": False}
"""Flags that only modules of specjax change."""

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}


def native_module(target: Target) -> NativeModule:
    """Return the module in the files of a target. Raises: UsageError if there is none that can draft."""
    native, name = target.native, target.model.name
    if native is None:
        raise UsageError(
            f"the files of {name} have no multi-token-prediction module that specjax can find, so there is no native "
            "draft; choose another draft, or train a module with specjax train --method mtp"
        )
    check_able(native)
    return native


def check_able(native: NativeModule) -> None:
    """Raise a UsageError for a module whose layer has parts that specjax lacks."""
    if native.lacking is not None:
        raise UsageError(
            f"{native.source} has a multi-token-prediction module of the form {native.dialect}, whose layer has "
            f"{native.lacking}, which specjax does not have in heads; choose another draft"
        )


def native_contents(native: NativeModule, num_layers: int) -> Contents:
    """Return the config and the tensors of a module in the files of a target with this number of layers."""
    path, row = Path(native.source), BY_NAME[native.dialect]
    owned = mtp_dialects.owner(row, num_layers)
    if row is GGUF:
        meta, located = gguf.read_header(path)
        tensors: dict[str, Any] = {name: quantized_tensor(name, x) for name, x in located.items() if owned(name)}
        return Contents(path, ConfigFields(meta, str(path)), tensors)
    fields = ConfigFields(read_json_object(path / "config.json") or {}, str(path / "config.json"))
    method = method_of(fields, path)
    kinds = () if method is None else hf.PARTS
    files = [file for file in hf.weight_files(path) if not file.name.startswith(hf.ADAPTER)]
    stored = {hf.text_name(name): x for file in files for name, x in hf.read_tensors(file, kinds).items()}
    tensors = {name: x for name, x in stored.items() if owned(name)}
    matrices: dict[str, Any] = tensors if method is None else as_matrices(tensors, method)
    return Contents(path, fields, matrices)


def dialect_of(contents: Contents) -> str | None:
    """Return the form of a folder that has modules only, or None for other files, such as a whole model."""
    names = contents.tensors
    if contents.config.text("model_type", "").startswith("exaone"):
        return None  # EXAONE-MoE has the names of Qwen3.5, but norms without the 1, and windows of its own
    if any(re.match(r"(model\.)?layers\.0\.", name) for name in names):
        return None
    dialect = mtp_dialects.find_dialect(names, 0, (OWN, *mtp_dialects.DIALECTS))
    return dialect and dialect.name


def plan(contents: Contents, dialect: str, spec: TargetSpec) -> HeadPlan:
    """Map the tensors to parameters. Raises: UsageError for inconsistent files, or a module of another target."""
    row = BY_NAME[dialect]
    check_able(mtp_dialects.describe(str(contents.folder), row, contents.tensors))
    tensors = _renamed(contents, row)
    count = len({name.split(".")[1] for name in tensors if name.startswith("modules.")})
    config = contents.config
    fields = config.subfields("text_config") if config.has("text_config") else config
    if row is GGUF:
        layer = layer_of(spec.target.model.config)
    else:
        layer = _layer_config(fields, tensors, row, spec)
        check_fits_target(config.where, fields.size("hidden_size"), fields.size("vocab_size", spec.vocab_size), spec)
    layer = _as_stored(layer, tensors, contents.folder, spec)
    layer = dataclasses.replace(layer, num_layers=count, vocab_size=spec.vocab_size)
    flags = {name: getattr(row, name) for name in FLAGS if name not in OWN_FLAGS} | OWN_FLAGS
    if row is OWN:
        flags = _own_flags(config.subfields("mtp"), flags)
    mtp = MtpConfig(layer, spec.vocab_size, spec.num_layers, **flags)
    joint = has_joint_queries(layer, tensors, contents.folder)
    return HeadPlan(
        "mtp", dialect, mtp, TABLE, tensors, flags | {"modules": count}, unused=(COPIES,),
        arrays={} if row.own_norm else _shared_norms(spec, count), assumed=row.open,
        stored=_stored(row, layer, tensors, joint=joint),
    )  # fmt: skip


def _shared_norms(spec: TargetSpec, count: int) -> dict[str, np.ndarray]:
    """Return the final norm of the target as that of each of `count` modules."""
    norm = np.asarray(spec.target.params["norm"]["weight"])
    return {f"{'' if count == 1 else f'modules.{number}.'}norm.weight": norm for number in range(count)}


def _renamed(contents: Contents, row: MtpDialect) -> Tensors:
    """Return the tensors by the names of the table, without copies of the target's."""
    firsts = [int(match[1]) for name in contents.tensors if (match := re.match(row.marker, name)) and match.groups()]
    first = min(firsts, default=0)
    tensors = Tensors(lambda name: mtp_dialects.name_in_files(row, name, first))
    for name, tensor in contents.tensors.items():
        new = name if re.match(COPIES, name) else mtp_dialects.rename(row, name, first)
        if new in tensors:
            raise UsageError(
                f"{contents.folder} has {quote(tensors.file_names[new])} and {quote(name)}, which are one tensor; "
                "remove one"
            )
        tensors[new], tensors.file_names[new] = tensor, name
    return tensors


def _layer_config(fields: ConfigFields, tensors: Tensors, row: MtpDialect, spec: TargetSpec) -> LlamaConfig:
    """Return the shapes of the layer by the fields of config.json; those of latent attention are the target's."""
    target = spec.target.model.config
    if row is not OWN and "modules.0.layers.0.self_attn.kv_a_proj_with_mqa.weight" in tensors:
        return _latent_layer(fields, spec)
    activation = fields.text("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise UsageError(f"{fields.where} has hidden_act {quote(activation)}; a module has {' or '.join(ACTIVATIONS)}")
    fields = rope.with_length(fields)
    width, heads = fields.size("hidden_size", maximum=WIDTH), fields.size("num_attention_heads", maximum=HEADS)
    kv_heads = fields.size("num_key_value_heads", heads, maximum=HEADS)
    head_dim = fields.size("head_dim", width // heads, maximum=HEADS)
    check_heads(fields, HF_HEADS, heads, kv_heads, head_dim)
    part = 1.0 if row is OWN else (target.rotary_dim or target.head_dim) / target.head_dim
    rotary = rope.rotary_from_hf(fields, head_dim, layer_type=rope.FULL, partial=True, part=part)
    return LlamaConfig(
        vocab_size=spec.vocab_size,
        width=width,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=fields.size("intermediate_size", maximum=ROWS),
        activation="gelu" if ACTIVATIONS[activation] == "gelu" else "silu",
        rope_base=rotary.base,
        rope_scaling=rotary.scaling,
        rotary_dim=rotary.rotary_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6, maximum=1.0),
        window=fields.size("sliding_window", None) if row is OWN else None,
        max_positions=rope.max_positions(fields, rotary.scaling) if row is OWN else spec.target.model.max_positions,
        dtype=spec.dtype,
        cache_bits=jax.default_backend() == "cpu",
        name=spec.name,
    )


def _latent_layer(fields: ConfigFields, spec: TargetSpec) -> LlamaConfig:
    """Return the shapes of a layer with latent attention like that of the target.

    Raises: UsageError for a target without latent attention.
    """
    target = spec.target.model.config
    if target.latent is None:
        raise UsageError(
            f"{fields.where} has a module with latent attention, and {spec.name} has none; choose the target it was "
            "trained with"
        )
    shared = {
        name: getattr(target, name)
        for name in (
            "width", "num_heads", "num_kv_heads", "head_dim", "rotary_dim", "latent", "mlp_width", "rope_base",
            "rope_scaling", "norm_eps", "max_positions",
        )
    }  # fmt: skip
    return LlamaConfig(
        vocab_size=spec.vocab_size, num_layers=1, dtype=spec.dtype, cache_bits=jax.default_backend() == "cpu",
        name=spec.name, **shared,
    )  # fmt: skip


def _as_stored(layer: LlamaConfig, tensors: Tensors, folder: Path, spec: TargetSpec) -> LlamaConfig:
    """Return the shapes with what the tensors show: the width of the MLP or experts, biases, norms and gates.

    Raises: UsageError for a module with experts whose target has none, because its own sizes are then unknown.
    """
    first = "modules.0.layers.0"
    experts = spec.target.model.config.experts if f"{first}.mlp.gate.weight" in tensors else None
    if experts is None:
        layer = dataclasses.replace(layer, mlp_width=tensors.shape(f"{first}.mlp.gate_proj.weight", folder)[0])
    return dataclasses.replace(
        layer,
        experts=None if experts is None else experts._replace(dense_layers=()),
        qkv_bias=f"{first}.self_attn.q_proj.bias" in tensors,
        qk_norm=f"{first}.self_attn.q_norm.weight" in tensors,
        attention_gate=f"{first}.self_attn.output_gate.weight" in tensors or has_joint_queries(layer, tensors, folder),
    )


def has_joint_queries(layer: LlamaConfig, tensors: Tensors, folder: Path) -> bool:
    """Return True if the matrix of queries has rows for their output gates too."""
    if layer.latent is not None:
        return False
    return (
        tensors.shape("modules.0.layers.0.self_attn.q_proj.weight", folder)[0] == 2 * layer.num_heads * layer.head_dim
    )


def _own_flags(stored: ConfigFields, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the flags of a module that specjax wrote. Raises: UsageError for unknown words."""
    words = {"hidden": ("normed", "raw"), "chained": ("normed", "raw", "target")}
    flags = {
        name: stored.text(name, value) if name in words else stored.flag(name, value)
        for name, value in defaults.items()
    }
    for name, allowed in words.items():
        if flags[name] not in allowed:
            raise UsageError(f"{stored.where} has mtp.{name} {quote(flags[name])}; it must be {' or '.join(allowed)}")
    return flags


def _stored(row: MtpDialect, layer: LlamaConfig, tensors: Tensors, *, joint: bool) -> Callable[[str], StoredTensor]:
    """Return the form of each tensor of the table in the files. joint: queries and output gates are one matrix."""
    width = 0 if layer.experts is None else layer.experts.width
    latent = {} if layer.latent is None else attention_forms(layer.latent, layer.num_heads)
    heads, size = {"q_proj": layer.num_heads, "k_proj": layer.num_kv_heads}, layer.head_dim

    def form(name: str) -> StoredTensor:
        part = name.split(".")[-2]
        is_norm = part.endswith("norm")
        module, _, tail = name.rpartition(".self_attn.")
        if tail.removesuffix(".weight").removesuffix("_proj") in latent:
            stored = latent[tail.removesuffix(".weight").removesuffix("_proj")]
            return stored._replace(name=f"{module}.self_attn.{stored.name}")
        experts, _, matrix = name.rpartition("#.")
        if experts and experts + "down_proj" in tensors:  # all experts are in two tensors
            if matrix.startswith("down"):
                return StoredTensor(experts + "down_proj", stacked=True)
            first = 0 if matrix.startswith("gate") else width
            return StoredTensor(experts + "gate_up_proj", first=first, rows=2 * width, stacked=True)
        if joint and part in ("q_proj", "output_gate"):
            order = head_rows(layer.num_heads, size, 2 * size, size if part == "output_gate" else 0)
            joined = name.replace("output_gate", "q_proj")
            return StoredTensor(joined, rows=2 * layer.num_heads * size, order=order)
        return StoredTensor(
            name,
            add=row.norm_offset if is_norm else 0.0,
            heads=heads.get(part, 0) if row.interleaved else 0,
        )

    return form


def variants(head: DraftHead, num_layers: int) -> list[HeadVariant]:
    """Return other interpretations of the same tensors, by the error that they would fix."""
    config = head.head.config
    order = "the embedding" if config.hidden_first else "the hidden state"
    hidden = "raw" if config.hidden == "normed" else "normed"
    chained = "raw" if config.chained == "normed" else "normed"
    return [
        change_config(head, {"chained": chained}, f"a drafted token should have the {chained} output"),
        change_config(head, {"hidden": hidden}, f"it reads the {hidden} hidden state of the target"),
        change_config(head, {"hidden_first": not config.hidden_first}, f"{order} comes first in its projection"),
    ]


def describe(config: MtpConfig, layout: str, info: SaveInfo) -> dict[str, Any]:
    """Return config.json."""
    act = next(name for name, activation in ACTIVATIONS.items() if activation == config.layer.activation)
    return {
        **describe_layers(config.layer), "architectures": ["MtpModule"], "vocab_size": config.vocab_size,
        "hidden_act": act, "num_nextn_predict_layers": config.layer.num_layers,
        "mtp": {name: getattr(config, name) for name in FLAGS},
    }  # fmt: skip


FORMAT = HeadFormat(
    kinds=("mtp",),
    table=TABLE,
    dialect_of=dialect_of,
    plan=plan,
    layouts={"specjax": ()},
    describe=describe,
    variants=variants,
    neutral=shown(
        "attention_bias",
        "layer_types",
        "num_hidden_layers",
        "num_nextn_predict_layers",
        "use_sliding_window",
        "torch_dtype",
    ),
)
