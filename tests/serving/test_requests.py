"""Requests with settings of their own, in one program; a source that keeps one waiting."""

import functools
import threading
import time

import jax
import numpy as np
import pytest
from tiers import those
from toy import markov, tiny_llama

import specjax
from specjax import Request, UsageError, arrivals, decode, drafters, serve
from specjax.processors import bias
from specjax.serving import admission
from specjax.serving import batch as module

LIMITS = {"slots": 2, "longest_prompt": 12, "max_new_tokens": 14}
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [5], [7, 8, 7, 8, 7], [9, 1], [3] * 12]
OWN = [
    {"temperature": 0.0},
    {"temperature": 1.3},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.5, "top_k": 20},
    {"temperature": 0.9, "top_p": 0.9},
]
COUNTS = [14, 9, 14, 11, 14]
DRAFTERS = {
    "prompt_lookup": lambda: drafters.prompt_lookup(3, min_ngram=1),
    "two_model": lambda: drafters.two_model(tiny_llama(seed=1, layers=1), 3),
    "close": lambda: drafters.two_model(tiny_llama(), 3),
    "branching": lambda: drafters.two_model(tiny_llama(), tree=specjax.trees.branching("2x2")),
}


def request(i, **more):
    return Request(PROMPTS[i], jax.random.key(i), COUNTS[i], **OWN[i] | more)


@functools.cache
def alone(name, i, **more):
    """Return the text of request i alone with the same key and settings. Those that a sampled one lacks do nothing, so
    there is one program."""
    options = OWN[i] | more
    if options["temperature"]:
        options = {"top_k": 64, "top_p": 1.0} | options
    drafter, key = DRAFTERS[name](), jax.random.key(i)[None]
    return decode(tiny_llama(), drafter, [PROMPTS[i]], key=key, max_new_tokens=COUNTS[i], **options).to_lists()[0]


def served(drafter, requests, **options):
    """Tokens, texts and reasons of each."""
    tokens, texts, reasons = [[] for _ in requests], ["" for _ in requests], [None] * len(requests)
    for news in serve(tiny_llama(), drafter, requests, **LIMITS | options):
        tokens[news.request] += news.tokens
        texts[news.request] += news.text
        reasons[news.request] = reasons[news.request] or news.finish_reason
    return tokens, texts, reasons


@pytest.mark.parametrize("name", those(("prompt_lookup", "close"), DRAFTERS))
def test_each_text_is_that_of_its_own_settings(name):
    """Greedy beside sampled rows, in either order; one program for all of them."""
    served(DRAFTERS[name](), [request(0)])
    sizes = lambda: [f._cache_size() for f in (admission.begin, module._empty, module._end, module.step)]
    num_programs = sizes()
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0]):
        tokens, _, reasons = served(DRAFTERS[name](), [request(i) for i in order])
        assert tokens == [alone(name, i) for i in order] and set(reasons) == {"length"}
    assert sizes() == num_programs and num_programs[0] > 0


def test_coupled_texts_too():
    tokens, _, _ = served(DRAFTERS["two_model"](), [request(i) for i in range(5)], sampling="coupled")
    assert tokens == [alone("prompt_lookup", i, sampling="coupled") for i in range(5)]


def test_where_a_request_does_not_say_it_is_as_serve_has_it():
    plain = [request(i)._replace(temperature=None, top_k=None, top_p=None) for i in range(3)]
    tokens, _, _ = served(DRAFTERS["prompt_lookup"](), plain, temperature=0.7, top_k=3)
    assert tokens[2] == alone("prompt_lookup", 2)
    off = plain[1]._replace(temperature=1.3, top_k=64, top_p=1.0)
    tokens, _, _ = served(DRAFTERS["prompt_lookup"](), [off], temperature=0.7, top_k=3, top_p=0.5)
    assert tokens[0] == alone("prompt_lookup", 1)


