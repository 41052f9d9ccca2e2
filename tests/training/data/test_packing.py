"""Texts in rows: none is in two, none is lost, and drafts begin where the target's own tokens follow."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.training.data.packing import TrainingText, choose_round_starts, find_round_starts, pack

TEXTS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=12)


def text_of(i: int, prompt: int, answer: int) -> TrainingText:
    return TrainingText(tuple(100 * (i + 1) + j for j in range(prompt + answer)), prompt)


@settings(deadline=None)
@given(TEXTS, st.integers(1, 3), st.integers(4, 20))
def test_every_text_stands_once_in_a_row(sizes, rows, length):
    texts = [text_of(i, *size) for i, size in enumerate(sizes)]
    batches = pack(texts, rows, length)
    rows_of_text = []
    for packed in batches:
        tokens, first, counts = map(np.asarray, packed[:3])
        assert tokens.shape == (rows, length)
        for row in range(rows):
            for begin in np.unique(first[row]):
                in_text = (first[row] == begin) & (np.arange(length) >= begin)
                words = tokens[row, in_text]
                if words.any():
                    rows_of_text.append((tuple(words[words > 0].tolist()), int((counts[row] & in_text).sum())))
    expected = [(text.tokens[:length], max(0, min(len(text.tokens), length) - text.prompt_length)) for text in texts]
    assert sorted(rows_of_text) == sorted(expected)


def test_one_text_a_row():
    batches = pack([text_of(i, 2, 3) for i in range(3)], 2, 20, one_per_row=True)
    assert [int((np.asarray(packed.tokens) > 0).sum()) for packed in batches] == [10, 5]


def test_drafts_begin_two_tokens_before_one_that_the_target_wrote():
    [packed] = pack([text_of(0, 3, 3), text_of(1, 1, 2)], 1, 12)
    #  prompt 0 1 2, answer 3 4 5; prompt 6, answer 7 8: from 1 the root is 2 and the first draft 3
    assert np.flatnonzero(find_round_starts(packed)[0]).tolist() == [1, 2, 3, 6]
    np.testing.assert_array_equal(choose_round_starts(packed, 6), [[1, 2, 3, 6, -1, -1]])
    np.testing.assert_array_equal(choose_round_starts(packed, 2), [[1, 2]])
    some = choose_round_starts(packed, 2, np.random.default_rng(0))
    assert set(some[0].tolist()) < {1, 2, 3, 6} and some[0, 0] < some[0, 1]
