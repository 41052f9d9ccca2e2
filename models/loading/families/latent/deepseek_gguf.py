"""DeepSeek-V2 and V3 in GGUF files: fields and tensor names of llama.cpp's architecture "deepseek2".

Sources: the tables of the package gguf 0.19, and what llama.cpp's converter writes. No file of a published model was
read. Files with corrections of the choice of experts are V3, the others V2. Present converters split the matrix that
expands short vectors into keys, transposed for each head, and values. Earlier ones keep it whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

from specjax.errors import UsageError
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.hybrid.config import HybridConfig
from specjax.models.latent.sizes import LatentSizes
from specjax.models.loading.families import mixtures_gguf, rope
from specjax.models.loading.families.config_fields import HEADS, ROWS, WIDTH, ConfigFields
from specjax.models.loading.families.hybrid import common
from specjax.models.loading.families.latent import deepseek
from specjax.models.loading.tensors.assembly import StoredTensor

HF_TYPES: tuple[str, ...] = ()
MODEL_TYPES: tuple[str, ...] = ()
GGUF_TYPES = ("deepseek2",)

NAMES = {
    "q_down": "attn_q_a", "q_down_norm": "attn_q_a_norm", "latent": "attn_kv_a_mqa", "latent_norm": "attn_kv_a_norm",
    "k_up": "attn_kv_b", "v_up": "attn_kv_b",
}  # fmt: skip
"""Tensors of attention by module, in files of earlier converters."""

LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
GROUPS = "expert_group_count"
NUM_IN_GROUPS = 160, 256
"""Numbers of experts of the published models with groups: DeepSeek-V2 and V3. Earlier converters left groups out."""


class PublishedSizes(NamedTuple):
    """Fields of a GGUF file that identify a published model."""

    expert_count: int
    expert_used_count: int
    expert_shared_count: int
    expert_feed_forward_length: int
    leading_dense_block_count: int
    block_count: int
    embedding_length: int


PUBLISHED_GROUPS: Mapping[PublishedSizes, tuple[int, int]] = MappingProxyType(
    {
        PublishedSizes(160, 6, 2, 1536, 1, 60, 5120): (8, 3),  # DeepSeek-V2, V2.5, Coder-V2
        PublishedSizes(256, 8, 1, 2048, 3, 61, 7168): (8, 4),  # DeepSeek-V3, R1, V3.1
    }
)
"""The groups of a model, and those that a row may choose from, by its sizes. Files of earlier converters lack them."""

_LAYER = "layers.*.attention."


def stored_gguf(config: HybridConfig, arch: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a GGUF file. Rotated numbers are neighbours, as in files of transformers."""
    sizes, heads = config.latent, config.num_heads
    assert sizes is not None
    stored = {path: StoredTensor(row.gguf) for path, row in common.by_path(common.WEIGHTS).items()}
    return {
        **stored,
        **mixtures_gguf.stored_gguf(),
        **_whole_attention(config),
        _LAYER + "k_up.weight": StoredTensor("blk.*.attn_k_b.weight", of_heads=heads, transposed=True),
        _LAYER + "v_up.weight": StoredTensor("blk.*.attn_v_b.weight", of_heads=heads),
    }


def earlier_gguf(config: HybridConfig, names: Collection[str]) -> dict[str, StoredTensor]:
    """Map the paths that differ in files of earlier converters, which have one matrix for keys and values."""
    return {} if any(name.endswith(".attn_k_b.weight") for name in names) else _whole_attention(config)


def _whole_attention(config: HybridConfig) -> dict[str, StoredTensor]:
    sizes = config.latent
    assert sizes is not None
    names = NAMES | {"q": "attn_q" if sizes.query_rank is None else "attn_q_b"}
    forms = deepseek.attention_forms(sizes, config.num_heads)
    return {f"{_LAYER}{part}.weight": form._replace(name=f"blk.*.{names[part]}.weight") for part, form in forms.items()}


