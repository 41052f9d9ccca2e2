"""The typed description of a checkpoint format of draft heads. Every file of a head in this folder has one: FORMAT."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from specjax.models.heads.contract import DraftHead
from specjax.models.loading.families.unread_fields import ANY
from specjax.models.loading.heads.checkpoint_contents import Contents, HeadPlan, Rules
from specjax.models.loading.heads.settings import HeadVariant
from specjax.models.loading.heads.target_fit import TargetSpec
from specjax.types import PyTree

NEUTRAL = MappingProxyType(
    {
        "embed_requires_grad": ANY, "has_no_defaults_at_init": ANY, "num_target_layers": ANY,
        "speculators_model_type": ANY, "speculators_version": ANY,
        "speculators_config.algorithm": ANY, "speculators_config.default_proposal_method": ANY,
        "speculators_config.proposal_methods": ANY, "transformer_layer_architecture": "LlamaDecoderLayer",
    }
)  # fmt: skip
"""Fields of all kinds of heads that change nothing with this value, although no format reads them."""


def shown(*names: str) -> dict[str, Any]:
    """Return fields whose values the tensors show, or that only training or another program needs."""
    return dict.fromkeys(names, ANY)


class SaveInfo(NamedTuple):
    """Facts that a config file has besides the config of the head."""

    target: str  # name of the target; "": unknown
    architectures: list[str]  # of the target, as its own config names them
    num_tokens: int  # suggested draft length
    params: PyTree


def _no_variants(head: DraftHead, num_layers: int) -> list[HeadVariant]:
    return []


class HeadFormat(NamedTuple):
    """The checkpoint format of one kind of head, or of several kinds that share their files' layout.

    `dialect_of(contents) -> str | None` returns the dialect of the writer, or None for other files.

    `plan(contents, dialect, target) -> HeadPlan` maps the tensors to parameters. It raises a UsageError for a head that
    does not fit the target, or for inconsistent files.

    `describe(config, layout, info) -> dict` returns config.json for a layout. It raises a UsageError if the layout
    cannot represent the head.

    `kind_of(contents) -> str` returns the kind, for formats of several kinds.

    `variants(head, num_layers) -> [HeadVariant]` returns other interpretations of the same tensors. The self-check
    tries them if the head hardly agrees with its target.
    """

    kinds: tuple[str, ...]
    table: Mapping[str, str]  # tensor names by the path of the parameter, see `HeadPlan.table`
    dialect_of: Callable[[Contents], str | None]
    plan: Callable[[Contents, str, TargetSpec], HeadPlan]
    layouts: Mapping[str, Rules | Callable[[Any], Rules]]  # for writing: renames of the table's names, or by the config
    describe: Callable[[Any, str, SaveInfo], dict[str, Any]]
    kind_of: Callable[[Contents], str] | None = None  # None: the only kind
    variants: Callable[[DraftHead, int], list[HeadVariant]] = _no_variants
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})  # shapes in files that differ from the parameter's
    takes_token_map: bool = False  # True: a list of ids can restrict the vocabulary that the head drafts
    neutral: Mapping[str, Any] = MappingProxyType({})  # fields that need no reader with this value, see `shown`
    spellings: Mapping[str, str] = MappingProxyType({})  # settings by other names, such as those of config.json
