"""Traces of experts, their groups for the devices of a mesh, and the file of the groups."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid_logits import whole_text_logits
from unusual_modes import unusual_modes

import specjax
from specjax.errors import UsageError
from specjax.models import init_params, make_model
from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.llama import LlamaConfig
from specjax.parallel.expert_groups import ExpertGroups, cluster_experts, group_experts
from specjax.parallel.expert_traces import ExpertTraces, _tracing_pass, trace_experts

TOKENS = np.random.default_rng(0).integers(0, 32, (2, 12))
CONFIG = LlamaConfig(
    vocab_size=32, width=32, num_layers=3, num_heads=8, num_kv_heads=8, head_dim=4, mlp_width=32,
    experts=MixtureSizes(8, 16, Routing(2, normalized=True), dense_layers=(0,)),
)  # fmt: skip
_logits = jax.jit(whole_text_logits, static_argnums=0)


def planted(devices=4, experts=16, layers=3, tokens=40, noise=0.0, seed=0):
    """Return traces whose tokens choose two experts of one group, and the group of each expert in each layer."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, tokens, 3000)
    group = np.stack([rng.permutation(np.arange(experts) % devices) for _ in range(layers)])
    choices = np.zeros((layers, len(ids), 2), np.int16)
    for layer in range(layers):
        for row, token in enumerate(ids):
            is_noise = rng.uniform() < noise
            members = np.arange(experts) if is_noise else np.flatnonzero(group[layer] == token % devices)
            choices[layer, row] = rng.choice(members, 2, replace=False)
    return ExpertTraces(ids.astype(np.int32), choices, experts, tokens + 5), group


def test_planted_groups_are_recovered():
    traces, group = planted()
    groups = cluster_experts(traces, 4)
    for layer, order in enumerate(groups.orders):
        assert all(len(set(group[layer][order[4 * g : 4 * g + 4]])) == 1 for g in range(4))
    assert groups.hit_rate == 1.0 and groups.remote == 0.0


def test_noisy_groups_beat_chance_and_have_equal_sizes():
    traces, _ = planted(noise=0.3)
    groups = cluster_experts(traces, 4)
    assert groups.hit_rate > 0.7
    np.testing.assert_array_equal(np.sort(groups.orders, -1), np.tile(np.arange(16), (3, 1)))
    unseen = groups.token_confidence[:, 40:]
    assert (unseen == 0).all() and (groups.token_confidence[:, :40] > 0.5).all()


def test_devices_of_two_layers_predict_what_tokens_do_not():
    """Random tokens choose a random group, and keep it in all layers."""
    rng = np.random.default_rng(0)
    device = rng.integers(0, 2, 2000)
    experts = (device[:, None] * 4 + rng.permuted(np.tile(np.arange(4), (2000, 1)), axis=1)[:, :2]).astype(np.int16)
    traces = ExpertTraces(rng.integers(0, 5, 2000).astype(np.int32), np.stack([experts] * 4), 8, 5)
    groups = cluster_experts(traces, 2)
    assert groups.history_confidence[2:].max() > 0.95 > groups.token_confidence[2:].max()
    assert groups.hit_rate > 0.7


def target(config=CONFIG):
    return specjax.Target(make_model(config), init_params(config, jax.random.key(0)))


def test_groups_do_not_change_outputs_and_survive_their_file(tmp_path):
    """The layers are stacked, as on TPUs."""
    mixture = target(dataclasses.replace(CONFIG, experts=CONFIG.experts._replace(dense_layers=()), stacked=True))
    traces = trace_experts(mixture, TOKENS.tolist(), window=8)
    np.testing.assert_array_equal(traces.tokens, TOKENS.reshape(-1))
    assert traces.experts.shape == (3, 24, 2)
    groups = cluster_experts(traces, 4)
    groups.save(tmp_path / "groups")
    again = ExpertGroups.load(tmp_path / "groups")
    for field in dataclasses.fields(groups):
        np.testing.assert_array_equal(getattr(groups, field.name), getattr(again, field.name))
    expected = np.asarray(_logits(mixture.model, mixture.params, TOKENS))
    together = group_experts(mixture, again)
    logits = np.asarray(_logits(together.model, together.params, TOKENS))
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    mutant = jax.tree.map(lambda x: x, together.params)  # new dicts
    router = mutant["layers"]["mlp"]["router"]
    router["weight"] = jnp.roll(router["weight"], 1, 1)
    assert np.abs(np.asarray(_logits(together.model, mutant, TOKENS)) - expected).max() > 1e-3
    with pytest.raises(UsageError, match="are in groups already"):
        group_experts(together, again)
    spread = specjax.shard(together, specjax.mesh(1, 2, expert=4))
    np.testing.assert_allclose(_logits(spread.model, spread.params, TOKENS), expected, atol=1e-5)


