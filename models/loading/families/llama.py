"""Architectures of the Llama family, one row each: tensor names, and configurations in both formats."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.decoder import DecoderConfig
from specjax.models.llama import LlamaConfig
from specjax.models.loading.families import gpt_oss, mixtures, mixtures_gguf, rope
from specjax.models.loading.families.config_fields import HEADS, LAYERS, ROWS, WIDTH, ConfigFields, check_heads
from specjax.models.loading.families.deepseek import llada2, routing
from specjax.models.loading.families.rope import FULL, SLIDING
from specjax.models.loading.tensors.assembly import StoredTensor, WeightNames

_ALL_GLOBAL = lambda hf, layers: (True,) * layers
_ALL_WINDOWED = lambda hf, layers: (False,) * layers


class LlamaDefaults(NamedTuple):
    """Properties of an architecture that its config omits, or may omit."""

    shape: Mapping[str, Any] = MappingProxyType({})  # fields of LlamaConfig
    fields: Mapping[str, Any] = MappingProxyType({})  # what config.json leaves out, as in the class of transformers
    biases: tuple[str, ...] = ()  # fields that add biases, which its class reads
    layers: Callable[[ConfigFields, int], tuple[bool, ...]] = _ALL_GLOBAL  # True: global
    rope_base: float = 10_000.0
    stretches_all: bool = True  # RoPE scaling applies to all layers, not only to global ones
    partial: bool = False  # a part of each head may be rotated
    joined: bool = False  # q, k and v are one matrix, and so are gate and up
    skipped: tuple[str, ...] = ()  # fields that its class does not read
    flags: Mapping[str, tuple[str, ...]] = MappingProxyType({})  # flags of config.json, and fields of LlamaConfig
    mixture: mixtures.MixtureForm | None = None  # layers have experts


_POST_NORM = {"norms": "after", "qk_norm": True, "qk_norm_scope": "projection"}


def qwen_global_layers(hf: ConfigFields, layers: int) -> tuple[bool, ...]:
    """Return the global layers of Qwen: with `use_sliding_window`, layers from `max_window_layers` on are windowed."""
    first, is_windowed = hf.size("max_window_layers", 28, minimum=0), hf.flag("use_sliding_window")
    return tuple(i < first or not is_windowed for i in range(layers))


_LLAMA_FIELDS = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048,
}  # fmt: skip
_MISTRAL_FIELDS = _LLAMA_FIELDS | {
    "intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096,
}  # fmt: skip
_QWEN_FIELDS = _LLAMA_FIELDS | {
    "vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32, "max_position_embeddings": 32_768,
    "sliding_window": 4096,
}  # fmt: skip
_PHI_FIELDS = _LLAMA_FIELDS | {
    "vocab_size": 32_064, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
}  # fmt: skip
_OLMO_FIELDS = _LLAMA_FIELDS | {"vocab_size": 50_304, "rms_norm_eps": 1e-5}

ROWS_OF_HF = {
    "llama": LlamaDefaults(fields=_LLAMA_FIELDS, biases=("attention_bias", "mlp_bias")),
    "mistral": LlamaDefaults(fields=_MISTRAL_FIELDS, layers=_ALL_WINDOWED),
    "ministral": LlamaDefaults(fields=_MISTRAL_FIELDS, layers=_ALL_WINDOWED),
    "qwen2": LlamaDefaults({"qkv_bias": True}, _QWEN_FIELDS, layers=qwen_global_layers),
    "mimo": LlamaDefaults(  # MiMo-7B
        {"qkv_bias": True}, _QWEN_FIELDS, layers=qwen_global_layers, skipped=("attention_bias",)
    ),
    "qwen3": LlamaDefaults(
        {"qk_norm": True}, _QWEN_FIELDS | {"head_dim": 128}, ("attention_bias",), layers=qwen_global_layers
    ),
    "phi3": LlamaDefaults(fields=_PHI_FIELDS, layers=_ALL_WINDOWED, partial=True, joined=True),  # and Phi-3.5, Phi-4
    "olmo2": LlamaDefaults(_POST_NORM, _OLMO_FIELDS, ("attention_bias",)),
    "olmo3": LlamaDefaults(
        _POST_NORM, _OLMO_FIELDS | {"sliding_window": 4096}, ("attention_bias",),
        layers=lambda hf, layers: every_nth_layer(4, layers), rope_base=500_000.0, stretches_all=False,
    ),
    "qwen3_moe": LlamaDefaults(
        {"qk_norm": True}, _QWEN_FIELDS | {
            "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4,
        }, ("attention_bias",),
        layers=lambda hf, layers: (not hf.flag("use_sliding_window"),) * layers, skipped=("max_window_layers",),
        mixture=mixtures.form("qwen3_moe"),
    ),
    "mixtral": LlamaDefaults(
        fields=_MISTRAL_FIELDS | {"sliding_window": None, "rms_norm_eps": 1e-5, "num_local_experts": 8},
        layers=_ALL_WINDOWED, rope_base=1e6, mixture=mixtures.form("mixtral"),
    ),
    "olmoe": LlamaDefaults(
        {"qk_norm": True, "qk_norm_scope": "projection"}, _OLMO_FIELDS | {
            "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
            "max_position_embeddings": 4096,
        }, ("attention_bias",), mixture=mixtures.form("olmoe"),
    ),
    "gpt_oss": LlamaDefaults(
        {"sinks": True}, gpt_oss.FIELDS, layers=lambda hf, layers: every_nth_layer(2, layers), rope_base=150_000.0,
        skipped=gpt_oss.SKIPPED, flags={"attention_bias": ("qkv_bias", "out_bias")}, mixture=gpt_oss.FORM,
    ),
    "glm4_moe": LlamaDefaults(
        fields=routing.FIELDS_OF_GLM, partial=True, mixture=routing.FORM,
        flags={"attention_bias": ("qkv_bias",), "use_qk_norm": ("qk_norm",)},
    ),
    "llada2_moe": LlamaDefaults(
        fields=llada2.FIELDS, partial=True, biases=("use_qkv_bias", "use_bias"), skipped=llada2.SKIPPED,
        flags={"use_qk_norm": ("qk_norm",)}, mixture=llada2.FORM,
    ),
}  # fmt: skip
"""Defaults by `model_type`."""

ROWS_OF_GGUF = {"llama": LlamaDefaults(), "olmo2": ROWS_OF_HF["olmo3"]} | {
    arch: ROWS_OF_HF[kind]
    for arch, kind in (
        *((kind, kind) for kind in ("qwen2", "qwen3", "phi3", "olmoe")),
        ("qwen3moe", "qwen3_moe"), ("gpt-oss", "gpt_oss"), ("glm4moe", "glm4_moe"),
    )
}  # fmt: skip
"""Defaults by `general.architecture`. "olmo2" is also OLMo 3, and "llama" also Mistral and Mixtral."""

GGUF_PERIODS: Mapping[str, int] = MappingProxyType({"olmo2": 4, "gpt-oss": 2})
"""Architectures of GGUF files in which every n-th layer has full attention, if the files have a window."""

GGUF_FLAGS: Mapping[str, str] = MappingProxyType(
    {"attention_bias": "blk.0.attn_q.bias", "use_qk_norm": "blk.0.attn_q_norm.weight"}
)
"""Tensors that show the flags of config.json, which GGUF files do not state."""

HF_TYPES = (*ROWS_OF_HF, "mistral3")  # the last is multimodal; only its text part is loaded
GGUF_TYPES = tuple(ROWS_OF_GGUF)

HF_HEADS = "num_attention_heads", "num_key_value_heads", "head_dim"
GGUF_HEADS = "attention.head_count", "attention.head_count_kv", "attention.key_length"

WEIGHTS = (
    WeightNames("embed.weight", "model.embed_tokens.weight", "token_embd.weight"),
    WeightNames("norm.weight", "model.norm.weight", "output_norm.weight"),
    WeightNames("head.weight", "lm_head.weight", "output.weight"),
    WeightNames("layers.*.attention_norm.weight", "model.layers.*.input_layernorm.weight", "blk.*.attn_norm.weight"),
    WeightNames("layers.*.attention.q.weight", "model.layers.*.self_attn.q_proj.weight", "blk.*.attn_q.weight"),
    WeightNames("layers.*.attention.k.weight", "model.layers.*.self_attn.k_proj.weight", "blk.*.attn_k.weight"),
    WeightNames("layers.*.attention.v.weight", "model.layers.*.self_attn.v_proj.weight", "blk.*.attn_v.weight"),
    WeightNames("layers.*.attention.o.weight", "model.layers.*.self_attn.o_proj.weight", "blk.*.attn_output.weight"),
    WeightNames("layers.*.attention.q.bias", "model.layers.*.self_attn.q_proj.bias", "blk.*.attn_q.bias"),
    WeightNames("layers.*.attention.k.bias", "model.layers.*.self_attn.k_proj.bias", "blk.*.attn_k.bias"),
    WeightNames("layers.*.attention.v.bias", "model.layers.*.self_attn.v_proj.bias", "blk.*.attn_v.bias"),
    WeightNames(
        "layers.*.attention.q_norm.weight", "model.layers.*.self_attn.q_norm.weight", "blk.*.attn_q_norm.weight"
    ),
    WeightNames(
        "layers.*.attention.k_norm.weight", "model.layers.*.self_attn.k_norm.weight", "blk.*.attn_k_norm.weight"
    ),
    WeightNames("layers.*.mlp_norm.weight", "model.layers.*.post_attention_layernorm.weight", "blk.*.ffn_norm.weight"),
    WeightNames("layers.*.mlp.gate.weight", "model.layers.*.mlp.gate_proj.weight", "blk.*.ffn_gate.weight"),
    WeightNames("layers.*.mlp.up.weight", "model.layers.*.mlp.up_proj.weight", "blk.*.ffn_up.weight"),
    WeightNames("layers.*.mlp.down.weight", "model.layers.*.mlp.down_proj.weight", "blk.*.ffn_down.weight"),
)


POST_NORMS = (
    WeightNames(
        "layers.*.attention_post_norm.weight",
        "model.layers.*.post_attention_layernorm.weight",
        "blk.*.post_attention_norm.weight",
    ),
    WeightNames(
        "layers.*.mlp_post_norm.weight",
        "model.layers.*.post_feedforward_layernorm.weight",
        "blk.*.post_ffw_norm.weight",
    ),
)
"""Norms after the sublayers, of families that have them."""


def stored_hf(config: LlamaConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint with this `model_type`."""
    stored = {w.path: StoredTensor(w.hf) for w in (*WEIGHTS, *POST_NORMS)}
    if kind in ROWS_OF_HF and ROWS_OF_HF[kind].joined:
        layer = "model.layers.*."
        stored |= joined_projections(config, f"{layer}self_attn.qkv_proj.weight", f"{layer}mlp.gate_up_proj.weight")
    form = None if kind not in ROWS_OF_HF else ROWS_OF_HF[kind].mixture
    return stored if form is None or config.experts is None else stored | form.stored(config)


