"""Models with per-layer embeddings read tokens only: vectors are refused by name before anything compiles."""

import jax
import jax.numpy as jnp
import pytest
from gemma4_models import FORMS, gemma4, loaded

import specjax
from specjax import UsageError
from specjax.models.heads.agreement import prompted_features
from specjax.models.heads.kinds import KINDS, init_head


def test_soft_prompts_are_refused_by_name(tmp_path):
    target = loaded(gemma4("small", num_hidden_layers=3, layer_types=FORMS["small"]["layer_types"][1:4],
                           num_kv_shared_layers=1), tmp_path)  # fmt: skip
    assert not target.model.capabilities.vectors
    head = init_head("ppd", KINDS["ppd"].of_target(target.model.config, num_prompts=2), jax.random.key(0))
    words = "has per-layer embeddings, which need tokens, so it reads no soft prompts"
    with pytest.raises(UsageError, match=words):
        jax.eval_shape(prompted_features, target, head, jnp.zeros((1, 4), jnp.int32))
    with pytest.raises(UsageError, match=r"soft prompts are vectors, but the model .* reads only tokens"):
        specjax.decode(target, head, [[1, 2]], key=0, max_new_tokens=2)