def test_traces_are_the_choices_of_the_router():
    """Zeros in the matrices that write to the stream leave the normalised embedding to each router."""
    mixture = target()
    zero = lambda path, x: x * 0 if any(getattr(p, "key", None) in ("o", "down", "expert_down") for p in path) else x
    params = jax.tree_util.tree_map_with_path(zero, mixture.params)
    text = TOKENS[0].tolist()
    traces = trace_experts(dataclasses.replace(mixture, params=params), [text], window=16)
    x = np.asarray(params["embed"]["weight"], np.float64)[text]
    x /= np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.norm_eps)
    for i, layer in enumerate((1, 2)):
        scores = x @ np.asarray(params["layers"][layer]["mlp"]["router"]["weight"], np.float64).T
        np.testing.assert_array_equal(traces.experts[i], np.sort(np.argsort(-scores)[:, :2]))


def test_a_second_trace_compiles_nothing_and_modes_change_nothing():
    mixture, text = target(), TOKENS[:1].tolist()
    expected = trace_experts(mixture, text, window=16).experts
    run = _tracing_pass(mixture.model).run
    count = run._cache_size()
    np.testing.assert_array_equal(trace_experts(mixture, text * 2, window=16).experts[:, 12:], expected)
    assert run._cache_size() == count == 1
    with unusual_modes():
        np.testing.assert_array_equal(trace_experts(mixture, text, window=16).experts, expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda traces, groups: cluster_experts(traces, 3), "3 devices cannot have equal parts of 16 experts"),
        (lambda traces, groups: cluster_experts(traces._replace(tokens=traces.tokens[:0]), 4), "have no tokens"),
        (lambda traces, groups: group_experts(target(), groups), "the groups have 3 layers of 16 experts"),
        (lambda traces, groups: trace_experts(target(), [[99]]), "the texts have tokens from 99 to 99"),
        (
            lambda traces, groups: trace_experts(target(), [[1]], window=0),
            "window must be a whole number",
        ),
        (lambda traces, groups: trace_experts(target(), [[1]], window=2.5), "window must be a whole number"),
        (lambda traces, groups: trace_experts(target(), [1, 2]), "each text must be a sequence of token ids, not 1"),
        (lambda traces, groups: trace_experts(target(), ["text"]), "each text must be a sequence of token ids"),
        (lambda traces, groups: trace_experts(target(), [[0.5]]), "each text must be a sequence of token ids"),
        (lambda traces, groups: cluster_experts(traces, 4.0), "devices must be a whole number from 1 to 127"),
        (lambda traces, groups: cluster_experts(traces, 4, seed=-1), "seed must be a whole number"),
        (lambda traces, groups: cluster_experts(traces, 4, balance=np.inf), "balance must be a number of at least 0"),
    ],
)
def test_wrong_input(call, message):
    traces, _ = planted(layers=3)
    with pytest.raises(UsageError, match=message):
        call(traces, cluster_experts(traces, 4))


def test_damaged_files(tmp_path):
    (tmp_path / "text").write_text("no groups")
    groups = cluster_experts(planted()[0], 4)
    np.savez(tmp_path / "other.npz", format="another")
    damages: dict[str, dict] = {
        "range": {"tokens": groups.tokens + 4},
        "dtype": {"tokens": groups.tokens.astype(np.float32)},
        "words": {"token_confidence": groups.token_confidence.astype(str)},
        "nan": {"history_confidence": groups.history_confidence * np.nan},
        "shape": {"history": np.int8(3)},
        "empty": {name: getattr(groups, name)[:, :0, :0] for name in ("history", "history_confidence")},
        "remote": {"remote": float("inf")},
        "vector": {"remote": np.ones(3)},
    }
    for name, changes in damages.items():
        dataclasses.replace(groups, **changes).save(tmp_path / name)
    for name in (*damages, "text", "other.npz", "missing"):
        with pytest.raises(UsageError, match=name):
            ExpertGroups.load(tmp_path / name)
