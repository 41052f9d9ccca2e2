"""Sentences begun by one model and ended by the other."""

import numpy as np
import pytest
import texts as lib
from tiers import exhaustive
from toy import markov

from specjax import UsageError, drafters
from specjax.collaborate import segments
from specjax.collaborate.methods.foreal import foreal

SMALL, LARGE = lib.history(0), lib.history(1)


def test_never_and_always():
    never = lib.run("foreal", p=0.0)
    assert never.to_lists() == lib.plain(SMALL, temperature=0.8) and (never.log.led == 0).all()
    always = lib.run("foreal", p=1.0, lead=99)
    assert always.to_lists() == lib.plain(LARGE, key=lib.keys_of(1), temperature=0.8)


def test_sentences_of_ten_with_three_of_the_leader():
    circle = markov(np.roll(np.eye(10), 1, 1) * 0.9 + 0.01)  # 0 1 2 ... 9 0 1 ...
    result = foreal(
        circle, circle, [[9]], key=0, max_new_tokens=40, segmenter=segments.after_any([9], 10), lead=3, p=1.0
    )
    assert result.to_lists() == [[*range(10)] * 4] and result.share(1).tolist() == [0.3]
    assert result.authors[0, :40].tolist() == ([1] * 3 + [0] * 7) * 4


@pytest.mark.parametrize("inside", [False, exhaustive(True)])
def test_greedy_text_is_that_of_the_loop_by_hand(inside):
    """A sentence that ends within the leader's tokens begins another one."""
    drafter = drafters.two_model(lib.alike(1), 3) if inside else None
    result = lib.run("foreal", p=1.0, temperature=0.0, max_new_tokens=24, drafter=drafter)
    for row, prompt in enumerate(lib.PROMPTS):
        text, authors = list(prompt), []
        while len(authors) < 24:
            lead = lib.greedy(LARGE, text, min(2, 24 - len(authors)), lib.ENDS)
            text, authors = text + lead, authors + [1] * len(lead)
            if lead[-1] not in lib.ENDS:
                continuation = lib.greedy(SMALL, text, 24 - len(authors), lib.ENDS)
                text, authors = text + continuation, authors + [0] * len(continuation)
        assert result.to_lists()[row] == text[len(prompt) :]
        assert result.authors[row].tolist() == authors


def test_the_coin_falls_as_often_as_it_should():
    circle = markov(np.eye(2)[[0, 0]] * 0.98 + 0.01)  # sentences of one token
    result = foreal(
        circle, circle, [[0]] * 40, key=0, max_new_tokens=50, segmenter=segments.after_any([0, 1], 2), lead=3, p=0.6
    )
    assert result.log.all.tolist() == [50] * 40
    assert abs(np.mean(result.log.led) / 50 - 0.6) < 3 * np.sqrt(0.24 / 2000)


PIECES = ["The", " cat", " sat", ".", " A", " 3", "5", " dog"]


class Pieces:
    def decode(self, ids):
        return "".join(PIECES[i] for i in ids)


def chain(*pieces):
    """A model that writes these pieces in a circle."""
    ids = [PIECES.index(piece) for piece in pieces]
    table = np.full((8, 8), 1e-3)
    for token, following in zip(ids, ids[1:] + ids[:1], strict=True):
        table[token, following] = 1.0
    return markov((table / table.sum(1, keepdims=True)).astype(np.float32)), ids


@pytest.mark.parametrize(
    ("pieces", "authors"),
    [
        ((".", " A", " cat", " sat"), [1, 0, 0, 0]),  # the blank belongs to the word behind the full stop
        ((".", "5", " dog", " 3"), [0, 0, 0, 0]),  # 3.5
        ((".", " A", " dog", " 3"), [1, 0, 0, 0]),  # dog 3. A
    ],
)
@pytest.mark.parametrize("lead", [1, 3])
def test_the_leader_writes_the_first_words_of_sentences(pieces, authors, lead):
    model, ids = chain(*pieces)
    segmenter = segments.after_sentences(Pieces(), len(PIECES))
    result = foreal(model, model, [ids[:1]], key=0, max_new_tokens=12, segmenter=segmenter, lead=lead, p=1.0)
    assert result.to_lists() == [(ids[1:] + ids[:1]) * 3]
    if authors[0]:
        authors = ([1] * lead + [0] * (4 - lead)) * 3
    else:  # one sentence without an end
        authors = [1] * lead + [0] * (12 - lead)
    assert result.authors[0].tolist() == authors


def test_what_is_wrong_is_one_sentence():
    with pytest.raises(UsageError, match="p must be from 0 to 1, not 2"):
        lib.run("foreal", p=2)
