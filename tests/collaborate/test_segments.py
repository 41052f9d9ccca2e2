"""Tests of the ends of steps: the automaton against a search in the text itself."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import UsageError
from specjax.collaborate import segments

PIECES = ["a", "\n", ".\n", "\n\n", "b\n\na", "", "\na", ".", "ab."]


class Pieces:
    def decode(self, ids):
        return "".join(PIECES[i] for i in ids)


def kept_of(segmenter, rows, parts=1):
    """Tokens of each row's first step, read in `parts` portions, and whether it ended."""
    tokens = jnp.array(rows)
    run, total = segments.start(len(rows)), 0
    for portion in np.array_split(np.arange(tokens.shape[1]), parts):
        run, count = segments.follow(segmenter, run, tokens[:, portion], jnp.full((len(rows),), len(portion)))
        total += np.asarray(count)
    return total.tolist(), np.asarray(run.over).tolist()


@pytest.mark.parametrize("ends", [["\n\n"], [".", "\n\na"], ["aba", "ab."]])
@pytest.mark.parametrize("parts", [1, 3])
def test_it_ends_with_the_token_that_completes_a_string(ends, parts):
    rows = np.random.default_rng(0).integers(0, len(PIECES), (200, 12))
    counts, over = kept_of(segments.after_strings(ends, Pieces(), len(PIECES)), rows, parts)
    for row, count, ended in zip(rows, counts, over, strict=True):
        texts = ["".join(PIECES[i] for i in row[: n + 1]) for n in range(12)]
        first = next((n for n, text in enumerate(texts) if any(end in text for end in ends)), None)
        assert (count, ended) == ((12, False) if first is None else (first + 1, True))


def test_sequences_of_tokens_overlap():
    segmenter = segments.after_tokens([[1, 1, 2]], 4)
    assert kept_of(segmenter, [[1, 1, 1, 2, 0, 0], [1, 2, 1, 1, 0, 2]]) == ([4, 6], [True, False])


def test_wrong_ends_are_one_sentence():
    with pytest.raises(UsageError, match="must not be empty"):
        segments.after_tokens([[]], 4)
    with pytest.raises(UsageError, match="list of strings"):
        segments.after_strings("\n\n", Pieces(), len(PIECES))


SENTENCE_PIECES = ["a", "3", ".", ".", "14", " The", "1.5", "!", ".\n", "4.", "x.y", ".5", " 7", "\n", "?!", "2.", ".."]


class SentencePieces:
    """A tokenizer that knows the bytes of its tokens; decoding one alone loses the blank before a word."""

    def spellings(self):
        return [piece.encode() for piece in SENTENCE_PIECES] + [None]

    def decode(self, ids):
        return "".join(SENTENCE_PIECES[i] for i in ids).lstrip()


def end_of_sentence(row):
    """(tokens of the first sentence, True) or (all, False), in the text itself."""
    text = "".join(SENTENCE_PIECES[i] for i in row)
    ends = np.cumsum([len(SENTENCE_PIECES[i]) for i in row])
    for place, letter in enumerate(text):
        left, behind = text[place - 1 : place].isdigit(), text[place + 1 : place + 2]
        if letter in "?!\n" or (letter == "." and not (left and (behind.isdigit() or not behind))):
            return int(np.searchsorted(ends, place, side="right")) + 1, True
    return len(row), False


@pytest.mark.parametrize("parts", [1, 4])
def test_a_sentence_ends_with_the_token_that_has_the_mark_unless_digits_surround_it(parts):
    rows = np.random.default_rng(1).integers(0, len(SENTENCE_PIECES), (400, 10))
    segmenter = segments.after_sentences(SentencePieces(), len(SENTENCE_PIECES) + 1)
    counts, over = kept_of(segmenter, rows, parts)
    assert list(zip(counts, over, strict=True)) == [end_of_sentence(row) for row in rows]
    number = [SENTENCE_PIECES.index(piece) for piece in ("3", ".", "14", " The")]
    ended = [SENTENCE_PIECES.index(piece) for piece in ("3", ".", " The", "a")]
    assert kept_of(segmenter, [number, ended]) == ([4, 2], [False, True])


def test_a_delimiter_has_the_blank_before_a_word():
    """SentencePiece decodes a word alone without its blank."""
    counts, over = kept_of(
        segments.after_strings([". T"], SentencePieces(), len(SENTENCE_PIECES)), [[2, 5, 0], [2, 0, 5]]
    )
    assert (counts, over) == ([2, 3], [True, False])
