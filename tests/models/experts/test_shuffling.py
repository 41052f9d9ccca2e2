"""Rows that tables send to devices have the results of the plain form, for right, random and wrong tables."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiers import exhaustive

import specjax
from specjax.models.experts import shuffling
from specjax.models.experts.counting import PassHistory
from specjax.models.experts.feed import MixtureFeed
from specjax.models.experts.routing import Routing, choose
from specjax.models.experts.shuffling import DevicePrediction, RowHistory, exchange_capacity, place_rows, surer
from specjax.models.experts.sizes import MixtureSizes, TokenShuffling
from specjax.models.layout import Layout

VOCAB, WIDTH, DEVICES, REMOTE = 16, 16, 4, 0.4
SIZES = MixtureSizes(8, 32, Routing(2, normalized=True), bias=True, shuffling=TokenShuffling(DEVICES, VOCAB, REMOTE))
TOKENS = np.random.default_rng(0).permutation(np.arange(42) % VOCAB).reshape(2, 21)  # 4 devices do not divide 21 rows


def rows_and_params():
    """Return rows whose tokens choose both experts of one device, and the parameters of a feed."""
    rng = np.random.default_rng(1)
    directions = np.eye(DEVICES, WIDTH)
    rows = 3 * directions[TOKENS % DEVICES] + 0.3 * rng.normal(size=(*TOKENS.shape, WIDTH))
    graphdef, state = nnx.split(MixtureFeed(WIDTH, SIZES, nnx.silu, dtype="float32", rngs=nnx.Rngs(0)))
    params = nnx.to_pure_dict(state)
    router = np.repeat(directions, 2, 0) + 0.05 * rng.normal(size=(8, WIDTH))
    bias = jnp.asarray(rng.normal(size=(8, WIDTH)), jnp.float32)  # one device adds it
    changes = {
        "router": {"weight": jnp.asarray(router, jnp.float32)},
        "expert_down": params["expert_down"] | {"bias": bias},
    }
    return jnp.asarray(rows, jnp.float32), graphdef, params | changes


ROWS, GRAPHDEF, PARAMS = rows_and_params()
START = PassHistory(RowHistory.start(TOKENS))


def main_devices():
    """Return the device with most experts of each row."""
    choice = nnx.merge(GRAPHDEF, nnx.State(PARAMS)).router(ROWS.reshape(-1, WIDTH))
    counts = (np.asarray(choice.experts)[..., None] // 2 == np.arange(DEVICES)).sum(1)
    return counts.argmax(-1).reshape(TOKENS.shape)


def tables(kind):
    """Return tables of tokens."""
    right = np.zeros(VOCAB, np.int8)
    right[TOKENS.reshape(-1)] = main_devices().reshape(-1)
    device = {
        "right": right,
        "random": np.random.default_rng(2).integers(0, DEVICES, VOCAB).astype(np.int8),
        "wrong": (right + 1) % DEVICES,
        "all on one": np.zeros(VOCAB, np.int8),
    }[kind]
    zeros = PARAMS["tables"]
    return zeros | {"token_device": jnp.asarray(device), "token_confidence": jnp.ones(VOCAB, jnp.float16)}


def run_on(mesh):
    """Return the compiled feed on a mesh, from parameters to outputs and history."""
    layout = Layout(mesh, mesh.axis_names)

    @jax.jit
    def run(params, rows, history):
        params = jax.tree.map(lambda x, s: jax.lax.with_sharding_constraint(x, s), params, layout.params(params))
        return nnx.merge(GRAPHDEF, nnx.State(params)).with_history(rows, layout, history)

    return run


def plain():
    return np.asarray(nnx.merge(GRAPHDEF, nnx.State(PARAMS))(ROWS))


@pytest.mark.parametrize(("data", "model"), [exhaustive(2, 1), (1, 2)])
def test_any_table_gives_the_same_outputs(data, model):
    """The tables are parameters, so all of them share a program."""
    run = run_on(specjax.mesh(data, model, expert=DEVICES))
    expected = plain()
    for kind in ("right", "random", "wrong", "all on one"):
        y, history = run(PARAMS | {"tables": tables(kind)}, ROWS, START)
        np.testing.assert_allclose(y, expected, atol=2e-6 * np.abs(expected).max(), err_msg=kind)
        np.testing.assert_array_equal(history.rows.devices, [np.full(TOKENS.shape, -1), main_devices()], err_msg=kind)


def test_without_the_full_exchange_wrong_tables_lose_pairs(monkeypatch):
    """A mutant that always takes the small buffers is right for right tables only, so the tests above overflow."""
    monkeypatch.setattr(shuffling.jax.lax, "cond", lambda condition, large, small: small())
    run = run_on(specjax.mesh(1, 1, expert=DEVICES))
    errors = {
        kind: np.abs(np.asarray(run(PARAMS | {"tables": tables(kind)}, ROWS, START)[0]) - plain()).max()
        for kind in ("right", "wrong")
    }
    assert errors["right"] < 1e-5 < 1e-2 < errors["wrong"]


def test_collectives_of_a_layer():
    """The buffers of the exchange have the capacity, the results are gathered once, and no sum over rows is left."""
    run = run_on(specjax.mesh(1, 1, expert=DEVICES))
    text = run.lower(PARAMS, ROWS, START).compile().as_text()
    operations = re.findall(r"= (.*?) (all-\w+(?:-\w+)?|reduce-scatter|collective-permute)\(", text)
    names = [name for _, name in operations]
    per_device = -(-TOKENS.size // DEVICES)
    assert names.count("all-to-all") == 2 * 3  # rows, routes and results, in both branches
    assert names.count("all-gather") in (1, 2)  # results and devices; a backend may join them
    assert all("f32" not in shape for shape, name in operations if name == "all-reduce")  # the branch, one number
    capacity = exchange_capacity(per_device, DEVICES, REMOTE)
    assert capacity < per_device
    shapes = {shape for shape, name in operations if name == "all-to-all"}
    assert any(f",{capacity},{WIDTH}]" in shape for shape in shapes), shapes


def test_rows_without_history_use_the_plain_form():
    run = run_on(specjax.mesh(1, 1, expert=DEVICES))
    y, history = run(PARAMS, ROWS, None)
    np.testing.assert_allclose(y, plain(), atol=1e-5)
    assert history is None


def test_each_row_has_one_slot_and_full_devices_keep_their_surest_rows():
    device = np.array([0, 0, 0, 1, 0, 1, 2])
    confidence = np.array([0.1, 0.9, 0.5, 0.3, 0.8, 0.2, 0.4], np.float32)
    slots = jax.tree.map(np.asarray, place_rows(DevicePrediction(jnp.asarray(device), jnp.asarray(confidence)), 4))
    rows = slots.rows.reshape(4, 2)
    assert sorted(slots.rows) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [set(rows[0]), set(rows[1])] == [{1, 4}, {3, 5}]
    assert 6 in rows[2]
    np.testing.assert_array_equal(slots.rows[slots.of_rows], np.arange(7))


def test_the_surer_table_predicts():
    first = DevicePrediction(jnp.array([0, 0, 0]), jnp.array([0.5, 0.5, 0.5]))
    second = DevicePrediction(jnp.array([1, 1, 1]), jnp.array([0.4, 0.5, 0.6]))
    np.testing.assert_array_equal(surer(first, second).device, [0, 0, 1])


def test_the_table_of_devices_needs_two_layers_of_history():
    feed = nnx.merge(GRAPHDEF, nnx.State(PARAMS))
    feed.tables.device[...] = jnp.arange(16, dtype=jnp.int8).reshape(4, 4) % DEVICES
    feed.tables.confidence[...] = jnp.ones((4, 4), jnp.float16)
    history = RowHistory.start(np.zeros((1, 1), np.int32)).after(jnp.full((1, 1), 1))
    assert int(feed.tables(history).device[0, 0]) == 0
    assert int(feed.tables(history.after(jnp.full((1, 1), 2))).device[0, 0]) == 6 % DEVICES


def test_capacity_grows_with_the_number_of_other_devices_and_ends_at_all_rows():
    assert [exchange_capacity(64, 8, remote) for remote in (0.0, 0.5, 7.0)] == [1, 9, 64]


def test_routers_with_groups_of_experts_choose_the_same_after_a_permutation():
    """DeepSeek-V3 only chooses among experts of the best groups, which are neighbours before the permutation."""
    rng = np.random.default_rng(0)
    logits, correction = rng.normal(size=(20, 8)), rng.normal(size=8)
    order = rng.permutation(8)
    routing = Routing(2, "sigmoid", num_groups=4, num_chosen_groups=2, group_score="two_best", normalized=True)
    arrays = lambda *parts: [jnp.asarray(part) for part in parts]
    plain_choice = choose(*arrays(logits), routing, *arrays(correction))
    choice_of_permutation = choose(*arrays(logits[:, order]), routing, *arrays(correction[order], order))
    weights = lambda experts, choice: (
        np.put_along_axis(full := np.zeros((20, 8)), experts, np.asarray(choice.weights), 1) or full
    )
    np.testing.assert_allclose(
        weights(order[np.asarray(choice_of_permutation.experts)], choice_of_permutation),
        weights(np.asarray(plain_choice.experts), plain_choice),
        atol=1e-6,
    )
