"""Rules on a trained model: where columns may be decided together, where not, and which rules know it."""

import functools

import numpy as np
import pytest
import toy
from toy_tasks import parallel_bench as bench
from toy_tasks import word_problems as words

import specjax
from specjax.diffusion import methods
from specjax.training.methods import denoisers

FOLDER = toy.DATA / "diffusion"
COUNT = 8


@functools.cache
def trained(name: str):
    return denoisers.load_denoiser(FOLDER / f"{name}.safetensors")


def right(denoiser, task: str, method, count: int = COUNT) -> tuple[float, float]:
    """(share of right answers, tokens per pass) of greedy decoding."""
    tasks, end = (words.TASKS_BY_NAME, words.END) if task in words.TASKS_BY_NAME else (bench.TASKS_BY_NAME, bench.END)
    puzzle, rng = tasks[task], np.random.default_rng(5)
    items = [puzzle.draw(rng) for _ in range(count)]
    prompts = [list(item.prompt) for item in items]
    result = specjax.denoise(denoiser, method, prompts, key=0, max_new_tokens=puzzle.columns, eos=end)
    answers = [bench.answer_of(tuple(text), end) for text in result.to_lists()]
    share = np.mean([puzzle.is_right(item.prompt, answer) for item, answer in zip(items, answers, strict=True)])
    return float(share), float(np.sum(result.lengths) / np.sum(result.stats.target_passes))


def test_a_copy_is_right_all_at_once():
    denoiser = trained("full")
    assert right(denoiser, "copy", methods.llada(denoiser, steps=1)) == (1.0, bench.TASKS_BY_NAME["copy"].columns)


def test_a_square_is_right_one_column_a_pass():
    denoiser = trained("full")
    assert right(denoiser, "latin", methods.llada(denoiser)) == (1.0, 1.0)


@pytest.mark.exhaustive
def test_a_square_is_wrong_all_at_once():
    denoiser = trained("full")
    assert right(denoiser, "latin", methods.llada(denoiser, steps=1)) == (0.0, 16.0)


def test_a_threshold_keeps_the_square_and_is_quicker_and_a_loose_factor_does_not_keep_it():
    denoiser = trained("full")
    share, rate = right(denoiser, "latin", methods.fast_dllm(denoiser, tau=0.9))
    assert share == 1.0 and rate > 1.2
    share, rate = right(denoiser, "latin", methods.fast_dllm(denoiser, rule="factor", factor=2.0))
    assert share < 0.5 and rate > 1.2


@pytest.mark.exhaustive
@pytest.mark.parametrize(("task", "threshold"), [("sort", 0.9), ("shuffle", 0.5), ("sudoku", 0.9)])
def test_the_block_causal_model_keeps_its_answers_under_its_threshold(task, threshold):
    denoiser = trained("block4")
    share, rate = right(denoiser, task, "sdar", count=48)  # of 8 shuffles 3 or 5 are right, as the processor rounds
    assert share >= threshold and rate > (2.0 if task == "sort" else 1.0)


def test_a_word_problem_is_right_several_columns_a_pass_and_not_all_at_once():
    """A threshold decides the words together, which are determined; a sum's terms hang together, and results have to be
    calculated."""
    denoiser = trained("words")
    share, rate = right(denoiser, "once", methods.fast_dllm(denoiser, tau=0.9))
    assert share >= 0.75 and rate > 2.0
    assert right(denoiser, "once", methods.llada(denoiser, steps=1))[0] < share


@pytest.mark.exhaustive
def test_the_block_causal_model_solves_word_problems_too():
    share, rate = right(trained("words_block4"), "once", "sdar")
    assert share >= 0.75 and rate > 1.3
