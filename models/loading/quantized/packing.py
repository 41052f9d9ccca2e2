"""Whole numbers of a few bits that are packed into words of 32 bits, lowest bits first."""

from __future__ import annotations

import numpy as np

WORD = 32


def num_words(bits: int, count: int) -> int:
    """Return the number of words that contain `count` numbers."""
    return -(-bits * count // WORD)


def unpack(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Return numbers uint8[..., count] from words int32[..., n]. Numbers of 3, 5, 6 and 7 bits can span two words."""
    words = np.ascontiguousarray(words).view(np.uint32)
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        numbers = (words.view(np.uint8)[..., None] >> shifts) & np.uint8(2**bits - 1)
        return numbers.reshape(*words.shape[:-1], -1)[..., :count]
    first = np.arange(count) * bits
    word, shift = first // WORD, (first % WORD).astype(np.uint32)
    numbers = words[..., word] >> shift
    spans = shift + bits > WORD
    numbers[..., spans] |= words[..., word[spans] + 1] << (WORD - shift[spans])
    return (numbers & np.uint32(2**bits - 1)).astype(np.uint8)


def words_of(bits: int, start: int, stop: int) -> tuple[int, int, int]:
    """Return the first word of the numbers `start:stop`, the end of their words, and the first number in these.

    The first word is one at which a number begins.
    """
    first = start // WORD * WORD
    return first * bits // WORD, num_words(bits, stop), first


def signed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Subtract half of the range from numbers uint8[...]. Return int8[...]."""
    return (numbers - np.uint8(2 ** (bits - 1))).view(np.int8)
