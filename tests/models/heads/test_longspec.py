"""LongSpec against its equations in NumPy, with a window shorter than the text, and its text and law."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
import training_runs
from head_runs import draft, random_params
from heads import config_of, tiny_head
from hybrids import tiny_hybrid
from rules import takes_all
from toy_models import law_of_triples

from specjax import UsageError, compression, decode, drafters, trees
from specjax.models.heads.contract import DraftHead, FeaturePairs
from specjax.models.heads.kinds import KINDS
from specjax.models.heads.longspec import LongSpecConfig, longspec_head
from specjax.models.hybrid.config import LayerKind
from specjax.numerics.quantization import Quantized, dequantize
from specjax.training import measure_acceptance, train
from specjax.training.data.packing import PackedBatch
from specjax.training.objectives.anchors import shift_positions
from specjax.training.objectives.recipes import recipe_of
from specjax.training.objectives.unroll import Rounds, run_target, unroll_rounds
from specjax.types import Context

WINDOW, SIZE, ROOT, DEPTHS = 5, 24, 18, 4
TEXT = np.random.default_rng(3).integers(0, 64, (1, SIZE)).astype(np.int32)
TARGETS = {
    "separate": {},
    "stacked": {"stacked": True},
    "int8": {"cache_dtype": "int8"},
    "stacked int8": {"stacked": True, "cache_dtype": "int8"},
    "windowed": {"window": 7},
}


@functools.cache
def target_of(name: str = "separate"):
    return toy.tiny_llama(layers=3, **TARGETS[name])


def read_text(target, count: int):
    """Return the target's cache of the first `count` tokens, and the keys and values [T, K, h] of its last layer."""
    model, length = target.model, jnp.array([count])
    positions, mask = jnp.arange(SIZE)[None], jnp.tril(jnp.ones((1, SIZE, SIZE), bool))
    cache = model.init_cache(target.params, None, 1, 128)
    output, pending = model.forward(target.params, jnp.asarray(TEXT), cache, positions=positions, mask=mask)
    last = lambda x: dequantize(x) if isinstance(x, Quantized) else x
    take = lambda x: last(jax.tree.map(lambda y: y[-1], x) if model.config.stacked else x[-1])
    keys = tuple(np.asarray(take(x))[0, :, :, : model.config.head_dim].swapaxes(0, 1) for x in (pending.k, pending.v))
    return model.commit(cache, pending, positions, length), output, keys


def drafted_logits(head, params, target, chunk: int) -> np.ndarray:
    """Return the logits float32[DEPTHS, V] of a draft along TEXT whose root is at ROOT, after reading by chunks."""
    cache, output, _ = read_text(target, ROOT)
    context = Context(jnp.asarray(TEXT), jnp.array([ROOT + 1]), cache=cache, target=target)
    memory = head.init_memory(params, context, 1, SIZE)
    for start in range(0, ROOT, chunk):
        features = jnp.pad(output.hidden, ((0, 0), (0, chunk), (0, 0)))[:, start : start + chunk]
        tokens = jnp.pad(jnp.asarray(TEXT), ((0, 0), (0, chunk + 1)))[:, start + 1 : start + 1 + chunk]
        count = jnp.array([min(chunk, ROOT - start)])
        memory = head.read(params, memory, FeaturePairs(features, tokens, count), context)
    return np.asarray(draft(head, params, memory, context, jnp.asarray(TEXT[:, ROOT + 1 : ROOT + DEPTHS])))[0]


