"""Fields of block drafters in config.json, in the spellings of all writers.

Writers are z-lab, SpecForge, DeepSpec, speculators, Model-Optimizer, NeMo Automodel and JetSpec. A field is in
`dflash_config` or at the top level. The engines look into `dflash_config` first, and so does specjax.
"""

from __future__ import annotations

from typing import Any

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.families.llama import global_layers, qwen_global_layers
from specjax.models.loading.heads.checkpoint_contents import Contents, Tensors
from specjax.models.loading.heads.target_fit import TargetSpec, first_statement, resolve_taps

TAPS = {
    "eagle_aux_hidden_state_layer_ids": 0, "aux_hidden_state_layer_ids": 0, "target_layer_ids": 1, "layer_ids": 1,
    "dspark_target_layer_ids": 1,
}  # fmt: skip
"""Fields with the tapped layers. 0: they number streams, where 0 is the embedding; 1: they number outputs of layers."""

ANCHOR = {
    "sample_from_anchor": True, "query_zero_predicts_next": True, "shift_label": True, "dspark_bonus_anchor": False,
}  # fmt: skip
"""Fields that state whether the root's slot drafts, and their value if it does."""

CAUSAL = ("is_causal", "causal", "causal_head")
"""Fields that state whether all layers attend to earlier slots only. JetSpec's is the last one."""

UNSUPPORTED = {
    "attention_value_scale": 1.0, "is_neox_style": True, "use_aux_hidden_state": True, "attention_sink_bias": False,
    "use_correction_target_fusion": False,
}  # fmt: skip
"""Fields that change the computation without a tensor of their own, and the values that specjax computes."""


class BlockFields:
    """The fields of a config. The methods take names without `dflash_config`, and add notes for reports."""

    def __init__(self, contents: Contents, notes: list[str]):
        self.top, self.changes, self.notes = contents.config, contents.changes, notes
        self.inner = self.top.subfields("dflash_config")
        self.assumed: list[str] = []

    def has(self, name: str) -> bool:
        return self.inner.has(name) or self.top.has(name)

    def of(self, name: str) -> ConfigFields:
        """Return the fields that contain `name`; the top level if none does. Add a note if both do and differ."""
        if not self.inner.has(name):
            return self.top
        first, second = self.inner.value(name), self.top.value(name)
        note = f"{self.top.where} has {name} {quote(second)}, and in dflash_config {quote(first)}, which is used"
        if second is not None and first != second and note not in self.notes:
            self.notes.append(note)
        return self.inner

    def note_assumed(self, name: str, value: Any) -> None:
        """Add a note about a setting that the files lack, and the value that is assumed for it."""
        if not self.has(name) and name not in self.changes:
            self.assumed.append(name)
            self.notes.append(f"{self.top.where} has no {name}; assumed {value} (--head-set {name}=... overrides it)")

    def refuse_unsupported(self) -> None:
        """Raise a UsageError for a field in UNSUPPORTED with another value."""
        for name, supported in UNSUPPORTED.items():
            fields = self.of(name)
            value = fields.value(name)
            if value is not None and value != supported:
                raise UsageError(
                    f"{self.top.where} has {fields.prefix}{name} {quote(value)}, which specjax does not support; "
                    "choose another head"
                )

    def agreed(self, meanings: dict[str, bool], setting: str) -> bool | None:
        """Return the value on which all of these fields agree, or None if none is present.

        Args:
          meanings: the fields, each with the value that means True. setting: the setting that overrides them.

        Raises: UsageError for fields that contradict each other.
        """
        statements = {name: self.of(name).flag(name) == true for name, true in meanings.items() if self.has(name)}
        if len({*statements.values()}) > 1 and setting not in self.changes:
            names = " and ".join(f"{name} {str(self.of(name).flag(name)).lower()}" for name in statements)
            raise UsageError(f"{self.top.where} has {names}, which contradict each other; set {setting} (--head-set)")
        return next(iter(statements.values()), None)


