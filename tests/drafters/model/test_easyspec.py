"""Groups of layers with parallel attention, and a draft cache without their approximate entries."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiers import exhaustive
from toy import chi_square, compiled, tiny_llama

from specjax import UsageError, decode, make_drafter, trees
from specjax.drafters import easyspec, two_model
from specjax.drafters.model.two_model import functions
from specjax.models import Gemma3Config, LlamaConfig, init_params, make_model
from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.models.rotary import Rotation
from specjax.types import Context, Target, Verdict

SHAPE = {
    "vocab_size": 32,
    "width": 16,
    "num_layers": 6,  # 0, then 1 to 4 in groups, then 5
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "mlp_width": 32,
}
LLAMA = LlamaConfig(**SHAPE, tied=False)
GEMMA = Gemma3Config(**SHAPE, is_global=(False, True, False, True, False, True), window=3)
PROMPTS = [[1, 2, 3, 1, 2], [4, 5], [3]]
OPTIONS = {"key": jax.random.key(3), "max_new_tokens": 12}


class Scale(nnx.Module):
    """Return a layer without norms, whose attention and MLP add a multiple of their input."""

    def __init__(self, attention: float, mlp: float):
        self.attention, self.mlp = attention, mlp

    def attend(self, x, inputs):
        return self.attention * x, (x, x)

    def feed(self, x, step):
        return self.mlp * x


@pytest.mark.parametrize(("group", "wanted"), [(1, 2.4024), (2, 2.2680)])
def test_scalar_toy_of_the_card(group, wanted):
    """Check gains .1 and .3 of attention and .2 and .4 of MLPs, between two layers that add zero."""
    layers = nnx.List([Scale(0, 0), Scale(0.1, 0.2), Scale(0.3, 0.4), Scale(0, 0)])
    cache = kv.KVCache((0,) * 4, (0,) * 4, jnp.zeros(1, jnp.int32))
    x = jnp.ones((1, 1, 1))
    step = L.make_pass_inputs(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1, 1), bool), cache, None, None)
    settings = L.AttentionSettings(Rotation.at(step.positions, jnp.zeros(1)))
    stream, pending, _ = L.run_layers(layers, x, step, cache, settings, group=group)
    np.testing.assert_allclose(stream[-1], wanted, atol=1e-6)
    assert len(stream) == 5
    np.testing.assert_allclose(pending.k[2], 1.32 if group == 1 else 1.0, atol=1e-6)  # what the second one read


def test_segments_cover_all_layers():
    for num_layers in range(1, 12):
        for group in range(1, 6):
            segments = L.layer_segments(num_layers, group)
            assert [i for start, size, n in segments for i in range(start, start + size * n)] == list(range(num_layers))
            assert all(size <= group and n > 0 for _, size, n in segments)
    assert L.layer_segments(9, 4) == [(0, 1, 1), (1, 4, 1), (5, 3, 1), (8, 1, 1)]


@functools.cache
def forward_at(group):
    @jax.jit
    def run(target):
        tokens = jnp.array([[3, 1, 4, 1], [5, 9, 2, 6]])
        positions = jnp.broadcast_to(jnp.arange(4), (2, 4))
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((4, 4), bool)), (2, 4, 4))
        cache = target.model.init_cache(target.params, None, 2, 8)
        options = {"positions": positions, "mask": mask, "taps": tuple(range(7)), "group": group}
        return target.model.forward(target.params, tokens, cache, **options)

    return run


@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=["llama", "gemma"])
def test_layers_of_a_group_read_one_stream(config):
    """Remove the MLP and attention of layer 2: the input of layer 3 does not change within one group."""
    params = init_params(config, jax.random.key(0))
    without = params | {"layers": params["layers"] | {2: jax.tree.map(lambda leaf: 0 * leaf, params["layers"][2])}}
    for group in (1, 3):  # (1, 2, 3) and (4)
        full, cut = (forward_at(group)(Target(make_model(config), p)) for p in (params, without))
        differs = [not np.allclose(a, b, atol=1e-5) for a, b in zip(full[1].k, cut[1].k, strict=True)]
        assert differs == [False, False, True, group == 1, True, True]
        stream = full[0].taps
        assert all(float(jnp.max(jnp.abs(a - b))) > 1e-3 for a, b in itertools.pairwise(stream))


@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=["llama", "gemma"])
def test_stacked_layers_give_the_same(config):
    params = init_params(config, jax.random.key(0))
    stacked = params | {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"].values())}
    apart = forward_at(3)(Target(make_model(config), params))
    scanned = forward_at(3)(Target(make_model(dataclasses.replace(config, stacked=True)), stacked))
    for a, b in zip(jax.tree.leaves(apart[0]), jax.tree.leaves(scanned[0]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    np.testing.assert_allclose(jnp.stack(apart[1].k), scanned[1].k, atol=1e-5)


@functools.cache
def draft_model():
    return tiny_llama(seed=3, layers=5)


def test_group_of_one_is_the_two_model_drafter_that_feeds_as_many_tokens_anew():
    sequential = easyspec(draft_model(), 3, group=1)
    assert sequential.propose is two_model(draft_model(), 3, lag=4).propose
    assert sequential.propose is not easyspec(draft_model(), 3).propose


@pytest.mark.exhaustive  # as it is the same function, rounding aside
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_group_of_one_drafts_as_any_two_model(temperature):
    sequential = easyspec(draft_model(), 3, group=1)
    run = lambda drafter: decode(tiny_llama(seed=3), drafter, PROMPTS, temperature=temperature, **OPTIONS)
    ours, wanted = run(sequential), run(two_model(draft_model(), 3))
    assert ours.to_lists() == wanted.to_lists()
    for a, b in zip(jax.tree.leaves(ours.stats), jax.tree.leaves(wanted.stats), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_root_law_is_exact_and_those_below_are_not():
    """Use the model as its own draft: the first token of a step is always right, later ones are not."""
    result = decode(draft_model(), easyspec(draft_model(), 3, group=3), PROMPTS, **OPTIONS)
    assert result.acceptance_by_depth[:, 0].tolist() == [1.0] * 3
    assert result.acceptance_by_depth[:, 1:].min() < 1
    assert decode(draft_model(), easyspec(draft_model(), 3, group=1), PROMPTS, **OPTIONS).acceptance_by_depth.min() == 1


def rounds(drafter, accepted):
    """Return (state, text, length) after each of several steps that accept these numbers of drafts."""
    drafter, text = compiled(drafter), np.random.default_rng(0).integers(0, 64, (2, 200), np.int32)
    length, context = 6, lambda: Context(jnp.asarray(text), jnp.full(2, length))
    state = drafter.init(drafter.params, context())
    for count in accepted:
        tree, state = drafter.propose(drafter.params, None, state, context(), jnp.full(2, 3))
        yield state, text, length
        text[:, length : length + count] = tree.tokens[:, 1 : count + 1]
        path = np.where(np.arange(4) <= count, np.arange(4), -1)
        verdict = Verdict(np.stack([path, path]), np.full(2, count + 1), np.zeros(2, np.int32))
        state = drafter.update(drafter.params, state, (), verdict)
        length += count + 1


@pytest.mark.parametrize("lag", [4, exhaustive(2)])
def test_the_cache_is_that_of_an_exact_prefill(lag):
    """Compare the cache in every step; it differs if fewer tokens are fed again, as in two_model."""
    drafter = easyspec(draft_model(), 3, group=3)
    if lag == 2:  # the mutant: keeps what approximate passes left
        drafter = functions(draft_model().model, trees.chain(3), 2, group=3).replace(params=draft_model().params)
    forward = jax.jit(lambda target, tokens: target.model.forward(
        target.params, tokens, target.model.init_cache(target.params, None, 2, 8),
        positions=jnp.broadcast_to(jnp.arange(32), (2, 32)),
        mask=jnp.broadcast_to(jnp.tril(jnp.ones((32, 32), bool)), (2, 32, 32)),
    )[1])  # fmt: skip
    gaps = []
    for state, text, length in rounds(drafter, (3, 0, 1, 3, 2, 3)):
        exact = forward(draft_model(), jnp.asarray(text[:, :32]))
        start = length - lag
        cache = state.state.cache
        assert cache.length.tolist() == [start] * 2
        for ours, pending, wanted in zip(
            (*cache.k, *cache.v), (*state.pending.k, *state.pending.v), (*exact.k, *exact.v), strict=True
        ):
            ours, pending, wanted = map(np.asarray, (ours, pending, wanted))
            ours_with_pending = np.concatenate([ours[:, :, :start], pending[:, :, :lag]], 2)
            gaps.append(np.abs(ours_with_pending - wanted[:, :, :length]).max())
    assert max(gaps) < 1e-5 if lag == 4 else max(gaps) > 1e-2


def test_sampled_text_has_the_law_of_the_target():
    """Compare three tokens with their exact distribution; half of the drafts come from approximate passes."""
    shape = {"vocab": 4, "width": 16, "num_heads": 2, "num_kv_heads": 1}
    target, draft, count = tiny_llama(layers=1, **shape), tiny_llama(seed=2, layers=5, **shape), 3000
    result = decode(
        target, easyspec(draft, 2, group=3), (jnp.ones((count, 1), jnp.int32), jnp.ones(count, jnp.int32)),
        key=jax.random.key(5), max_new_tokens=3, temperature=3.0,
    )  # fmt: skip
    counts = np.bincount(np.asarray(result.tokens) @ np.array([16, 4, 1]), minlength=64)
    triples = np.stack(np.meshgrid(*[np.arange(4)] * 3, indexing="ij"), -1).reshape(-1, 3)
    output, _ = jax.jit(target.model.forward)(
        target.params, np.pad(triples, ((0, 0), (1, 0)), constant_values=1),
        target.model.init_cache(target.params, None, 64, 8),
        positions=np.tile(np.arange(4), (64, 1)), mask=np.tile(np.tril(np.ones((4, 4), bool)), (64, 1, 1)),
    )  # fmt: skip
    distributions = np.asarray(jax.nn.softmax(output.logits[:, :3] / 3.0, -1), np.float64)
    distribution = np.prod(np.take_along_axis(distributions, np.asarray(triples)[:, :, None], 2), (1, 2))
    assert 0.1 < float(result.stats.accepted.sum() / result.stats.drafted.sum()) < 0.9
    assert chi_square(counts, distribution / distribution.sum()) > 1e-3


def test_a_draft_model_without_middle_layers_is_sequential():
    for layers in (1, 2, 3):
        draft = tiny_llama(seed=1, layers=layers)
        assert easyspec(draft, 3).propose is easyspec(draft, 3, group=1).propose
    wide, narrow = easyspec(tiny_llama(layers=5), 3, group=5), easyspec(tiny_llama(layers=5), 3, group=3)
    assert wide.propose is narrow.propose


def test_bad_settings():
    with pytest.raises(UsageError, match="group must be at least 1, not 0"):
        easyspec(draft_model(), group=0)
    with pytest.raises(UsageError, match="num_tokens must be at least 1"):
        make_drafter("easyspec", tiny_llama(), draft_model(), num_tokens=0)
