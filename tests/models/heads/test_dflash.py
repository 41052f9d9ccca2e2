"""Block drafters against an oracle in float64, the effect of each flag, and new corrections that change nothing."""

from __future__ import annotations

import functools
import zlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_llama

from specjax import UsageError
from specjax.models.heads import blocks
from specjax.models.heads.contract import DraftedNodes, FeaturePairs
from specjax.models.heads.dflash import DFlash, DFlashConfig, default_taps, dflash_head
from specjax.models.llama import LlamaConfig
from specjax.types import Context, DraftOutput

LAYER = LlamaConfig(
    vocab_size=16, width=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=64, qk_norm=True
)
PLAIN = DFlashConfig(LAYER, (1, 2, 0), 32, 64, 4, 63)
# Together every flag, so that each is proved by one that matters where it stands.
CONFIGS = {
    "dflash": {
        "own_head": True, "embeds": True, "embedding_scale": 2.0, "logit_scale": 3.0, "softcap": 2.0,
        "windows": (None, 3), "causal": "no", "mask_embedding": True, "capped_scale": 0.5,
    },
    "jetspec": {"causal": "all", "own_head": True},
    "gated": {"from_anchor": True, "markov": "gated", "markov_rank": 4, "confidence": "state", "windows": (2, None)},
    "rnn": {"own_head": True, "markov": "rnn", "markov_rank": 4, "confidence": "markov", "windows": (2, 3)},
    "vanilla": {"from_anchor": True, "own_head": True, "markov": "vanilla", "markov_rank": 4},
    "dflash2": {"conv_taps": 2, "conv_group": 4, "selector_rank": 4, "candidates": 5, "causal": "all"},
    "domino": {"from_anchor": True, "prefix_rank": 4, "prefix_state": 5, "pure_prefix": 2},
    "domino of masks": {"prefix_rank": 4, "prefix_state": 5, "pure_prefix": 2},
}  # fmt: skip


def config_of(**changes) -> DFlashConfig:
    wide = changes.get("markov") == "gated"
    return replace(PLAIN, layer=replace(LAYER, head_dim=16) if wide else LAYER, **changes)  # heads wider than D / H


