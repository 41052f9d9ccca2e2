"""The formats of IBM's MLP speculator, and of the older one of vllm speculators with different norms."""

from __future__ import annotations

from typing import Any, NamedTuple

from specjax.errors import UsageError
from specjax.models.heads.mlp_speculator import MlpSpeculatorConfig
from specjax.models.loading.families.config_fields import HEADS, ROWS, WIDTH
from specjax.models.loading.heads.checkpoint_contents import Contents, HeadPlan, Rules, count_indices, rename_tensors
from specjax.models.loading.heads.describing import describe_verifier
from specjax.models.loading.heads.format import HeadFormat, SaveInfo, shown
from specjax.models.loading.heads.target_fit import TargetSpec, check_equal

TABLE = {
    "embeddings.*.weight": "emb.*.weight",
    "projections.*.weight": "proj.*.weight",
    "norms.*.weight": "ln.*.weight",
    "norms.*.bias": "ln.*.bias",
    "heads.*.weight": "head.*.weight",
}
RULES: Rules = (
    (r"^speculator\.", ""),
    (r"^emb_layers\.", "emb."),  # the last three: speculators
    (r"^proj_layers\.", "proj."),
    (r"^layernorms\.", "ln."),
)
REPEATED = (
    r"((speculator\.)?(emb|ln|head)|emb_layers|layernorms)\.[1-9]", r"((speculator\.)?proj|proj_layers)\.([2-9]|\d\d)",
)  # fmt: skip
"""Copies of tied tensors that files contain."""


def dialect_of(contents: Contents) -> str | None:
    """Return the dialect of the writer, or None for other files."""
    if contents.config.has("speculators_model_type"):
        return "speculators" if contents.config.text("speculators_model_type") == "mlp" else None
    names = {name.removeprefix("speculator.") for name in contents.tensors}
    return "ibm" if {"emb.0.weight", "proj.0.weight", "head.0.weight"} <= names else None


class FieldNames(NamedTuple):
    """The names of fields in config.json."""

    width: str
    inner: str
    heads: str


FIELD_NAMES = {
    "ibm": FieldNames("emb_dim", "inner_dim", "n_predict"),
    "speculators": FieldNames("hidden_size", "intermediate_size", "num_layers"),
}


EPS = {"ibm": 1e-6, "speculators": 1e-5}
"""The epsilon of the norms."""


def plan(contents: Contents, dialect: str, spec: TargetSpec) -> HeadPlan:
    """Map the tensors to parameters. Raises: UsageError for inconsistent files, or a head of another target."""
    c, where = contents.config, contents.config.where
    names, is_speculators = FIELD_NAMES[dialect], dialect == "speculators"
    width = c.size(names.width, maximum=WIDTH)
    check_equal(where, names.width, width, spec.width, f"the width of the target {spec.name} is")
    size = c.size("vocab_size", maximum=ROWS)
    check_equal(where, "vocab_size", size, spec.vocab_size, f"the vocabulary of the target {spec.name} has")
    tensors, heads, tied = (
        rename_tensors(contents, RULES),
        c.size(names.heads, maximum=HEADS),
        c.flag("tie_weights", is_speculators),
    )
    count = count_indices(tensors, r"head\.(\d+)\.weight$")
    if not tied and count != heads:
        raise UsageError(f"{where} has {names.heads} {heads}, and {contents.folder} has {count} heads")
    config = MlpSpeculatorConfig(
        width=width,
        inner_width=c.size(names.inner, 0, minimum=0, maximum=WIDTH) or width,
        vocab_size=size,
        num_heads=heads,
        tied=tied,
        scaled=c.flag("scale_input"),
        centred=is_speculators,
        norm_eps=EPS[dialect],
        taps=(spec.num_layers,) if is_speculators and not c.flag("inputs_hidden_states_normalized") else (),
        dtype=spec.dtype,
    )
    flags = {name: getattr(config, name) for name in ("num_heads", "inner_width", "tied", "scaled", "centred", "taps")}
    return HeadPlan("mlp_speculator", dialect, config, TABLE, tensors, flags, unused=REPEATED if config.tied else ())


def describe(config: MlpSpeculatorConfig, layout: str, info: SaveInfo) -> dict[str, Any]:
    """Return config.json. Raises: UsageError for a head with the norms or features of the other layout."""
    is_speculators, names = layout == "speculators", FIELD_NAMES[layout]
    if config.centred != is_speculators or config.norm_eps != EPS[layout]:
        norms = "subtract the mean" if config.centred else "do not subtract the mean"
        raise UsageError(
            f"the head's norms {norms} and have the epsilon {config.norm_eps:g}, which the layout {layout} does not "
            "support; choose another layout"
        )
    if config.taps and not is_speculators:
        raise UsageError("the head reads the stream before the final norm, which the layout ibm does not support")
    shapes = {names.width: config.width, names.inner: config.inner_width, names.heads: config.num_heads}
    shared = {
        "vocab_size": config.vocab_size, "tie_weights": config.tied, "scale_input": config.scaled,
        "torch_dtype": config.dtype,
    }  # fmt: skip
    if not is_speculators:
        name = info.target
        return {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"} | shapes | shared | {
            "base_model_name_or_path": name
        }  # fmt: skip
    return describe_verifier("mlp", "MLPSpeculator", info) | shapes | shared | {
        "inputs_hidden_states_normalized": not config.taps
    }  # fmt: skip


FORMAT = HeadFormat(
    kinds=("mlp_speculator",),
    table=TABLE,
    dialect_of=dialect_of,
    plan=plan,
    layouts={
        "ibm": ((r"^", "speculator."),),
        "speculators": ((r"^emb\.", "emb_layers."), (r"^proj\.", "proj_layers."), (r"^ln\.", "layernorms.")),
    },
    describe=describe,
    neutral=shown("n_candidates", "top_k_tokens_per_head"),
)
