"""The MLP speculator by IBM, and the older one of vllm speculators, whose norms are others."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.mlp_speculator import MlpSpeculatorConfig
from specjax.models.loading.families.config_fields import HEADS, ROWS, WIDTH
from specjax.models.loading.heads.checkpoint_contents import (
    Contents,
    Plan,
    Reader,
    Rules,
    check_equal,
    indices,
    renamed,
)
from specjax.models.loading.heads.describing import described_verifier

KINDS = ("mlp_speculator",)

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
"""Tensors of tied weights that files have more than once."""


def dialect_of(contents: Contents) -> str | None:
    """Who wrote it; None: it is no MLP speculator."""
    if contents.config.given("speculators_model_type"):
        return "speculators" if contents.config.text("speculators_model_type") == "mlp" else None
    names = {name.removeprefix("speculator.") for name in contents.tensors}
    return "ibm" if {"emb.0.weight", "proj.0.weight", "head.0.weight"} <= names else None


class Words(NamedTuple):
    """What the fields of config.json are called."""

    width: str
    inner: str
    heads: str


WORDS = {
    "ibm": Words("emb_dim", "inner_dim", "n_predict"),
    "speculators": Words("hidden_size", "intermediate_size", "num_layers"),
}


EPS = {"ibm": 1e-6, "speculators": 1e-5}
"""Of the norms."""


def kind_of(contents: Contents) -> str:
    """The method that it is drafted with."""
    return "mlp_speculator"


def plan(contents: Contents, dialect: str, reader: Reader, token_map: np.ndarray | None) -> Plan:
    """Raises: UsageError for a head that does not fit the target."""
    c, where = contents.config, contents.config.where
    if token_map is not None:
        raise UsageError(f"{contents.folder} is an MLP speculator, which takes no token map; leave it out")
    words, theirs = WORDS[dialect], dialect == "speculators"
    width = c.size(words.width, most=WIDTH)
    check_equal(where, words.width, width, reader.width, f"the width of the target {reader.name} is")
    size = c.size("vocab_size", most=ROWS)
    check_equal(where, "vocab_size", size, reader.vocab_size, f"the vocabulary of the target {reader.name} has")
    tensors, heads, tied = renamed(contents, RULES), c.size(words.heads, most=HEADS), c.flag("tie_weights", theirs)
    own = indices(tensors, r"head\.(\d+)\.weight$")
    if not tied and own != heads:
        raise UsageError(f"{where} has {words.heads} {heads}, and {contents.folder} has {own} heads")
    config = MlpSpeculatorConfig(
        width=width,
        inner_width=c.size(words.inner, 0, least=0, most=WIDTH) or width,
        vocab_size=size,
        num_heads=heads,
        tied=tied,
        scaled=c.flag("scale_input"),
        centred=theirs,
        norm_eps=EPS[dialect],
        taps=(reader.num_layers,) if theirs and not c.flag("inputs_hidden_states_normalized") else (),
        dtype=reader.dtype,
    )
    flags = {name: getattr(config, name) for name in ("num_heads", "inner_width", "tied", "scaled", "centred", "taps")}
    return Plan("mlp_speculator", dialect, config, TABLE, tensors, flags, unused=REPEATED if config.tied else ())


def variants(head: DraftHead, num_layers: int) -> dict[str, DraftHead]:
    """Other readings of the same tensors, by what would be wrong with this one: none."""
    return {}


LAYOUTS: dict[str, Rules] = {
    "ibm": ((r"^", "speculator."),),
    "speculators": ((r"^emb\.", "emb_layers."), (r"^proj\.", "proj_layers."), (r"^ln\.", "layernorms.")),
}


def describe(config: MlpSpeculatorConfig, layout: str, about: dict[str, Any]) -> dict[str, Any]:
    """config.json. Raises: UsageError for a head whose norms or features are the other layout's."""
    theirs, words = layout == "speculators", WORDS[layout]
    if config.centred != theirs or config.norm_eps != EPS[layout]:
        norms = "take the mean off first" if config.centred else "leave the mean in"
        raise UsageError(f"the head's norms {norms}, with {config.norm_eps:g}, which the layout {layout} does not")
    if config.taps and not theirs:
        raise UsageError("the head reads the stream before the final norm, which the layout ibm does not")
    own = {words.width: config.width, words.inner: config.inner_width, words.heads: config.num_heads}
    shared = {
        "vocab_size": config.vocab_size, "tie_weights": config.tied, "scale_input": config.scaled,
        "torch_dtype": config.dtype,
    }  # fmt: skip
    if not theirs:
        name = about["name"]
        return {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"} | own | shared | {
            "base_model_name_or_path": name
        }  # fmt: skip
    return described_verifier("mlp", "MLPSpeculator", about) | own | shared | {
        "inputs_hidden_states_normalized": not config.taps
    }  # fmt: skip
