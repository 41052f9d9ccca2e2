"""Hybrid decoders: chains, trees, trees grown by levels, commits, and stacked layers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import models
from specjax.arrays import texts
from specjax.errors import UsageError
from specjax.models.hybrid import reading
from specjax.models.hybrid.config import GatedDeltaSizes, HybridConfig, LayerKind, Mamba2Sizes
from specjax.models.layout import fits_heads

PARENTS = (-1, 0, 0, 1, 1, 2, 4)
SIZE, ROWS, TEXT, CAPACITY = len(PARENTS), 2, 12, 128
START = np.array([10, 6])  # committed tokens of each row before the tree
GROUP = (
    LayerKind("gated_delta"), LayerKind("short_convolution"), LayerKind("mamba2", "none"), LayerKind(),
    LayerKind("attention_and_mamba2"), LayerKind("none", "relu2"),
)  # fmt: skip
CONFIG = HybridConfig(
    vocab_size=64, width=32, num_layers=2 * len(GROUP), num_heads=2, num_kv_heads=1, head_dim=16, mlp_width=48,
    kinds=GROUP * 2, gated_delta=GatedDeltaSizes(2, 4, 8, 8), mamba2=Mamba2Sizes(4, 8, 2, 8),
    convolution_kernel=3, attention_gate=True, rotary_dim=4, qk_norm=True, max_positions=256,
)  # fmt: skip


def path_to(node: int) -> list[int]:
    return [] if node < 0 else [*path_to(PARENTS[node]), node]


MASK = np.array([[j in path_to(i) for j in range(SIZE)] for i in range(SIZE)])
DEPTH = MASK.sum(1) - 1


class Programs:
    """Compiled functions of one model with fixed parameters."""

    def __init__(self, config: HybridConfig, params):
        self.model, self.params = models.make_model(config), params
        self.forward = jax.jit(functools.partial(self.model.forward, params))
        self.commit = jax.jit(self.model.commit)
        self.empty = self.model.init_cache(params, None, ROWS, CAPACITY)

    def read(self, cache, tokens, start, count):
        """Read a text of SIZE tokens or fewer; return the logits and the cache with the first `count` tokens."""
        wide = np.zeros((ROWS, TEXT), np.int32)
        wide[:, : tokens.shape[1]] = tokens
        mask = np.broadcast_to(np.tril(np.ones((TEXT, TEXT), bool)), (ROWS, TEXT, TEXT))
        places = np.broadcast_to(np.arange(TEXT), (ROWS, TEXT))
        output, pending = self.forward(wide, cache, positions=start[:, None] + places, mask=mask)
        return output.logits[:, : tokens.shape[1]], self.commit(cache, pending, places, np.asarray(count))

    def read_nodes(self, cache, tokens, nodes, earlier=None):
        """Read nodes of the tree, given the pending entries of those before them."""
        stop = nodes.stop
        mask = np.broadcast_to(MASK[nodes, :stop], (ROWS, stop - nodes.start, stop))
        positions = START[:, None] + DEPTH[nodes]
        return self.forward(tokens[:, nodes], cache, positions=positions, mask=mask, earlier=earlier)


@pytest.fixture(scope="module")
def parameters():
    return models.init_params(CONFIG, jax.random.key(0))


@pytest.fixture(scope="module")
def programs(parameters):
    return Programs(CONFIG, parameters)


@pytest.fixture(scope="module")
def text():
    return np.random.default_rng(0).integers(0, CONFIG.vocab_size, (ROWS, TEXT)).astype(np.int32)


@pytest.fixture(scope="module")
def tree():
    return np.random.default_rng(1).integers(0, CONFIG.vocab_size, (ROWS, SIZE)).astype(np.int32)


@pytest.fixture(scope="module")
def committed(programs, text):
    """Return a cache with texts of different lengths."""
    return programs.read(programs.empty, text, np.zeros(ROWS, np.int32), START)[1]


def close(x, y, atol=5e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=atol), x, y)


def test_one_pass_equals_token_by_token(programs, text):
    logits, cache = programs.read(programs.empty, text, np.zeros(ROWS, np.int32), np.full(ROWS, TEXT))
    other, single = programs.empty, []
    for i in range(TEXT):
        step, other = programs.read(other, text[:, i : i + 1], np.full(ROWS, i), np.ones(ROWS, np.int32))
        single.append(step)
    close(logits, jnp.concatenate(single, 1))
    close(cache.recurrent, other.recurrent)


def test_a_constant_mask_marks_a_text(programs, monkeypatch):
    """Prefill reads it in chunks, with the states of a mask that is data."""
    count, calls = reading.CHUNK + 6, []
    read_text = reading.read_text
    monkeypatch.setattr(reading, "read_text", lambda *arguments: calls.append(1) or read_text(*arguments))
    tokens = np.random.default_rng(2).integers(0, CONFIG.vocab_size, (ROWS, count)).astype(np.int32)
    mask, path, lengths = texts.causal_mask(ROWS, count), texts.in_order(ROWS, count), np.array([count, count - 3])

    def read(mask, path):
        output, pending = programs.model.forward(programs.params, tokens, programs.empty, positions=path, mask=mask)
        return output.logits, programs.model.commit(programs.empty, pending, path, lengths).recurrent

    of_data = jax.jit(read)(mask, path)
    assert not calls
    close(of_data, jax.jit(lambda: read(mask, path))())
    assert calls


def test_every_path_of_a_tree_equals_a_text(programs, committed, tree):
    output, pending = programs.read_nodes(committed, tree, slice(0, SIZE))
    probe = np.full((ROWS, 1), 5, np.int32)
    for node in range(SIZE):
        path = path_to(node)
        count = np.full(ROWS, len(path))
        logits, of_text = programs.read(committed, tree[:, path], START, count)
        close(output.logits[:, node], logits[:, -1])
        nodes = np.full((ROWS, SIZE), -1, np.int32)
        nodes[:, : len(path)] = path
        of_tree = programs.commit(committed, pending, nodes, count)
        close(of_tree.recurrent, of_text.recurrent)
        one = np.ones(ROWS, np.int32)
        close(*(programs.read(cache, probe, START + count, one)[0] for cache in (of_tree, of_text)))


def test_a_tree_grown_by_levels_equals_the_whole_tree(programs, committed, tree):
    output, pending = programs.read_nodes(committed, tree, slice(0, SIZE))
    first, grown = programs.read_nodes(committed, tree, slice(0, 3))
    deeper, more = programs.read_nodes(committed, tree, slice(3, SIZE), grown)
    close(output.logits, jnp.concatenate([first.logits, deeper.logits], 1))
    joined = programs.model.insert(programs.model.widen(grown, SIZE), more, 3)
    for updates, same in zip(pending.recurrent, joined.recurrent, strict=True):
        close(updates[:3], same[:3])
        if updates.total is not None:  # the split of a decay into two parts follows its rounding
            close(updates.total.sum(-1), same.total.sum(-1))


def test_recurrent_layers_do_not_depend_on_positions(programs, committed, tree):
    """A token of a text of segments takes one slot of the cache, and its position counts all tokens of the text."""
    mask = np.broadcast_to(MASK, (ROWS, SIZE, SIZE))
    every = START[:, None] + DEPTH, START[:, None] + DEPTH + 7, START[:, None] + 3 * DEPTH
    passes = (programs.forward(tree, committed, positions=positions, mask=mask) for positions in every)
    first, *shifted = (pending.recurrent[0] for _, pending in passes)  # the first layer reads no output of attention
    for other in shifted:
        close(first, other)


def test_layers_with_own_kernels(text):
    """The layer of the largest kernel sets the window, and a kernel of one tap needs none."""
    sizes = Mamba2Sizes(4, 8, 2, 8, kernel=1)
    long = LayerKind("mamba2", "none", (("mamba2", sizes._replace(kernel=6)),))
    for kinds in ((LayerKind("mamba2", "none"),), (long, LayerKind("mamba2", "none"))):
        changes = {"kinds": kinds, "num_layers": len(kinds), "mamba2": sizes}
        config = dataclasses.replace(CONFIG, gated_delta=None, convolution_kernel=0, **changes)
        programs = Programs(config, models.init_params(config, jax.random.key(0)))
        logits, read_once = programs.read(programs.empty, text, np.zeros(ROWS, np.int32), np.full(ROWS, TEXT))
        half, cache = programs.read(programs.empty, text[:, :6], np.zeros(ROWS, np.int32), np.full(ROWS, 6))
        later, cache = programs.read(cache, text[:, 6:], np.full(ROWS, 6), np.full(ROWS, TEXT - 6))
        close(logits, jnp.concatenate([half, later], 1))
        close(read_once.recurrent, cache.recurrent)


def test_rows_that_accept_nothing_stay_the_same_to_the_bit(programs, committed, tree):
    _, pending = programs.read_nodes(committed, tree, slice(0, SIZE))
    poisoned = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if x.dtype == jnp.float32 else x, pending)
    nodes = np.array([[0, 1, 4, 6, -1, -1, -1], [-1] * SIZE])
    moved = programs.commit(committed, pending, nodes, np.array([4, 0]))
    idle = programs.commit(committed, poisoned, nodes, np.array([0, 0]))
    caches = (committed.recurrent, moved.recurrent, idle.recurrent)
    for old, new, same in zip(*map(jax.tree.leaves, caches), strict=True):
        assert not np.array_equal(old[0], new[0])
        assert np.array_equal(old[1], new[1]) and np.array_equal(old, same)


def test_stacked_layers_equal_separate_ones(parameters, programs, committed, tree):
    config = dataclasses.replace(CONFIG, stacked=True)
    assert (CONFIG.period, config.num_members) == (len(GROUP), len(GROUP))
    stack = lambda member: jax.tree.map(
        lambda *x: jnp.stack(x), *(parameters["layers"][member + n] for n in (0, len(GROUP)))
    )
    stacked = Programs(config, {**parameters, "layers": {i: stack(i) for i in range(len(GROUP))}})
    shapes = lambda tree: jax.tree.map(jnp.shape, tree)
    assert shapes(stacked.params) == shapes(models.abstract_params(config))
    _, cache = stacked.read(stacked.empty, np.zeros((ROWS, TEXT), np.int32), np.zeros(ROWS, np.int32), START)
    _, same = programs.read(programs.empty, np.zeros((ROWS, TEXT), np.int32), np.zeros(ROWS, np.int32), START)
    output, pending = stacked.read_nodes(cache, tree, slice(0, SIZE))
    close(output.logits, programs.read_nodes(same, tree, slice(0, SIZE))[0].logits)
    axes = stacked.model.axes(cache)
    assert jax.tree.structure(axes) == jax.tree.structure(cache) and axes.recurrent[0].state == 1
    nodes = np.array([[0, 1, 4, 6, -1, -1, -1], [0, 2, -1, -1, -1, -1, -1]])
    _, of_separate = programs.read_nodes(same, tree, slice(0, SIZE))
    states = stacked.commit(cache, pending, nodes, np.array([4, 2])).recurrent
    references = programs.commit(same, of_separate, nodes, np.array([4, 2])).recurrent
    close(states[0].state[1], references[4].state)


def test_draft_heads_have_layers_that_attend():
    layer = dataclasses.replace(CONFIG, stacked=True).draft_head_config(2)
    assert isinstance(layer, models.LlamaConfig) and (layer.num_layers, layer.attention_gate, layer.stacked) == (
        2,
        0,
        0,
    )
    assert (layer.width, layer.head_dim, layer.rotary_dim) == (CONFIG.width, CONFIG.head_dim, CONFIG.rotary_dim)


def test_options_that_do_not_fit():
    with pytest.raises(UsageError, match="has 12 kinds for 11 layers; give one LayerKind per layer"):
        dataclasses.replace(CONFIG, num_layers=11)
    with pytest.raises(UsageError, match="same_bits does not hold for hybrid"):
        dataclasses.replace(CONFIG, same_bits=True, dtype="bfloat16")
    with pytest.raises(UsageError, match='norms "after" its sublayers only; set norms to "before" or "both"'):
        dataclasses.replace(CONFIG, norms="after")
    with pytest.raises(UsageError, match="does not read is_global; set window in the changes of each LayerKind"):
        dataclasses.replace(CONFIG, window=4, is_global=(True,) * 12)
    with pytest.raises(UsageError, match="does not read mlp_widths; set mlp_width in the changes"):
        dataclasses.replace(CONFIG, mlp_widths=(48,) * 12)
    wide = LayerKind(changes=(("num_heads", 4), ("num_kv_heads", 2)))
    kinds = {"kinds": (wide, LayerKind()), "num_layers": 2}
    assert dataclasses.replace(CONFIG, joined=("qkv", "gate_up"), **kinds).joined == ("gate_up",)
    assert not fits_heads(dataclasses.replace(CONFIG, **kinds), 2) and fits_heads(CONFIG, 2)
