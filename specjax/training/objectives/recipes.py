"""Default training recipes, one row per kind of head or model. Most of them are the authors' own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from specjax.errors import UsageError
from specjax.training.objectives.losses import LOSSES


@dataclass(frozen=True)
class Recipe:
    """The loss of a training run, and its optimizer."""

    losses: tuple[tuple[str, float], ...] = (("soft_ce", 1.0),)  # (name, weight) of each loss of the logits
    depths: int | None = None  # drafted tokens per round; None: all that the head drafts, see `resolve_depths`
    passes: int = 4  # passes per round of a head that drafts chains of any length, unless `depths` is given
    decay: float = 0.8  # factor of the loss from one depth to the next
    weighting: Literal["decay", "d_pace"] = "decay"
    features: float = 0.0  # weight of the smooth L1 loss of predicted features
    confidence: float = 0.0  # weight of the cross entropy of the predicted acceptance
    noise: float = 0.0  # half width of the uniform noise on features, for rows of 512 tokens (scaled by 512 / T)
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 1e-3
    tables: float = 0.3  # Adam's rate for tables and norms, divided by Muon's, which may be higher
    warmup: float = 0.05  # share of all steps
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    weight_decay: float = 0.01
    clip: float = 1.0  # limit of the global gradient norm
    betas: tuple[float, float] = (0.9, 0.95)
    frozen: tuple[str, ...] = ()  # names of parameters or modules that are not trained
    packs: bool = True  # several texts per row
    draws_depth: bool = False  # train one random depth of each round instead of all
    rising_images: bool = False  # texts with images are drawn more often in the second half, from none to all (MSD)
    anchors: bool = False  # a random number is added to the positions of a row, except to those of its first tokens

    replace = replace

    @property
    def reads_teacher(self) -> bool:
        """Return True if a loss reads the target's distributions, in addition to its tokens."""
        return any(name != "ce" for name, _ in self.losses)


def resolve_depths(recipe: Recipe, kind: str, max_depth: int | None, default: int | None = None) -> int:
    """Return the number of tokens that a round drafts in training.

    Without `depths` these are all tokens that the head drafts, so that none of its parameters stays untrained.

    Args: max_depth: longest chain that the head drafts; None: any length. default: depths of a head without a limit.

    Raises: UsageError for more depths than the head drafts.
    """
    if recipe.depths is None:
        return max_depth or default or recipe.passes
    if max_depth and recipe.depths > max_depth:
        raise UsageError(
            f"depths={recipe.depths} is more than the {max_depth} tokens that {kind} drafts; lower it, or leave it out"
        )
    return recipe.depths


MUON_FACTOR = 10
"""Ratio of Muon's learning rate to AdamW's, with steps of the same size (optax's consistent_rms). It was measured on
an EAGLE-3 head of SmolLM2 in one epoch of 50,882 response tokens. AdamW at 1e-3, 3e-3, 6e-3 reached 1.35, 1.41, 1.38
tokens per pass. Muon at 1e-3, 4e-3, 1e-2, 2e-2 (`tables` 1) reached 1.21, 1.45, 1.50, 1.48."""


def recipe_of(kind: str, **changes) -> Recipe:
    """Return the recipe of a kind, with changes.

    A change of the optimizer also changes the learning rate by MUON_FACTOR, unless `changes` has a learning rate.

    Raises: UsageError for an unknown loss, weighting, optimizer or schedule, or numbers out of range.
    """
    default = RECIPES.get(kind, Recipe())
    recipe = default.replace(**changes)
    if recipe.optimizer != default.optimizer and "learning_rate" not in changes:
        factor = MUON_FACTOR if recipe.optimizer == "muon" else 1 / MUON_FACTOR
        recipe = recipe.replace(learning_rate=factor * default.learning_rate)
    check_recipe(recipe)
    return recipe


