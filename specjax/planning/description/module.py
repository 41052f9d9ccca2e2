"""Description of the multi-token-prediction module that the files of a model contain, without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax.catalog.defaults import can_draft_natively
from specjax.errors import UsageError
from specjax.models.heads import mtp
from specjax.models.heads.kinds import abstract_head
from specjax.models.loading.families.config_fields import LAYERS, ConfigFields
from specjax.models.loading.formats import hf
from specjax.models.loading.heads import mtp as stored_mtp
from specjax.models.loading.heads.target_fit import target_spec
from specjax.models.loading.mtp_dialects import BY_NAME, DIALECTS
from specjax.models.storage import num_bytes
from specjax.planning.inputs.model_configs import num_params_of_head
from specjax.planning.inputs.native_heads import stated_config
from specjax.types import Target


@dataclass(frozen=True)
class ModuleDescription:
    """A module in the files of a model. A field is None if the files do not show it."""

    dialect: str | None  # a name of `mtp_dialects.BY_NAME`; None: there is no weight file that shows the form
    families: str | None  # the models with this form, in words
    count: int  # number of modules
    drafts_by_default: bool
    reason: str | None  # the reason why it cannot draft, in words; None: it can
    parameters: int | None = None  # of all modules, without the arrays of the target
    weights_bytes: int | None = None
    mlp_width: int | None = None
    embedding: str = "target"  # the owner of the embedding: always the target
    output_layer: str | None = None  # the owner of the output layer: "target" or "module"
    hidden: str | None = None  # the target's hidden state that it reads: "normed" or "raw"
    hidden_first: bool | None = None  # its projection reads [hidden; embedding]
    chained: str | None = None  # the state of a drafted token, see `specjax.models.heads.mtp.Chain`


def describe_module(target: Target) -> ModuleDescription:
    """Return the description of the module `target.native`. The parameters of the target may be shapes.

    Raises: UsageError for files that contradict themselves, or for a module of another target.
    """
    native = target.native
    assert native is not None
    row, is_default = BY_NAME[native.dialect], can_draft_natively(target)
    if native.lacking is not None:
        reason = f"its layer has {native.lacking}, which specjax does not have in heads"
        return ModuleDescription(native.dialect, row.families, native.count, is_default, reason)
    spec = target_spec(target)
    plan = stored_mtp.plan(stored_mtp.native_contents(native, spec.num_layers), native.dialect, spec)
    return _of_config(plan.config, native.dialect, is_default)


def describe_stated(config: Any, dialect: str) -> ModuleDescription:
    """Return the description of the module that a built-in config's release has, of the form `dialect`."""
    return _of_config(stated_config(config, dialect), dialect, True)


def count_stated(folder: Path) -> int:
    """Return the number of modules that the config.json of a folder states; 0: none."""
    fields = ConfigFields(hf.read_config(folder).values, str(folder / "config.json"))
    nested = fields.subfields("text_config") if fields.has("text_config") else fields
    names = {row.field for row in DIALECTS}
    try:
        return max(nested.size(name, 0, minimum=0, maximum=LAYERS) for name in names)
    except UsageError:  # a family that has the field for another purpose
        return 0


def _of_config(config: mtp.MtpConfig, dialect: str, is_default: bool) -> ModuleDescription:
    return ModuleDescription(
        dialect,
        BY_NAME[dialect].families,
        config.layer.num_layers,
        is_default,
        None,
        parameters=num_params_of_head("mtp", config),
        weights_bytes=num_bytes(abstract_head("mtp", config).params),
        mlp_width=config.layer.mlp_width,
        output_layer="module" if config.own_head else "target",
        hidden=config.hidden,
        hidden_first=config.hidden_first,
        chained=config.chained,
    )
