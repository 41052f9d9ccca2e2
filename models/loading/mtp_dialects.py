"""Multi-token-prediction modules in the files of their targets: one row for each family's form.

Sources: vLLM's and SGLang's classes of each family, transformers' `MtpModel`, and llama.cpp's converter for GGUF. The
authors' own code counts where these differ: Xiaomi's class in vLLM gives the module of MiMo-7B the states before the
final norm, and so does Baidu's training of Ernie 4.5, which also norms the module's output by the target's final norm.
The names of the tensors tell the families apart. `specjax.models.heads.mtp` has the mathematics.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from specjax.files.untrusted import quote
from specjax.models.loading.families.config_fields import LAYERS, ConfigFields

LAYER, OF_LAYER = r"modules.\1.layers.0.", "layers.0."


class MtpDialect(NamedTuple):
    """The form of one family's modules."""

    name: str
    families: str  # in words
    marker: str  # pattern of a tensor that every module of this form has, and no other; the group is the module
    owned: str  # pattern of all tensors of modules; the group is a module, or a layer
    names: tuple[tuple[str, str], ...]  # renames of tensors to `modules.N.` and enorm, hnorm, eh_proj, norm, layers.0
    field: str = "num_nextn_predict_layers"  # the field of config.json with the number of modules
    numbered_as_layers: bool = False  # modules follow the layers of the target, with their numbers
    hidden_first: bool = False  # the projection reads [hidden; embedding]
    hidden: Literal["normed", "raw"] = "normed"  # the target's hidden state: after or before its final norm
    chained: Literal["normed", "raw", "target"] = "normed"  # see `specjax.models.heads.mtp.Chain`
    own_norm: bool = True  # the norm between the layer and the output layer is its own; False: the target's final norm
    own_head: bool = False  # modules have output layers that differ from the target's
    norm_offset: float = 0.0  # added to the stored weights of norms
    interleaved: bool = False  # neighbouring numbers of a query or key are rotated together
    open: tuple[str, ...] = ()  # settings about which sources differ
    lacking: str | None = None  # parts of its layer that no tensor shows, and that specjax lacks


