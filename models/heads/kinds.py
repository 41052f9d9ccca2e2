"""Every kind of head by the name of its method: for loaders, planners, trainers and tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from specjax.models.heads import (
    chimera,
    clover,
    dflash,
    eagle,
    eagle3,
    falcon,
    hamburger,
    hidden_transfer,
    hydra,
    kangaroo,
    m2r2,
    medusa,
    mlp_speculator,
    p_eagle,
    ppd,
    redrafter,
)
from specjax.models.heads.blocks import abstract_params, init_params
from specjax.models.heads.contract import DraftHead, Head


class Kind(NamedTuple):
    """What a kind of head is made by."""

    module: Callable[..., Any]  # (config, *, rngs) -> its nnx.Module
    head: Callable[[Any], Head]  # (config)
    of_target: Callable[..., Any]  # (the target's config, **changes) -> config, as the authors train it
    numbers: tuple[str, ...] = ()  # which changes are whole numbers
    taps: bool = False  # whether it may read other streams of the target than its authors'
    flags: tuple[str, ...] = ()  # which changes are yes or no

    @property
    def changes(self) -> tuple[str, ...]:
        """What `change` takes."""
        return (("taps",) if self.taps else ()) + self.numbers + self.flags

    def change(self, text: str) -> tuple[str, Any] | None:
        """The name and value of `num_layers=1`, `taps=2+15+27` or `embeds=no`; None for what is no change of it."""
        name, _, value = text.partition("=")
        if name in self.flags:
            return (name, YES_NO[value]) if value in YES_NO else None
        parts = value.split("+") if name == "taps" else [value]
        if name not in self.changes or not all(part.isdecimal() for part in parts):
            return None
        numbers = tuple(map(int, parts))
        if name == "taps":
            return name, numbers
        return (name, numbers[0]) if numbers[0] else None

    @property
    def forms(self) -> tuple[str, ...]:
        """How `change` wants them written."""
        forms = {"taps": "2+15+27"} | dict.fromkeys(self.flags, "no")
        return tuple(f"{name}={forms.get(name, 'N')}" for name in self.changes)


def written(changes: Mapping[str, Any]) -> list[str]:
    """As `Kind.change` reads them."""

    def plain(value: Any) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)

    return [f"{name}={plain(value)}" for name, value in changes.items()]


YES_NO = {"yes": True, "no": False}
BLOCK = "num_layers", "block_size", "mlp_width"
KINDS: dict[str, Kind] = {
    "chimera": Kind(chimera.Chimera, chimera.chimera_head, chimera.of_target, ("num_heads",)),
    "dflash": Kind(dflash.DFlash, dflash.dflash_head, dflash.of_target, BLOCK, taps=True),
    "dflash2": Kind(dflash.DFlash, dflash.dflash_head, dflash.dflash2_of_target, BLOCK, taps=True),
    "domino": Kind(dflash.DFlash, dflash.dflash_head, dflash.domino_of_target, BLOCK, taps=True),
    "dspark": Kind(dflash.DFlash, dflash.dflash_head, dflash.dspark_of_target, BLOCK, taps=True),
    "clover": Kind(clover.clover, clover.clover_head, clover.of_target),
    "eagle": Kind(eagle.Eagle, eagle.eagle_head, eagle.of_target),
    "eagle3": Kind(
        eagle3.Eagle3,
        eagle3.eagle3_head,
        eagle3.of_target,
        ("draft_vocab_size", "mlp_width", "head_rank"),
        taps=True,
    ),
    "falcon": Kind(falcon.Falcon, falcon.falcon_head, falcon.of_target, ("block_size",)),
    "hamburger": Kind(hamburger.Hamburger, hamburger.hamburger_head, hamburger.of_target, ("num_layers", "segment")),
    "hidden_transfer": Kind(
        hidden_transfer.HiddenTransfer,
        hidden_transfer.hidden_transfer_head,
        hidden_transfer.of_target,
        ("num_heads", "behind"),
    ),
    "hydra": Kind(hydra.Hydra, hydra.hydra_head, hydra.of_target, ("num_heads",)),
    "kangaroo": Kind(kangaroo.Kangaroo, kangaroo.kangaroo_head, kangaroo.of_target, ("exit_layer",)),
    "m2r2": Kind(m2r2.M2R2, m2r2.m2r2_head, m2r2.of_target, ("exit_layer", "rank", "recent")),
    "medusa": Kind(medusa.Medusa, medusa.medusa_head, medusa.of_target, ("num_heads",)),
    "p_eagle": Kind(
        p_eagle.PEagle,
        p_eagle.p_eagle_head,
        p_eagle.of_target,
        ("num_layers", "draft_vocab_size", "mlp_width", "head_rank"),
        taps=True,
        flags=("embeds",),
    ),
    "ppd": Kind(ppd.Ppd, ppd.ppd_head, ppd.of_target, ("num_prompts", "copies")),
    "mlp_speculator": Kind(
        mlp_speculator.MlpSpeculator, mlp_speculator.mlp_speculator_head, mlp_speculator.of_target, ("num_heads",)
    ),
    "redrafter": Kind(redrafter.ReDrafter, redrafter.redrafter_head, redrafter.of_target),
}


def init_head(kind: str, config: Any, key) -> DraftHead:
    """A head with random parameters, for tests and for training."""
    return DraftHead(KINDS[kind].head(config), init_params(KINDS[kind].module, config, key))


def abstract_head(kind: str, config: Any) -> DraftHead:
    """A head with shapes for parameters; nothing is allocated."""
    return DraftHead(KINDS[kind].head(config), abstract_params(KINDS[kind].module, config))