def variant_hf(config: LlamaConfig, names: Collection[str]) -> dict[str, StoredTensor]:
    """Map the paths that differ in files with other tensors than `stored_hf` has."""
    return gpt_oss.variant_hf(config.experts, names) if config.sinks and config.experts is not None else {}


def separate_hf(config: LlamaConfig) -> dict[str, StoredTensor]:
    """Map the parameters of experts to separate tensors, for a family whose files stack them."""
    assert config.sinks, "only files of gpt-oss stack experts"
    return gpt_oss.separate_hf()


def joined_projections(config: LlamaConfig, attention: str, mlp: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of files with one matrix for q, k and v, and one for gate and up."""
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = {
        attention: {"attention.q": heads, "attention.k": kv, "attention.v": kv},
        mlp: {"mlp.gate": config.mlp_width, "mlp.up": config.mlp_width},
    }
    stored = {}
    for name, rows in parts.items():
        firsts = itertools.accumulate(rows.values(), initial=0)
        for part, first in zip(rows, firsts, strict=False):
            stored[f"layers.*.{part}.weight"] = StoredTensor(name, first=first, rows=sum(rows.values()))
    return stored


def stored_gguf(config: LlamaConfig, arch: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a GGUF file. "llama" files permute q and k to rotate neighbouring rows."""
    heads = {"q": config.num_heads, "k": config.num_kv_heads} if arch == "llama" else {}
    stored = {w.path: StoredTensor(w.gguf, heads=heads.get(w.path.split(".")[-2], 0)) for w in (*WEIGHTS, *POST_NORMS)}
    stored |= {} if config.experts is None else mixtures_gguf.stored_gguf()
    stored["layers.*.attention.o.bias"] = StoredTensor("blk.*.attn_output.bias")
    stored["layers.*.attention.sinks"] = StoredTensor("blk.*.attn_sinks.weight")
    if arch in ("gpt-oss", "glm4moe"):
        stored["layers.*.mlp_norm.weight"] = StoredTensor("blk.*.post_attention_norm.weight")
    return stored | (
        joined_projections(config, "blk.*.attn_qkv.weight", "blk.*.ffn_up.weight") if arch == "phi3" else {}
    )


def earlier_gguf(config: LlamaConfig, names: Collection[str]) -> dict[str, StoredTensor]:
    """Map the paths that differ in files of earlier converters."""
    return {} if config.experts is None else mixtures_gguf.earlier_gguf(names)


def config_from_hf(hf: ConfigFields, **options) -> LlamaConfig:
    """Build a config from the config.json of one of HF_TYPES.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.
    """
    if hf.text("model_type") == "mistral3":
        hf = text_config(hf, {"model_type": "mistral"})
    kind, where = hf.text("model_type"), hf.where
    if kind not in ROWS_OF_HF:
        raise UsageError(
            f"{where} has the architecture {quote(kind)} in {hf.prefix}model_type, which specjax does not support "
            f"(only {', '.join(ROWS_OF_HF)})"
        )
    row = ROWS_OF_HF[kind]
    hf = rope.with_length(gpt_oss.with_rotary(hf) if kind == "gpt_oss" else hf).with_defaults(row.fields)
    hf.skip(*row.skipped)
    for field in row.biases:
        if hf.flag(field):
            raise UsageError(f"{where} sets {field}, which specjax does not support")
    if hf.text("hidden_act", "silu") != "silu":
        raise UsageError(f"{where} has hidden_act {quote(hf.text('hidden_act'))}; specjax supports silu only")
    if hf.value("clip_qkv") is not None:
        raise UsageError(f"{where} has clip_qkv {quote(hf.value('clip_qkv'))}, which specjax does not support")
    width, heads = hf.size("hidden_size", maximum=WIDTH), hf.size("num_attention_heads", maximum=HEADS)
    kv_heads = hf.size("num_key_value_heads", heads, maximum=HEADS)
    head_dim = hf.size("head_dim", width // heads, maximum=HEADS)
    check_heads(hf, HF_HEADS, heads, kv_heads, head_dim)
    layers = hf.size("num_hidden_layers", maximum=LAYERS)
    window, is_global = _windows(hf, row, layers)
    base, scaling, rotary_dim = rope.rotary_from_hf(
        hf, head_dim, base=row.rope_base, layer_type=FULL, partial=row.partial
    )
    flags: dict[str, Any] = {name: hf.flag(flag) for flag, names in row.flags.items() for name in names}
    local = None if is_global is None or row.stretches_all else rope.local_base_from_hf(hf, head_dim, base)
    return LlamaConfig(
        vocab_size=hf.size("vocab_size", maximum=ROWS),
        width=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=hf.size("intermediate_size", maximum=ROWS),
        experts=None if row.mixture is None else row.mixture.sizes(hf, layers),
        rope_base=base,
        rope_scaling=scaling,
        rotary_dim=rotary_dim,
        norm_eps=hf.number("rms_norm_eps", 1e-6, maximum=1.0),
        tied=hf.flag("tie_word_embeddings"),
        window=window,
        is_global=is_global,
        local_rope_base=local,
        max_positions=rope.max_positions(hf, scaling),
        **row.shape,
        **flags,
        **options,
    )


def text_config(hf: ConfigFields, defaults: Mapping[str, Any]) -> ConfigFields:
    """Return the text fields of a multimodal config. `defaults` are values of fields that it may omit.

    Raises: UsageError if it has no text config.
    """
    fields = hf.subfields("text_config")
    if not fields.values:
        raise UsageError(
            f"{hf.where} lacks the field text_config, so the shape of the model is unknown; download the file again"
        )
    tie_field = {name: hf.value(name) for name in ("tie_word_embeddings",) if hf.has(name)}
    return fields.with_defaults({**defaults, **tie_field})


def _windows(hf: ConfigFields, row: LlamaDefaults, layers: int) -> tuple[int | None, tuple[bool, ...] | None]:
    """Return the window and the global layers.

    The layers are None if every layer is windowed with the same rotary settings.
    """
    default = row.layers(hf, layers)
    is_global = global_layers(hf, layers) or default
    if row.layers is _ALL_GLOBAL and all(is_global):  # a model without windows; a field that names one stays unread
        return None, None
    window = hf.size("sliding_window", None)
    if window is None or all(is_global):
        return None, None
    if row.layers is qwen_global_layers and hf.has("use_sliding_window") and not hf.flag("use_sliding_window"):
        raise UsageError(f"{hf.where} has use_sliding_window false, and layer_types with windows; make them agree")
    return window, is_global if any(is_global) or not row.stretches_all else None


def global_layers(hf: ConfigFields, layers: int) -> tuple[bool, ...]:
    """Return the layers with full attention, from `layer_types`; () if it is absent.

    Raises: UsageError for other kinds of attention.
    """
    types = hf.array("layer_types", str)
    if types and len(types) != layers:
        raise UsageError(f"{hf.where} has {len(types)} layer_types, but num_hidden_layers is {layers}; make them equal")
    unsupported = [kind for kind in types if kind not in (FULL, SLIDING)]
    if unsupported:
        raise UsageError(
            f"{hf.where} has {quote(unsupported[0])} among its layer_types, which specjax does not support "
            f"(only {FULL}, {SLIDING})"
        )
    return tuple(kind == FULL for kind in types)


def every_nth_layer(pattern: int, layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it is global: every n-th one is, with n = `pattern`."""
    return tuple((i + 1) % pattern == 0 for i in range(layers))


def layer_types(c: DecoderConfig) -> list[str]:
    """Return the `layer_types` that `global_layers` reads."""
    is_global = c.is_global or (c.window is None,) * c.num_layers
    return [FULL if full else SLIDING for full in is_global]


def config_to_hf(c: LlamaConfig) -> dict[str, Any]:
    """Return the fields that `config_from_hf` reads."""
    kind, extra = model_type_of(c), rope.rotary_to_hf(c.rope_base, c.rope_scaling)
    row = ROWS_OF_HF[kind]
    if kind == "olmo3":
        local = rope.rotary_to_hf(c.local_rope_base or c.rope_base, None)
        extra = {"rope_parameters": {FULL: rope.to_rope_parameters(extra), SLIDING: rope.to_rope_parameters(local)}}
    if c.rotary_dim is not None:
        extra["partial_rotary_factor"] = c.rotary_dim / c.head_dim
    if c.rope_scaling is not None and c.rope_scaling.kind == "longrope":
        extra["original_max_position_embeddings"] = c.rope_scaling.original_positions
    if kind == "phi3":
        extra["pad_token_id"] = None  # the default 32000 makes transformers refuse smaller vocabularies
    return {
        "architectures": ["".join(map(str.capitalize, kind.split("_"))) + "ForCausalLM"],
        "model_type": kind,
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "intermediate_size": c.mlp_width,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        **extra,
        "sliding_window": c.window,
        **({"use_sliding_window": c.window is not None} if kind in ("qwen2", "qwen3", "qwen3_moe") else {}),
        **({} if row.mixture is None else row.mixture.to_hf(c)),
        "layer_types": layer_types(c),
        "attention_bias": False,
        **{flag: getattr(c, names[0]) for flag, names in row.flags.items()},
        "mlp_bias": False,
        "max_position_embeddings": c.max_positions,
        "tie_word_embeddings": c.tied,
        "torch_dtype": c.dtype,
    }


def model_type_of(c: LlamaConfig) -> str:
    """Return the `model_type` with code that computes the same as this config."""
    if c.experts is not None:
        return mixtures.kind_of(c)
    if c.rotary_dim is not None:  # test first: layers of draft heads may have q/k norms too, which their files show
        return "phi3"
    if c.norms == "after":
        return "olmo2" if c.window is None else "olmo3"
    if c.qk_norm or c.qkv_bias:
        return "qwen3" if c.qk_norm else "qwen2"
    if c.window is not None:
        return "mistral" if c.is_global is None else "ministral"
    return "llama"


def config_from_gguf(meta: ConfigFields, shapes: dict[str, tuple[int, ...]], factors, **options) -> LlamaConfig:
    """Build a config from the metadata of a file of one of GGUF_TYPES.

    Args:
      shapes: shapes of the file's tensors.
      factors: its tensors of rope.GGUF_DIVISORS.
    """
    arch, where = meta.prefix.removesuffix("."), meta.where
    experts = mixtures_gguf.sizes_from_gguf(arch, meta, shapes)
    width, heads = meta.size("embedding_length", maximum=WIDTH), meta.size("attention.head_count", maximum=HEADS)
    kv_heads = meta.size("attention.head_count_kv", heads, maximum=HEADS)
    row, layers = ROWS_OF_GGUF[arch], meta.size("block_count", maximum=LAYERS)
    rotary_dim = meta.size("rope.dimension_count", width // heads, maximum=HEADS)
    head_dim = meta.size("attention.key_length", width // heads if row.partial else rotary_dim, maximum=HEADS)
    check_heads(meta, GGUF_HEADS, heads, kv_heads, head_dim)
    if row.partial and (rotary_dim % 2 or rotary_dim > head_dim):
        raise UsageError(
            f"{where} has rope.dimension_count {rotary_dim}, which must be even and at most {head_dim}, the size of a "
            "head"
        )
    # llama.cpp rounds the ends of YaRN's range for every model. The authors of gpt-oss do not.
    base, scaling = rope.rotary_from_gguf(meta, whole_ends=arch != "gpt-oss")
    scaling = rope.scaling_from_divisors(factors, meta, rotary_dim if row.partial else head_dim, base) or scaling
    minimum_window = 0 if arch == "phi3" else 1  # llama.cpp writes 0 for no window
    window = meta.size("attention.sliding_window", None, minimum=minimum_window) or None
    is_periodic = window is not None and arch in GGUF_PERIODS
    is_global = gguf_global_layers(meta, layers, GGUF_PERIODS[arch]) if is_periodic else None
    flags: dict[str, Any] = {name: GGUF_FLAGS[flag] in shapes for flag, names in row.flags.items() for name in names}
    return LlamaConfig(
        vocab_size=gguf_vocab_size(shapes, where),
        width=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=meta.size("feed_forward_length", maximum=ROWS),
        experts=experts,
        rope_base=base,
        rope_scaling=scaling,
        rotary_dim=rotary_dim if row.partial and rotary_dim < head_dim else None,
        norm_eps=meta.number("attention.layer_norm_rms_epsilon", maximum=1.0),
        tied="output.weight" not in shapes,
        window=window,
        is_global=is_global,
        local_rope_base=None if is_global is None or row.stretches_all else base,
        max_positions=rope.longest_text(meta.size("context_length"), scaling),
        **row.shape,
        **flags,
        **options,
    )


def gguf_global_layers(meta: ConfigFields, layers: int, pattern: int) -> tuple[bool, ...]:
    """Return the layers with full attention. The field is an array of windowed layers, or a period.

    pattern: the period of a file without the field.
    """
    name = "attention.sliding_window_pattern"
    if isinstance(meta.value(name), list):
        return tuple(not windowed for windowed in meta.array(name, int, layers))
    return every_nth_layer(meta.size(name, pattern), layers)


def gguf_vocab_size(shapes: dict[str, tuple[int, ...]], where: str) -> int:
    """Return the number of rows of the embedding. GGUF does not state the size of the vocabulary."""
    shape = shapes.get("token_embd.weight", ())
    if len(shape) != 2 or not 1 <= shape[0] <= ROWS:
        raise UsageError(f"{where} has no token_embd.weight with two dimensions, so the vocabulary size is unknown")
    return shape[0]
