"""Training, analysis and adaptive depth compute the same in the modes that research code sets."""

import jax.numpy as jnp
import pytest
import toy
from tiers import exhaustive
from training_runs import PROMPTS, SETTINGS, LetterTokenizer, target, texts
from unusual_modes import unusual_modes

import specjax
from specjax import adaptive, analysis, training
from specjax.models import LlamaConfig


def train_head(folder):
    training.train_drafter(target(), LetterTokenizer(), "medusa", PROMPTS, folder=folder, settings=SETTINGS)


def train_stopping(folder):
    start = training.init_stopping(toy.tiny_llama(layers=2))
    training.train(target(), start, texts(), recipe=training.recipe_of("specdec++"), rows=2, length=64)


def train_denoiser(folder):
    small = LlamaConfig(
        vocab_size=64, width=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, mlp_width=16, max_positions=64
    )
    lines = [training.TrainingText((5, 6, 7, 8, *range(10, 26)), 4)]
    recipe = training.recipe_of("masked_diffusion")
    denoiser = training.train(
        None, training.init_denoiser(small, mask_token=0), lines, recipe=recipe, rows=2, length=32
    )
    batches = training.pack(lines, 2, 32, one_per_row=True)
    denoiser, _ = training.train_certainty(denoiser, batches, block=8, key=0)
    training.train_filter(denoiser, batches, block=8, key=0, steps=2)


def train_judge(folder):
    judged = [training.JudgedResponse(training.TrainingText((1, 2, 3, 4), 2), wrong=wrong) for wrong in (None, 3)]
    features, labels = training.make_examples(target(), judged, rows=2, length=16)
    judge = training.fit_judge(features, labels)
    training.threshold_for(judge(features), labels, wrong=0.02)


def check_model(folder):
    specjax.check_model(target().model, target().params)


def compare_rules(folder):
    analysis.acceptance("standard", [0.5, 0.3, 0.2], [0.2, 0.5, 0.3], 1)


def train_exits(folder):
    tokens, length = [[1, 2, 3, 4, 5, 6]], [6]
    adaptive.train_sorted(toy.tiny_llama(layers=3), jnp.asarray(tokens, jnp.int32), jnp.asarray(length), steps=2)


@pytest.mark.parametrize(
    "run",
    [
        train_judge,
        compare_rules,
        *map(exhaustive, (train_head, train_stopping, train_denoiser, check_model, train_exits)),
    ],
)
def test_it_runs_in_unusual_modes(run, tmp_path):
    target()
    with unusual_modes():
        run(tmp_path)
