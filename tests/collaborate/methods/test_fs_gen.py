"""The forms by hand, and where they are one of the models."""

import jax.numpy as jnp
import numpy as np
import pytest
import texts as lib
from tiers import exhaustive

from specjax import UsageError, processors
from specjax.collaborate.methods.fs_gen import contrastive, is_unsure, proxy

SMALL, LARGE = lib.history(0), lib.history(1)


def test_forms_by_hand():
    s, l = np.log([[0.5, 0.3, 0.2]]), np.log([[0.2, 0.75, 0.05]])
    log = lambda x: jnp.asarray(x, jnp.float32)
    scores = contrastive(log(s), log(l), jnp.float32(0.5), jnp.float32(0.1))  # 0.05 < 0.1 x 0.75
    np.testing.assert_allclose(scores[0], [*(s + 0.5 * (l - s))[0, :2], -np.inf], rtol=1e-5)
    assert jnp.argmax(contrastive(log(s), log(l), jnp.float32(0), jnp.float32(0.1))) == 0  # the small one's, plausible
    assert jnp.argmax(contrastive(log(s), log(l), jnp.float32(0), jnp.float32(0.9))) == 1
    whole = contrastive(log(s), log(l), jnp.float32(1), jnp.float32(0))
    np.testing.assert_allclose(whole, l, rtol=1e-5)
    np.testing.assert_allclose(proxy(log(s), log(l), log(s), jnp.float32(1)), l, rtol=1e-5)
    tuned = proxy(log(s), log(l), log(s[:, ::-1].copy()), jnp.float32(1))
    np.testing.assert_allclose(tuned, l + s[:, ::-1] - s, rtol=1e-5)
    missing = contrastive(log([[0.0, -np.inf]]), log([[0.0, -np.inf]]), jnp.float32(0.5), jnp.float32(0))
    np.testing.assert_array_equal(missing, [[0.0, -np.inf]])


def test_routers_by_hand():
    small = jnp.log(jnp.array([[0.6, 0.4], [0.9, 0.1]]))
    assert is_unsure(small, "threshold", 0.7).tolist() == [True, False]
    assert is_unsure(small, "margin", 0.2).tolist() == [True, False]  # 0.1 and 0.4
    assert not is_unsure(small, "threshold", 0.0).any() and is_unsure(small, "threshold", 1.01).all()


@pytest.mark.parametrize("form, strength, model", [
    ("threshold", 0.0, SMALL), ("threshold", 1.01, LARGE), exhaustive("margin", 0.0, SMALL),
    exhaustive("margin", 0.51, LARGE),
])  # fmt: skip
def test_a_router_that_never_or_always_asks(form, strength, model):
    result = lib.run("fs_gen", form=form, strength=strength, temperature=0.8)
    assert result.to_lists() == lib.plain(model, temperature=0.8)
    assert (result.share(int(model is LARGE)) == 1).all()


def test_proxy_of_an_untuned_model_is_the_large_one():
    result = lib.run("fs_gen", form="proxy", tuned=SMALL, temperature=0.8)
    assert result.to_lists() == lib.plain(LARGE, temperature=0.8) and result.passes.tolist() == [[12, 12, 12]] * 3


def test_the_oracle_asks_where_the_models_differ():
    result = lib.run("fs_gen", form="oracle", temperature=0.0)
    assert result.to_lists() == lib.plain(LARGE)
    for prompt, tokens, authors in zip(lib.PROMPTS, result.to_lists(), result.authors.tolist(), strict=True):
        for n, token in enumerate(tokens):
            small = int(lib.table_logits(SMALL, [*prompt, *tokens[:n]]).argmax())
            assert authors[n] == int(small != token)


def test_a_token_that_a_small_model_lacks_is_not_written():
    small, tuned = jnp.array([[0.0, 1.0, -jnp.inf, -jnp.inf]]), jnp.array([[0.0, -jnp.inf, 1.0, -jnp.inf]])
    large = jnp.array([[0.0, 1.0, 2.0, 3.0]])
    assert jnp.argmax(proxy(small, large, tuned, jnp.float32(1.0)), -1) == 0
    assert (proxy(small, large, tuned, jnp.float32(0.0)) == large).all()


def test_processors_shape_what_was_chosen():
    shaped = {"temperature": 0.8, "processors": [processors.repetition(1.7), processors.frequency(0.6)]}
    alone = lib.run("fs_gen", form="threshold", strength=0.0, **shaped)
    assert alone.to_lists() == lib.plain(lib.history(0), **shaped)


def test_what_is_wrong_is_one_sentence():
    with pytest.raises(UsageError, match=r'form must be one of contrastive, .*, not "sum"'):
        lib.run("fs_gen", form="sum")
    with pytest.raises(UsageError, match="tuned"):
        lib.run("fs_gen", form="proxy")