def rotated(x: np.ndarray, positions: np.ndarray, base: float) -> np.ndarray:
    """Rotate x [T, H, h] at positions int[T]."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    return np.concatenate([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)


def attend(q, keys, values, visible) -> np.ndarray:
    """Return softmax attention [T, H h] of q [T, H, h] over keys [S, K, h], where visible bool[T, S]."""
    group = q.shape[1] // keys.shape[1]
    scores = np.einsum("thd,shd->hts", q, np.repeat(keys, group, 1)) * q.shape[-1] ** -0.5
    weights = np.exp(np.where(visible, scores, -np.inf) - scores.max())
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hts,shd->thd", weights, np.repeat(values, group, 1)).reshape(len(q), -1)


def equations(params, config: LongSpecConfig, target, lag: int) -> np.ndarray:
    """Return the logits float64[T, V] at every column t with target rows up to t - lag, as in a training pass.

    The window of a column is that of the root, which is lag - 1 columns before it.
    """
    c, t = config.layer, np.arange(SIZE)
    of_target = target.model.config
    get = lambda path: functools.reduce(lambda tree, name: tree[name], path.split("."), params)
    project = lambda x, path: x @ np.asarray(get(f"{path}.weight"), np.float64).T
    norm = lambda x, path: x / np.sqrt((x * x).mean(-1, keepdims=True) + c.norm_eps) * np.asarray(get(f"{path}.weight"))
    heads = lambda x: x.reshape(SIZE, -1, c.head_dim)
    x = np.asarray(target.model.embed(target.params, jnp.asarray(TEXT)), np.float64)[0]
    y, root = norm(x, "attention_norm"), t - (lag - 1)
    q, k = (rotated(heads(project(y, f"attention.{p}")), t, c.rope_base) for p in "qk")
    visible = (t <= t[:, None]) & (t >= root[:, None] - config.window)
    x = x + project(attend(q, k, heads(project(y, "attention.v")), visible), "attention.o")
    q = rotated(heads(project(norm(x, "cross_norm"), "cross_attention.q")), t, of_target.rope_base)
    visible = t <= t[:, None] - lag
    if of_target.window is not None:
        visible &= t > t[:, None] - of_target.window
    keys, values = read_text(target, ROOT)[2]
    with np.errstate(invalid="ignore"):
        x = x + np.nan_to_num(project(attend(q, keys, values, visible), "cross_attention.o"))
    y = norm(x, "mlp_norm")
    gate = project(y, "mlp.gate")
    x = x + project(gate / (1 + np.exp(-gate)) * project(y, "mlp.up"), "mlp.down")
    return x @ np.asarray(target.params["head"]["weight"], np.float64).T


@pytest.mark.parametrize("name", TARGETS)
def test_a_draft_has_the_logits_of_a_training_column_with_its_lag(name):
    target = target_of(name)
    config = config_of("longspec", target)
    assert config.window == WINDOW < ROOT
    head, params = longspec_head(config), random_params("longspec", config)
    by_chunk = [drafted_logits(head, params, target, chunk) for chunk in (3, 7, 18)]
    for lag in range(1, DEPTHS + 1):
        column = ROOT + lag - 1
        expected = equations(params, config, target, lag)[column]
        for drafted in by_chunk:
            np.testing.assert_allclose(drafted[lag - 1], expected, atol=2e-4, rtol=2e-4)
        for wrong in {lag - 1, lag + 1} - {0}:  # a mask that is off by one row is seen
            assert np.abs(equations(params, config, target, wrong)[column] - expected).max() > 1e-2


def test_a_wide_window_and_lag_1_are_ordinary_attention():
    target = target_of()
    config = dataclasses.replace(config_of("longspec", target), window=200)
    params = random_params("longspec", config)
    wide = equations(params, config, target, 1)
    np.testing.assert_array_equal(wide, equations(params, dataclasses.replace(config, window=SIZE), target, 1))
    drafted = drafted_logits(longspec_head(config), params, target, 6)
    np.testing.assert_allclose(drafted[0], wide[ROOT], atol=2e-4, rtol=2e-4)


def unrolled(name: str, token_positions=None, skipped=None) -> np.ndarray:
    """Return the logits [depths, V] of a training round whose root is at ROOT."""
    target = target_of(name)
    config = config_of("longspec", target)
    head, params = longspec_head(config), random_params("longspec", config)
    packed = PackedBatch(TEXT, np.zeros_like(TEXT), np.ones(TEXT.shape, bool))

    @jax.jit
    def run(params, target):
        rounds = Rounds(
            packed, run_target(target, head, packed, token_positions), jnp.array([[2, ROOT - 1]]),
            token_positions=token_positions, skipped=skipped,
        )  # fmt: skip
        stack = lambda depths: jnp.stack([depth.logits for depth in depths], 1)
        return unroll_rounds(head, params, target, rounds, DEPTHS if skipped is None else 1, stack)

    return np.asarray(run(params, target))[1]


@pytest.mark.parametrize("name", TARGETS)
def test_training_computes_what_is_drafted(name):
    target = target_of(name)
    config = config_of("longspec", target)
    drafted = drafted_logits(longspec_head(config), random_params("longspec", config), target, 18)
    np.testing.assert_allclose(unrolled(name), drafted, atol=3e-4, rtol=3e-4)


def test_a_round_that_skips_depths_is_a_training_column_with_that_lag():
    """The window of the draft moves with the token, so the window of the equations is longer by the skipped depths."""
    target = target_of()
    config = config_of("longspec", target)
    params = random_params("longspec", config)
    for lag in range(1, DEPTHS + 1):
        ours = unrolled("separate", skipped=jnp.array([[0, lag - 1]]))[0]
        column = dataclasses.replace(config, window=WINDOW - (lag - 1))
        np.testing.assert_allclose(ours, equations(params, column, target, lag)[ROOT + lag - 1], atol=3e-4, rtol=3e-4)


def test_anchor_positions_shift_both_models():
    none = jnp.zeros((1, 10), jnp.int32)
    positions = shift_positions(none, jnp.array([3]), jnp.array([100]))
    assert positions.tolist() == [[0, 1, 2, *range(103, 110)]]
    column = jnp.arange(SIZE)[None]
    np.testing.assert_allclose(unrolled("separate", column + 100), unrolled("separate"), atol=3e-4, rtol=3e-4)
    with_sinks = shift_positions(jnp.zeros_like(column), jnp.array([3]), jnp.array([100]))
    assert np.abs(unrolled("separate", with_sinks) - unrolled("separate")).max() > 1e-2
    packed = shift_positions(jnp.array([[0, 0, 2, 2, 2]]), jnp.array([1]), jnp.array([50]))
    assert packed.tolist() == [[0, 51, 2, 53, 54]]


@pytest.mark.parametrize("window", [5, 512])
def test_its_memory_does_not_grow_with_the_text(window):
    target = target_of()
    head = longspec_head(dataclasses.replace(config_of("longspec", target), window=window))

    def shapes(capacity: int):
        context = Context(jnp.zeros((2, 8), jnp.int32), jnp.ones((2,), jnp.int32), target=target)
        memory = jax.eval_shape(lambda: head.init_memory({}, context, 2, capacity))
        return [x.shape for x in jax.tree.leaves(memory)]

    assert shapes(64) == shapes(100_000)
    assert max(np.prod(shape) for shape in shapes(64)) == 2 * 2 * max(window, 128) * 8


PROMPTS = [list(range(30)), [5], [7, 7, 7]]


@pytest.mark.parametrize("name", ["stacked", "int8", "stacked int8", "windowed"])
def test_greedy_text_is_that_of_plain_decoding(name):
    target = target_of(name)
    run = lambda drafter: decode(target, drafter, PROMPTS, key=0, max_new_tokens=30)
    for tree in (trees.chain(3), trees.parse("top:3x2x1"), trees.parse("beam:2x3")):
        drafter = drafters.head_drafter(tiny_head("longspec", target), tree=tree)
        assert run(drafter).to_lists() == run("autoregressive").to_lists()


def test_a_hybrid_target_whose_last_layer_attends():
    for kinds in (
        (LayerKind("gated_delta"), LayerKind("attention")),
        (LayerKind("mamba2"), LayerKind("attention")) * 2,
    ):
        target = tiny_hybrid(kinds=kinds, num_layers=len(kinds), stacked=len(kinds) > 2)
        run = lambda drafter, target=target: decode(target, drafter, PROMPTS, key=0, max_new_tokens=30).to_lists()
        drafter = drafters.head_drafter(tiny_head("longspec", target), tree=trees.parse("top:2x1"))
        assert run(drafter) == run("autoregressive")


LAW = [1, 0, 2, 1]


def counted_triples(target, tree, verifier=None) -> np.ndarray:
    """Count int[3, 3, 3] three sampled tokens of a vocabulary of 3."""
    drafter = drafters.head_drafter(tiny_head("longspec", target), tree=trees.parse(tree))
    result = decode(
        target, drafter, [LAW], key=jax.random.key(7), max_new_tokens=3, temperature=1.0, samples_per_prompt=4000,
        verifier=verifier,
    )  # fmt: skip
    return np.bincount(np.asarray(result.tokens) @ np.array([9, 3, 1]), minlength=27).reshape(3, 3, 3)


@pytest.mark.parametrize("tree", ["2x1", "beam:2x2", "1x1"])
def test_sampled_text_has_the_law_of_the_target(tree):
    target = toy.tiny_llama(vocab=3)
    law = law_of_triples(target, LAW, temperature=1.0)
    assert toy.chi_square(counted_triples(target, tree), law) > 1e-3
    if tree == "2x1":
        assert toy.chi_square(counted_triples(target, tree, takes_all), law) < 1e-6


def test_targets_without_readable_keys_are_refused():
    config = config_of("longspec", target_of())
    head = DraftHead(longspec_head(config), random_params("longspec", config))

    def refused(target, words):
        with pytest.raises(UsageError, match=words):
            decode(target, drafters.head_drafter(head), [[1, 2]], key=0, max_new_tokens=4)

    recurrent = tiny_hybrid(kinds=(LayerKind("attention"), LayerKind("gated_delta")), num_layers=2)
    refused(compression.gear(target_of(), 4), "has a cache of the form gear:4.*choose another cache dtype")
    refused(recurrent, "that of hybrid has none .it is gated_delta.; choose a head that reads features")
    refused(toy.markov(), "the cache of .* has another form; choose a head that reads features")
    refused(toy.tiny_llama(num_kv_heads=4), "reads keys of 2 heads of size 8, but the last layer of .* has 4 of size 8")
    with pytest.raises(UsageError, match="that of hybrid has none"):
        KINDS["longspec"].of_target(recurrent.model.config)
    with pytest.raises(UsageError, match="must be at least 1, not 0"):
        dataclasses.replace(config, window=0)


def test_training_makes_it_draft_and_the_text_stays():
    target, head = training_runs.target(), training_runs.head_of("longspec")
    texts = training_runs.texts()
    recipe = recipe_of("longspec", learning_rate=1e-2)
    assert recipe.anchors and recipe.draws_depth
    fitted = train(target, head, texts, recipe=recipe, epochs=60, rows=2, length=32)
    shape = {"depths": 3, "rows": 2, "length": 32}
    untrained, trained = (measure_acceptance(target, one, texts, **shape).per_pass for one in (head, fitted))
    assert untrained < 1.2 < 1.8 < trained
    prompts = [list(text.tokens[: text.prompt_length]) for text in texts]
    run = lambda drafter: decode(target, drafter, prompts, key=0, max_new_tokens=24)
    drafted = run(drafters.head_drafter(fitted, 3))
    assert drafted.to_lists() == run("autoregressive").to_lists()
    assert drafted.stats.target_passes.sum() < 0.7 * run("autoregressive").stats.target_passes.sum()
    with pytest.raises(UsageError, match="medusa reads no keys of the target, but the recipe has anchors=True"):
        train(target, training_runs.head_of("medusa"), texts, recipe=recipe_of("medusa", anchors=True), length=32)
