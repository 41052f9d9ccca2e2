"""The forms by hand, and where they are one of the models."""

import jax.numpy as jnp
import numpy as np
import pytest
import texts as lib
from tiers import exhaustive

from specjax import UsageError, processors
from specjax.collaborate.methods.fs_gen import contrastive, is_unsure, proxy

SMALL, LARGE, TUNED = (lib.history(seed) for seed in range(3))


def test_forms_by_hand():
    s, l = np.log([[0.5, 0.3, 0.2]]), np.log([[0.2, 0.75, 0.05]])
    log = lambda x: jnp.asarray(x, jnp.float32)
    scores = contrastive(log(s), log(l), jnp.float32(0.5), jnp.float32(0.1))  # 0.05 < 0.1 x 0.75
    np.testing.assert_allclose(scores[0], [*(s + 0.5 * (l - s))[0, :2], -np.inf], rtol=1e-5)
    assert jnp.argmax(contrastive(log(s), log(l), jnp.float32(0), jnp.float32(0.1))) == 0  # the small one's, plausible
    assert jnp.argmax(contrastive(log(s), log(l), jnp.float32(0), jnp.float32(0.9))) == 1
    all_large = contrastive(log(s), log(l), jnp.float32(1), jnp.float32(0))
    np.testing.assert_allclose(all_large, l, rtol=1e-5)
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


@pytest.mark.parametrize("gate, threshold, model", [
    ("threshold", 0.0, SMALL), ("threshold", 1.01, LARGE), exhaustive("margin", 0.0, SMALL),
    exhaustive("margin", 0.51, LARGE),
])  # fmt: skip
def test_a_router_that_never_or_always_asks(gate, threshold, model):
    result = lib.run("fs_gen", form="large", gate=gate, threshold=threshold, temperature=0.8)
    assert result.to_lists() == lib.plain(model, temperature=0.8)
    assert (result.share(int(model is LARGE)) == 1).all()


def log_softmax(logits):
    return logits - np.log(np.sum(np.exp(logits)))


def is_called(gate, base, large, threshold):
    second, first = np.sort(np.exp(log_softmax(base)))[-2:]
    return {
        "always": True,
        "threshold": first < (threshold or 0),
        "margin": (first - second) / 2 < (threshold or 0),
        "oracle": base.argmax() != large.argmax(),
    }[gate]


def by_the_rule(prompt, count, form, gate, strength=None, threshold=None, alpha=0.1):
    """Greedy text and authors in float64, one token at a time, by the card's rules."""
    tokens, authors = [], []
    for _ in range(count):
        s, l, tuned = (
            np.asarray(lib.table_logits(model, [*prompt, *tokens]), np.float64) for model in (SMALL, LARGE, TUNED)
        )
        base, author = (tuned, 2) if form == "proxy" else (s, 0)
        call = is_called(gate, base, l, threshold)
        logits = base
        if call:
            author = 1
            plausible = log_softmax(l) >= np.log(alpha) + log_softmax(l).max()
            logits = {
                "large": l,
                "contrastive": np.where(plausible, s + (strength or 0) * (l - s), -np.inf),
                "proxy": l + (strength or 0) * (tuned - s),
            }[form]
        tokens.append(int(logits.argmax()))
        authors.append(author)
    return tokens, authors


GATED = [
    ("contrastive", "threshold", 0.5, 0.6), ("proxy", "margin", 1.0, 0.25), ("contrastive", "margin", 0.9, 0.2),
    ("contrastive", "oracle", 0.5, None), ("contrastive", "always", 0.5, None), ("proxy", "threshold", 0.7, 0.6),
    ("proxy", "oracle", 1.0, None), ("proxy", "always", 1.0, None), ("large", "margin", None, 0.25),
]  # fmt: skip


@pytest.mark.parametrize("form, gate, strength, threshold", [*GATED[:2], *(exhaustive(*row) for row in GATED[2:])])
def test_every_form_behind_every_gate(form, gate, strength, threshold):
    """The text, its authors and the calls of the large model are those of the rule. The gate changes the text."""
    tuned = {"tuned": TUNED} if form == "proxy" else {}
    numbers = {"strength": strength, "threshold": threshold}
    result = lib.run("fs_gen", form=form, gate=gate, **numbers, **tuned, temperature=0.0)
    ours = [by_the_rule(prompt, 12, form, gate, **numbers) for prompt in lib.PROMPTS]
    assert [*zip(result.to_lists(), result.authors.tolist(), strict=True)] == ours
    calls = np.array([[author == 1 for author in authors] for _, authors in ours])
    assert gate in ("always", "oracle") or (calls.any() and not calls.all())
    if gate in ("threshold", "margin") and form != "large":  # the oracle's calls are those that change the text
        other = [by_the_rule(prompt, 12, form, "always", **numbers)[0] for prompt in lib.PROMPTS]
        assert other != result.to_lists()  # without the gate the text is another one
    passes = np.asarray(result.passes)[:, 1]  # the large model reads the tokens between two calls in a pass of its own
    assert (passes >= calls.sum(1)).all() and (gate == "oracle" or (passes <= 2 * calls.sum(1)).all())


def test_a_gated_token_is_sampled_from_its_logits():
    """The text of `proxy` without any call is the tuned model's; the other two models never run."""
    result = lib.run("fs_gen", form="proxy", gate="threshold", threshold=0.0, tuned=TUNED, temperature=0.8)
    assert result.to_lists() == lib.plain(TUNED, temperature=0.8)
    assert result.passes.tolist() == [[0, 0, 12]] * 3 and (result.share(2) == 1).all()


def test_proxy_of_an_untuned_model_is_the_large_one():
    result = lib.run("fs_gen", form="proxy", tuned=SMALL, temperature=0.8)
    assert result.to_lists() == lib.plain(LARGE, temperature=0.8) and result.passes.tolist() == [[12, 12, 12]] * 3


def test_the_oracle_asks_where_the_models_differ():
    result = lib.run("fs_gen", form="large", gate="oracle", temperature=0.0)
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
    alone = lib.run("fs_gen", form="large", gate="threshold", threshold=0.0, **shaped)
    assert alone.to_lists() == lib.plain(lib.history(0), **shaped)


def test_what_is_wrong_is_one_sentence():
    with pytest.raises(UsageError, match=r'form must be one of contrastive, .*, not "sum"'):
        lib.run("fs_gen", form="sum")
    with pytest.raises(UsageError, match="tuned"):
        lib.run("fs_gen", form="proxy")
    with pytest.raises(UsageError, match=r'gate must be one of always, .*, not "svm"'):
        lib.run("fs_gen", gate="svm")
    with pytest.raises(UsageError, match='strength is for contrastive and proxy, and form="large" does not read it'):
        lib.run("fs_gen", form="large", strength=0.5)
    with pytest.raises(UsageError, match='alpha is for contrastive, and form="large" does not read it'):
        lib.run("fs_gen", form="large", alpha=0.1)
    with pytest.raises(UsageError, match='threshold is for threshold and margin, and gate="oracle" does not'):
        lib.run("fs_gen", gate="oracle", threshold=0.5)
