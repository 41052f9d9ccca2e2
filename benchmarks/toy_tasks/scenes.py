"""Scenes of coloured shapes on a grid of four rows and columns, and questions about them with answers in sentences.

    how many red shapes are there ?
    row one : a red circle , one . row two : nothing . row three : a blue cross , one , then a red square , two . ...

Some words of an answer are only in the image, and others follow from the words before them. The questions of
`TEXT_KINDS` need no image. All words are in `WORDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

SIDE, CELL = 4, 16
SIZE = SIDE * CELL
"""The rows and columns of an image, in pixels."""

COLOURS = {"red": (205, 40, 45), "blue": (40, 70, 205), "green": (45, 150, 60), "yellow": (230, 195, 40)}
SHAPES = {"circle": "circles", "square": "squares", "triangle": "triangles", "cross": "crosses"}
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LETTERS = sorted(set("".join((*COLOURS, *SHAPES))))

MARKS = ".", ",", ":", "?"
OTHER_WORDS = (
    "describe the scene what do you see is in row column where how many are there shape shapes "
    "a so i look for nothing then beside it all spell and spelled count from to that numbers read grid"
)

WORDS = tuple(dict.fromkeys((
    *COLOURS, *SHAPES, *SHAPES.values(), *NUMBERS, *LETTERS, *MARKS, *OTHER_WORDS.split()
)))  # fmt: skip


class Shape(NamedTuple):
    """A shape in a cell of the grid. Rows and columns are counted from 1."""

    row: int
    column: int
    colour: str
    form: str

    @property
    def name(self) -> str:
        return f"{self.colour} {self.form}"


Scene = tuple[Shape, ...]


class Question(NamedTuple):
    """A question with its answer."""

    kind: str
    text: str
    answer: str


def make_scene(rng: np.random.Generator) -> Scene:
    """Return a scene of three to six shapes in different cells, in the order of reading."""
    cells = np.sort(rng.choice(SIDE**2, rng.integers(3, 7), replace=False))
    return tuple(
        Shape(int(cell) // SIDE + 1, int(cell) % SIDE + 1, str(rng.choice([*COLOURS])), str(rng.choice([*SHAPES])))
        for cell in cells
    )


def draw(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """Return the image uint8[SIZE, SIZE, 3] of a scene. Sizes, places, shades and the background vary."""
    image = np.full((SIZE, SIZE, 3), rng.uniform(215, 250))
    for shape in scene:
        y, x = np.indices((CELL, CELL)) - (CELL - 1) / 2 - rng.integers(-1, 2, (2, 1, 1))
        inside = _inside(shape.form, x, y, rng.uniform(5, 6.5))
        colour = np.array(COLOURS[shape.colour]) + rng.uniform(-20, 20)
        top, left = (shape.row - 1) * CELL, (shape.column - 1) * CELL
        image[top : top + CELL, left : left + CELL][inside] = colour
    return np.clip(image + rng.normal(0, 4, image.shape), 0, 255).astype(np.uint8)


def _inside(form: str, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    """Return bool[CELL, CELL], the pixels of a shape around the origin."""
    near = (abs(x) < radius) & (abs(y) < radius)
    forms = {
        "circle": x**2 + y**2 < radius**2,
        "square": near,
        "triangle": near & (abs(x) < (y + radius) / 2),
        "cross": near & (np.minimum(abs(x), abs(y)) < radius / 3),
    }
    return forms[form]


def _rows(scene: Scene, parts: list[str], last: int = SIDE) -> list[str]:
    """Return a sentence for each row to `last`, with the part of each of its shapes."""
    sentences = []
    for row in range(1, last + 1):
        in_row = [part for shape, part in zip(scene, parts, strict=True) if shape.row == row]
        sentences.append(f"row {NUMBERS[row]} : {' , then '.join(in_row) or 'nothing'} .")
    return sentences


def _counted(count: int, one: str, many: str) -> str:
    """Return a sentence with a number of things."""
    return f"so there {'is' if count == 1 else 'are'} {NUMBERS[count]} {one if count == 1 else many} ."


def _counting(scene: Scene, is_match: Callable[[Shape], bool], one: str, many: str) -> str:
    """Return an answer that counts along the rows."""
    count, parts = 0, []
    for shape in scene:
        count += is_match(shape)
        parts.append(f"a {shape.name} , {NUMBERS[count]}")
    return " ".join([*_rows(scene, parts), _counted(count, one, many)])


def _describe(scene: Scene, rng: np.random.Generator) -> tuple[str, str]:
    text = str(rng.choice(["describe the scene .", "what do you see ?", "what is in the scene ?"]))
    rows = _rows(scene, [f"a {shape.name}" for shape in scene])
    return text, " ".join([*rows, f"in all there are {NUMBERS[len(scene)]} shapes ."])


def _read(scene: Scene, rng: np.random.Generator) -> tuple[str, str]:
    names = {(shape.row, shape.column): shape.name for shape in scene}
    numbers = range(1, SIDE + 1)
    rows = [" , ".join(names.get((row, column), "nothing") for column in numbers) for row in numbers]
    sentences = [f"row {NUMBERS[row]} : {text} ." for row, text in zip(numbers, rows, strict=True)]
    return "read the grid .", " ".join(sentences)


def _count_colour(scene: Scene, rng: np.random.Generator) -> tuple[str, str]:
    colour = str(rng.choice([*COLOURS]))
    names = f"{colour} shape", f"{colour} shapes"
    return f"how many {names[1]} are there ?", _counting(scene, lambda shape: shape.colour == colour, *names)


def _count_form(scene: Scene, rng: np.random.Generator) -> tuple[str, str]:
    form = str(rng.choice([*SHAPES]))
    answer = _counting(scene, lambda shape: shape.form == form, form, SHAPES[form])
    return f"how many {SHAPES[form]} are there ?", answer


def _count_both(scene: Scene, rng: np.random.Generator) -> tuple[str, str]:
    wanted = _one_of(scene, rng)
    many = f"{wanted.colour} {SHAPES[wanted.form]}"
    answer = _counting(scene, lambda shape: shape.name == wanted.name, wanted.name, many)
    return f"how many {many} are there ?", answer


def _where(scene: Scene, rng: np.random.Generator) -> tuple[str, str]:
    name = _one_of(scene, rng).name
    rows = [shape.row for shape in scene if shape.name == name]
    sentences = _rows(scene, [f"a {shape.name}" for shape in scene], rows[0] if rows else SIDE)
    last = f"so the {name} is in row {NUMBERS[rows[0]]} ." if rows else f"so there is no {name} ."
    return f"where is the {name} ?", " ".join([*sentences, last])


def _in_row(scene: Scene, rng: np.random.Generator) -> tuple[str, str]:
    row = int(rng.integers(1, SIDE + 1))
    matches = [f"a {shape.name} in column {NUMBERS[shape.column]}" for shape in scene if shape.row == row]
    place = f"row {NUMBERS[row]}"
    last = _counted(len(matches), f"shape in {place}", f"shapes in {place}")
    return f"what is in {place} ?", f"{place} : {' , then '.join(matches) or 'nothing'} . {last}"


def _one_of(scene: Scene, rng: np.random.Generator) -> Shape:
    """Return a shape to ask for, which is in the scene in four of five cases."""
    if rng.random() < 0.8:
        return scene[rng.integers(len(scene))]
    return Shape(0, 0, str(rng.choice([*COLOURS])), str(rng.choice([*SHAPES])))


def _spell(scene: Scene, rng: np.random.Generator) -> tuple[str, str]:
    words = [str(word) for word in rng.choice([*COLOURS, *SHAPES], 3, replace=False)]
    answer = " ".join(f"{word} is spelled {' '.join(word)} ." for word in words)
    return f"spell {words[0]} , {words[1]} and {words[2]} .", answer


def _numbers(scene: Scene, rng: np.random.Generator) -> tuple[str, str]:
    first, last = (int(number) for number in rng.choice(np.arange(1, 10), 2, replace=False))
    step = 1 if first < last else -1
    numbers = [NUMBERS[number] for number in range(first, last + step, step)]
    answer = f"{' , '.join(numbers)} . that is {NUMBERS[len(numbers)]} numbers from {numbers[0]} to {numbers[-1]} ."
    return f"count from {numbers[0]} to {numbers[-1]} .", answer


Writer = Callable[[Scene, np.random.Generator], tuple[str, str]]
IMAGE_KINDS: Mapping[str, Writer] = {
    "describe": _describe, "read": _read, "colour": _count_colour, "form": _count_form, "both": _count_both,
    "where": _where, "row": _in_row,
}  # fmt: skip
"""Kinds of questions about an image."""
TEXT_KINDS: Mapping[str, Writer] = {"spell": _spell, "numbers": _numbers}
"""Kinds of questions without an image."""


def ask(kind: str, scene: Scene, rng: np.random.Generator) -> Question:
    """Return a question of a kind. Those of `TEXT_KINDS` contain all that the answer needs."""
    return Question(kind, *{**IMAGE_KINDS, **TEXT_KINDS}[kind](scene, rng))