_SHARED = (
    (r"^model\.layers\.(\d+)\.(enorm|hnorm|eh_proj)\.", r"modules.\1.\2."),
    (r"^model\.layers\.(\d+)\.shared_head\.norm\.", r"modules.\1.norm."),
)
_NUMBERED: dict[str, Any] = {"owned": r"model\.layers\.(\d+)\.", "numbered_as_layers": True}
_LIKE_DEEPSEEK = (
    *_SHARED, (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."), (r"^model\.layers\.(\d+)\.", LAYER),
)  # fmt: skip

DIALECTS = (
    MtpDialect(
        "step", "Step-3.5, Step-3.7", r"model\.layers\.(\d+)\.transformer\.shared_head\.norm\.weight",
        names=(
            (r"\.transformer\.shared_head\.norm\.", ".shared_head.norm."), *_SHARED,
            (r"^model\.layers\.(\d+)\.transformer\.shared_head\.output\.", r"modules.\1.head."),
            (r"^model\.layers\.(\d+)\.", LAYER),
        ),
        hidden="raw", chained="raw", own_head=True, norm_offset=1.0, **_NUMBERED,
    ),
    MtpDialect(
        "deepseek", "DeepSeek-V3, R1, V3.1 and V3.2, GLM-4.5, 4.6, 4.7 and 5",
        r"model\.layers\.(\d+)\.eh_proj\.weight", names=_LIKE_DEEPSEEK, open=("chained", "hidden"),
        **_NUMBERED,
    ),
    MtpDialect(
        "mimo", "MiMo-7B", r"model\.mtp_layers\.(\d+)\.input_proj\.weight", r"model\.mtp_layers\.(\d+)\.",
        names=(
            (r"^model\.mtp_layers\.(\d+)\.token_layernorm\.", r"modules.\1.enorm."),
            (r"^model\.mtp_layers\.(\d+)\.hidden_layernorm\.", r"modules.\1.hnorm."),
            (r"^model\.mtp_layers\.(\d+)\.input_proj\.", r"modules.\1.eh_proj."),
            (r"^model\.mtp_layers\.(\d+)\.final_layernorm\.", r"modules.\1.norm."),
            (r"^model\.mtp_layers\.(\d+)\.", LAYER),
        ),
        hidden_first=True, hidden="raw", chained="raw", open=("chained",),
    ),
    MtpDialect(
        "mimo_v2", "MiMo-V2", r"model\.mtp\.layers\.(\d+)\.pre_mlp_layernorm\.weight", r"model\.mtp\.layers\.(\d+)\.",
        names=(
            (r"^model\.mtp\.layers\.(\d+)\.(enorm|hnorm|eh_proj)\.", r"modules.\1.\2."),
            (r"^model\.mtp\.layers\.(\d+)\.final_layernorm\.", r"modules.\1.norm."),
            (r"\.pre_mlp_layernorm\.", ".post_attention_layernorm."), (r"^model\.mtp\.layers\.(\d+)\.", LAYER),
        ),
        hidden="raw", chained="target", lacking="attention sinks",
    ),
    MtpDialect(
        "longcat", "LongCat-Flash", r"model\.mtp\.layers\.(\d+)\.enorm\.m\.weight", r"model\.mtp\.",
        names=(
            (r"^model\.mtp\.layers\.(\d+)\.(enorm|hnorm)\.m\.", r"modules.\1.\2."),
            (r"^model\.mtp\.layers\.(\d+)\.eh_proj\.", r"modules.\1.eh_proj."),
            (r"^model\.mtp\.norm\.", "modules.0.norm."),
            (r"^model\.mtp\.layers\.(\d+)\.transformer_layer\.", LAYER), (r"^model\.mtp\.layers\.(\d+)\.", LAYER),
        ),
    ),
    MtpDialect(
        "qwen3_5", "Qwen3-Next, Qwen3.5", r"mtp\.fc\.weight", r"mtp\.", field="mtp_num_hidden_layers",
        names=(
            (r"^mtp\.fc\.", "modules.0.eh_proj."), (r"^mtp\.pre_fc_norm_embedding\.", "modules.0.enorm."),
            (r"^mtp\.pre_fc_norm_hidden\.", "modules.0.hnorm."), (r"^mtp\.norm\.", "modules.0.norm."),
            (r"^mtp\.", "modules.0."),
        ),
        norm_offset=1.0,
    ),
    MtpDialect(
        "ernie", "Ernie 4.5", r"model\.mtp_linear_proj\.(\d+)\.weight",
        r"model\.mtp_(?:emb_norm|hidden_norm|linear_proj|block)\.(\d+)\.",
        names=(
            (r"^model\.mtp_emb_norm\.(\d+)\.", r"modules.\1.enorm."),
            (r"^model\.mtp_hidden_norm\.(\d+)\.", r"modules.\1.hnorm."),
            (r"^model\.mtp_linear_proj\.(\d+)\.", r"modules.\1.eh_proj."), (r"^model\.mtp_block\.(\d+)\.", LAYER),
        ),
        hidden="raw", chained="raw", own_norm=False, interleaved=True,
    ),
    MtpDialect(
        "nemotron", "Nemotron-3", r"mtp\.layers\.(\d+)\.eh_proj\.weight", r"mtp\.",
        names=(
            (r"^mtp\.layers\.0\.(enorm|hnorm|eh_proj)\.", r"modules.0.\1."),
            (r"^mtp\.layers\.\d+\.final_layernorm\.", "modules.0.norm."), (r"^mtp\.", "modules.0."),
        ),
    ),
)  # fmt: skip
"""The forms of modules in Hugging Face's files. A marker of an earlier row excludes the later ones."""

GGUF = MtpDialect(
    "gguf", "GGUF files of llama.cpp", r"blk\.(\d+)\.nextn\.eh_proj\.weight", r"blk\.(\d+)\.",
    names=(
        (r"^blk\.(\d+)\.nextn\.(enorm|hnorm|eh_proj)\.", r"modules.\1.\2."),
        (r"^blk\.(\d+)\.nextn\.shared_head_norm\.", r"modules.\1.norm."),
        (r"^blk\.(\d+)\.attn_norm\.", LAYER + "input_layernorm."),
        (r"^blk\.(\d+)\.(?:ffn_norm|post_attention_norm)\.", LAYER + "post_attention_layernorm."),
        (r"^blk\.(\d+)\.attn_([qkv])\.", LAYER + r"self_attn.\2_proj."),
        (r"^blk\.(\d+)\.attn_output\.", LAYER + "self_attn.o_proj."),
        (r"^blk\.(\d+)\.attn_([qk])_norm\.", LAYER + r"self_attn.\2_norm."),
        (r"^blk\.(\d+)\.ffn_(gate|up|down)\.", LAYER + r"mlp.\2_proj."), (r"^blk\.(\d+)\.", LAYER),
    ),
    field="nextn_predict_layers", numbered_as_layers=True,
)  # fmt: skip
"""The form of GGUF files. Their norms have the 1 already, and `block_count` includes the modules."""

OWN = MtpDialect("specjax", "heads of specjax", r"modules\.(\d+)\.eh_proj\.weight", r"modules\.(\d+)\.", names=())
"""The form in which a trained module is written, with its flags in config.json."""

BY_NAME = {dialect.name: dialect for dialect in (*DIALECTS, GGUF, OWN)}

COPIES = r".*(?:embed_tokens|shared_head\.head|shared_head_head|rotary_emb\.inv_freq)(?:\.weight)?$"
"""Tensors of modules that are copies of the target's, or computed."""

KNOWN = (
    r"modules\.\d+\.(?:(?:enorm|hnorm|eh_proj|norm|head)|layers\.0\.(?:(?:input|post_attention)_layernorm|"
    r"self_attn\.(?:[qkvo]_proj|[qk]_norm|output_gate)|mlp\.(?:gate|up|down)_proj))\.weight|"
    r"modules\.\d+\.layers\.0\.self_attn\.[qkv]_proj\.bias|modules\.\d+\.layers\.0\.mlp\.(?:"
    r"(?:experts\.\d+|shared_expert)\.(?:gate|up|down)_proj\.weight|experts\.(?:gate_up|down)_proj|"
    r"(?:gate|shared_expert_gate)\.weight|gate\.e_score_correction_bias)|"
    r"modules\.\d+\.layers\.0\.self_attn\.(?:q_[ab]_proj|q_a_layernorm|kv_a_proj_with_mqa|kv_a_layernorm|kv_b_proj)\.weight"
)
"""Renamed tensors of the parts of a module that specjax has."""

LACKING = {
    r"\.attn_kv_a_mqa\.": "multi-head latent attention (MLA)",
    r"\.indexer\.": "sparse attention with an indexer (DSA)",
    r"\.mlp\.router|\.block_sparse_moe\.|\.ffn_gate_inp|_exps\.": "experts (MoE)",
    r"\.moe\.": "experts (MoE)",
    r"\.g_proj\.": "a gate per attention head",
    r"\.sinks$|attention_sink": "attention sinks",
    r"\.mixer\.": "layers of one sublayer",
    r"^mtp\.embed_tokens\.": "an embedding of its own",
}
"""Parts of layers that specjax lacks, by the tensors that show them."""


@dataclass(frozen=True)
class NativeModule:
    """A multi-token-prediction module in the files of a target."""

    source: str = field(compare=False)  # the folder or file of the target
    dialect: str = ""  # a name of BY_NAME
    count: int = 1  # number of modules
    lacking: str | None = None  # the parts of its layers that specjax lacks, in words; None: it can draft


def find_dialect(names: Collection[str], num_layers: int, rows: Iterable[MtpDialect] = DIALECTS) -> MtpDialect | None:
    """Return the form of the modules among the tensors of a target with this number of layers, or None."""
    for dialect in rows:
        if any(_owns(dialect, dialect.marker + "$", name, num_layers) for name in names):
            return dialect
    return None


def owner(dialect: MtpDialect, num_layers: int) -> Callable[[str], bool]:
    """Return a function that is true for the names of the tensors of modules."""
    return lambda name: _owns(dialect, dialect.owned, name, num_layers)


def _owns(dialect: MtpDialect, pattern: str, name: str, num_layers: int) -> bool:
    match = re.match(pattern, name)
    return match is not None and (not dialect.numbered_as_layers or int(match[1]) >= num_layers)


def rename(dialect: MtpDialect, name: str, first: int) -> str:
    """Return the name `modules.N. ...` of a module's tensor; modules count from `first`."""
    for pattern, replacement in dialect.names:
        name = re.sub(pattern, replacement, name)
    return re.sub(r"^modules\.(\d+)\.", lambda match: f"modules.{int(match[1]) - first}.", name)


def name_in_files(dialect: MtpDialect, name: str, first: int) -> str:
    """Return the name that `rename` maps to `name`, for errors about missing tensors; `name` if there is none."""
    if not name.startswith("modules."):
        return name
    number = int(name.split(".")[1]) + first
    tails = [name[match.end() :] for match in re.finditer(r"\.", name)]
    prefixes = (prefix for pattern, _ in dialect.names for prefix in _examples(pattern, number))
    candidates = (prefix + tail for prefix in prefixes for tail in tails)
    return next((candidate for candidate in candidates if rename(dialect, candidate, first) == name), name)


def _examples(pattern: str, number: int) -> Iterator[str]:
    """Yield texts that a pattern of `MtpDialect.names` matches, with the number of a module or layer."""
    plain = lambda text: text.replace(r"\d+", str(number)).replace("\\", "")
    parts = re.split(r"\((?:\?:)?([^()]*)\)", pattern.removeprefix("^"))
    groups = [list(part[1:-1]) if part.startswith("[") else plain(part).split("|") for part in parts]
    yield from map("".join, itertools.product(*groups))


def describe(source: str, dialect: MtpDialect, names: Iterable[str]) -> NativeModule:
    """Return the module with these tensors."""
    names = sorted(names)
    markers = {match[0] for name in names if (match := re.match(dialect.marker, name))}
    parts = [text for pattern, text in LACKING.items() if any(re.search(pattern, name) for name in names)]
    parts += [dialect.lacking] if dialect.lacking else []
    unknown = [
        name for name in names if not re.match(COPIES, name) and not re.fullmatch(KNOWN, rename(dialect, name, 0))
    ]
    parts += [f"the tensor {quote(unknown[0])}"] if unknown and not parts else []
    return NativeModule(source, dialect.name, len(markers), " and ".join(dict.fromkeys(parts)) or None)


def num_layers_of(fields: ConfigFields) -> int:
    """Return the number of layers of the target of a config.json, without its modules."""
    nested = fields.subfields("text_config") if fields.has("text_config") else fields
    return nested.size("num_hidden_layers", LAYERS, maximum=LAYERS)
