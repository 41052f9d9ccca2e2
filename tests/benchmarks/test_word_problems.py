"""Word problems: what is asked, which answers are right, and what is kept back."""

import itertools
import re

import numpy as np
import pytest
from toy_tasks import parallel_bench as bench
from toy_tasks import word_problems as words

ANSWERED = {
    "once": ("ann has 7 apples . ann loses 5 apples . how many apples ?", "7 - 5 = 2 . ann has 2 apples"),
    "beside": ("ben has 3 pens and 9 eggs . ben buys 4 pens . how many pens ?", "4 + 3 = 7 . ben has 7 pens"),
    "twice": (
        "eva has 2 coins . eva finds 6 coins . eva sells 1 coins . how many coins ?",
        "2 + 6 = 8 . 8 - 1 = 7 . eva has 7 coins",
    ),
    "compared": (
        "gus has 5 books . dan has 2 fewer books than gus . how many in all ?",
        "5 - 2 = 3 . 3 + 5 = 8 . they have 8 books",
    ),
}
"""By hand."""
ORDERS = {"once": 1, "beside": 2, "twice": 2, "compared": 2}
"""How many answers of those are right: the terms of a sum come in either order, but where they are equal."""


@pytest.mark.parametrize("name", ANSWERED)
def test_answers_by_hand(name):
    task, (question, answer) = words.TASKS_BY_NAME[name], ANSWERED[name]
    prompt, right = words.tokens(question), words.answers(words.TEMPLATES[name].solve(question.split()))
    assert words.tokens(answer) in right and len(right) == ORDERS[name] and task.is_right(prompt, words.tokens(answer))
    assert task.is_right((*prompt, words.NOTHING), words.tokens(answer))
    wrong = re.sub(r"\d+ (\w+)$", r"20 \1", answer)
    assert not task.is_right(prompt, words.tokens(wrong)), "the number at the end"
    if " + " in answer:
        same = re.sub(r"(\d+) \+ (\d+)", r"\1 + \1", answer)
        assert not task.is_right(prompt, words.tokens(same)), "a sum of which one term is said twice"


@pytest.mark.parametrize("name", words.TASKS_BY_NAME)
def test_questions_and_answers(name):
    """Every step is true, and of what the steps before it came to."""
    task, rng = words.TASKS_BY_NAME[name], np.random.default_rng(0)
    for draw, held_out in ((task.draw, True), (lambda rng: words.training_item(rng, name), False)):
        for _ in range(40):
            item = draw(rng)
            assert task.is_right(item.prompt, item.answer) and words.is_held_out(item.prompt) == held_out
            assert len(item.prompt) % words.BLOCK == 0 and max(item.answer) < words.NOTHING
            assert len(item.answer) + (len(item.answer) % words.BLOCK > 0) == task.columns
            filled = bench.pad_answer(item.answer, words.END)
            assert len(filled) % words.BLOCK == 0 and bench.answer_of(filled, words.END) == item.answer
            text = words.text(item.answer)
            steps = re.findall(r"(\d+) ([+-]) (\d+) = (\d+) \.", text)
            assert [str(words.value((int(a), sign, int(b)))) for a, sign, b, _ in steps] == [step[3] for step in steps]
            assert all(previous[3] in (step[0], step[2]) for previous, step in itertools.pairwise(steps))
            assert re.search(r"(\d+) \w+$", text)[1] == steps[-1][3]


def test_both_orders_of_a_sum_are_taught():
    rng = np.random.default_rng(0)
    first = [(item.prompt[2], item.answer[0]) for item in (words.training_item(rng, "once") for _ in range(200))]
    assert {sentence == question for question, sentence in first} == {True, False}
