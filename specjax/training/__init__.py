"""Training of draft heads, draft models and denoisers (docs/training.md).

`train_drafter` goes from a target to a served head in one call. `train` is the training loop on any texts, and
`train_step` is one pure step of it. `measure_acceptance` computes the tokens per target pass of a head or draft model
without decoding.

Other methods have their own functions. The docstrings of their modules have examples:

- `train_hamburger`, `train_lud` and `train_consistency` train models that write several tokens per pass on their own.
- `train_certainty` and `train_filter` (dParallel, Learn2PD) make denoisers unmask more columns per pass.
- `init_denoiser`, `save_denoiser` and `load_denoiser` create and store denoisers; `save_denoiser_model` writes a model
  folder.
- `train_draft_denoiser` (DEER) trains a small denoiser that drafts, and `record_steps` makes the examples of SpecKV.
- `init_stopping` (SpecDec++) and `fit_judge` (Judge Decoding) train classifiers for a drafter or a verifier.
- `collect_steps` and `train_router` train the router of Arbitrage.
- `OnlineTrainer` updates a drafter while `serve` runs.
"""

from specjax.training.data.conversation_files import TextFile, read_text_file
from specjax.training.data.judged_files import JudgedResponse
from specjax.training.data.packing import PackedBatch, TrainingText, pack
from specjax.training.data.target_responses import (
    ResponseStore,
    TargetResponse,
    generate_prompts,
    generate_responses,
)
from specjax.training.loop.head_init import new_head
from specjax.training.loop.step import train_step
from specjax.training.loop.target_activations import ActivationCache
from specjax.training.loop.trainer import TrainingProgress, train
from specjax.training.measure.acceptance_eval import MeasuredAcceptance, measure_acceptance
from specjax.training.methods.arbitrage_router import StepExamples, collect_steps, train_router
from specjax.training.methods.certainty_forcing import train_certainty
from specjax.training.methods.consistency import collect_trajectories, mixed_labels, train_consistency
from specjax.training.methods.denoisers import init_denoiser, load_denoiser, save_denoiser, save_denoiser_model
from specjax.training.methods.draft_denoiser import train_draft_denoiser
from specjax.training.methods.draft_lengths import record_steps
from specjax.training.methods.hamburger import train_hamburger
from specjax.training.methods.judge_head import JudgeClassifier, fit_judge, make_examples, threshold_for
from specjax.training.methods.learn2pd_filter import train_filter
from specjax.training.methods.lexical_units import train_lud
from specjax.training.methods.online import OnlineTrainer
from specjax.training.objectives.losses import LOSSES
from specjax.training.objectives.recipes import RECIPES, Recipe, recipe_of
from specjax.training.objectives.stopping import init_stopping
from specjax.training.observer import TrainingObserver
from specjax.training.pipeline import TrainedDrafter, TrainingSettings, train_drafter

__all__ = [
    "LOSSES",
    "RECIPES",
    "ActivationCache",
    "JudgeClassifier",
    "JudgedResponse",
    "MeasuredAcceptance",
    "OnlineTrainer",
    "PackedBatch",
    "Recipe",
    "ResponseStore",
    "StepExamples",
    "TargetResponse",
    "TextFile",
    "TrainedDrafter",
    "TrainingObserver",
    "TrainingProgress",
    "TrainingSettings",
    "TrainingText",
    "collect_steps",
    "collect_trajectories",
    "fit_judge",
    "generate_prompts",
    "generate_responses",
    "init_denoiser",
    "init_stopping",
    "load_denoiser",
    "make_examples",
    "measure_acceptance",
    "mixed_labels",
    "new_head",
    "pack",
    "read_text_file",
    "recipe_of",
    "record_steps",
    "save_denoiser",
    "save_denoiser_model",
    "threshold_for",
    "train",
    "train_certainty",
    "train_consistency",
    "train_draft_denoiser",
    "train_drafter",
    "train_filter",
    "train_hamburger",
    "train_lud",
    "train_router",
    "train_step",
]