def config_from_gguf(meta: ConfigFields, shapes: dict[str, tuple[int, ...]], factors, **options) -> HybridConfig:
    """Build a config from the metadata of a file of one of GGUF_TYPES.

    Args:
      shapes: shapes of the file's tensors.
      factors: its tensors of rope.GGUF_DIVISORS, which must be empty.

    Raises: UsageError for a file without experts, or for settings that specjax does not support.
    """
    if factors:
        raise UsageError(f"{meta.where} has a {min(factors)}, which specjax does not support for this architecture")
    experts = _experts(meta, shapes)
    heads, rotary_dim = (
        meta.size(name, maximum=HEADS) for name in ("attention.head_count", "rope.dimension_count")
    )  # fmt: skip
    base, scaling = rope.rotary_from_gguf(meta, whole_ends=True)
    if scaling is not None and scaling.kind == "yarn":
        scaling = scaling._replace(amplitude=1.0)  # mscale and mscale_all_dim are equal in all published models
    latent = _latent(meta, rotary_dim, has_yarn=scaling is not None and scaling.kind == "yarn")
    meta.skip("attention.head_count_kv", "attention.value_length")  # that of the cache, 1, or of the heads
    sizes = common.gguf_sizes_of_model(meta, shapes)
    return HybridConfig(
        **sizes | {"max_positions": rope.longest_text(sizes["max_positions"], scaling)},
        num_heads=heads,
        num_kv_heads=1,
        head_dim=latent.cached,
        mlp_width=meta.size("feed_forward_length", maximum=ROWS),
        kinds=deepseek.kinds_of_layers(experts, sizes["num_layers"]),
        latent=latent,
        experts=experts,
        rope_base=base,
        rope_scaling=scaling,
        rotary_dim=rotary_dim,
        model_type="deepseek_v3" if experts.correction else "deepseek_v2",
        **options,
    )


def _experts(meta: ConfigFields, shapes: Collection[str]) -> MixtureSizes:
    """Return the sizes of the experts.

    Raises: UsageError for a file without experts, for normalised softmax scores, or for a file that lacks the groups.
    """
    experts = mixtures_gguf.sizes_from_gguf("deepseek2", meta, shapes)
    if experts is None:
        raise UsageError(f"{meta.where} has no experts, and specjax reads files of deepseek2 only with them")
    if experts.routing.normalized and not experts.correction:
        raise UsageError(
            f"{meta.where} has {meta.prefix}expert_weights_norm and softmax scores, which no supported model of this "
            "architecture has; use its safetensors"
        )
    if experts.num_experts not in NUM_IN_GROUPS or meta.has(GROUPS):
        return experts
    sizes = PublishedSizes(*(meta.size(name, 0, minimum=0) for name in PublishedSizes._fields))
    if sizes not in PUBLISHED_GROUPS:
        raise UsageError(
            f"{meta.where} has {experts.num_experts} experts and lacks {meta.prefix}{GROUPS}, so their groups are "
            "unknown; convert the model again with a present llama.cpp"
        )
    groups, best = PUBLISHED_GROUPS[sizes]
    return experts._replace(routing=experts.routing._replace(num_groups=groups, num_chosen_groups=best))


def _latent(meta: ConfigFields, rotary_dim: int, *, has_yarn: bool) -> LatentSizes:
    """Return the sizes of attention.

    Args:
      has_yarn: True if the file has YaRN.

    Raises: UsageError for sizes that contradict each other, or for scores whose factor is unknown.
    """
    suffix = "_mla" if meta.has("attention.key_length_mla") else ""  # earlier files have no sizes of the cache
    key_dim, value_dim = (meta.size(f"attention.{part}_length{suffix}", maximum=HEADS) for part in ("key", "value"))
    meta.skip("attention.key_length")
    if rotary_dim % 2 or rotary_dim >= key_dim:
        raise UsageError(
            f"{meta.where} has {meta.prefix}rope.dimension_count {rotary_dim}, which must be even and below {key_dim}, "
            "the size of a key"
        )
    if has_yarn and not meta.has(LOG_MULTIPLIER):
        raise UsageError(
            f"{meta.where} has YaRN and lacks {meta.prefix}{LOG_MULTIPLIER}, so the factor on its scores is unknown; "
            "convert the model again with a present llama.cpp"
        )
    if meta.has("attention.temperature_scale"):
        raise UsageError(f"{meta.where} has {meta.prefix}attention.temperature_scale, which specjax does not support")
    return LatentSizes(
        meta.size("attention.kv_lora_rank", maximum=WIDTH),
        rotary_dim,
        key_dim - rotary_dim,
        value_dim,
        meta.size("attention.q_lora_rank", None, maximum=WIDTH),
        10.0 * meta.number(LOG_MULTIPLIER, 0.0, minimum=0.0),  # the file has a tenth of `mscale_all_dim`
    )