def check_recipe(recipe: Recipe) -> None:
    """Raise a UsageError for an invalid recipe."""
    unknown = [name for name, _ in recipe.losses if name not in LOSSES]
    if unknown:
        raise UsageError(f'unknown loss "{unknown[0]}"; choose from {", ".join(LOSSES)}')
    if not recipe.losses or not all(0 < share < math.inf for _, share in recipe.losses):
        raise UsageError(f"a recipe needs losses with weights above 0, not {recipe.losses}")
    choices_by_name = {
        "weighting": ("decay", "d_pace"),
        "optimizer": ("adamw", "muon"),
        "schedule": ("cosine", "linear", "constant"),
    }
    for name, choices in choices_by_name.items():
        if getattr(recipe, name) not in choices:
            raise UsageError(f'{name} must be {" or ".join(choices)}, not "{getattr(recipe, name)}"')
    for name in ("depths", "passes"):
        count = getattr(recipe, name)
        if count is not None and count < 1:
            raise UsageError(f"{name} must be at least 1, not {count}")
    for name, share in (("decay", recipe.decay), ("warmup", recipe.warmup)):
        if not 0 <= share <= 1:
            raise UsageError(f"{name} must be from 0 to 1, not {share}")
    for name, beta in zip(("beta_1", "beta_2"), recipe.betas, strict=True):
        if not 0 <= beta < 1:  # at 1 the first step would divide 0 by 0
            raise UsageError(f"{name} must be at least 0 and below 1, not {beta}")
    for name in ("features", "confidence", "noise", "tables", "weight_decay"):
        if not 0 <= getattr(recipe, name) < math.inf:
            raise UsageError(f"{name} must be 0 or more, not {getattr(recipe, name)}")
    if not recipe.clip > 0:
        raise UsageError(f"clip must be above 0, not {recipe.clip}")
    if not 0 < recipe.learning_rate < math.inf:
        raise UsageError(f"the learning rate must be a number above 0, not {recipe.learning_rate}")


_BLOCK = Recipe((("ce", 0.1), ("tv", 0.9)), weighting="d_pace", learning_rate=6e-4, warmup=0.04)
_FEATURES = Recipe((("soft_ce", 0.1),), features=1.0, noise=0.1, learning_rate=3e-4)
_MODEL = Recipe((("kl", 1.0),), learning_rate=1e-4, warmup=0.02, weight_decay=0.1)

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        # The authors' training-time test of 7 steps, but with Muon instead of their AdamW (see MUON_FACTOR).
        "eagle3": Recipe(passes=7, decay=0.8, optimizer="muon", learning_rate=1e-2),
        "mtp": Recipe(passes=3, optimizer="muon", learning_rate=1e-2),
        "p_eagle": Recipe(decay=1.0),
        "eagle": _FEATURES,
        "msd": _FEATURES.replace(rising_images=True),
        "flash": _FEATURES.replace(learning_rate=3e-4),
        "specvlm": _FEATURES,
        "falcon": Recipe(
            (("kl", 0.09), ("ce", 0.01)), passes=2, features=1.0, noise=0.1, learning_rate=3e-4, packs=False
        ),
        "medusa": Recipe((("ce", 1.0),)),  # Medusa-1: 0.8^k, hard labels
        "hydra": Recipe(decay=1.0, weight_decay=0.1),
        "clover": Recipe((("soft_ce", 1.0),), decay=0.7),
        "chimera": Recipe((("ce", 1.0),)),
        "kangaroo": Recipe(passes=1, learning_rate=5e-4),
        "longspec": Recipe(
            (("ce", 1.0),),
            passes=4,
            decay=1.0,
            learning_rate=5e-4,
            warmup=0.1,
            betas=(0.9, 0.98),
            weight_decay=0.1,
            draws_depth=True,
            anchors=True,
        ),
        "m2r2": Recipe(passes=1, confidence=1.0, learning_rate=1e-3),  # `specjax.adaptive.train_m2r2` has its own loss
        "hamburger": Recipe(
            (("ce", 1.0),), decay=1.0, confidence=0.5, learning_rate=1e-4
        ),  # for HAMburger as a drafter
        "hidden_transfer": Recipe((("kl", 1.0),)),
        "ppd": Recipe((("kl", 1.0),), learning_rate=1e-2, weight_decay=0.0),
        "dflash": _BLOCK.replace(losses=(("soft_ce", 1.0),)),
        "jetspec": _BLOCK.replace(losses=(("kl", 1.0),)),
        "dflash2": _BLOCK.replace(losses=(("soft_ce", 1.0),)),
        "domino": _BLOCK.replace(losses=(("soft_ce", 1.0),)),
        "dspark": _BLOCK.replace(confidence=1.0, frozen=("confidence/temperatures",)),  # calibrated instead of trained
        "mlp_speculator": Recipe((("ce", 1.0),), decay=1.0),
        "redrafter": Recipe((("ce", 1.0),), passes=5, decay=1.0),
        "distillspec": _MODEL,
        "direct_alignment": _MODEL.replace(losses=(("tvd++", 1.0),)),
        "fastdraft_pretraining": _MODEL.replace(losses=(("ce", 1.0),), learning_rate=1e-3),
        "fastdraft": _MODEL.replace(losses=(("ce", 1.0),)),
        "masked_diffusion": Recipe((("ce", 1.0),), learning_rate=2e-3, packs=False),  # small models, from scratch
        "specdec++": Recipe(warmup=0.03, weight_decay=0.0, frozen=("draft",)),
    }
)
"""Recipes by kind. The rows after `redrafter` are for draft models, denoisers and stopping heads. The `passes` of draft
models are only the length of the measured chain."""
