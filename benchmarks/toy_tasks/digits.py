"""Handwritten digits as tokens: codes of pairs of pixels, rows that end with a newline, and a class as the prompt.

The images are the 1,797 digits of scikit-learn, 8 by 8 pixels with values from 0 to 16. Two neighbouring pixels of a
row are one code of a codebook, which k-means makes. So an image has 8 rows of 4 codes and a newline token each.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from specjax import processors
from specjax.types import Processor

CODES, CLASSES = 32, 10
NEWLINE = CODES
FIRST_CLASS = NEWLINE + 1
ANY = FIRST_CLASS + CLASSES
"""The class of the unconditional prompt."""
VOCABULARY = ANY + 1
SIDE, PIXELS = 8, 2
ROW = SIDE // PIXELS + 1
TOKENS = SIDE * ROW
HELD_OUT = 400


class Digits(NamedTuple):
    images: np.ndarray  # float32[N, 8, 8], from 0 to 16
    classes: np.ndarray  # int64[N]


@functools.cache
def digits() -> tuple[Digits, Digits]:
    """Return the digits for training, and the held-out ones."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images, classes = data.images[order].astype(np.float32), data.target[order]
    return Digits(images[HELD_OUT:], classes[HELD_OUT:]), Digits(images[:HELD_OUT], classes[:HELD_OUT])


def make_codebook(images: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return a codebook float32[CODES, PIXELS] of the pairs of pixels."""
    from sklearn.cluster import KMeans

    pairs = images.reshape(-1, PIXELS)
    return KMeans(CODES, n_init=1, random_state=seed).fit(pairs).cluster_centers_.astype(np.float32)


def to_tokens(images: np.ndarray, codebook: np.ndarray) -> np.ndarray:
    """Return the tokens int[N, TOKENS] of images."""
    pairs = images.reshape(-1, PIXELS)
    square = np.sum(codebook**2, 1) - 2 * pairs @ codebook.T
    codes = np.argmin(square, 1).reshape(len(images), SIDE, -1)
    return np.pad(codes, ((0, 0), (0, 0), (0, 1)), constant_values=NEWLINE).reshape(len(images), TOKENS)


def to_images(tokens: np.ndarray, codebook: np.ndarray) -> np.ndarray:
    """Return the images float32[N, 8, 8] of tokens. A token in the place of a code that is no code is black."""
    grid = np.asarray(tokens).reshape(-1, SIDE, ROW)[:, :, :-1]
    pairs = np.where((grid < CODES)[..., None], codebook[np.minimum(grid, CODES - 1)], 0.0)
    return pairs.reshape(-1, SIDE, SIDE).astype(np.float32)


def augmented(data: Digits, count: int, seed: int) -> Digits:
    """Return `count` images made of `data`, some of them moved by one pixel, and all a bit darker or lighter."""
    rng = np.random.default_rng(seed)
    index = rng.integers(0, len(data.images), count)
    padded = np.pad(data.images, ((0, 0), (1, 1), (1, 1)))
    down, right = rng.choice([0, *[1] * 6, 2], (2, count))
    rows = (down[:, None] + np.arange(SIDE))[:, :, None]
    columns = (right[:, None] + np.arange(SIDE))[:, None]
    images = padded[index[:, None, None], rows, columns] * rng.uniform(0.85, 1.1, (count, 1, 1))
    return Digits(np.clip(images, 0, 16).astype(np.float32), data.classes[index])


def layout() -> Processor:
    """Return the processor that forces the newline of each row, and allows only codes elsewhere."""
    return processors.by_place([range(CODES), [NEWLINE]], ([0] * (ROW - 1) + [1]) * SIDE)
