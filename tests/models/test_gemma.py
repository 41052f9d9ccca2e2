"""Models of the package gemma, Linen modules with positions in their cache, as targets with their own cache."""

import jax
import jax.numpy as jnp
import pytest
from own import of_page

from specjax import check_model

pytest.importorskip("gemma", reason="gemma is not installed")
from gemma.gm.nn._config import TransformerConfig
from gemma.gm.nn._modules import AttentionType
from gemma.gm.nn._transformer import Transformer

CONFIG = TransformerConfig(
    num_embed=64, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=8, num_kv_heads=2, final_logit_softcap=None,
    use_post_attn_norm=True, use_post_ffw_norm=True, use_qk_norm=True, sliding_window_size=5,
    attention_types=(AttentionType.LOCAL_SLIDING, AttentionType.GLOBAL),
)  # fmt: skip


def test_all_promises_are_kept_with_its_own_cache():
    """The windows of Gemma's own cache count positions, so that trees are right too."""
    model = Transformer(config=CONFIG, dtype=jnp.float32)
    start_time = jax.tree.leaves(model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))
    structure = jax.tree.structure(jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))
    keys = jax.random.split(jax.random.key(1), len(start_time))
    noisy = [x + 0.3 * jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, start_time, strict=True)]
    variables = structure.unflatten(noisy)
    target = of_page("of_gemma")(model, variables["params"])
    actual = check_model(
        target.model, target.params, reference=lambda params, tokens: model.apply({"params": params}, tokens + 0).logits
    )
    assert actual and len(actual.promises) == 13, actual
    for ours, theirs in zip(jax.tree.leaves(target.params), noisy, strict=True):
        assert ours is theirs
