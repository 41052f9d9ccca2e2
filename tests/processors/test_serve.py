"""Requests with processors of their own settings, in one program."""

import jax
import numpy as np
from processed import counting
from toy import markov

from specjax import Request, decode, drafters, processors, serve
from specjax.processors.constraint import following
from specjax.serving import admission

VOCAB = 12
ROWS = np.random.default_rng(0).dirichlet(np.full(VOCAB, 0.4), VOCAB).astype(np.float32)
FREE = processors.constraint(counting(VOCAB), follow=None)
OURS = [processors.repetition(1.0), processors.bias({}), FREE]
OWN = [
    {},
    {"processors": [processors.repetition(1.9), processors.bias({3: 1.0, 4: -np.inf}), FREE]},
    {"processors": [processors.repetition(1.0), processors.ban([1, 2]), following(FREE, 0)], "min_p": 0.1},
]


def request(i, **changes):
    return Request([i + 1, 3], jax.random.key(i), 12, temperature=0.9, **OWN[i] | changes)


def texts(requests, **options):
    token_rows, errors = [[] for _ in requests], {}
    drafter = drafters.prompt_lookup(3, min_ngram=1)
    for news in serve(markov(ROWS), drafter, requests, slots=2, longest_prompt=4, max_new_tokens=12, **options):
        token_rows[news.request] += news.tokens
        if news.error:
            errors[news.request] = news.error
    return token_rows, errors


def test_each_text_is_that_of_its_own_settings():
    options = {"processors": OURS, "min_p": 0.0, "sampling": "coupled"}
    wanted = []
    for i in range(3):
        settings = {"processors": OURS, "min_p": 0.0} | OWN[i] | {"temperature": 0.9, "sampling": "coupled"}
        key = jax.random.key(i)[None]
        wanted += decode(
            markov(ROWS), "autoregressive", [[i + 1, 3]], key=key, max_new_tokens=12, **settings
        ).to_lists()
    first, _ = texts([request(0)], **options)
    compiled = admission.begin._cache_size()
    served, errors = texts([request(2), request(0), request(1)], **options)
    assert served == [wanted[2], wanted[0], wanted[1]] and first == wanted[:1] and not errors
    assert admission.begin._cache_size() == compiled
    other = request(1, processors=[processors.presence(1.0)])
    wider = request(1, processors=[OURS[0], processors.bias({}, room=17), FREE])
    unknown = request(1, processors=[OURS[0], processors.bias({VOCAB: 1.0}), FREE])
    copied = request(1, processors=[*OURS[:2], processors.constraint(counting(VOCAB))])
    served, errors = texts([other, request(0), wider, unknown, copied], **options)
    assert served[1] == wanted[0] and set(errors) == {0, 2, 3, 4}
    for number in (0, 2, 4):
        assert errors[number].startswith("its processors must be those of serve")
    assert errors[3].startswith("a logit bias has token 12, outside of the model's vocabulary")


def test_what_serve_has_not_compiled_is_refused():
    _, errors = texts([request(0, min_p=0.1), request(0, processors=OURS)])
    assert errors[0].startswith("its min_p needs a min_p") and errors[1].startswith("its processors must be those")
