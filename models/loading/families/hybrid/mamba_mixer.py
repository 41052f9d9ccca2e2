"""Mamba-2 mixers in files: tensor names and sizes, for all families that have them.

One matrix has the rows of the gate, of the input of the convolution (x, B and C) and of the time steps, in this order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.hybrid.config import HybridConfig, LayerKind, Mamba2Sizes
from specjax.models.loading.families.config_fields import HEADS, ROWS, WIDTH, ConfigFields
from specjax.models.loading.families.hybrid import common
from specjax.models.loading.tensors.assembly import StoredTensor

MAMBA, FULL = "linear_attention", "full_attention"
ATTENTION_NAMES = {MAMBA: "mamba", "mamba": "mamba", FULL: "attention", "attention": "attention"}
"""Names of the kinds of layers in config.json, new and old."""

UNLIMITED_TEXT = 1 << 20  # positions of a model whose files state none, as in llama.cpp

NO_EFFECT = (
    "chunk_size", "mamba_chunk_size", "use_mamba_kernels", "num_logits_to_keep", "mamba_ssm_cache_dtype",
    "rescale_prenorm_residual", "residual_in_fp32", "time_step_min", "time_step_max", "time_step_floor",
    "time_step_rank", "time_step_scale", "time_step_init_scheme", "z_loss_coefficient", "mamba_dt_min", "mamba_dt_max",
    "mamba_dt_init_floor", "use_mambapy",
)  # fmt: skip
"""Fields about initialisation, training and kernels. The residual stream always has the dtype of the model."""

_RECURRENT = "layers.*.recurrent."


class MixerFields(NamedTuple):
    """Names of the fields of config.json that describe a mixer."""

    heads: str
    head_dim: str
    groups: str
    state: str
    kernel: str
    conv_bias: str
    bias: str
    out_bias: str


FIELDS_OF_HYBRIDS = MixerFields(
    "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_conv_bias",
    "mamba_proj_bias", "mamba_proj_bias",
)  # fmt: skip
"""Names in configs of Bamba, Granite and Falcon-H1."""


def stored_hf(config: HybridConfig, module: str) -> dict[str, StoredTensor]:
    """Map the parameters of mixers to tensors of a Hugging Face checkpoint, with names below `module`."""
    name = lambda part: f"{module}.{part}"
    return {
        **joined_input(config, name("in_proj")),
        _RECURRENT + "convolution.kernel": common.convolution(name("conv1d.weight")),
        _RECURRENT + "convolution.bias": StoredTensor(name("conv1d.bias")),
        _RECURRENT + "decay.rate": common.decay_rate(name("A_log")),
        _RECURRENT + "decay.bias": StoredTensor(name("dt_bias")),
        _RECURRENT + "skip.weight": StoredTensor(name("D")),
        _RECURRENT + "norm.weight": StoredTensor(name("norm.weight")),
        _RECURRENT + "out.weight": StoredTensor(name("out_proj.weight")),
        _RECURRENT + "out.bias": StoredTensor(name("out_proj.bias")),
    }


def stored_gguf(config: HybridConfig) -> dict[str, StoredTensor]:
    """Map the parameters of mixers to tensors of a GGUF file, which has rates of decay and not their logarithms."""
    name = lambda part: f"blk.*.ssm_{part}"
    return {
        **joined_input(config, name("in")),
        _RECURRENT + "convolution.kernel": StoredTensor(name("conv1d.weight")),
        _RECURRENT + "convolution.bias": StoredTensor(name("conv1d.bias")),
        _RECURRENT + "decay.rate": StoredTensor(name("a"), flat=True),
        _RECURRENT + "decay.bias": StoredTensor(name("dt.bias")),
        _RECURRENT + "skip.weight": StoredTensor(name("d"), flat=True),
        _RECURRENT + "norm.weight": StoredTensor(name("norm.weight"), flat=True),
        _RECURRENT + "out.weight": StoredTensor(name("out.weight")),
        _RECURRENT + "out.bias": StoredTensor(name("out.bias")),
    }


def joined_input(config: HybridConfig, name: str) -> dict[str, StoredTensor]:
    """Map the projections of the input, with their biases, to the matrix `name` that joins them."""
    sizes = config.mamba2
    if sizes is None:
        return {}
    rows = {"output_gate": sizes.inner, "convolved": sizes.channels, "time_step": sizes.num_heads}
    return {
        f"{_RECURRENT}{part}.{kind}": stored
        for kind in ("weight", "bias")
        for part, stored in common.joined_rows(f"{name}.{kind}", rows).items()
    }


def sizes_from_hf(hf: ConfigFields, names: MixerFields, inner: int | None = None, **changes: Any) -> Mamba2Sizes:
    """Return the sizes of the mixers.

    Args:
      inner: the width that the heads have together; None: any.
      changes: more fields of `Mamba2Sizes`.

    Raises: UsageError for sizes that do not fit each other.
    """
    hf.skip(*NO_EFFECT)
    common.check_activation(hf, "mamba_hidden_act" if hf.has("mamba_hidden_act") else "hidden_act")
    heads = hf.size(names.heads, maximum=HEADS)
    is_derived = hf.value(names.head_dim) in (None, "auto") and inner is not None
    head_dim = max(inner // heads, 1) if is_derived and inner else hf.size(names.head_dim, maximum=WIDTH)
    groups = hf.size(names.groups, maximum=HEADS)
    if inner is not None and heads * head_dim != inner:
        raise UsageError(
            f"{hf.where} has {heads} heads of {head_dim} numbers in {names.heads} and {names.head_dim}, which must "
            f"have {inner} together"
        )
    check_groups(hf.where, names.groups, groups, names.heads, heads)
    return Mamba2Sizes(
        heads, head_dim, groups, hf.size(names.state, maximum=WIDTH), hf.size(names.kernel, minimum=2, maximum=64),
        conv_bias=hf.flag(names.conv_bias, True), bias=hf.flag(names.bias), out_bias=hf.flag(names.out_bias),
        time_step_limit=time_step_limit(hf), **changes,
    )  # fmt: skip


def check_groups(where: str, groups_name: str, groups: int, heads_name: str, heads: int) -> None:
    """Check that groups of B and C serve equal numbers of heads. Raises: UsageError if they do not."""
    if heads % groups:
        raise UsageError(f"{where} has {groups_name} {groups}, which must divide {heads_name}, {heads}")


def time_step_limit(hf: ConfigFields) -> tuple[float, float]:
    """Return the smallest and the largest time step. JSON files have infinity as `Infinity` or as an object.

    Raises: UsageError for other contents.
    """
    value = hf.value("time_step_limit")
    if value is None:
        return 0.0, float("inf")
    plain = [_plain_number(entry) for entry in value] if isinstance(value, list) else []
    numbers = [float(entry) for entry in plain if type(entry) in (int, float)]
    if len(numbers) != 2 or len(plain) != 2 or not 0 <= numbers[0] <= numbers[1]:
        raise UsageError(
            f"{hf.where} has time_step_limit {quote(value)}, which must be two numbers from 0 on, the smaller one first"
        )
    return numbers[0], numbers[1]


def _plain_number(entry: Any) -> Any:
    is_infinity = isinstance(entry, dict) and entry.get("__float__") == "Infinity"
    return float("inf") if is_infinity else entry


def fields_to_hf(sizes: Mamba2Sizes, names: MixerFields) -> dict[str, Any]:
    """Return the fields that `sizes_from_hf` reads."""
    return {
        names.heads: sizes.num_heads,
        names.head_dim: sizes.head_dim,
        names.groups: sizes.num_groups,
        names.state: sizes.state_dim,
        names.kernel: sizes.kernel,
        names.conv_bias: sizes.conv_bias,
        names.bias: sizes.bias,
        names.out_bias: sizes.out_bias,
        "time_step_limit": list(sizes.time_step_limit),
    }


def expansion(hf: ConfigFields, name: str, width: int) -> int:
    """Return the width of a mixer whose config states it as a multiple of the width of the stream."""
    return hf.size(name, maximum=64) * width


def expansion_to_hf(c: HybridConfig) -> int:
    """Return the multiple that `expansion` reads. Raises: UsageError if there is none."""
    assert c.mamba2 is not None
    if c.mamba2.inner % c.width:
        raise UsageError(
            f"{c.name} has mixers of {c.mamba2.inner} numbers, which a config.json of type {c.model_type} cannot "
            f"express; it must be a multiple of {c.width}"
        )
    return c.mamba2.inner // c.width


def gguf_sizes(meta: ConfigFields, shapes: Mapping[str, tuple[int, ...]]) -> Mamba2Sizes:
    """Return the sizes of the mixers of a GGUF file. Its tensors show biases and norms."""
    inner, heads = meta.size("ssm.inner_size", maximum=ROWS), meta.size("ssm.time_step_rank", maximum=HEADS)
    groups = meta.size("ssm.group_count", 1, maximum=HEADS)
    if inner % heads:
        raise UsageError(
            f"{meta.where} has {meta.prefix}ssm.inner_size {inner}, which must be a multiple of "
            f"{meta.prefix}ssm.time_step_rank, {heads}"
        )
    check_groups(meta.where, meta.prefix + "ssm.group_count", groups, meta.prefix + "ssm.time_step_rank", heads)
    has = lambda part: any(name.endswith(f".ssm_{part}") for name in shapes)
    return Mamba2Sizes(
        heads, inner // heads, groups, meta.size("ssm.state_size", maximum=WIDTH),
        meta.size("ssm.conv_kernel", minimum=2, maximum=64), conv_bias=has("conv1d.bias"), bias=has("in.bias"),
        out_bias=has("out.bias"), has_norm=has("norm.weight"),
    )  # fmt: skip


def without_attention() -> dict[str, Any]:
    """Return the fields of a config whose layers do not attend."""
    return {"num_heads": 1, "num_kv_heads": 1, "head_dim": 2}


def kinds_from_names(names: Iterable[str], kinds: Mapping[str, LayerKind]) -> tuple[LayerKind, ...]:
    """Return the kinds of layers by names in ATTENTION_NAMES. `kinds` has "mamba" and "attention"."""
    return tuple(kinds[ATTENTION_NAMES[name]] for name in names)
