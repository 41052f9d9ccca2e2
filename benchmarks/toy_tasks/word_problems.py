"""Word problems from templates, answered with their steps: most columns are determined by the question, but not all.

The problems are GSM-like sums in the form of `parallel_bench`. Each word and each number up to 20 is one token:

    ann has 7 apples . ann buys 5 apples . how many apples ?      7 + 5 = 12 . ann has 12 apples

The question alone determines signs, names and things, so they may be decided in any pass. It also determines the
results, but these must be calculated, and a second result depends on the first. The terms of a sum may come in either
order. Two terms that are decided in one pass may therefore both become the same number.

A prompt is padded with NOTHING and an answer with END, to a multiple of 4.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from toy_tasks.parallel_bench import BLOCK, Item, List, Task

MOST = 20  # the largest number
PEOPLE = ("ann", "ben", "cleo", "dan", "eva", "finn", "gus", "hana")
THINGS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps")
SIGNS = {"buys": "+", "finds": "+", "loses": "-", "sells": "-", "more": "+", "fewer": "-"}
OTHERS = ("has", "have", "and", "than", "how", "many", "in", "all", "they", "=", ".", "?", "+", "-", "<nothing>")
WORDS = (*map(str, range(MOST + 1)), *PEOPLE, *THINGS, *SIGNS, *OTHERS, "<end>", "<mask>")
VOCABULARY = len(WORDS)
NOTHING, END, MASK = range(VOCABULARY - 3, VOCABULARY)
_NUMBERED = {word: token for token, word in enumerate(WORDS)}

Step = tuple[int, str, int]  # a term, the sign, the other term


class Solution(NamedTuple):
    """The parts of an answer: its steps, and the counts of each person."""

    steps: tuple[Step, ...]
    who: str
    what: str


class ProblemTemplate(NamedTuple):
    """Questions of one form."""

    text: str  # {who}, {other}, {what}, {beside}, {a}, {b}, {c}, {gets}, {then}, {more}
    solve: Callable[[list[str]], Solution]  # takes the words of a question


def value(step: Step) -> int:
    """Return the result of a step."""
    first, sign, second = step
    return first + second if sign == "+" else first - second


def _once(at: int) -> Callable[[list[str]], Solution]:
    """Return a solver of one step; `at` is the index of the verb."""

    def solve(words: list[str]) -> Solution:
        return Solution(((int(words[2]), SIGNS[words[at]], int(words[at + 1])),), f"{words[0]} has", words[3])

    return solve


def _twice(words: list[str]) -> Solution:
    one = (int(words[2]), SIGNS[words[6]], int(words[7]))
    return Solution((one, (value(one), SIGNS[words[11]], int(words[12]))), f"{words[0]} has", words[3])


def _compared(words: list[str]) -> Solution:
    one = (int(words[2]), SIGNS[words[8]], int(words[7]))
    return Solution((one, (one[0], "+", value(one))), "they have", words[3])


TEMPLATES = {
    "once": ProblemTemplate("{who} has {a} {what} . {who} {gets} {b} {what} . how many {what} ?", _once(6)),
    "beside": ProblemTemplate(
        "{who} has {a} {what} and {b} {beside} . {who} {gets} {c} {what} . how many {what} ?", _once(9)
    ),
    "twice": ProblemTemplate(
        "{who} has {a} {what} . {who} {gets} {b} {what} . {who} {then} {c} {what} . how many {what} ?", _twice
    ),
    "compared": ProblemTemplate(
        "{who} has {a} {what} . {other} has {b} {more} {what} than {who} . how many in all ?", _compared
    ),
}  # fmt: skip


def tokens(text: str) -> List:
    """Return the tokens of words separated by blanks."""
    return tuple(_NUMBERED[word] for word in text.split())


def text(tokens: List) -> str:
    """Return the text without padding."""
    return " ".join(WORDS[token] for token in tokens if token not in (NOTHING, END))


def answers(solution: Solution) -> list[List]:
    """Return all correct answers."""
    steps = [
        [f"{a} {sign} {b} = {value((a, sign, b))} ." for a, b in ([(x, y)] if sign == "-" else {(x, y), (y, x)})]
        for x, sign, y in solution.steps
    ]
    last = f"{solution.who} {value(solution.steps[-1])} {solution.what}"
    return [tokens(" ".join((*order, last))) for order in itertools.product(*map(sorted, steps))]


def is_held_out(prompt: List) -> bool:
    """Return True if a question belongs to the test set, one in seven."""
    return sum((place + 1) * token for place, token in enumerate(prompt)) % 7 == 3


def _ask(template: ProblemTemplate, rng: np.random.Generator, held_out: bool) -> Item:
    while True:
        who, other = rng.permutation(PEOPLE)[:2]
        what, beside = rng.permutation(THINGS)[:2]
        gets, then = rng.choice(list(SIGNS)[:4], 2)
        a, b, c = rng.integers(1, 10, 3)
        words = {
            "who": who, "other": other, "what": what, "beside": beside, "gets": gets, "then": then,
            "more": rng.choice(["more", "fewer"]), "a": a, "b": b, "c": c,
        }  # fmt: skip
        question = template.text.format(**words)
        prompt = tokens(question)
        prompt += (NOTHING,) * (-len(prompt) % BLOCK)
        solution = template.solve(question.split())
        if is_held_out(prompt) == held_out and all(0 <= value(step) <= MOST for step in solution.steps):
            right = answers(solution)
            return Item(prompt, right[rng.integers(len(right))])


def _task(name: str, steps: int) -> Task:
    def is_right(prompt: List, answer: List) -> bool:
        return answer in answers(TEMPLATES[name].solve(text(prompt).split()))

    length = 6 * steps + 4
    columns = length + (length % BLOCK > 0)
    return Task(name, columns, lambda rng: _ask(TEMPLATES[name], rng, True), is_right, None)


TASKS_BY_NAME: dict[str, Task] = {
    task.name: task for task in (_task("once", 1), _task("beside", 1), _task("twice", 2), _task("compared", 2))
}


def training_item(rng: np.random.Generator, task: str) -> Item:
    """Draw a question for training, outside of the test set."""
    return _ask(TEMPLATES[task], rng, False)
