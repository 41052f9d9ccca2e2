"""`specjax.as_target`: users' functions and Flax modules as targets and drafts, with the text or a cache as memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from own import LONGEST, VOCAB, OwnLinen, OwnNNX, empty_cache, plain, transformer, weights
from tiers import exhaustive, those

import specjax
from specjax import Target, UsageError, as_target, check_model, decode, trees
from specjax.drafters import prompt_lookup, two_model
from specjax.models import custom_caches

PROMPTS = [[1, 2, 3, 1, 2, 3], [5], [7, 8]]
OPTIONS = {"key": jax.random.key(1), "max_new_tokens": 12}
MADE = {
    "function, text, chains": lambda: as_target(plain, weights(), max_positions=LONGEST),
    "function, text, trees": lambda: as_target(transformer, weights(), max_positions=LONGEST),
    "function, cache": lambda: as_target(transformer, weights(), max_positions=LONGEST, cache=empty_cache),
    "nnx, cache": lambda: as_target(OwnNNX(), max_positions=LONGEST, cache=empty_cache),
    "nnx, text": lambda: as_target(OwnNNX(), max_positions=LONGEST, trees=False),
    "linen, cache": lambda: as_target(OwnLinen(), {"params": weights()}, max_positions=LONGEST, cache=empty_cache),
    "linen, text": lambda: as_target(OwnLinen(), weights(), max_positions=LONGEST),
}


@functools.cache
def made(name: str) -> Target:
    return MADE[name]()


@functools.cache
def greedy_texts() -> list[list[int]]:
    """Decode with the function itself, one token after another."""
    read, texts = jax.jit(plain), []
    for prompt in PROMPTS:
        text = np.zeros((1, 20), np.int32)
        text[0, : len(prompt)] = prompt
        for place in range(len(prompt), len(prompt) + OPTIONS["max_new_tokens"]):
            text[0, place] = np.argmax(read(weights(), text)[0, place - 1])
        texts.append(text[0, len(prompt) : place + 1].tolist())
    return texts


@pytest.mark.parametrize(
    "name",
    those([], MADE),
)
def test_texts_are_those_of_the_function(name):
    """This holds for drafts that are accepted and drafts that are not."""
    actual = decode(made(name), prompt_lookup(3), PROMPTS, **OPTIONS)
    assert actual.to_lists() == greedy_texts()
    assert 0 < int(actual.stats.accepted.sum()) < int(actual.stats.drafted.sum())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MADE)
def test_texts_under_drafts_of_an_own_model_are_those_of_the_function(name):
    target = made(name)
    able = target.model.capabilities.trees
    assert able == ("chains" not in name and name != "nnx, text")
    shape = "2x2" if able else "1x1"
    drafter = two_model(Target(target.model, jax.tree.map(lambda x: x * 1.05, target.params)), tree=trees.parse(shape))
    actual = decode(target, drafter, PROMPTS, **OPTIONS)
    assert actual.to_lists() == greedy_texts()
    assert float(actual.mean_accepted.mean()) > 0.5 and int(actual.stats.drafted.sum() - actual.stats.accepted.sum())


@pytest.mark.parametrize("name", those(["function, text, chains"], MADE))
def test_all_promises_are_kept(name):
    target = made(name)
    actual = check_model(target.model, target.params, reference=lambda params, tokens: plain(weights(), tokens))
    assert actual and len(actual.promises) == (13 if target.model.capabilities.trees else 10), actual


@jax.jit
def logits_of(target):
    """Compute logits of a text, by a pass over its end after its beginning, and by the function."""
    model, text = target.model, jnp.array([PROMPTS[0]])
    cache, recorded = model.init_cache(target.params, None, 1, 8), []
    for start, end in ((0, 2), (2, 6)):
        mask = jnp.tril(jnp.ones((1, end - start, end - start), bool))
        positions = jnp.arange(start, end)[None]
        output, pending = model.forward(target.params, text[:, start:end], cache, positions=positions, mask=mask)
        cache = model.commit(cache, pending, jnp.arange(end - start)[None], jnp.array([end - start]))
        recorded.append(output.logits)
    return jnp.concatenate(recorded, 1), plain(weights(), text)


@pytest.mark.parametrize("name", those(["linen, text"], ["nnx, cache", "linen, text"]))
def test_a_module_is_its_function(name):
    model = made(name).model
    assert (model.vocab_size, model.max_positions) == (VOCAB, LONGEST)
    np.testing.assert_allclose(*logits_of(made(name)), atol=1e-4)


def test_nothing_is_copied():
    module = OwnNNX()
    pairs = [(as_target(module, max_positions=8).params, nnx.state(module))]
    pairs += [(made(name).params, weights()) for name in ("linen, cache", "linen, text", "function, cache")]
    for ours, theirs in pairs:
        for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert x is y and x.unsafe_buffer_pointer() == y.unsafe_buffer_pointer()


def test_equal_models_are_one():
    assert made("nnx, cache").model == as_target(OwnNNX(seed=3), max_positions=LONGEST, cache=empty_cache).model
    assert made("linen, text").model == as_target(OwnLinen(), weights(3), max_positions=LONGEST).model
    assert made("function, cache").model == MADE["function, cache"]().model
    assert made("function, cache").model != made("function, text, trees").model
    assert made("nnx, cache").model.name == "OwnNNX" and made("function, cache").model.name == "transformer"


def test_what_a_pass_leaves_undone_is_refused_before_anything_runs():
    with pytest.raises(UsageError, match="cache needs a model with a parameter `cache`, which plain lacks"):
        as_target(plain, weights(), max_positions=8, cache=empty_cache)
    with pytest.raises(UsageError, match="no parameter `mask` or `attention_mask`, which trees need"):
        as_target(plain, weights(), max_positions=8, trees=True)
    with pytest.raises(UsageError, match=r"a Linen module or a function needs params.*pass \(\)"):
        as_target(plain, max_positions=8)
    with pytest.raises(UsageError, match="needs the argument `segments`, which specjax does not pass; wrap it"):
        as_target(lambda params, tokens, segments: tokens, (), max_positions=8, name="mine")
    with pytest.raises(UsageError, match=r"mine must return logits \[B, T, V\] for tokens \[1, 4\], not \[1, 4\]"):
        as_target(lambda params, tokens: tokens, (), max_positions=8, name="mine")
    for longest in (0, 1.5, True, "8", None):
        with pytest.raises(UsageError, match="max_positions must be a whole number of at least 1, not "):
            as_target(plain, weights(), max_positions=longest)
    for module in (OwnNNX, OwnLinen):
        with pytest.raises(UsageError, match=f"model is the class {module.__name__}; pass an instance"):
            as_target(module, weights(), max_positions=8)
    with pytest.raises(UsageError, match="must be a Flax module or a function, not str"):
        as_target("llama", (), max_positions=8)
    with pytest.raises(UsageError, match=r"mine must return logits .* not dict"):
        as_target(lambda params, tokens: {"logits": tokens}, (), max_positions=8, name="mine")
    silent = lambda params, tokens, positions, mask, cache: transformer(params, tokens, positions, mask, cache)[0]
    with pytest.raises(UsageError, match="mine must return the cache with the logits"):
        as_target(silent, weights(), max_positions=8, cache=empty_cache, name="mine")
    ring = lambda batch, slots: {"kv": jnp.zeros((batch, 2, 64, 2, 8)), "next": jnp.zeros((batch,), jnp.int32)}
    with pytest.raises(UsageError, match=r"float32\[2, 2, 64, 2, 8\] at \['kv'\] for 2 rows of 128 slots"):
        as_target(transformer, weights(), max_positions=8, cache=ring)
    drafter = two_model(made("function, cache"), tree=trees.parse("2x2"))
    with pytest.raises(UsageError, match="chain"):
        decode(made("function, text, chains"), drafter, PROMPTS, **OPTIONS)
    with pytest.raises(UsageError, match="takes tokens only"):
        made("function, cache").model.init_cache(None, jnp.zeros(1), 1, 8)


@pytest.mark.exhaustive
def test_padding_behind_the_last_place_is_no_number_otherwise(monkeypatch):
    """The model has fewer positions than a chunk of a prompt."""
    monkeypatch.setattr(custom_caches, "_clip_positions", lambda positions, max_positions: positions)
    target = as_target(transformer, weights(), max_positions=LONGEST, cache=empty_cache, name="beyond")
    assert str(check_model(target.model, target.params)) == "beyond: its logits are not numbers"


@pytest.mark.exhaustive
def test_pending_nodes_that_do_not_see_those_above_them(monkeypatch):
    alone = lambda mask, positions: jnp.broadcast_to(jnp.eye(3, 6, dtype=bool), (len(mask), 3, 6))
    right = custom_caches._earlier_mask
    broken = lambda mask, positions: alone(mask, positions) if mask.shape[1:] == (3, 6) else right(mask, positions)
    monkeypatch.setattr(custom_caches, "_earlier_mask", broken)
    target = as_target(transformer, weights(), max_positions=LONGEST, name="alone")
    assert "alone: tokens that are pending are read otherwise" in str(check_model(target.model, target.params))


def test_a_cache_may_be_of_chains_alone():
    target = as_target(transformer, weights(), max_positions=LONGEST, cache=empty_cache, trees=False)
    assert not target.model.capabilities.trees


@pytest.mark.parametrize("params", [(), exhaustive({"scale": 5.0})])
def test_a_function_with_hardly_any_parameters(params):
    """It has none with a dtype that would determine costs either."""
    scale = lambda params: params["scale"] if params else 1.0
    function = lambda params, tokens: jax.nn.one_hot(tokens + 1, VOCAB) * scale(params)
    target = as_target(function, params, max_positions=LONGEST)
    assert specjax.make_drafter("choice", target).traits.widths  # as `auto`, it weighs costs
    assert check_model(target.model, target.params)


@pytest.mark.exhaustive
def test_objects_with_logits_and_a_cache_that_has_another_order():
    """The axes of rows and slots are found; `.logits` and `.cache` are accepted in place of a tuple."""

    class Output:
        def __init__(self, logits, cache):
            self.logits, self.cache = logits, cache

    def turned(params, tokens, positions, mask, cache):
        stored = {"kv": jnp.transpose(cache["kv"], (2, 0, 1, 3, 4)), "next": cache["next"][None]}
        logits, new_cache = transformer(params, tokens, positions, mask, stored)
        return Output(logits, {"kv": jnp.transpose(new_cache["kv"], (1, 2, 0, 3, 4)), "next": new_cache["next"][0]})

    def cache(batch, slots):  # [layers, S, B, 2, D], in tiles of 128 slots
        slots = -(-slots // 128) * 128
        return {"kv": jnp.zeros((2, slots, batch, 2, 8)), "next": jnp.int32(0)}

    target = as_target(turned, weights(), max_positions=LONGEST, cache=cache)
    np.testing.assert_allclose(*logits_of(target), atol=1e-4)


def test_new_parameters_of_a_module_that_is_trained():
    module = OwnNNX()
    target = as_target(module, max_positions=LONGEST)
    nnx.update(module, nnx.state(OwnNNX(seed=5)))
    again = as_target(module, max_positions=LONGEST)
    assert again.model == target.model
    np.testing.assert_array_equal(again.params["embed"], weights(5)["embed"])


@pytest.mark.exhaustive
def test_it_is_served():
    target = made("function, cache")
    requests = [specjax.Request(prompt, jax.random.key(i), 6) for i, prompt in enumerate(PROMPTS)]
    texts = [[] for _ in PROMPTS]
    for piece in specjax.serve(target, "prompt_lookup", requests, slots=2, longest_prompt=8, max_new_tokens=6):
        texts[piece.request] += piece.tokens
    assert texts == [text[:6] for text in greedy_texts()]
