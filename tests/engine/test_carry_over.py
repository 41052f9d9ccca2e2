"""Tests of what one text teaches the next ones, where several are decoded at the same time and end one after
another."""

import functools

import jax
import numpy as np
import pytest
from tiers import those
from toy import markov

from specjax import Request, decode, drafters, serve, stream
from specjax.engine.prepare import Settings, prepare
from specjax.engine.run import canonical, learned, start, step
from specjax.types import Hooks

RECYCLING = functools.partial(drafters.token_recycling, 30, num_nodes=7)
REMEMBERING = {
    "token_recycling": RECYCLING,
    "auto": lambda: drafters.auto(30, costs=(1.0, 1.01, 1.02, 1.03)),
    "stand": lambda: drafters.stand(30, num_nodes=8, buckets=64),
    "aded": lambda: drafters.aded(num_nodes=7, buckets=64),
    "choice": lambda: drafters.choice(RECYCLING(), depths=(3,), costs=(1.0, 1.01)),
    "suffix": lambda: drafters.suffix(4, fallback=RECYCLING()),
}


def cycle(stride):
    """A target that goes round 30 tokens."""
    return markov(np.eye(30, dtype=np.float32)[(np.arange(30) + stride) % 30] + 1e-9)


def text(drafter, stride, first):
    """Return what a row has learned after 14 tokens, and how many of its drafts were accepted."""
    prompt, key = [[first]], jax.random.key(0)
    job = prepare(cycle(stride), drafter, prompt, Settings(), key=key, max_new_tokens=14)
    state, over, accepted = start(job), False, 0
    while not over:
        state, info, over = step(job.parts, state)
        accepted += int(info.accepted[0])
    return state.draft, accepted


@pytest.mark.parametrize("name", those(("token_recycling", "auto"), REMEMBERING))
def test_a_text_that_ends_late_takes_nothing_back(name):
    drafter = REMEMBERING[name]()
    early = learned(drafter, text(drafter, 1, 14)[0])  # 15 follows 14, ...
    long, _ = text(early, 1, 0)
    short, _ = text(early, -1, 29)  # now 28 follows 29, ...
    early_drafter = learned(early, short)
    late_drafter = learned(early_drafter, long)
    accepted = [text(candidate, -1, 29)[1] for candidate in (drafter, early_drafter, late_drafter)]
    assert accepted[2] >= accepted[1] > accepted[0] + 5
    assert text(late_drafter, 1, 0)[1] > text(early_drafter, 1, 0)[1] + 5


def test_what_stays_as_it_is_is_not_copied():
    """A corpus, or a draft model, of a drafter that remembers something else."""
    parameters = {"corpus": np.arange(4), "learnt": jax.numpy.zeros(())}
    learning = lambda params, state: params | {"learnt": params["learnt"] + 1}
    drafter = drafters.autoregressive().replace(params=jax.device_put(parameters), hooks=Hooks(export=learning))
    target, prompts, options = cycle(1), [[3]], {"key": 0, "max_new_tokens": 2}
    requests = [Request(prompts[0], 0)] * 3
    last = lambda steps: list(steps)[-1].drafter()
    for updated, lessons in (
        (decode(target, drafter, prompts, **options).drafter, 1),
        (last(stream(target, drafter, prompts, **options)), 1),
        (last(serve(target, drafter, requests, slots=2, longest_prompt=1, max_new_tokens=2)), 4),
        (canonical(target, drafter), 1),
    ):
        assert updated.params["corpus"] is drafter.params["corpus"]
        assert updated.params["learnt"] == lessons
