"""Records of decoding for SpecKV's network."""

import numpy as np
import pytest
import toy

from specjax import UsageError, stream
from specjax.controllers.spec_kv import features
from specjax.drafters import two_model
from specjax.training import record_steps
from specjax.training.methods.draft_lengths import random_lengths


def test_steps_of_all_prompts_and_lengths_are_recorded():
    """The target as its own draft model accepts all; another model does not; the features are those of the run."""
    target, prompts = toy.tiny_llama(), [[1, 2, 3], [7, 5], [4]]
    settings = {"max_new_tokens": 12, "gammas": (1, 3), "rows": 2}
    same = record_steps(target, target, prompts, key=0, **settings)
    assert same.features.shape == (len(same.drafted), 5)
    assert {1.0, 3.0} <= {*same.drafted} <= {1.0, 2.0, 3.0}  # 2: before the end
    np.testing.assert_array_equal(same.accepted, same.drafted)
    other = record_steps(target, toy.tiny_llama(seed=1), prompts, key=0, code=2, **settings)
    assert 0 <= other.accepted.sum() < other.drafted.sum() and (other.features[:, 4] == 2).all()
    steps = stream(
        target, two_model(target, 3, keep_logits=True), [prompts[0], prompts[1]], key=0, max_new_tokens=12,
        controller=random_lengths((1, 3)),
    )  # fmt: skip
    infos = [step.info for step in steps]
    np.testing.assert_allclose(same.features[:2], features(infos[0].signals), atol=1e-5)
    assert same.drafted[:2].tolist() == infos[1].drafted_depth.tolist()


def test_bad_settings():
    target = toy.tiny_llama()
    for options, words in (
        ({"gammas": ()}, "at least one draft length"),
        ({"gammas": (2, 0)}, "gammas must be"),
        ({"rows": 0}, "rows must be"),
        ({"code": 3}, r"code must be 0 \(float16\)"),
        ({"max_new_tokens": 1}, "no text has a second step"),
    ):
        with pytest.raises(UsageError, match=words):
            record_steps(target, target, [[1, 2]], key=0, **{"max_new_tokens": 4, "gammas": (2,)} | options)