def params_of(config: DFlashConfig):
    """Return parameters with the same arrays for the same parts of all heads."""

    def fill(path, shape):
        name = jax.tree_util.keystr(path)
        draw = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape.shape).astype(np.float32)
        if "place" in name:  # the draft's own ids: 0, 3, 6, ...
            return np.where(np.arange(64) % 3 == 0, np.arange(64) // 3, 99).clip(max=16).astype(np.int32)
        return 1 + 0.3 * draw if "norm" in name or "temperatures" in name else 0.3 * draw

    return jax.tree_util.tree_map_with_path(fill, blocks.abstract_params(DFlash, config))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms(x, norm, eps=1e-5):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * norm["weight"]


def linear(x, part):
    return x @ part["weight"].T + part.get("bias", 0.0)


def rotated(x, positions):
    """Rotate x [T, H, h] by halves."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None] / 10000.0 ** (np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def convolved(part, x, group):
    """Return x after the convolution before a sublayer, and the kernels for the one after it."""
    dynamic = linear(x, part["projection"]).reshape(len(x), 2, 2, -1)

    def by(side):
        def convolve(y):
            kernel = part["base"][side] + np.repeat(dynamic[:, side], group, -1)  # [b, taps, D]
            return kernel[:, 0] * y + kernel[:, 1] * np.concatenate([np.zeros_like(y[:1]), y[:-1]])

        return convolve

    return by(0)(x), by(1)


def block_states(c: DFlashConfig, p, features, root):
    """Return the outputs [b, D] of the slots of one block."""
    layer, n, b = c.layer, len(features), c.block_size
    table = p["embed"] if c.embeds else tiny("embed")
    text = rms(linear(features, p["fc"]), p["hidden_norm"])
    x = table["weight"][[root] + [c.mask_token] * (b - 1)]
    if c.mask_embedding:
        x = np.concatenate([x[:1], np.tile(p["mask_embedding"], (b - 1, 1))])
    x = x * c.embedding_scale
    q_at, k_at = n + np.arange(b), np.arange(n + b)
    back = q_at[:, None] - k_at  # how far a key lies behind
    for i in range(layer.num_layers):
        part, window = p["layers"][i], (c.windows or (None, None))[i]
        visible = np.ones_like(back, bool) if window is None else np.abs(back) < window
        if c.causal == "all" or (c.causal == "windowed" and window is not None):
            visible &= back >= 0
        y, next_state = rms(x, part["attention_norm"]), lambda y: y
        if c.conv_taps:
            y, next_state = convolved(part["attention_conv"], y, c.conv_group)
        attention, both = part["attention"], np.concatenate([text, y])
        heads = lambda x: x.reshape(len(x), -1, layer.head_dim)
        q = rotated(rms(heads(linear(y, attention["q"])), attention["q_norm"]), q_at)
        k = rotated(rms(heads(linear(both, attention["k"])), attention["k_norm"]), k_at)
        k, v = (
            np.repeat(x, layer.num_heads // layer.num_kv_heads, 1) for x in (k, heads(linear(both, attention["v"])))
        )
        scores = np.where(visible[None], np.einsum("qhd,khd->hqk", q, k) * layer.head_dim**-0.5, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(b, -1)
        x = x + next_state(linear(out, attention["o"]))
        y, next_state = rms(x, part["mlp_norm"]), lambda y: y
        if c.conv_taps:
            y, next_state = convolved(part["mlp_conv"], y, c.conv_group)
        mlp = part["mlp"]
        x = x + next_state(linear(silu(linear(y, mlp["gate"])) * linear(y, mlp["up"]), mlp["down"]))
    return rms(x, p["norm"])


def markov_step(kind, p, token, h, s):
    z = p["w1"]["weight"][token]
    if kind == "gated":
        z = sigmoid(linear(np.concatenate([h, z]), p["gating"])) * z
    if kind == "rnn":
        gate, candidate, out = np.split(linear(np.concatenate([s, z, h]), p["joint"]), 3)
        s, z = sigmoid(gate) * s + (1 - sigmoid(gate)) * np.tanh(candidate), np.tanh(out)
    return s, p["w2"]["weight"] @ z


def prefix_step(p, embedded, h, s):
    (r_in, z_in, n_in), (r, z, n) = np.split(linear(embedded, p["inputs"]), 3), np.split(linear(s, p["states"]), 3)
    z = sigmoid(z_in + z)
    s = (1 - z) * np.tanh(n_in + sigmoid(r_in + r) * n) + z * s
    return s, linear(silu(linear(np.concatenate([h, s]), p["narrow"])), p["wide"])


def oracle(c: DFlashConfig, params, features, root, path):
    """Return the logits [V] after the root and after each token of a chain `path`, and the confidences."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64 if np.issubdtype(x.dtype, np.floating) else x.dtype), params)
    h, s, confidences = block_states(c, p, features, root), 0.0, []
    if c.markov == "rnn":
        s = np.zeros(c.markov_rank)
        if not c.from_anchor:
            s, _ = markov_step("rnn", p["markov"], root, h[0], s)
    if c.prefix_rank:
        s = np.zeros(c.prefix_state)
    for depth, token in enumerate([root, *path]):
        slot = depth + (not c.from_anchor)
        logits = (p["head"] if c.own_head else tiny("head"))["weight"] @ h[slot] * c.logit_scale
        if c.softcap:
            logits = c.softcap * np.tanh(logits / c.softcap)
        logits = logits * c.capped_scale
        if c.markov != "no":
            s, more = markov_step(c.markov, p["markov"], token, h[slot], s)
            logits = logits + more
        if c.prefix_rank:
            table = p["embed"] if c.embeds else tiny("embed")
            s, more = prefix_step(p["prefix"], table["weight"][token], h[slot], s)
            logits = logits + more * (depth >= c.pure_prefix)
        if c.selector_rank:
            part, best = p["selector"], np.argsort(-logits)[: c.candidates]
            gate = part["predecessor"]["weight"][token] * linear(h[slot], part["projection"])
            scores, logits = logits[best] + part["successor"]["weight"][best] @ gate, np.full(64, -np.inf)
            logits[best] = scores
        if c.own_head:
            logits = np.append(logits, -np.inf)[p["vocabulary"]["place"]]
        sure = h[slot]
        if c.confidence == "markov":
            sure = np.concatenate([sure, p["markov"]["w1"]["weight"][token]])
        if c.confidence != "no":
            sure = sigmoid(linear(sure, p["confidence"]["proj"])[0] / p["confidence"]["temperatures"][depth])
        confidences.append((logits, sure if c.confidence != "no" else None))
    return confidences


@functools.cache
def tiny(part):
    """Return the target's embedding or output layer in float64."""
    return {"weight": np.asarray(tiny_llama().params[part]["weight"], np.float64)}


LENGTHS = 6, 3  # of two texts, in buffers with something behind
TOKENS = np.random.default_rng(1).integers(0, 63, (2, 8)).astype(np.int32)
FEATURES = np.random.default_rng(2).normal(size=(2, 7, 96)).astype(np.float32)
PATHS = (), (9,), (7,), (7, 4), (9, 11)  # the nodes drafted below both roots, the last two crosswise


def spoken(config, params):
    """Return the logits [B, 5, V] after each node, and the confidences [B, 5]."""
    head = dflash_head(config)

    @jax.jit
    def run(params, target, tokens, features):
        context = Context(tokens, jnp.array(LENGTHS), target=target)
        pairs = FeaturePairs(features, tokens[:, 1:], jnp.array(LENGTHS) - 1)
        memory = head.read(params, head.init_memory(params, context, 2, 16), pairs, context)
        scratch, outputs = head.start(params, memory, context, len(PATHS))
        confidences = [jax.tree.map(lambda x: x[:, None], outputs)]
        both = lambda *values: jnp.broadcast_to(jnp.array(values), (2, 2))
        for place, parents, visible in ((1, both(0, 0), [(), ()]), (3, both(2, 1), [(2,), (1,)])):
            nodes = PATHS[place : place + 2]
            mask = jnp.array([[n in places for n in range(len(PATHS))] for places in visible])
            drafted = DraftedNodes(
                both(*(path[-1] for path in nodes)), both(*map(len, nodes)), jnp.int32(place), parents,
                jnp.broadcast_to(mask, (2, *mask.shape)),
            )  # fmt: skip
            scratch, outputs = head.follow(params, scratch, drafted, context)
            confidences.append(outputs)
        return jax.tree.map(lambda *x: jnp.concatenate(x, 1), *confidences)

    outputs = run(params, tiny_llama(), TOKENS, FEATURES)
    return outputs if isinstance(outputs, DraftOutput) else DraftOutput(outputs, None)


def wanted(config, params, row):
    """Return the expected logits and confidences of one row from the oracle."""
    length = LENGTHS[row]
    confidences = lambda path: oracle(config, params, FEATURES[row, : length - 1], TOKENS[row, length - 1], path)
    return [confidences(path)[-1] for path in PATHS]


@pytest.mark.parametrize("name", CONFIGS)
def test_one_block_and_what_follows_nodes_drafted_from_it(name):
    """Two texts of different lengths have other tokens after them in the buffer."""
    config = config_of(**CONFIGS[name])
    params = params_of(config)
    outputs = spoken(config, params)
    for row in (0, 1):
        for node, (logits, sure) in enumerate(wanted(config, params, row)):
            np.testing.assert_allclose(outputs.logits[row, node], logits, atol=2e-5, rtol=2e-5)
            if sure is not None:
                np.testing.assert_allclose(outputs.confidence[row, node], sure, atol=1e-5)


SHAPES = {"markov_rank", "prefix_rank", "prefix_state", "selector_rank", "conv_group", "candidates"}


@pytest.mark.parametrize(
    ("name", "flag"), [(name, flag) for name in CONFIGS for flag in CONFIGS[name] if flag not in SHAPES]
)
def test_each_flag_matters(name, flag):
    """The oracle changes with each flag, so a head that ignored one would not agree with it."""
    config = config_of(**CONFIGS[name])
    other = config_of(**CONFIGS[name] | {flag: getattr(PLAIN, flag)})
    if flag == "markov" and config.confidence == "markov":
        other = replace(other, confidence="no")
    ours, theirs = (wanted(c, params_of(c), 0) for c in (config, other))
    assert any(map(differ, ours, theirs))


def differ(one, other) -> bool:
    """Return True if the outputs after one node differ, with a confidence or without."""
    same = lambda a, b: a is b if a is None or b is None else np.allclose(a, b, atol=1e-3)
    return not all(map(same, one, other))


@pytest.mark.parametrize("name", ["gated", "rnn", "vanilla", "dflash2", "domino"])
def test_a_new_correction_leaves_dflash_as_it_is(name):
    """The oracle is enough here, since the heads agree with it."""
    config = config_of(**CONFIGS[name])
    config = replace(config, candidates=64)
    corrections = {"markov", "selector", "prefix", "confidence", "attention_conv", "mlp_conv"}
    new = blocks.init_params(DFlash, config, jax.random.key(0))
    select = params_of(config)
    params = jax.tree_util.tree_map_with_path(
        lambda path, fresh, drawn: fresh if corrections & {str(getattr(k, "key", "")) for k in path} else drawn,
        new,
        select,
    )
    plain = replace(config, markov="no", confidence="no", conv_taps=0, selector_rank=0, prefix_rank=0)
    for (ours, _), (theirs, _) in zip(wanted(config, params, 0), wanted(plain, params, 0), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_masks_are_told_apart_by_their_positions_alone():
    config = config_of(**CONFIGS["dflash"])
    order = np.array([0, 3, 1, 2])

    @jax.jit
    def run(params, target, order):
        module = blocks.bind(DFlash, config)(params)
        context = Context(TOKENS, jnp.array(LENGTHS), target=target)
        cache = blocks.empty_cache(context, config.layer, 2, 16)
        pending = module.keys_and_values(FEATURES, blocks.causal_inputs(context, config.layer, cache, 7), cache)
        cache = blocks.commit_first(context, config.layer, cache, pending, jnp.array(LENGTHS) - 1)
        block = jnp.full((2, 4), 63).at[:, 0].set(5)
        step = blocks.pass_inputs(
            context, config.layer, cache, cache.length[:, None] + order, jnp.ones((2, 4, 4), bool)
        )
        return module.states(block, step, cache, context)

    straight, turned = (run(params_of(config), tiny_llama(), slots) for slots in (np.arange(4), order))
    np.testing.assert_allclose(turned, straight[:, order], atol=1e-5)
    assert np.abs(turned - straight).max() > 1e-2


def test_causal_slots_do_not_depend_on_the_slots_behind_them():
    """A JetSpec head computes only the slots of the draft; a shorter block of slots that see both sides differs."""

    def after_root(places, **changes):
        config = config_of(**CONFIGS["jetspec"] | changes)
        head, params = dflash_head(config), params_of(config)

        @jax.jit
        def run(params, target):
            context = Context(jnp.asarray(TOKENS), jnp.array(LENGTHS), target=target)
            pairs = FeaturePairs(jnp.asarray(FEATURES), context.tokens[:, 1:], context.length - 1)
            memory = head.read(params, head.init_memory(params, context, 2, 16), pairs, context)
            return head.start(params, memory, context, places)

        scratch, logits = run(params, tiny_llama())
        return scratch.slots.h.shape[1], np.asarray(logits)

    (all_slots, full), (one_slot, short) = after_root(3), after_root(1)
    assert (all_slots, one_slot) == (3, 1)
    np.testing.assert_allclose(short, full, atol=1e-5)
    blocks_of_two_sides = [after_root(1, causal="no", block_size=size)[1] for size in (4, 2)]
    long, brief = (np.where(np.isfinite(x), x, 0) for x in blocks_of_two_sides)
    assert np.abs(long - brief).max() > 1e-2


def test_how_many_tokens_a_block_drafts():
    assert [dflash_head(replace(PLAIN, block_size=2, from_anchor=on)).max_depth for on in (False, True)] == [1, 2]
    assert default_taps(36, 5) == (2, 10, 18, 26, 34)  # behind layers 1, 9, 17, 25, 33, as published for 36 of them
    assert default_taps(36, 1) == (19,)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"markov": "rnn", "selector_rank": 4}, "a Markov head, a selector or a Domino head, but only one"),
        ({"selector_rank": 4, "own_head": True}, "needs the target's 64 tokens, not a draft vocabulary of 16"),
        ({"confidence": "markov"}, 'confidence="markov" needs a Markov head'),
        ({"conv_taps": 2, "conv_group": 5}, "conv_group must divide the width 32, and 5 does not"),
        ({"selector_rank": 4, "candidates": 65}, "candidates must be between 1 and the vocabulary size, 64"),
        ({"windows": (3,)}, "windows has 1 entries for 2 layers"),
        ({"block_size": 1}, "block_size must be at least 2"),
    ],
)
def test_parts_that_do_not_fit(changes, says):
    with pytest.raises(UsageError, match=says):
        dflash_head(config_of(**changes))