def test_each_ends_with_its_own_eos():
    text = alone("prompt_lookup", 0)
    eos = next(token for token in text[4:] if token not in text[:4])
    requests = [request(0, eos=eos), request(0), request(0, eos=[60, eos]), request(0, eos=())]
    cut = text[: text.index(eos) + 1]
    tokens, _, reasons = served(DRAFTERS["prompt_lookup"](), requests)
    assert tokens == [cut, text, cut, text] and reasons == ["eos", "length", "eos", "length"]
    tokens, _, reasons = served(DRAFTERS["prompt_lookup"](), requests, eos=eos)
    assert tokens == [cut, cut, cut, text] and reasons == ["eos", "eos", "eos", "length"]


class Letters:
    """Id i is a letter; 26 of them are shown by two ids each."""

    def decode(self, ids):
        return "".join(chr(97 + i % 26) for i in ids)


def test_each_text_ends_before_its_own_stop_string():
    """And the slot is free for the next request."""
    tokens_alone = alone("prompt_lookup", 0)
    text = Letters().decode(tokens_alone)
    stop = text[5:8]
    place = text.index(stop)
    requests = [request(0, stop=["never", stop]), request(0), request(0, stop=[text[-2:] + "?"]), request(1)]
    tokens, texts, reasons = served(DRAFTERS["prompt_lookup"](), requests, tokenizer=Letters())
    assert texts == [text[:place], text, text, Letters().decode(alone("prompt_lookup", 1))]
    assert reasons == ["stop", "length", "length", "length"]
    assert tokens == [tokens_alone[: place + 3], tokens_alone, tokens_alone, alone("prompt_lookup", 1)]


def test_what_may_begin_a_stop_string_is_held_back():
    tokens_alone = alone("prompt_lookup", 0)
    stop = Letters().decode(tokens_alone)[:2]
    news = list(
        serve(tiny_llama(), drafters.autoregressive(), [request(0, stop=[stop])], **LIMITS, tokenizer=Letters())
    )
    assert [n.finish_reason for n in news] == [None, "stop"] and [n.text for n in news] == ["", ""]


def test_without_eos_in_the_text():
    text = alone("prompt_lookup", 0)
    news = list(serve(tiny_llama(), None, [request(0, eos=text[2])], **LIMITS, tokenizer=Letters()))
    assert "".join(n.text for n in news) == Letters().decode(text[: text.index(text[2])])


def test_what_does_not_fit_is_refused_with_a_sentence():
    wrong = {
        "temperature must be at least 0, not -1": {"temperature": -1.0},
        "top_k must be a whole number of at least 1, not 0": {"top_k": 0},
        "top_p must be above 0 and at most 1, not 0": {"top_p": 0.0},
        "eos has 9 ids, more than the 8": {"eos": range(9)},
        "it has stop strings, which need a tokenizer; pass tokenizer= to serve": {"stop": ["x"]},
        "its stop must be a list of strings": {"stop": "x"},
        "its prompt has the token 64, outside of the model's vocabulary of 64": {"prompt": [1, 64]},
        "its prompt must be a list of token ids": {"prompt": "abc"},
    }
    requests = [request(1)._replace(**change) for change in wrong.values()]
    news = list(serve(tiny_llama(), drafters.autoregressive(), [*requests, request(1)], **LIMITS))
    for number, sentence in enumerate(wrong):
        (refused,) = (n for n in news if n.request == number)
        assert refused.finish_reason == "refused" and refused.error.startswith(sentence)
    assert [token for n in news if n.request == len(wrong) for token in n.tokens] == alone("prompt_lookup", 1)
    with pytest.raises(UsageError, match="temperature must be one number in serve"):
        serve(tiny_llama(), None, [], **LIMITS, temperature=np.array([0.0, 1.0]))


def test_a_source_that_keeps_one_waiting_does_not_hold_the_batch_up():
    """The second request comes only after the first has ended, which it could not if the batch waited for it."""
    ended = threading.Event()

    def source():
        yield request(0)
        assert ended.wait(60)
        yield request(1)

    tokens = [[], []]
    for news in serve(tiny_llama(), DRAFTERS["prompt_lookup"](), arrivals(source()), **LIMITS):
        tokens[news.request] += news.tokens
        if news.finish_reason:
            ended.set()
    assert tokens == [alone("prompt_lookup", i) for i in (0, 1)]


def waited_for(holds, seconds=120):
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def test_arrivals_hand_on_everything_in_order_then_end():
    assert [item for item in arrivals(iter(range(200))) if item is not None] == list(range(200))


