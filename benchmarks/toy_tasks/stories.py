"""Stories from templates: short English texts whose people, things and counts stay the same within a story.

    Eva has 3 red apples in the kitchen. Finn gives Eva 2 more red apples. Now Eva has 5 red apples. ...

Each sentence chooses one of several events at random. The names, things and counts in it follow from the sentences
before it. A model must therefore remember the text, but can predict most bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PEOPLE = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana")
THINGS = ("apples", "books", "coins", "shells", "stamps", "marbles")
COLOURS = ("red", "blue", "green", "yellow")
PLACES = ("garden", "kitchen", "school", "harbour", "forest", "market")
MAX_COUNT = 9
EVENTS = 5  # sentences between the first and the last of a story


@dataclass
class World:
    """The facts of a story."""

    owner: str
    friend: str
    things: str  # with their colour
    place: str
    count: int


def story(rng: np.random.Generator) -> str:
    """Return a story of some 250 to 400 characters."""
    owner, friend = rng.choice(PEOPLE, 2, replace=False)
    things = f"{rng.choice(COLOURS)} {rng.choice(THINGS)}"
    world = World(str(owner), str(friend), things, str(rng.choice(PLACES)), int(rng.integers(2, MAX_COUNT)))
    first = f"{world.owner} has {world.count} {world.things} in the {world.place}."
    events = [EVENT_SENTENCES[rng.integers(len(EVENT_SENTENCES))](world, rng) for _ in range(EVENTS)]
    return " ".join([first, *events, f"In the end {world.owner} has {world.count} {world.things}."])


def _gift(world: World, rng: np.random.Generator) -> str:
    number = int(rng.integers(1, 4))
    if world.count + number > MAX_COUNT:
        return _loss(world, rng)
    world.count += number
    return (
        f"{world.friend} gives {world.owner} {number} more {world.things}. "
        f"Now {world.owner} has {world.count} {world.things}."
    )


def _loss(world: World, rng: np.random.Generator) -> str:
    number = int(rng.integers(1, 4))
    if world.count - number < 1:
        return _look(world, rng)
    world.count -= number
    return f"{world.owner} loses {number} of the {world.things}. Now {world.owner} has {world.count} {world.things}."


def _walk(world: World, rng: np.random.Generator) -> str:
    world.place = str(rng.choice([place for place in PLACES if place != world.place]))
    return f"{world.owner} and {world.friend} walk to the {world.place}."


def _look(world: World, rng: np.random.Generator) -> str:
    return f"They look at the {world.count} {world.things} in the {world.place}."


EVENT_SENTENCES = (_gift, _loss, _walk, _look)
