"""Tasks that show the cost of decoding several tokens at once: list operations, squares and sums.

Kang et al.: ParallelBench: Understanding the Trade-offs of Parallel Decoding in Diffusion LLMs (2025), arXiv
2510.04767, with single tokens for names.

The columns of an answer are either determined by the question or depend on each other. Determined columns may be
decided in one pass. Columns that depend on each other may not: each one can be plausible alone while together they are
wrong. `Task.together` is the probability that independent draws from the correct marginals give a correct answer.

A prompt is [task, argument, list of N], or [task, nothing, nothing, nothing] for a square. The answer is padded with
END to a multiple of 4.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

NAMES, N = 16, 6  # tokens 0 ... 15 are names; a list has 6 different ones
DIGIT = NAMES  # the token of the digit 0
TASKS = DIGIT + 10
NOTHING = TASKS + 8
END = NOTHING + 1
MASK = END + 1
VOCABULARY = MASK + 1
BLOCK = 4

List = tuple[int, ...]


class Item(NamedTuple):
    """A question with one correct answer."""

    prompt: List
    answer: List  # without END


class Task(NamedTuple):
    """A kind of question, with a generator and a check of its answers."""

    name: str
    columns: int  # length of the padded answer, at most one END included
    draw: Callable[[np.random.Generator], Item]
    is_right: Callable[[List, List], bool]  # (prompt, answer without END)
    together: float | None  # probability for independent draws from correct marginals; None: depends on the question


def _names(rng: np.random.Generator, count: int) -> List:
    return tuple(rng.permutation(NAMES)[:count].tolist())


def _list_task(number: int, answer: Callable[[np.random.Generator, List, int], List], argument: bool = False):
    def draw(rng: np.random.Generator) -> Item:
        names = _names(rng, N + 1)
        word, names = (names[0] if argument else NOTHING), names[1:]
        return Item((TASKS + number, word, *names), answer(rng, names, word))

    return draw


def _shuffle(rng: np.random.Generator, names: List, word: int) -> List:
    while (order := tuple(rng.permutation(N).tolist())) == tuple(range(N)):
        pass
    return tuple(names[i] for i in order)


def _replace(rng: np.random.Generator, names: List, word: int) -> List:
    place = int(rng.integers(N))
    return (*names[:place], word, *names[place + 1 :])


def is_replaced(prompt: List, answer: List) -> bool:
    """Return True if exactly one name was replaced by the argument of the prompt."""
    changes = [(old, new) for old, new in zip(prompt[2:], answer, strict=False) if old != new]
    return len(answer) == N and len(changes) == 1 and changes[0][1] == prompt[1]


def _squares() -> list[List]:
    """Return all Latin squares of size 4, row by row."""
    rows = list(itertools.permutations(range(1, 5)))
    return [
        sum(square, ())
        for square in itertools.product(rows, repeat=4)
        if all(len(set(column)) == 4 for column in zip(*square, strict=True))
    ]


SQUARES = _squares()


def _has_boxes(square: List) -> bool:
    return all(len({square[r + i * 4 + j] for i in (0, 1) for j in (0, 1)}) == 4 for r in (0, 2, 8, 10))


SUDOKUS = [square for square in SQUARES if _has_boxes(square)]


def _tokens(digits: List) -> List:
    return tuple(DIGIT + digit for digit in digits)


def _latin(rng: np.random.Generator) -> Item:
    return Item((TASKS + 5, NOTHING, NOTHING, NOTHING), _tokens(SQUARES[rng.integers(len(SQUARES))]))


def _sudoku(rng: np.random.Generator) -> Item:
    square = _tokens(SUDOKUS[rng.integers(len(SUDOKUS))])
    return Item((TASKS + 6, NOTHING, NOTHING, NOTHING, *square[:4]), square[4:])


def _digits(number: int, count: int) -> List:
    return _tokens(tuple(int(digit) for digit in str(number).zfill(count)))


def is_held_out(first: int, second: int) -> bool:
    """Return True if the sum of two numbers belongs to the test set, one in seven."""
    return (first * 100 + second) % 7 == 3


def _sum(rng: np.random.Generator, held_out: bool) -> Item:
    while True:
        first, second = (int(number) for number in rng.integers(100, size=2))
        if is_held_out(first, second) == held_out:
            break
    prompt = (TASKS + 7, NOTHING, *_digits(first, 2), NOTHING, NOTHING, *_digits(second, 2))
    return Item(prompt, _digits(first + second, 3))


def _is_sum(prompt: List, answer: List) -> bool:
    first, second = (10 * a + b - 11 * DIGIT for a, b in (prompt[2:4], prompt[6:8]))
    return answer == _digits(first + second, 3)


_SQUARE_SET, _SUDOKU_SET = {_tokens(x) for x in SQUARES}, {_tokens(x) for x in SUDOKUS}

TASKS_BY_NAME: dict[str, Task] = {
    task.name: task
    for task in (
        Task("copy", N + 1, _list_task(0, lambda rng, x, _: x), lambda p, a: a == p[2:], 1.0),
        Task("reverse", N + 1, _list_task(1, lambda rng, x, _: x[::-1]), lambda p, a: a == p[:1:-1], 1.0),
        Task(
            "sort", N + 1, _list_task(2, lambda rng, x, _: tuple(sorted(x))), lambda p, a: a == tuple(sorted(p[2:])), 1
        ),
        Task(
            "shuffle",
            N + 1,
            _list_task(3, _shuffle),
            lambda p, a: sorted(a) == sorted(p[2:]) and a != p[2:],
            # The marginals are not uniform: the identity is excluded, so each name is rarer at its own place.
            None,
        ),
        Task("replace", N + 1, _list_task(4, _replace, argument=True), is_replaced, (1 - 1 / N) ** (N - 1)),
        Task("latin", 16, _latin, lambda p, a: a in _SQUARE_SET, len(SQUARES) / 4**16),
        Task("sudoku", 12, _sudoku, lambda p, a: p[4:] + a in _SUDOKU_SET, None),
        Task("sum", 4, lambda rng: _sum(rng, True), _is_sum, 1.0),
    )
}


def shuffle_together(count: int) -> float:
    """Return the probability that independent draws from the marginals of all shuffles give a shuffle.

    A shuffle is a permutation of `count` names other than the identity.
    """
    orders = [order for order in itertools.permutations(range(count)) if order != tuple(range(count))]
    share = np.array([[sum(o[place] == name for o in orders) for name in range(count)] for place in range(count)])
    share = share / len(orders)
    return float(sum(math.prod(share[place, name] for place, name in enumerate(order)) for order in orders))


def pad_answer(answer: List, end: int = END) -> List:
    """Pad with END to a multiple of BLOCK. An answer that already has such a length gets none."""
    return (*answer, *[end] * (-len(answer) % BLOCK))


def training_item(rng: np.random.Generator, task: str) -> Item:
    """Draw a question for training. Sums of the test set are left out."""
    return _sum(rng, False) if task == "sum" else TASKS_BY_NAME[task].draw(rng)


def answer_of(tokens: List, end: int = END) -> List:
    """Return the tokens before the first END."""
    return tokens[: tokens.index(end)] if end in tokens else tokens
