"""Gumbel top-k: the kernel, simulated on CPU, against the specification; its noise against jax's; how it draws.

Every kind of check is shown to fail on a kernel with a fault put into it.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import tpu as tpu_devices
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, PartitionSpec, SingleDeviceSharding

from specjax.numerics import sampling
from specjax.pallas_kernels.gumbel_topk import gumbel_topk, likeliest, reference, tpu
from specjax.pallas_kernels.tuning import tuned_sizes

BLOCK, WIDTH = 512, 256
STRICT = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
kernel = functools.partial(gumbel_topk, implementation="pallas_tpu", interpret=True, block=BLOCK, width=WIDTH)


@pytest.fixture
def fault(monkeypatch):
    """Replace a part of the kernel; programs compiled before and after know nothing of it."""

    def put(name, value, module=tpu):
        jax.clear_caches()
        monkeypatch.setattr(module, name, value)

    yield put
    jax.clear_caches()


def rows_of_keys(*rows, seed=0):
    return jax.random.split(jax.random.key(seed), rows)


def agree(result, wanted):
    """Equal ids in order, where there is a token at all; equal scores."""
    (ids, scores), (wanted_ids, wanted_scores) = (jax.tree.map(np.asarray, x) for x in (result, wanted))
    np.testing.assert_allclose(scores, wanted_scores, atol=1e-5, rtol=0)
    real = wanted_scores > -np.inf
    np.testing.assert_array_equal(ids[real], wanted_ids[real])
    assert ids.dtype == np.int32 and scores.dtype == np.float32


def same_noise():
    """The kernel's noise is that of `sampling.noise`, bit for bit; its bits are jax's."""
    key = jax.random.key(7)
    words = jax.random.key_data(key)
    ours = jax.jit(tpu.gumbel)(words[0], words[1], jnp.arange(100_003))
    np.testing.assert_array_equal(ours, jax.jit(sampling.gumbel)(jax.random.bits(key, (100_003,), jnp.uint32)))
    np.testing.assert_array_equal(ours, sampling.noise(key[None], 100_003)[0])


def test_noise_is_that_of_sampling():
    same_noise()


def test_noise_check_sees_a_round_too_few(fault):
    fault("ROTATIONS", ((13, 15, 26), reference.ROTATIONS[1]), reference)
    with pytest.raises(AssertionError):
        same_noise()


@settings(max_examples=16, deadline=None)
@given(
    rows=st.sampled_from([(), (1,), (3,), (2, 4), (33,)]),
    vocab=st.sampled_from([1, 2, 8, 127, 128, 129, 130, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77]),
    k=st.sampled_from([1, 2, 9, 64]),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
    mask=st.sampled_from([None, "one for all", "per row", "logits"]),
    temperature=st.sampled_from([None, 0.7, "per row"]),
    noisy=st.booleans(),
    tied=st.booleans(),
    seed=st.integers(0, 99),
)
def test_kernel_equals_reference(rows, vocab, k, dtype, mask, temperature, noisy, tied, seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (*rows, vocab))
    if tied:
        logits = np.round(logits / 3)
    if mask == "logits":
        logits = np.where(rng.random(logits.shape) < 0.5, logits, -np.inf)
    valid = {"one for all": rng.random(vocab) < 0.5, "per row": rng.random(logits.shape) < 0.02}.get(mask)
    if temperature == "per row":
        temperature = jnp.asarray(rng.uniform(0.3, 2, rows), jnp.float32)
    arguments = rows_of_keys(*rows, seed=seed) if noisy else None, jnp.asarray(logits, dtype), min(k, vocab)
    options = {"temperature": temperature, "valid": valid}
    ids, scores = kernel(*arguments, **options)
    agree((ids, scores), jax.jit(reference.gumbel_topk, static_argnums=2)(*arguments, **options))
    assert np.all((ids >= 0) & (ids < vocab))


@pytest.mark.parametrize("vocab, k", [(BLOCK + 130, 3), (300, 9)])
def test_kernel_without_races_on_dead_memory(vocab, k):
    """Memory that nobody wrote is NaN, and the rows do not fill the last block of eight."""
    keys = rows_of_keys(33) if k < 8 else rows_of_keys(8)
    logits = jax.random.normal(jax.random.key(1), (len(keys), vocab))
    agree(kernel(keys, logits, k, interpret=STRICT), reference.gumbel_topk(keys, logits, k))


def ties(k=10):
    """Check that the lower of equal logits' ids win, within a lane and across lanes, and when a better one pushes them
    down."""
    logits = jnp.zeros((8, 1000)).at[:, 700].set(1.0).at[:, 130].set(-0.0)
    agree(kernel(None, logits, k), reference.gumbel_topk(None, logits, k))


def test_ties_go_to_the_lower_id():
    ties()


def test_tie_check_sees_a_kernel_that_prefers_later_ids(fault):
    insert = tpu._insert
    fault("_insert", lambda scores, ids, slots, new, tokens: insert(scores, ids, slots, new[::-1], tokens[::-1]))
    with pytest.raises(AssertionError):
        ties()


def one_lane(slots):
    """All of the best lie in one lane, which keeps fewer than that at first."""
    logits = jax.random.normal(jax.random.key(2), (8, 4 * BLOCK)).at[:, 5::128].add(50.0)
    agree(kernel(None, logits, 12, slots=slots), reference.gumbel_topk(None, logits, 12))


@pytest.mark.parametrize("slots", [None, 1, 12])
def test_a_lane_with_too_few_slots_is_seen(slots):
    one_lane(slots)


def test_crowding_check_sees_a_kernel_that_does_not_look_again(fault):
    choose = tpu._select
    fault("_select", lambda *arguments: (*choose(*arguments)[:2], jnp.zeros((8, 128), jnp.int32)))
    with pytest.raises(AssertionError):
        one_lane(1)


def beyond_the_row():
    """Compare a row with the reference where everything that lies beyond it is better than anything in it."""
    logits = jnp.full((8, BLOCK + 1), -1e30)
    zeros = pltpu.InterpretParams(uninitialized_memory="zero")
    agree(kernel(None, logits, 2, interpret=zeros), reference.gumbel_topk(None, logits, 2))


def test_padding_is_never_chosen():
    beyond_the_row()


def test_padding_check_sees_a_kernel_without_bounds(fault):
    body = tpu._kernel
    fault("_kernel", lambda *refs, columns, **options: body(*refs, columns=-(-columns // WIDTH) * WIDTH, **options))
    with pytest.raises(AssertionError):
        beyond_the_row()


def test_slots_are_few_and_enough():
    assert [tpu._slots(k) for k in (1, 4, 8, 16, 64)] == [1, 4, 8, 5, 8]
    rng = np.random.default_rng(0)
    fullest = [np.bincount(rng.integers(128, size=64)).max() for _ in range(5000)]
    assert np.mean(np.array(fullest) >= tpu._slots(64)) < 1e-3


def in_while_loop(search):
    def run(keys, logits):
        body = lambda carry: (carry[0] + 1, *search(keys, logits))
        start = 0, jnp.zeros((8, 4), jnp.int32), jnp.zeros((8, 4))
        return jax.lax.while_loop(lambda carry: carry[0] < 2, body, start)[1:]

    return jax.jit(run)


def over_eight_devices(search):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split = PartitionSpec("data")
    return jax.jit(jax.shard_map(search, mesh=mesh, in_specs=(split, split), out_specs=(split, split)))


@pytest.mark.parametrize(
    "options", [{}, {"implementation": "pallas_tpu", "interpret": True}], ids=["default", "kernel"]
)
@pytest.mark.parametrize("noisy", [True, False])
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, in_while_loop, over_eight_devices])
def test_in_every_transformation(transform, options, noisy):
    keys, logits = rows_of_keys(8), jax.random.normal(jax.random.key(3), (8, 300))
    search = lambda keys, logits: gumbel_topk(keys if noisy else None, logits, 4, **options)
    agree(transform(search)(keys, logits), reference.gumbel_topk(keys if noisy else None, logits, 4))


def distribution_of_pairs(trials=4000):
    """Chi-square of ordered pairs drawn from a distribution of five tokens, against P(a, b) = p_a p_b / (1 - p_a)."""
    p = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(p, jnp.float32)), (trials, 5))
    ids = np.asarray(kernel(rows_of_keys(trials), logits, 2)[0])
    pairs = list(itertools.permutations(range(5), 2))
    counts = [np.sum((ids[:, 0] == a) & (ids[:, 1] == b)) for a, b in pairs]
    expected = [trials * p[a] * p[b] / (1 - p[a]) for a, b in pairs]
    return scipy.stats.chisquare(counts, expected).pvalue


def test_law_without_replacement():
    assert distribution_of_pairs() > 1e-3


def test_law_check_sees_noise_that_rows_share(fault):
    """The check fails if one key is used for all rows of a block."""
    noise = tpu.gumbel
    fault("gumbel", lambda word0, word1, ids: noise(word0[:1], word1[:1], ids))
    assert distribution_of_pairs() < 1e-6


def test_arguments_that_do_not_fit_are_refused():
    keys, logits = rows_of_keys(2), jnp.zeros((2, 100))
    with pytest.raises(ValueError, match="from 1 to the vocabulary size 100, not 101"):
        gumbel_topk(keys, logits, 101)
    with pytest.raises(ValueError, match=r"shape \(2,\), one per row"):
        gumbel_topk(keys[:1], logits, 1)
    with pytest.raises(ValueError, match="temperature"):
        gumbel_topk(keys, logits, 1, temperature=jnp.ones(3))
    with pytest.raises(ValueError, match=r"\['block'\]"):
        gumbel_topk(keys, logits, 1, block=512)
    with pytest.raises(ValueError, match="divide block, not 256 and 300"):
        gumbel_topk(keys, logits, 1, implementation="pallas_tpu", width=256, block=300)


def test_a_named_implementation_never_falls_back():
    keys, logits = rows_of_keys(2), jnp.zeros((2, 100))
    with pytest.raises(NotImplementedError, match='"pallas_gpu"'):
        gumbel_topk(keys, logits, 1, implementation="pallas_gpu")
    for bad, match in [
        ((keys, logits, 65), "k up to 64, not 65"),
        ((keys, logits.astype(jnp.float16), 2), "not float16"),
    ]:
        with pytest.raises(NotImplementedError, match=match):
            gumbel_topk(*bad, implementation="pallas_tpu")
        agree(gumbel_topk(*bad), reference.gumbel_topk(*bad))  # None falls back
    with jax.threefry_partitionable(False), pytest.raises(NotImplementedError, match="partitionable"):
        gumbel_topk(keys, logits, 1, implementation="pallas_tpu")


def test_keys_of_any_implementation():
    """The kernel draws with the words of threefry keys."""
    logits = jax.random.normal(jax.random.key(1), (3, 300))
    for implementation in ("rbg", "unsafe_rbg"):
        keys = jax.random.split(jax.random.key(0, impl=implementation), 3)
        result = kernel(keys, logits, 4)
        agree(result, gumbel_topk(keys, logits, 4))
        agree(jax.tree.map(lambda x: x[1:2], result), gumbel_topk(keys[1:2], logits[1:2], 4))


def test_tuned_sizes_of_an_unknown_device_are_the_default():
    assert tuned_sizes("gumbel_topk", "TPU v99") == tuned_sizes("gumbel_topk") == {"block": 32768, "width": 1024}


def test_kernel_is_chosen_by_the_platform_lowered_for():
    """No TPU, no compiler: lowering for TPUs takes the kernel, for CPUs XLA."""
    program = jax.jit(lambda keys, logits: gumbel_topk(keys, logits, 4)).trace(rows_of_keys(2), jnp.zeros((2, 1000)))
    text = lambda platform: program.lower(lowering_platforms=(platform,)).as_text()
    assert "tpu_custom_call" in text("tpu") and "tpu_custom_call" not in text("cpu")


def test_programs_of_64_bits_too():
    search = jax.jit(lambda keys, logits: gumbel_topk(keys, logits, 4, implementation="pallas_tpu"))
    with jax.enable_x64(True):
        program = search.trace(rows_of_keys(2), jnp.zeros((2, 1000), jnp.float32)).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in program.as_text()


@pytest.mark.tpu_compile
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2", "v5p:2x2x1", "tpu7x:2x2x1"])
@pytest.mark.parametrize(
    "rows, vocab, dtype", [(8, 262144, "float32"), (64, 151936, "bfloat16"), (3, 151936, "float32")]
)
def test_compiles_for_tpus(topology, rows, vocab, dtype):
    """The program for k = 64 has the second run in it, and the noise [rows, vocab] is nowhere in memory."""
    place = SingleDeviceSharding(tpu_devices.devices(topology)[0])
    shape = lambda *shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    search = lambda words, logits: gumbel_topk(jax.random.wrap_key_data(words, impl="threefry2x32"), logits, 64)
    program = jax.jit(search).lower(shape(rows, 2, dtype=jnp.uint32), shape(rows, vocab, dtype=dtype)).compile()
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 2
    folded = 0 if rows % 8 == 0 else 2 * rows * vocab * 4  # the logits again, cut into eight
    assert program.memory_analysis().temp_size_in_bytes < folded + 1e6


def test_likeliest_are_the_best_of_log_softmax():
    logits = 30 * jax.random.normal(jax.random.key(5), (2, 3, 500))
    ids, log_p = likeliest(logits, 7)
    wanted, best = jax.lax.top_k(jax.nn.log_softmax(logits, -1), 7)
    np.testing.assert_array_equal(ids, best)
    np.testing.assert_allclose(log_p, wanted, atol=2e-5)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5), st.sampled_from([4096, 8192, 8192 + 64, 5000]))
def test_the_best_blocks_have_the_best_tokens(seed, k, vocab):
    """Equal scores, within a block and over blocks: the lower id first, as `jax.lax.top_k` has it."""
    rng = np.random.default_rng(seed)
    scores = jnp.asarray(rng.integers(0, 6, (2, 3, vocab)) * (rng.random((2, 3, vocab)) < 2 / vocab), jnp.float32)
    same_as_top_k(scores, k)


def same_as_top_k(scores, k):
    result, wanted = reference.blocked_top_k(scores, k), jax.lax.top_k(scores, k)
    np.testing.assert_array_equal(result[1], wanted[1])
    np.testing.assert_array_equal(result[0], wanted[0])


def test_blocks_out_of_order_are_seen(monkeypatch):
    scores = jnp.zeros((1, 8192)).at[0, jnp.array([100, 4000, 4001, 4201])].set(1.0).at[0, 4200].set(2.0)
    same_as_top_k(scores, 3)
    monkeypatch.setattr(reference.jnp, "sort", lambda x, axis: x)
    with pytest.raises(AssertionError):
        same_as_top_k(scores, 3)


def test_the_best_of_minus_infinity_are_tokens():
    scores = jnp.full((1, 8192), -jnp.inf).at[0, 70].set(0.0)
    scores_of, ids = reference.blocked_top_k(scores, 3)
    assert ids[0, 0] == 70 and (ids < 8192).all() and np.isneginf(scores_of[0, 1:]).all()
