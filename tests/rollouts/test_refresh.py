"""A head that is trained on own rollouts: its loss falls, the sampler uses it, and the texts do not change."""

import numpy as np
import pytest
from heads import tiny_head
from toy import tiny_llama

from specjax import UsageError
from specjax.drafters.combined.auto import auto
from specjax.rollouts import RolloutSampler
from specjax.rollouts.refresh import HeadRefresher

PROMPTS = [[1, 2, 3]] * 2 + [[4, 5]] * 2
SETTINGS = {"key": 3, "max_new_tokens": 12, "temperature": 0.5}


def test_the_loss_of_a_refreshed_head_falls_and_the_texts_stay_those_of_plain_decoding():
    policy = tiny_llama()
    head = tiny_head("eagle", policy)
    drafter = auto(64, head=head, widths=(1, 4), costs=(1.0, 1.1))
    samplers = [RolloutSampler(choice, max_prompt_length=4) for choice in (drafter, "autoregressive")]
    refresher = HeadRefresher(head, every=2, rows=4, length=24, rounds=8, learning_rate=3e-3)
    losses = []
    for _ in range(4):
        ours, plain = (sampler.sample(policy, PROMPTS, **SETTINGS) for sampler in samplers)
        assert [row.tolist() for row in ours.tokens] == [row.tolist() for row in plain.tokens]
        if refresher.add(PROMPTS, ours.tokens):
            for _ in range(8):
                params = refresher.update(policy)
                losses.append(float(refresher.loss))
            samplers[0].refresh(params)
    assert refresher.calls == 4 and len(losses) == 16 and refresher.seconds > 0
    assert np.mean(losses[-4:]) < np.mean(losses[:4])


def test_bad_numbers_are_refused():
    with pytest.raises(UsageError, match="length at least 8, not 1, 0, 64 and 256"):
        HeadRefresher(tiny_head("eagle", tiny_llama()), every=1, rows=0)