def read_taps(block: BlockFields, contents: Contents, tensors: Tensors, spec: TargetSpec, default) -> tuple[int, ...]:
    """Return the streams of the target that the head reads. default: see `resolve_taps`."""
    statements: dict[str, list[int]] = {}
    for name, plus in TAPS.items():
        fields = block.of(name)
        ids = fields.array(name, int)
        if ids:
            statements[fields.prefix + name] = [i + plus for i in ids]
    field, ids = first_statement(statements, block.top.where, block.notes)
    return resolve_taps(contents, tensors, spec, ids, field, default, block.notes)


def is_dspark(c: ConfigFields) -> bool:
    """Return True if the config is of the class DSpark."""
    return any("DSpark" in writer for writer in c.array("architectures", str)) or c.has("markov_rank")


def read_anchor(block: BlockFields, dialect: str, kind: str) -> bool:
    """Return True if the root's slot drafts.

    speculators writes the field since July 2026; its earlier heads leave that slot out. DeepSpec never writes it, and
    all slots of its class DSpark draft, without a Markov head too. SpecForge trains DSpark alike, and Domino by
    `shift_label`.
    """
    value = block.agreed(ANCHOR, "from_anchor")
    if value is not None:
        return value
    value = dialect != "speculators" and (kind == "dspark" or is_dspark(block.top))
    if kind in ("dspark", "domino") or value:
        block.assumed.append("from_anchor")
        block.notes.append(
            f"{block.top.where} has no sample_from_anchor; assumed {str(value).lower()}, like "
            f"{'DeepSpec' if value else 'SpecForge' if kind == 'domino' else 'speculators before July 2026'} "
            "(--head-set from_anchor=... overrides it)"
        )
    return value


def read_attention(block: BlockFields, fields: ConfigFields, layers: int) -> dict[str, Any]:
    """Return the windows and the causality of the layers, as fields of `DFlashConfig`.

    A window of `use_swa` sees both sides. One of `layer_types` is causal, unless a field states otherwise.

    fields: the fields that describe the layers.
    """
    is_global = global_layers(fields, layers)
    if not is_global and (fields.has("sliding_window") or not fields.is_stated("sliding_window")):
        is_global = qwen_global_layers(fields, layers)  # the layers of all writers are Qwen's
    fields.skip("sliding_window", "use_sliding_window", "max_window_layers")
    slides = bool(is_global) and not all(is_global)
    has_swa = block.of("use_swa").flag("use_swa") and not slides
    causal = block.agreed(dict.fromkeys(CAUSAL, True), "causal")
    both_sides = block.of("sliding_window_non_causal").flag("sliding_window_non_causal") or has_swa
    kind = ("no" if both_sides else "windowed") if causal is None else "all" if causal else "no"
    if not (slides or has_swa):
        return {"windows": (), "causal": kind}
    has_own = block.has("swa_window_size")
    window = block.of("swa_window_size").size("swa_window_size") if has_own else fields.size("sliding_window")
    full_layers = (False,) * layers if has_swa else is_global
    return {"windows": tuple(None if full else window for full in full_layers), "causal": kind}


def read_scales(block: BlockFields, spec: TargetSpec, own_head: bool) -> dict[str, Any]:
    """Return the factors on embeddings and logits, as fields of `DFlashConfig`.

    A softcap that the target's output layer has is not repeated.
    """
    number = lambda name, default, **limits: block.of(name).number(name, default, **limits)
    softcap = number("final_logit_softcapping", None, minimum=0.0) or None
    target_cap = getattr(spec.target.model.config, "logit_softcap", None)
    scale, output_scale = number("output_multiplier", 1.0), number("logit_scale", 1.0)
    if softcap is None:
        scale, output_scale = scale * output_scale, 1.0
    return {
        "embedding_scale": number("input_embedding_scale", 1.0),
        "logit_scale": scale,
        "softcap": None if not own_head and softcap == target_cap else softcap,
        "capped_scale": output_scale,
    }
