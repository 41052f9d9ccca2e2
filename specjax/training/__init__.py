"""Training drafters on what their target writes: docs/training.md.

`train` is the loop, `loop.train_step` one pure step of it; `served` says what a head serves,
exactly and without decoding. Models that write several tokens a pass by themselves are trained whole:
`train_hamburger`, `train_lud`, `train_consistency`.
"""

from specjax.training.data.packing import Lesson, Text, pack
from specjax.training.data.target_responses import Answers, answer, own_prompts
from specjax.training.loop.head_init import new_head
from specjax.training.loop.trainer import Progress, train, train_step
from specjax.training.measure.acceptance_eval import Served, served
from specjax.training.methods.consistency import mixed_labels, train_consistency, trajectories
from specjax.training.methods.hamburger import train_hamburger
from specjax.training.methods.lexical_units import train_lud
from specjax.training.objectives.losses import LOSSES
from specjax.training.objectives.recipes import RECIPES, Recipe, recipe_of

__all__ = [
    "LOSSES",
    "RECIPES",
    "Answers",
    "Lesson",
    "Progress",
    "Recipe",
    "Served",
    "Text",
    "answer",
    "mixed_labels",
    "new_head",
    "own_prompts",
    "pack",
    "recipe_of",
    "served",
    "train",
    "train_consistency",
    "train_hamburger",
    "train_lud",
    "train_step",
    "trajectories",
]
