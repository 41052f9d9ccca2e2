"""Mamba-2 and its hybrids against the classes of transformers, and the errors that are easy to make."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid_logits import whole_text_logits
from mamba_models import FORMS, make, transformers, without_own_limit
from tiers import those

import specjax
from specjax import models
from specjax.errors import UsageError
from specjax.models.hybrid.config import NO_MULTIPLIERS
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.formats import hf
from specjax.models.loading.tensors.assembly import assemble, check_tensors

SEEN = 1e-3  # a difference of logits that parity tests notice, whose tolerance is 100 times smaller


@pytest.mark.parametrize("form", FORMS)
def test_logits(check_parity, form):
    check_parity(make(form))


def changed_logits(config, params, tokens, **changes):
    model = models.make_model(dataclasses.replace(config, **changes))
    return np.asarray(jax.jit(whole_text_logits, static_argnums=0)(model, params, tokens))


@pytest.mark.parametrize("form", those({"granite without rotation"}, ["granite without rotation", "falcon_h1"]))
def test_a_forgotten_factor_is_seen(check_parity, form):
    config, params, expected, tokens = check_parity(make(form))
    used = [name for name, value in config.multipliers._asdict().items() if value != getattr(NO_MULTIPLIERS, name)]
    mutants = [{"multipliers": config.multipliers._replace(**{name: 1.0})} for name in used]
    if config.query_scale is not None:
        mutants.append({"query_scale": None})
    parts = config.mamba2.multipliers or ()
    for place in range(len(parts)):
        without = (*parts[:place], 1.0, *parts[place + 1 :])
        mutants.append({"mamba2": config.mamba2._replace(multipliers=without)})
    assert len(mutants) == (4 if form.startswith("granite") else 14)
    for changes in mutants:
        difference = np.abs(changed_logits(config, params, tokens, **changes) - expected).max()
        assert difference > SEEN, changes


def test_the_limit_of_time_steps_and_the_order_of_gate_and_norm_are_seen(check_parity):
    config, params, expected, tokens = check_parity(make("mamba2 with a limit of time steps"))
    for changes in ({"time_step_limit": (0.0, float("inf"))}, {"norm_before_gate": True}, {"num_groups": 1}):
        mixer = config.mamba2._replace(**changes)
        if "num_groups" in changes:  # one norm over all heads, with as many channels
            mixer = mixer._replace(state_dim=2 * mixer.state_dim)
        difference = np.abs(changed_logits(config, params, tokens, mamba2=mixer) - expected).max()
        assert difference > SEEN, changes


def test_groups_that_heads_read_in_turn_are_seen(check_parity):
    """Each group serves heads in a row. In a model whose head j reads group j % G, heads 1 and 2 are exchanged."""
    config, params, expected, tokens = check_parity(make("mamba2"))
    sizes = config.mamba2
    heads = np.array([0, 2, 1, 3])
    rows = (heads[:, None] * sizes.head_dim + np.arange(sizes.head_dim)).reshape(-1)
    channels = np.concatenate([rows, np.arange(sizes.inner, sizes.channels)])

    def exchanged(path, x):
        names = [entry.key for entry in path]
        if "recurrent" not in names:
            return x
        module = names[names.index("recurrent") + 1]
        orders = {"convolved": channels, "convolution": channels, "output_gate": rows, "norm": rows}
        if module == "out":
            return x[:, rows]
        return x[orders.get(module, heads)]

    other = jax.tree_util.tree_map_with_path(exchanged, params)
    assert np.abs(changed_logits(config, other, tokens) - expected).max() > SEEN


def test_the_class_of_nemotron_h_has_another_limit_than_its_published_models(check_parity):
    """transformers 5.24 limits steps from below by a field of the initialisation, and only in passes of many tokens."""
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_parity(lambda: make("nemotron_h")(own_limit=True))


WRITTEN = {"mamba2", "nemotron_h", "granite with rotation", "falcon_h1"}


@pytest.mark.parametrize("form", those(WRITTEN, FORMS))
def test_what_is_written_is_read_by_transformers(check_parity, form, tmp_path):
    torch = pytest.importorskip("torch")
    config, params, expected, tokens = check_parity(make(form))
    target = specjax.Target(models.make_model(config), params)
    specjax.save_model(tmp_path / "written", target)
    checkpoint = hf.read(tmp_path / "written", dtype="float32")
    assert dataclasses.replace(checkpoint.config, name=config.name) == config
    check_tensors(checkpoint)
    is_exact = lambda path: "rate" not in [entry.key for entry in path]  # a logarithm of it is stored
    compare = lambda path, x, y: np.testing.assert_allclose(x, y, rtol=0 if is_exact(path) else 3e-7)
    jax.tree_util.tree_map_with_path(compare, assemble(checkpoint), params)
    reference, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "written", output_loading_info=True, dtype=torch.float32
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    if config.model_type == "nemotron_h":
        without_own_limit(reference)
    with torch.no_grad():
        logits = reference.eval()(torch.tensor(np.asarray(tokens))).logits.numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-5 * max(1.0, np.abs(expected).max()))


CHANGES = {
    "bamba": [
        ({"attention_bias": True}, "sets attention_bias, which specjax does not support"),
        ({"attn_rotary_emb": 8}, "has attn_rotary_emb 8, but 4 of the 8 numbers of a head are rotated"),
        ({"mamba_n_groups": 3}, "has mamba_n_groups 3, which must divide mamba_n_heads, 4"),
        ({"mamba_d_head": 8}, "has 4 heads of 8 numbers in mamba_n_heads and mamba_d_head, which must have 64"),
        ({"hidden_act": "gelu"}, 'has hidden_act "gelu"; specjax supports silu only'),
    ],
    "mamba2": [
        ({"time_step_limit": [0.0]}, "has time_step_limit .*, which must be two numbers from 0 on"),
        ({"time_step_limit": [2.0, 1.0]}, "has time_step_limit .*, which must be two numbers from 0 on"),
        ({"time_step_limit": [0.0, float("nan")]}, "which must be two numbers from 0 on"),
        ({"model_type": "falcon_mamba"}, '"falcon_mamba", which specjax does not support: its Mamba-1 layers have'),
        ({"model_type": "jamba"}, "its Mamba-1 layers have a decay for each channel and state"),
        ({"model_type": "kimi_linear"}, "its Kimi delta attention has a decay for each key channel"),
        ({"expand": 3}, "has 4 heads of 16 numbers in num_heads and head_dim, which must have 96 together"),
    ],
    "nemotron_h": [
        ({"layers_block_type": ["mamba", "moe"]}, "layers with a mixture of experts in layers_block_type"),
        ({"layers_block_type": None, "hybrid_override_pattern": "ME*-"}, "experts in hybrid_override_pattern"),
        ({"layers_block_type": None, "hybrid_override_pattern": "MX"}, 'has "X" in hybrid_override_pattern'),
        ({"layers_block_type": None}, "lacks the field hybrid_override_pattern"),
        ({"num_hidden_layers": 5}, "has kinds for 4 layers, but num_hidden_layers is 5; make them equal"),
        ({"mlp_hidden_act": "silu"}, 'has mlp_hidden_act "silu"; specjax supports relu2'),
    ],
    "granite without rotation": [
        ({"num_local_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok 5, which must be at most 4"),
        ({"position_embedding_type": "alibi"}, 'has position_embedding_type "alibi"; specjax supports nope and rope'),
        ({"layer_types": ["mamba", "attention"]}, "has 2 layer_types, but num_hidden_layers is 3; make them equal"),
        ({"layer_types": ["mamba", "conv", "mamba"]}, 'has "conv" among its layer_types'),
    ],
    "falcon_h1": [
        ({"mlp_multipliers": [1.0]}, "has mlp_multipliers .*, which must be a list of 2"),
        ({"ssm_multipliers": ["a"] * 5}, "has ssm_multipliers .*, which must be a list of 5"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("form", CHANGES)
def test_configs_that_do_not_fit(form):
    fields = json.loads(make(form)().config.to_json_string())
    for changes, message in CHANGES[form]:
        left = {name: value for name, value in (fields | changes).items() if value is not None or name not in changes}
        with pytest.raises(UsageError, match=message):
            hf.parse_config(ConfigFields(left, "config.json"), dtype="float32")


def test_old_names_of_kinds_and_letters():
    fields = json.loads(make("nemotron_h")().config.to_json_string())
    new, _ = hf.parse_config(ConfigFields(fields, "config.json"), dtype="float32")
    for form in ({"hybrid_override_pattern": "M-*M"}, {"layers_block_type": ["mamba", "mlp", "attention", "mamba"]}):
        left = {name: value for name, value in fields.items() if name != "layers_block_type"}
        old, _ = hf.parse_config(ConfigFields(left | form, "config.json"), dtype="float32")
        assert old == new
    granite = json.loads(make("granite without rotation")().config.to_json_string())
    old = granite | {"layer_types": ["mamba", "attention", "mamba"]}
    assert len({hf.parse_config(ConfigFields(x, "x"), dtype="float32")[0] for x in (granite, old)}) == 1


@pytest.mark.exhaustive
def test_a_model_without_attention_decodes_trees(check_parity):
    config, params, _, _ = check_parity(make("mamba2"))
    target = specjax.Target(models.make_model(config), params)
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [5, 6]]
    plain, drafted = (
        specjax.decode(target, drafter, prompts, key=0, max_new_tokens=24) for drafter in (None, "suffix")
    )
    assert jnp.array_equal(plain.tokens, drafted.tokens)
