"""Requests with automata of their own, in one program and in memory of a fixed size."""

import itertools

import jax
import numpy as np
import pytest
from processed import EOS, counting
from toy import markov

from specjax import Cancel, Request, UsageError, decode, drafters, processors, serve
from specjax.engine.prepare import Settings
from specjax.processors.automaton import automaton
from specjax.serving import admission, automata
from specjax.serving.automata import PIECE, AutomatonTable
from specjax.serving.requests import Limits, check_request

VOCAB, MIB = 12, PIECE * 4 / 2**20
ROWS = np.random.default_rng(0).dirichlet(np.full(VOCAB, 0.4), VOCAB).astype(np.float32)


def repeating(*word):
    """Return the automaton of texts that repeat a word, up to its end."""
    states = {i: {token: (i + 1) % len(word)} for i, token in enumerate(word)}
    return automaton(0, states, {0}, [EOS])


def long(seed, size):
    return repeating(*np.random.default_rng(seed).integers(1, VOCAB, size).tolist())


AUTOMATA = [None, counting(VOCAB), repeating(3, 5), repeating(7, 8, 9), long(0, 1400), long(1, 1400)]


def request(i, which, **changes):
    options = {"temperature": 0.9, "eos": (EOS,), "constraint": AUTOMATA[which]} | changes
    return Request([i % 5 + 1, 3], jax.random.key(i), 14, **options)


def wanted(i, which):
    ours = [] if which == 0 else [processors.constraint(AUTOMATA[which])]
    key = jax.random.key(i)[None]
    options = {"temperature": 0.9, "sampling": "coupled", "processors": ours, "eos": EOS, "max_new_tokens": 14}
    return decode(markov(ROWS), "autoregressive", [[i % 5 + 1, 3]], key=key, **options).to_lists()[0]


def served(requests, send=()):
    texts, reasons, errors = [[] for _ in requests], {}, {}
    drafter = drafters.prompt_lookup(3, min_ngram=1)
    options = {
        "longest_prompt": 4,
        "max_new_tokens": 14,
        "sampling": "coupled",
        "eos": (9, 10),
    }
    updates = serve(markov(ROWS), drafter, requests, slots=2, constraint_mib=2 * MIB, **options)
    sent = iter(send)
    update = next(updates)
    for _ in itertools.count():
        texts[update.request] += update.tokens
        if update.finish_reason:
            reasons[update.request], errors[update.request] = update.finish_reason, update.error
        try:
            update = updates.send(next(sent, None))
        except StopIteration:
            return texts, reasons, errors


def test_texts_are_those_of_decode_with_the_same_constraint_and_nothing_is_compiled_later(monkeypatch):
    pairs = [(i, (3 * i + 1) % 4) for i in range(9)]
    served([request(0, 0)])
    sizes = admission.begin._cache_size(), automata._put._cache_size()
    texts, reasons, _ = served([request(*pair) for pair in pairs])
    assert texts == [wanted(*pair) for pair in pairs]
    assert {reasons[i] for i in range(9)} <= {"eos", "length"}
    assert (admission.begin._cache_size(), automata._put._cache_size()) == sizes
    acquire = AutomatonTable.acquire  # and a mutant: all rows have the automaton at address 0
    monkeypatch.setattr(AutomatonTable, "acquire", lambda *arguments: acquire(*arguments) and 0)
    assert served([request(*pair) for pair in pairs])[0] != texts


def test_requests_wait_for_room():
    """There are two rows, and room for one of the long automata."""
    pairs = [(0, 4), (1, 5), (2, 4), (3, 1), (4, 0), (5, 5)]
    texts, _, errors = served([request(*pair) for pair in pairs])
    assert texts == [wanted(*pair) for pair in pairs] and not any(errors.values())


def test_one_that_waits_may_be_cancelled():
    texts, reasons, _ = served([request(0, 4), request(1, 5), request(2, 1)], send=[Cancel(1)])
    assert reasons[1] == "cancelled" and texts[1] == [] and texts[2] == wanted(2, 1)


def test_what_does_not_fit_is_refused():
    longer, wide = long(0, 3000), repeating(3, 40)
    texts, _, errors = served([request(0, 1), request(1, 0, constraint=longer), request(2, 0, constraint=wide)])
    assert texts[0] == wanted(0, 1)
    assert errors[1].startswith("its constraint takes 0.19 MiB, and there is room for 0.125; raise constraint_mib")
    assert errors[2].startswith("its constraint has tokens up to 40, but the model's vocabulary has 12")
    with pytest.raises(UsageError, match="it has a constraint, but serve has no room for automata; pass constraint_mi"):
        check_request(request(0, 1), Limits(4, 14, VOCAB, Settings()))


def test_automata_are_shared_and_the_oldest_unused_one_is_replaced():
    table = AutomatonTable(2 * MIB, VOCAB)
    first, second, third = AUTOMATA[1:4]
    assert table.acquire(first) == table.acquire(first) == 0 and table.acquire(second) == PIECE
    assert table.acquire(third) is None
    table.release(first)
    assert table.acquire(third) is None
    table.release(first)
    assert table.acquire(third) == 0 and table.acquire(second) == PIECE
    assert table.acquire(first) is None