def test_what_the_source_raises_is_raised():
    def source():
        yield 1
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        list(arrivals(source()))


def test_a_closed_one_leaves_no_thread_and_closes_its_source():
    closed = threading.Event()

    def source():
        try:
            while True:
                yield 1
        finally:
            closed.set()

    threads = lambda: [t for t in threading.enumerate() if t.name == "specjax-arrivals"]
    assert waited_for(lambda: not threads())
    items = arrivals(source())
    assert waited_for(lambda: next(items) == 1) and len(threads()) == 1
    items.close()
    assert closed.wait(20) and waited_for(lambda: not threads())
    served_one = serve(tiny_llama(), drafters.autoregressive(), arrivals(request(1) for _ in range(10**9)), **LIMITS)
    next(served_one)
    assert len(threads()) == 1
    served_one.close()
    del served_one
    assert waited_for(lambda: not threads())


def test_serve_does_not_spin_where_there_is_nothing_to_do():
    """It asks a source that has nothing yet a few hundred times a second, not as often as it can."""
    polls = 0

    def source():
        nonlocal polls
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            polls += 1
            yield None

    assert list(serve(markov(), drafters.autoregressive(), source(), **LIMITS)) == []
    assert 2 <= polls < 600


@pytest.mark.parametrize(
    "change",
    [
        {"max_new_tokens": 2.5}, {"max_new_tokens": "5"}, {"stop": 5}, {"stop": [1]}, {"stop": [b"x"]}, {"eos": 2**40},
        {"eos": [[1], [2, 3]]}, {"temperature": [[1], [2, 3]]}, {"key": 2**70}, {"key": "x"}, {"prompt": [[1], [2, 3]]},
        {"inputs": "abc"}, None,
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused_and_the_others_go_on(change):
    """A bad request is refused alone: one of them ended all that ran, and a limit of 2.5 tokens held its slot for
    ever."""
    wrong = [1, 2] if change is None else request(0)._replace(**change)
    served = list(
        serve(tiny_llama(), DRAFTERS["prompt_lookup"](), [wrong, Request([1, 2, 3], 0)], slots=2, longest_prompt=16,
              max_new_tokens=4)
    )  # fmt: skip
    assert served[0].finish_reason == "refused" and served[0].error
    assert sum(len(news.tokens) for news in served if news.request == 1) == 4


def test_a_model_that_gives_nan_is_named():
    target = tiny_llama()
    broken = type(target)(target.model, jax.tree.map(lambda x: x * float("nan"), target.params))
    served = list(
        serve(
            broken, DRAFTERS["prompt_lookup"](), [Request([1, 2, 3], 0)], slots=2, longest_prompt=16, max_new_tokens=4
        )
    )
    assert "NaN" in served[-1].error and served[-1].finish_reason == "failed"
    assert not any(news.tokens for news in served)


def test_a_request_whose_processors_ban_everything_is_named_and_the_others_go_on():
    halves = range(32), range(32, 64)  # one processor that bans everything is refused earlier
    everything, nothing = ([bias(dict.fromkeys(half, x)) for half in halves] for x in (-np.inf, 0.0))
    requests = [Request([1, 2, 3], n, processors=processor) for n, processor in enumerate((everything, nothing))]
    served = list(
        serve(
            tiny_llama(), DRAFTERS["prompt_lookup"](), requests, slots=2, longest_prompt=16, max_new_tokens=4,
            processors=nothing,
        )
    )  # fmt: skip
    [failed] = [news for news in served if news.request == 0]
    assert (failed.tokens, failed.finish_reason) == ([], "failed") and "the processors allow no token" in failed.error
    assert sum(len(news.tokens) for news in served if news.request == 1) == 4


def test_a_draft_model_is_not_copied_when_a_request_ends():
    drafter = DRAFTERS["two_model"]()
    buffers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(drafter.params)}
    served = list(serve(tiny_llama(), drafter, [Request([1, 2, 3], 0)], slots=2, longest_prompt=16, max_new_tokens=4))
    drafter_after = served[-1].drafter()
    assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(drafter_after.params)} == buffers
