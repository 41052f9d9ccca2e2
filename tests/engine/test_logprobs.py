"""`decode(..., logprobs=True)` against a fresh pass over the whole text, and gradients of that pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import exhaustive, those
from toy import tiny_llama, tiny_llama_alike

from specjax import UsageError, decode, drafters, mesh, shard, stream, trees
from specjax.engine.step import buffer_size
from specjax.numerics.sampling import warp
from specjax.processors import ban
from specjax.types import Sampling

PROMPTS = [[1, 2, 3, 1, 2], [4, 5], [6, 7, 8, 9, 6, 7], [3]]
NEW = 16
WARPING = {"temperature": 0.7, "top_k": 9, "top_p": 0.9}


DRAFTERS = {
    "plain": drafters.autoregressive,
    "chain": lambda: drafters.two_model(tiny_llama_alike(), 3),
    "tree": lambda: drafters.two_model(tiny_llama_alike(), tree=trees.branching("3x2x1")),
    "n-grams, several widths": lambda: drafters.prompt_lookup(6),
}


def rescored(target, prompts, result, forbidden=(), **warping):
    """float32[B, NEW]: log p of the new tokens by one pass over each text, 0 behind the end."""

    @jax.jit
    def distribution(text):
        t = text.shape[1]
        mask = jnp.tril(jnp.ones((1, t, t), bool))
        cache = target.model.init_cache(target.params, None, 1, t)
        output, _ = target.model.forward(target.params, text, cache, positions=jnp.arange(t)[None], mask=mask)
        logits = output.logits.at[:, :, jnp.array(forbidden, int)].set(-jnp.inf)
        return jax.nn.log_softmax(warp(logits, Sampling(**warping)))[0]

    rows = []
    longest = max(map(len, prompts)) + NEW
    for prompt, new in zip(prompts, result.to_lists(), strict=True):
        text = prompt + new
        log_p = distribution(jnp.array([text + [0] * (longest - len(text))]))[len(prompt) - 1 : len(text) - 1]
        rows.append(np.pad(np.take_along_axis(log_p, np.array(new)[:, None], 1)[:, 0], (0, NEW - len(new))))
    return np.stack(rows)


@pytest.mark.parametrize("drafter", those(("chain",), DRAFTERS))
def test_they_are_those_of_a_fresh_pass(drafter):
    target, options = tiny_llama(), {"key": jax.random.key(1), "max_new_tokens": NEW, **WARPING}
    decoded = lambda eos: decode(target, DRAFTERS[drafter](), PROMPTS, eos=eos, logprobs=True, **options)
    result = decoded(eos=decoded(eos=target.model.vocab_size - 1).to_lists()[1][4])
    assert result.logprobs.shape == (4, NEW) and result.logprobs.dtype == jnp.float32
    assert result.lengths.min() <= 5
    wanted = rescored(target, PROMPTS, result, **WARPING)
    assert (wanted < -0.1).sum() > 10
    np.testing.assert_allclose(result.logprobs, wanted, atol=2e-4)


def test_greedy_tokens_are_certain():
    options = {"key": jax.random.key(1), "max_new_tokens": NEW, "logprobs": True}
    assert decode(tiny_llama(), DRAFTERS["chain"](), PROMPTS, **options).logprobs.tolist() == [[0.0] * NEW] * 4
    mixed = decode(
        tiny_llama(), drafters.autoregressive(), PROMPTS[:2], temperature=jnp.array([0.0, 1.0]), **options
    ).logprobs
    assert mixed[0].tolist() == [0.0] * NEW and (mixed[1] < 0).any()


@pytest.mark.parametrize("form, warping", [("tempered", {"temperature": 0.7}), ("raw", {"temperature": 1.0})])
def test_other_forms_ignore_what_is_not_theirs(form, warping):
    options = {"key": jax.random.key(1), "max_new_tokens": NEW, "logprobs": form}
    result = decode(tiny_llama(), DRAFTERS["chain"](), PROMPTS, **options, **WARPING)
    np.testing.assert_allclose(result.logprobs, rescored(tiny_llama(), PROMPTS, result, **warping), atol=2e-4)
    greedy = decode(tiny_llama(), DRAFTERS["chain"](), PROMPTS, **options)
    np.testing.assert_allclose(greedy.logprobs, rescored(tiny_llama(), PROMPTS, greedy, temperature=1.0), atol=2e-4)
    with pytest.raises(UsageError, match="logprobs must be True, False, or one of"):
        decode(tiny_llama(), DRAFTERS["plain"](), PROMPTS, key=0, max_new_tokens=1, logprobs="log")


@pytest.mark.parametrize("warping", [{}, WARPING], ids=["greedy", "sampled"])
def test_the_untempered_form_is_after_the_processors(warping):
    forbidden = [2, 5, 11]
    options = {"key": jax.random.key(1), "max_new_tokens": NEW, "processors": [ban(forbidden)]}
    result = decode(tiny_llama(), DRAFTERS["tree"](), PROMPTS, logprobs="untempered", **options, **warping)
    np.testing.assert_allclose(
        result.logprobs, rescored(tiny_llama(), PROMPTS, result, forbidden, temperature=1.0), atol=2e-4
    )


def test_they_come_only_if_asked_for_and_step_by_step_too():
    options = {"key": jax.random.key(1), "max_new_tokens": NEW, "temperature": 1.0}
    decoded = decode(tiny_llama(), DRAFTERS["chain"](), PROMPTS, logprobs=True, **options)
    assert jax.eval_shape(lambda: decode(tiny_llama(), DRAFTERS["chain"](), PROMPTS, **options)).logprobs is None
    parts = [[] for _ in PROMPTS]
    for step in stream(tiny_llama(), DRAFTERS["chain"](), PROMPTS, logprobs=True, **options):
        for row, new, count in zip(parts, step.info.logprobs, step.info.emitted, strict=True):
            row += new[:count].tolist()
    np.testing.assert_allclose(np.array(parts), decoded.logprobs, atol=1e-6)


def test_no_law_leaves_the_step():
    """Per token they cost one number: the loop carries nothing of the size of the vocabulary."""
    target = tiny_llama(vocab=1013)
    call = lambda logprobs: jax.make_jaxpr(
        lambda: decode(
            target, DRAFTERS["plain"](), PROMPTS, key=jax.random.key(1), max_new_tokens=NEW, temperature=1.0,
            logprobs=logprobs,
        )
    )()  # fmt: skip
    shapes = lambda jaxpr: [v.aval.shape for v in jaxpr.jaxpr.outvars]
    assert not any(1013 in shape for shape in shapes(call(True)))
    carried = lambda jaxpr: sorted(
        str(v.aval.shape) for eqn in _equations(jaxpr.jaxpr) if eqn.primitive.name == "while" for v in eqn.outvars
    )
    more = carried(call(True))
    for shape in carried(call(False)):
        more.remove(shape)
    size = buffer_size(max(map(len, PROMPTS)), NEW, 1, target.model.max_positions)
    assert more == [f"(4, {size})"]  # a place for each of the buffer


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(list(eqn.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def test_a_mesh_that_splits_the_vocabulary_gives_the_same():
    target = tiny_llama(num_heads=8, num_kv_heads=8)
    options = {"key": jax.random.key(1), "max_new_tokens": NEW, "logprobs": True, **WARPING}
    unsharded = decode(target, DRAFTERS["plain"](), PROMPTS, **options)
    split = decode(shard(target, mesh(1, 8)), DRAFTERS["plain"](), PROMPTS, **options)
    assert split.to_lists() == unsharded.to_lists()
    np.testing.assert_allclose(split.logprobs, unsharded.logprobs, atol=1e-4)


# Heads of 64 are those that the TPU kernel takes.
@pytest.mark.parametrize(("head_dim", "stacked"), [exhaustive(8, False), exhaustive(64, False), (64, True)])
def test_gradients_flow_through_the_models_own_pass(head_dim, stacked):
    target = tiny_llama(head_dim=head_dim, stacked=stacked)
    tokens = jnp.array([[1, 2, 3, 1, 2, 5]])

    def loss(params):
        cache = target.model.init_cache(target.params, None, 1, 6)
        mask = jnp.tril(jnp.ones((1, 6, 6), bool))
        output, _ = target.model.forward(params, tokens, cache, positions=jnp.arange(6)[None], mask=mask)
        log_p = jax.nn.log_softmax(output.logits[:, :-1])
        return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], 2))

    value, gradients = jax.jit(jax.value_and_grad(loss))(target.params)
    assert np.isfinite(value)
    for leaf in jax.tree.leaves(gradients):
        assert np.isfinite(leaf).all()
    size = sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(gradients)) ** 0.5
    step = jax.tree.map(lambda p, g: p - 1e-3 / size * g, target.params, gradients)
    np.testing.assert_allclose(float(value - jax.jit(loss)(step)), 1e-3 * size, rtol=0.05)
